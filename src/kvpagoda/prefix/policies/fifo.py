"""The FIFO policy."""

from __future__ import annotations

from kvpagoda.prefix.policies.heap import HeapPolicy
from kvpagoda.prefix.policies.protocol import Keys


class FIFO(HeapPolicy):
    """First added, first evicted."""

    def touch(self, keys: Keys, priority: int) -> None:
        pass
