"""The leaves in the order in which they would go: a heap that lives as long as the tree."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from kvpagoda.errors import CheckFailed

Key = tuple[int, int]


class LeafIndex:
    """Leaves ordered by ``key(cell)``, which may grow while a cell is in: entries are corrected when they come up.

    ``add``, ``pop`` and ``first`` are amortised O(log n), ``discard`` is O(1). The heap holds an entry for each leaf
    that is at most its key, and at most twice as many others.
    """

    def __init__(self, key: Callable[[int], Key]) -> None:
        self._key = key
        self._heap: list[tuple[int, int, int]] = []
        self.leaves: set[int] = set()

    def add(self, cell: int) -> None:
        self.leaves.add(cell)
        heappush(self._heap, (*self._key(cell), cell))
        if len(self._heap) > 2 * len(self.leaves) + 1024:
            self._heap = [(*self._key(leaf), leaf) for leaf in self.leaves]
            heapify(self._heap)

    def discard(self, cell: int) -> None:
        self.leaves.discard(cell)

    def first(self) -> tuple[int, int, int] | None:
        """(\\*key, cell) of the leaf with the smallest key; it stays in."""
        heap = self._heap
        while heap:
            rank, stamp, cell = heap[0]
            if cell not in self.leaves:
                heappop(heap)
                continue
            now = self._key(cell)
            if now == (rank, stamp):
                return heap[0]
            heapreplace(heap, (*now, cell))
        return None

    def pop(self) -> int:
        """Take out the leaf with the smallest key."""
        top = self.first()
        assert top is not None, "pop from an index without leaves"
        heappop(self._heap)
        self.leaves.discard(top[2])
        return top[2]

    def check(self, leaves: set[int]) -> None:
        """Prove that these are the leaves, and that each will come up in time. O(n)."""
        if leaves != self.leaves:
            raise CheckFailed(f"eviction index and tree disagree about leaves {sorted(leaves ^ self.leaves)[:16]}")
        found = {cell for rank, stamp, cell in self._heap if cell in leaves and (rank, stamp) <= self._key(cell)}
        if found != leaves:
            raise CheckFailed(f"leaves that the eviction index would not find in time: {sorted(leaves - found)[:16]}")
