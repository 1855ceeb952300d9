"""Eviction by priority or by deadline."""

from __future__ import annotations

import numpy as np

from kvpagoda.prefix.policies.heap import HeapPolicy
from kvpagoda.prefix.policies.protocol import Keys


class ByPriority(HeapPolicy):
    """Lowest priority first, among equals the least recently used. A block keeps the highest priority it was used with.

    With a deadline (by any whole-numbered clock) as the priority, this is time to live: the block that expires first is
    evicted first.
    """

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._rank[keys] = priority

    def touch(self, keys: Keys, priority: int) -> None:
        highest = np.maximum(self._rank[keys], priority)
        super().touch(keys, priority)
        self._rank[keys] = highest
