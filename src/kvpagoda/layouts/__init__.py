"""WHERE bytes lie: layouts as values, copies between them, engines' layouts by name. No torch, and nothing of the cache."""

from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.named import named, names, read
from kvpagoda.layouts.reshard import ReshardPlan, reshard

__all__ = ["Layout", "ReshardPlan", "named", "names", "read", "reshard"]
