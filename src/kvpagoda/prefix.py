"""WHICH prefixes exist, for cache managers of your own: the prefix tree that ``KVCache`` has, and what it returns.

It needs numpy alone. ``docs/own-parts.md`` and ``kvpagoda.adapters`` have uses of it.
"""

from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.cache.request import Breakpoint
from kvpagoda.core.prefix import Entry, Evicted, Inserted, Lease, Match, PrefixTree

__all__ = ["Breakpoint", "Entry", "Evicted", "Inserted", "Lease", "Match", "PrefixMatch", "PrefixTree"]
