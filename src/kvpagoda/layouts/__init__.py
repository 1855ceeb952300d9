"""WHERE bytes lie: layouts as values, copies between them, what kernels demand of them, rows packed as they can read them.

What needs torch (``pack``, ``unpack``) is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpagoda.errors import MissingExtra
from kvpagoda.layouts.judge import Verdict, judge
from kvpagoda.layouts.layout import Layout, View
from kvpagoda.layouts.named import named, names, read
from kvpagoda.layouts.reshard import ReshardPlan, reshard

if TYPE_CHECKING:
    from kvpagoda.layouts.packed import pack, unpack

__all__ = [
    "Layout", "ReshardPlan", "Verdict", "View", "judge", "named", "names", "pack", "read", "reshard", "unpack",
]  # fmt: skip

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
