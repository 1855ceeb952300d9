"""Sizes in bytes as people write them, two integer divisions, and one check for each kind of argument.

A check raises BadInput for every value that it cannot use, and lets pass what an object of the caller raises itself:
TypeError, ValueError and RuntimeError say that it is of the wrong kind, everything else is the caller's own error.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from kvpagoda.errors import BadInput, shown

T = TypeVar("T")
MOST = 2**63
"""Numbers from here on do not fit in 64 bits: no count, size or id is so large."""

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def ceil_div(a: int, b: int) -> int:
    """Return the smallest whole number that is at least ``a / b``."""
    return -(-a // b)


def align_up(n: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is at least ``n``."""
    return ceil_div(n, to) * to


def table_rows(n: int, width: int, table_width: int) -> int:
    """Return how many rows of ``table_width`` bytes ``n`` records of ``width`` bytes take.

    A table row holds either several whole records, or one piece of a record: no record shares a row with a piece of
    another.
    """
    return ceil_div(n, table_width // width) if 0 < width <= table_width else n * ceil_div(width, table_width)


def parse_bytes(size: int | str) -> int:
    """Convert ``"40GiB"``, ``"1.5 MB"`` or a whole number of bytes (also a numpy integer) to bytes. Raises BadInput."""
    if isinstance(size, str):
        match = _SIZE.match(size)
        if match is None:
            text = f"cannot read {shown(size)} as a size; write '512MiB', '2GiB' or a number of bytes"
            raise BadInput(text, needed=size)
        number, prefix, binary = match.groups()
        nbytes = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
        size = int(min(nbytes, MOST))
    return whole_number(size, "a size (bytes, or text such as '2GiB')", at_least=1)


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes: 1536 -> '1.5 KiB'; exact below 1 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def whole_number(
    value: object,
    what: str,
    at_least: int = 0,
    error: type[BadInput] = BadInput,
    below: int | None = None,
    *,
    bits: int = 63,
) -> int:
    """Return ``value`` as an int if it is a whole number with ``at_least <= value < below`` (None: 2^bits).

    Accepts Python and numpy integers, not bool and not float: ``whole_number(np.int64(64), "max_requests")`` is 64.

    Raises ``error``; its message names ``what`` and the value.
    """
    end = 2**bits if below is None else below
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # what arrays and tensors raise that are not one whole number
        number = None
    if number is None or not at_least <= number < end:
        wanted = "positive whole number" if at_least == 1 else f"whole number of at least {at_least}"
        if below is not None:
            wanted = f"whole number from {at_least:,} to {below - 1:,}"
        elif number is not None and number >= end:
            text = f"{what} must be below 2^{bits}, got {shown(value)}"
            raise error(text, needed=value, available=end - 1, field=what)
        raise error(f"{what} must be a {wanted}, got {shown(value)}", needed=value, available=at_least, field=what)
    return number


def real_number(value: object, what: str) -> float:
    """Return ``value`` as a finite float of at least 0. Accepts Python and numpy numbers, not bool and not tensors.

    Raises BadInput, which names ``what`` and the value.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < MOST:  # type: ignore[operator]
        text = f"{what} must be a finite number of at least 0, got {shown(value)}"
        raise BadInput(text, needed=value, available=0, field=what)
    return float(value)  # type: ignore[arg-type]


def truth(value: object, what: str) -> bool:
    """Return ``value`` as a bool if it is one, of Python or numpy. Raises BadInput, which names ``what``."""
    if type(value).__name__ not in ("bool", "bool_"):  # of Python and numpy 2, of numpy 1
        raise BadInput(f"{what} is True or False, got {shown(value)}", field=what, needed=value)
    return bool(value)


def option(value: T | None, kind: type[T]) -> T:
    """Return ``value``, the options of a ``kind`` of this library; for None the defaults. Raises BadInput."""
    return kind() if value is None else instance_of(value, kind, kind.__name__.lower())


def instance_of(value: object, kind: type[T], what: str) -> T:
    """Return ``value`` if it is a ``kind``, a class of this library. Raises BadInput, which names ``what``."""
    if not isinstance(value, kind):
        text = f"{what} is a kvpagoda.{kind.__name__}, got {type(value).__name__}"
        raise BadInput(text, field=what, needed=type(value).__name__)
    return value


def utf8(text: object, what: str) -> bytes:
    """Return ``text`` as UTF-8. Raises BadInput, which names ``what``, for half a surrogate pair and for what is no
    text."""
    if not isinstance(text, str):
        raise BadInput(f"{what} must be text, got {shown(text)}", field=what, needed=text)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadInput(
            f"{what} must be text that UTF-8 can hold, got {shown(text)}; give it as bytes", field=what, needed=text
        ) from None


def name_of(text: object, what: str) -> str:
    """Return ``text``, a name for the system or for another library: of a host, a socket, a folder. Raises BadInput, which
    names ``what``, for what is no text, for text that UTF-8 cannot hold, and for a zero byte, at which C ends a name."""
    if b"\0" in utf8(text, what):
        raise BadInput(f"{what} must be text without a zero byte, got {shown(text)}", needed=text, field=what)
    return str(text)


def path_of(path: object, what: str) -> Path:
    """Return ``path``, text or an ``os.PathLike``, as a ``Path``. Raises BadInput, which names ``what``, for what is none."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
        is_path = isinstance(text, str) and b"\0" not in os.fsencode(text)
    except (TypeError, ValueError):
        is_path = False
    if not is_path:
        raise BadInput(
            f"{what} must be a path, as text without a zero byte or an os.PathLike, got {shown(path)}",
            field=what, needed=path,
        )  # fmt: skip
    return Path(text)


def items_of(values: object) -> Iterator[Any]:
    """Return an iterator over ``values``; over ``values`` alone if it has no items, as an array without dimensions.

    So what is no sequence at all is refused as the wrong item that it is.
    """
    if isinstance(values, Iterable):
        with suppress(TypeError):
            return iter(values)
    return iter((values,))


def all_of(values: object, kind: type[T], what: str) -> tuple[T, ...]:
    """Return the items of ``values`` if each is a ``kind``. Raises BadInput, which names ``what``, at the first other
    one: after O(1), however many there are."""
    items: list[T] = []
    for value in items_of(values):
        if not isinstance(value, kind):
            raise BadInput(f"{what}, got {shown(value)}", field=what, needed=value)
        items.append(value)
    return tuple(items)


def positive_numbers(**numbers: SupportsIndex) -> list[int]:
    """Return the arguments, in their order, as ints of at least 1. Raises BadInput naming the first that is not."""
    return [whole_number(n, what, at_least=1) for what, n in numbers.items()]
