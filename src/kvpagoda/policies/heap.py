"""Policies that evict the leaf with the smallest (rank, stamp): FIFO, LFU, LFUDA, priorities and SIEVE; and their heap."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import grown
from kvpagoda.errors import CheckFailed
from kvpagoda.policies.protocol import Forgotten, Keys

Mask = npt.NDArray[np.bool_]
_LAST = 2**62, 2**62, -1
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


class HeapPolicy:
    """A rank and a stamp for each key, and a heap of the leaves ordered by both; the base class of policies.

    Stamps come from one counter, so no two are equal. Adding or touching n blocks is O(n) array work. A choice is
    amortised O(log leaves), plus O(1) for each block chosen.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._rank = np.zeros(0, np.int64)
        self._stamp = np.zeros(0, np.int64)
        self._leaves = LazyHeap(self._order)

    def add(self, keys: Keys, priority: int) -> None:
        self._make_room(int(keys.max(initial=0)) + 1)
        self._use(keys)
        self._rank[keys] = 0

    def touch(self, keys: Keys, priority: int) -> None:
        self._use(keys)

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._leaves.add(key)
        else:
            self._leaves.discard(key)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        return self._first_of(self._leaves, chain, self._leaves)

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        return keys

    def check(self, keys: Keys, leaves: set[int]) -> None:
        if len(keys) and int(keys.max()) >= len(self._stamp):
            raise CheckFailed(f"the policy has no rank for key {int(keys.max())}")
        self._leaves.check(leaves)

    def _make_room(self, length: int) -> None:
        """Grow the arrays to ``length`` keys. Called before anything changes, since it may raise."""
        self._rank, self._stamp = grown(self._rank, length), grown(self._stamp, length)

    def _order(self, key: int) -> tuple[int, int]:
        return int(self._rank[key]), int(self._stamp[key])

    def _first_of(self, heap: LazyHeap, chain: Callable[[int], Keys], *heaps: LazyHeap) -> Keys:
        """Return the first leaf of ``heap``, and then its ancestors to evict before all other leaves of ``heaps``."""
        leaf = heap.pop()
        try:
            return self._run(chain(leaf), *heaps)
        except BaseException:
            heap.add(leaf)
            raise

    def _run(self, keys: Keys, *heaps: LazyHeap) -> Keys:
        """Return the first of ``keys``, and those after it to evict before all remaining leaves of ``heaps``.

        ``keys``: a victim and its ancestors.
        """
        if len(keys) == 1:
            return keys
        rank, stamp, _ = min((heap.first() or _LAST for heap in heaps), key=itemgetter(1))
        for start in range(1, len(keys), 256):  # in pieces: the cost depends on the result, not on all ``keys``
            part = keys[start : start + 256]
            goes = self._goes(part, keys[start - 1 :][: len(part)], rank, stamp)
            stop = int(goes.argmin())
            if not goes[stop]:
                return keys[: start + stop]
        return keys

    def _goes(self, keys: Keys, below: Keys, rank: int, stamp: int) -> Mask:
        """Return which of ``keys`` would be evicted before a leaf of this rank and stamp.

        ``below``: for each key the key of the block below it, which is evicted before it.
        """
        ranks = self._rank[keys]
        goes: Mask = (ranks < rank) | ((ranks == rank) & (self._stamp[keys] < stamp))
        return goes

    def _use(self, keys: Keys) -> None:
        """Give ``keys`` new stamps, the smallest to the deepest (the last) of them."""
        n = len(keys)
        self._stamp[keys] = np.arange(self._clock + n, self._clock, -1)
        self._clock += n


class FIFO(HeapPolicy):
    """First added, first evicted."""

    def touch(self, keys: Keys, priority: int) -> None:
        pass


class LFU(HeapPolicy):
    """Least frequently used since it was cached, among equals the least recently used."""

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._rank[keys] = 1

    def touch(self, keys: Keys, priority: int) -> None:
        super().touch(keys, priority)
        self._rank[keys] += 1


class LFUDA(HeapPolicy):
    """LFU with dynamic ageing: old uses lose weight.

    The rank is the number of uses plus the age: the highest rank of a victim so far. Where a leaf of a lower one was held
    until then, and is evicted later, the age stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0
        self._uses = np.zeros(0, np.int64)

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._uses[keys] = 1
        self._rank[keys] = self._age + 1

    def touch(self, keys: Keys, priority: int) -> None:
        super().touch(keys, priority)
        self._uses[keys] += 1
        self._rank[keys] = self._age + self._uses[keys]

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        keys = super().choose(chain)
        self._age = max(self._age, int(self._rank[keys[-1]]))
        return keys

    def _make_room(self, length: int) -> None:
        super()._make_room(length)
        self._uses = grown(self._uses, length)


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


class SIEVE(HeapPolicy):
    """SIEVE (Zhang et al., NSDI 2024): a hand moves from the oldest block to the newest, and then starts again.

    It evicts the first leaf that was not used since the hand passed it; a leaf that was used is skipped once. Blocks
    that are not leaves are ignored. Blocks never move, so the rank of a key is the round in which the hand reaches it,
    and the stamp is its place in the round. New blocks lie ahead of the hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self._round, self._hand = 0, 0
        self._used = np.zeros(0, np.bool_)

    def add(self, keys: Keys, priority: int) -> None:
        super().add(keys, priority)
        self._used[keys] = False

    def touch(self, keys: Keys, priority: int) -> None:
        self._used[keys] = True

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._rank[key] = self._round + (self._stamp[key] <= self._hand)
        super().set_leaf(key, is_leaf)

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        while self._used[leaf := self._leaves.pop()]:
            self._used[leaf] = False
            self._rank[leaf] += 1
            self._leaves.add(leaf)
        self._leaves.add(leaf)
        if self._rank[leaf] > self._round:
            self._round, self._hand = int(self._rank[leaf]), 0
        keys = super().choose(chain)
        self._hand = int(self._stamp[keys[-1]])
        return keys

    def _goes(self, keys: Keys, below: Keys, rank: int, stamp: int) -> Mask:
        ahead = self._stamp[keys]
        sooner = ahead < stamp if self._round == rank else np.full(len(keys), self._round < rank)
        return sooner & (ahead > self._stamp[below]) & ~self._used[keys]

    def _make_room(self, length: int) -> None:
        super()._make_room(length)
        self._used = grown(self._used, length)
