"""The LFU policy."""

from __future__ import annotations

from kvpagoda.prefix.policies.heap import HeapPolicy
from kvpagoda.prefix.policies.protocol import Keys


class LFU(HeapPolicy):
    """Least frequently used since it was cached, among equals the least recently used."""

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._rank[keys] = 1

    def touch(self, keys: Keys, priority: int) -> None:
        super().touch(keys, priority)
        self._rank[keys] += 1
