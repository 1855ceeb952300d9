"""The memory layouts of caches: layouts as values, copies between layouts, kernels' demands, and packed rows.

``pack`` and ``unpack`` need torch and are loaded on first use.
"""

from typing import TYPE_CHECKING

from kvpagoda.layouts.judge import Verdict, judge
from kvpagoda.layouts.layout import Layout, View
from kvpagoda.layouts.named import named, names, read
from kvpagoda.layouts.reshard import ReshardPlan, reshard
from kvpagoda.loading import load_when_used

if TYPE_CHECKING:
    from kvpagoda.layouts.packed import pack, unpack

__all__ = [
    "Layout", "ReshardPlan", "Verdict", "View", "judge", "named", "names", "pack", "read", "reshard", "unpack",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__ = load_when_used(__name__, {"kvpagoda.layouts.packed": ("pack", "unpack")})
