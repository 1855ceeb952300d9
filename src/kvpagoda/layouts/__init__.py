"""Layouts as values: what kernels demand of a cache's bytes, and rows packed as they can read them.

What needs torch (``pack``, ``unpack``) is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpagoda.errors import MissingExtra
from kvpagoda.layouts.judge import Verdict, judge

if TYPE_CHECKING:
    from kvpagoda.layouts.packed import pack, unpack

__all__ = ["Verdict", "judge", "pack", "unpack"]

_NEEDS_TORCH = {"pack": "kvpagoda.layouts.packed", "unpack": "kvpagoda.layouts.packed"}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_NEEDS_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(
            f"kvpagoda.layouts.{name} needs torch; pip install 'kvpagoda[torch]'", name="torch"
        ) from None
