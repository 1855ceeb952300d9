"""Eviction by priority, or by deadline."""

from __future__ import annotations

import numpy as np

from kvpagoda.prefix.policies.heap import HeapPolicy
from kvpagoda.prefix.policies.protocol import Keys


class ByPriority(HeapPolicy):
    """Lowest priority first, among equals the least recently used. A block has the highest priority it was used with.

    With a deadline (any whole-numbered clock) for a priority this is eviction by time to live: what expires first.
    """

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._rank[keys] = priority

    def touch(self, keys: Keys, priority: int) -> None:
        highest = np.maximum(self._rank[keys], priority)
        super().touch(keys, priority)
        self._rank[keys] = highest
