"""WHICH prefixes exist, for cache managers of your own: the prefix tree that ``KVCache`` has, and what it returns.

It needs numpy alone. ``docs/own-parts.md`` and ``kvpagoda.adapters`` have uses of it.
"""

from kvpagoda.core.prefix import Entry, Evicted, Inserted, Lease, Match, PrefixTree

__all__ = ["Entry", "Evicted", "Inserted", "Lease", "Match", "PrefixTree"]
