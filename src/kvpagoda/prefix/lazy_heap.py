"""A persistent heap of members whose position in the order may change."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from kvpagoda.errors import CheckFailed

Order = tuple[int, int]


class LazyHeap:
    """Members, whole numbers, ordered by ``order(member)``; the smallest is first.

    The order of a member may grow while it is in the heap: its entry is corrected when it reaches the top. If the order
    shrinks, ``add`` the member again.

    ``add``, ``pop`` and ``first`` are amortised O(log n), ``discard`` is O(1). The heap has an entry for each member
    that is at most its order, and at most about twice as many other entries.

    >>> used = {7: (0, 3), 8: (0, 5)}
    >>> heap = LazyHeap(used.__getitem__)
    >>> heap.add(7), heap.add(8)
    (None, None)
    >>> used[7] = (0, 9)
    >>> heap.pop(), heap.first()
    (8, (0, 9, 7))
    """

    def __init__(self, order: Callable[[int], Order]) -> None:
        self._order = order
        self._heap: list[tuple[int, int, int]] = []
        self.members: set[int] = set()

    def add(self, member: int) -> None:
        """Add ``member``, at its present position in the order."""
        self.members.add(member)
        heappush(self._heap, (*self._order(member), member))
        if len(self._heap) > 2 * len(self.members) + 1024:
            self._heap = [(*self._order(number), number) for number in self.members]
            heapify(self._heap)

    def discard(self, member: int) -> None:
        """Remove ``member``, if it is in."""
        self.members.discard(member)

    def first(self) -> tuple[int, int, int] | None:
        """Return (\\*order, member) of the smallest member, without removing it; None if there is none."""
        heap = self._heap
        while heap:
            rank, stamp, member = heap[0]
            if member not in self.members:
                heappop(heap)
                continue
            now = self._order(member)
            if now == (rank, stamp):
                return heap[0]
            heapreplace(heap, (*now, member))
        return None

    def pop(self) -> int:
        """Remove and return the smallest member. There must be one."""
        top = self.first()
        assert top is not None, "pop from a heap without members"
        heappop(self._heap)
        self.members.discard(top[2])
        return top[2]

    def check(self, members: set[int]) -> None:
        """Prove that these are the members, and that each reaches the top in time. Raises CheckFailed. O(n)."""
        if members != self.members:
            raise CheckFailed(f"heap and tree disagree about members {sorted(members ^ self.members)[:16]}")
        found = {one for rank, stamp, one in self._heap if one in members and (rank, stamp) <= self._order(one)}
        if found != members:
            raise CheckFailed(f"members that the heap would not find in time: {sorted(members - found)[:16]}")
