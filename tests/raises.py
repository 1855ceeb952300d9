"""``raises``: an error of the library by its class and its figures. Its text may change; ``test_messages.py`` keeps some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from kvpagoda.errors import KVPagodaError

E = TypeVar("E", bound=KVPagodaError)


@contextmanager
def raises(
    kind: type[E], *, needed: Any = None, available: Any = None, **attributes: Any
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Fail unless the block raises a ``kind``, and no class derived from it, with these figures.

    ``needed`` and ``available`` are compared even where they are not given, and then are None: an error that says less
    or more is another one. ``attributes``: others to compare (``field``, ``group``, ``rule``, ..). ``unittest.mock.ANY``
    equals every value. Values are equal only if their classes are. Raises TypeError if nothing is given to compare.
    """
    wanted = {"needed": needed, "available": available, **attributes}
    if all(value is None for value in wanted.values()):
        raise TypeError(f"give a figure or an attribute that tells this {kind.__name__} from others")
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    found = {name: getattr(error, name) for name in wanted}
    assert type(error) is kind, f"{type(error).__name__} is not {kind.__name__} itself: {error}"
    assert _typed(found, wanted) == _typed(wanted, wanted), f"{found} is not {wanted}: {error}"


def _typed(values: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Return ``values``, a bool beside a mark that it is one: True is no 1."""
    return {
        name: (value, isinstance(value, bool)) if isinstance(like[name], bool | int) else value
        for name, value in values.items()
    }
