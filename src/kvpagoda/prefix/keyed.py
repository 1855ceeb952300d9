"""Policies that evict the leaf with the smallest key: LRU by block, FIFO, LFU, LFUDA, SIEVE, and by priority or deadline."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.leaf_index import Key, LeafIndex
from kvpagoda.prefix.numbers import grown
from kvpagoda.prefix.policy import Cells

Mask = npt.NDArray[np.bool_]
_LAST = 2**62, 2**62, -1


class ByKey:
    """What these policies share: a key (rank, stamp) for each cell and the leaves ordered by it.

    One counter is the clock, so no two stamps are equal. Adding or touching n blocks is O(n) array work; a choice is
    O(log leaves) and O(1) for each block chosen.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._rank = np.zeros(0, np.int64)
        self._stamp = np.zeros(0, np.int64)
        self._index = LeafIndex(self._key)

    def add(self, cells: Cells, priority: int) -> None:
        self._rank = grown(self._rank, int(cells.max(initial=0)) + 1)
        self._stamp = grown(self._stamp, len(self._rank))
        self._rank[cells] = 0
        self._use(cells)

    def touch(self, cells: Cells, priority: int) -> None:
        self._use(cells)

    def mark(self, cell: int, is_leaf: bool) -> None:
        if is_leaf:
            self._index.add(cell)
        else:
            self._index.discard(cell)

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        return self._run(chain(self._index.pop()), self._index)

    def remove(self, cells: Cells, *, evicted: bool) -> Cells:
        return cells

    def check(self, cells: Cells, leaves: set[int]) -> None:
        if len(cells) and int(cells.max()) >= len(self._stamp):
            raise CheckFailed(f"the policy has no key for cell {int(cells.max())}")
        self._index.check(leaves)

    def _key(self, cell: int) -> Key:
        return int(self._rank[cell]), int(self._stamp[cell])

    def _run(self, cells: Cells, *indexes: LeafIndex) -> Cells:
        """The first of ``cells``, a victim and its ancestors, and those after it that go before all leaves left."""
        other = None if len(cells) == 1 else min((index.first() or _LAST for index in indexes), key=itemgetter(1))
        for start in range(1, len(cells), 256):  # by pieces, so that the cost follows what goes and not what could
            assert other is not None
            part = cells[start : start + 256]
            goes = self._goes(part, cells[start - 1 :][: len(part)], other[0], other[1])
            stop = int(goes.argmin())
            if not goes[stop]:
                return cells[: start + stop]
        return cells

    def _goes(self, cells: Cells, below: Cells, rank: int, stamp: int) -> Mask:
        """Which of ``cells``, as soon as the one ``below`` each is gone, would go before a leaf of that key."""
        ranks = self._rank[cells]
        goes: Mask = (ranks < rank) | ((ranks == rank) & (self._stamp[cells] < stamp))
        return goes

    def _use(self, cells: Cells) -> None:
        n = len(cells)
        self._stamp[cells] = np.arange(self._clock + n, self._clock, -1)
        self._clock += n


class FIFO(ByKey):
    """First added first."""

    def touch(self, cells: Cells, priority: int) -> None:
        pass


class LFU(ByKey):
    """Least often used since it was added first; among equals the least recently used."""

    def add(self, cells: Cells, priority: int) -> None:
        super().add(cells, priority)
        self._rank[cells] = 1

    def touch(self, cells: Cells, priority: int) -> None:
        super().touch(cells, priority)
        self._rank[cells] += 1


class LFUDA(ByKey):
    """LFU with dynamic ageing: uses count from the rank that the last victim had, so that old fame fades."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0
        self._uses = np.zeros(0, np.int64)

    def add(self, cells: Cells, priority: int) -> None:
        super().add(cells, priority)
        self._uses = grown(self._uses, len(self._rank))
        self._uses[cells] = 1
        self._rank[cells] = self._age + 1

    def touch(self, cells: Cells, priority: int) -> None:
        super().touch(cells, priority)
        self._uses[cells] += 1
        self._rank[cells] = self._age + self._uses[cells]

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        cells = super().choose(chain)
        self._age = int(self._rank[cells[-1]])
        return cells


class ByPriority(ByKey):
    """Lowest priority first, among equals the least recently used. A block has the highest priority it was used with.

    With a deadline (any whole-numbered clock) for a priority this is eviction by time to live: what expires first.
    """

    def add(self, cells: Cells, priority: int) -> None:
        super().add(cells, priority)
        self._rank[cells] = priority

    def touch(self, cells: Cells, priority: int) -> None:
        super().touch(cells, priority)
        self._rank[cells] = np.maximum(self._rank[cells], priority)


class SIEVE(ByKey):
    """SIEVE (Zhang et al., NSDI 2024): a hand goes from the oldest block to the newest, and round again; it spares a
    leaf that was used since the last time, once, and evicts the first that was not.

    Blocks that are not leaves are passed as if they were not there. Blocks never move, so the rank is the round in which
    the hand comes to a cell, and the stamp its place in the round; what is new lies ahead of the hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self._round, self._hand = 0, 0
        self._used = np.zeros(0, np.bool_)

    def add(self, cells: Cells, priority: int) -> None:
        super().add(cells, priority)
        self._used = grown(self._used, len(self._rank))
        self._used[cells] = False

    def touch(self, cells: Cells, priority: int) -> None:
        self._used[cells] = True

    def mark(self, cell: int, is_leaf: bool) -> None:
        if is_leaf:
            self._rank[cell] = self._round + (self._stamp[cell] <= self._hand)
        super().mark(cell, is_leaf)

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        while self._used[leaf := self._index.pop()]:
            self._used[leaf] = False
            self._rank[leaf] += 1
            self._index.add(leaf)
        self._round = int(self._rank[leaf])
        cells = self._run(chain(leaf), self._index)
        self._hand = int(self._stamp[cells[-1]])
        return cells

    def _goes(self, cells: Cells, below: Cells, rank: int, stamp: int) -> Mask:
        ahead = self._stamp[cells]
        sooner = ahead < stamp if self._round == rank else np.full(len(cells), self._round < rank)
        return sooner & (ahead > self._stamp[below]) & ~self._used[cells]
