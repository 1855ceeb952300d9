"""Policies that remember what they evicted: S3-FIFO and ARC."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.prefix.keyed import ByKey, Mask
from kvpagoda.prefix.leaf_index import LeafIndex
from kvpagoda.prefix.numbers import grown
from kvpagoda.prefix.policy import Cells

Queue = OrderedDict[int, None]


def _capacity(num_blocks: int) -> int:
    if num_blocks < 1:
        raise BadInput(f"this policy needs the number of blocks that the cache holds, at least 1, got {num_blocks}")
    return num_blocks


def _cells(numbers: list[int]) -> Cells:
    return np.array(numbers, np.int32)


class S3FIFO:
    """S3-FIFO (Yang et al., SOSP 2023) for a cache of ``capacity`` blocks: a small queue that filters, a main queue, and
    a ghost queue of those that left the small one.

    From the tail of small (a tenth of the capacity) a block that was used more than once since, or that is no leaf,
    moves to main; others are evicted and remembered. At the tail of main a block that was used goes round again with one
    use less (uses count to 3), one that is no leaf goes round too. To pass a block that is no leaf costs O(1), so a
    choice is O(blocks passed), in the worst case all that are cached.
    """

    def __init__(self, capacity: int) -> None:
        self._small_size = max(1, _capacity(capacity) // 10)
        self._ghost_size = capacity - self._small_size
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghost: Queue = OrderedDict()
        self._uses = np.zeros(0, np.int8)
        self._leaves: set[int] = set()

    def add(self, cells: Cells, priority: int) -> None:
        self._uses = grown(self._uses, int(cells.max(initial=0)) + 1)
        self._uses[cells] = 0
        for cell in cells[::-1].tolist():
            if cell in self._ghost:
                del self._ghost[cell]
                self._main[cell] = None
            else:
                self._small[cell] = None

    def touch(self, cells: Cells, priority: int) -> None:
        self._uses[cells] = np.minimum(self._uses[cells] + 1, 3)

    def mark(self, cell: int, is_leaf: bool) -> None:
        (self._leaves.add if is_leaf else self._leaves.discard)(cell)

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        small, main, uses = self._small, self._main, self._uses
        passed = 0  # of the main queue in a row that may not go: once round, and every leaf is in the small one
        while True:
            if len(small) >= self._small_size or not main or (passed > len(main) and small):
                cell = next(iter(small))
                if uses[cell] <= 1 and cell in self._leaves:
                    return self._run(chain(cell), small, 1, max(1, len(small) - self._small_size + 1) if main else 256)
                if uses[cell] > 1:
                    uses[cell] = 0
                del small[cell]
                main[cell] = None
            else:
                cell = next(iter(main))
                if uses[cell] > 0:
                    uses[cell] -= 1
                    passed = 0
                elif cell in self._leaves:
                    return self._run(chain(cell), main, 0, 256)
                else:
                    passed += 1
                main.move_to_end(cell)

    def _run(self, cells: Cells, queue: Queue, most_uses: int, limit: int) -> Cells:
        """The first of ``cells``, and of those after it at most ``limit - 1`` that are next in the queue and go too."""
        for n, (cell, queued) in enumerate(zip(cells[:limit].tolist(), queue)):
            if cell != queued or self._uses[cell] > most_uses:
                return cells[:n]
        return cells[: min(limit, len(queue))]

    def remove(self, cells: Cells, *, evicted: bool) -> Cells:
        forgotten = []
        for cell in cells.tolist():
            if cell in self._main:
                del self._main[cell]
                forgotten.append(cell)
            else:
                del self._small[cell]
                if evicted:
                    self._ghost[cell] = None
                else:
                    forgotten.append(cell)
        while len(self._ghost) > self._ghost_size:
            forgotten.append(self._ghost.popitem(last=False)[0])
        return _cells(forgotten)

    def check(self, cells: Cells, leaves: set[int]) -> None:
        if leaves != self._leaves:
            raise CheckFailed(f"S3-FIFO and the tree disagree about leaves {sorted(leaves ^ self._leaves)[:16]}")
        queued = sorted([*self._small, *self._main])
        if queued != sorted(cells.tolist()) or not self._ghost.keys().isdisjoint(queued):
            raise CheckFailed(
                f"S3-FIFO queues and tree disagree about cells {sorted({*queued} ^ {*cells.tolist()})[:16]}"
            )


class Ghosts:
    """What ARC remembers of blocks that went, by how often they had been used, and the share for those used once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = _capacity(capacity)
        self.share = 0
        self.once: Queue = OrderedDict()
        self.again: Queue = OrderedDict()

    def recall(self, cell: int) -> bool:
        """``cell`` comes back: it is a ghost no more, and moves the share. False if it was none."""
        once, again = len(self.once), len(self.again)
        if cell in self.once:
            self.share = min(self._capacity, self.share + max(1, again // once))
            del self.once[cell]
        elif cell in self.again:
            self.share = max(0, self.share - max(1, once // again))
            del self.again[cell]
        else:
            return False
        return True

    def trim(self, num_once: int) -> list[int]:
        """Forget the oldest, as far as ARC does with ``num_once`` cached blocks used once; returns them."""
        forgotten = []
        while len(self.once) > max(0, self._capacity - num_once):
            forgotten.append(self.once.popitem(last=False)[0])
        while len(self.once) + len(self.again) > self._capacity:
            forgotten.append((self.again or self.once).popitem(last=False)[0])
        return forgotten


class ARC(ByKey):
    """ARC (Megiddo and Modha, FAST 2003) for a cache of ``capacity`` blocks: those used once and those used again, each
    by recency, each with its ghosts; a hit on a ghost moves the share of the first.

    The victim is the least recently used leaf of the first kind while more blocks are of it than its share, otherwise of
    the second; of the other kind where that one has no leaf. The rank is the kind: 1 used once, 2 used again, negative
    for their ghosts, 0 for what is not known. Amortised O(log leaves) for a choice and O(1) for each block chosen.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._ghosts = Ghosts(capacity)
        self._num_once = 0
        self._again = LeafIndex(self._key)  # the leaves that were used once are in _index

    def add(self, cells: Cells, priority: int) -> None:
        self._rank = grown(self._rank, int(cells.max(initial=0)) + 1)
        kinds = self._rank[cells]
        for cell in cells[kinds < 0][::-1].tolist():
            self._ghosts.recall(cell)
        super().add(cells, priority)
        self._rank[cells] = np.where(kinds == 0, 1, 2)
        self._num_once += len(cells) - int(np.count_nonzero(kinds))

    def touch(self, cells: Cells, priority: int) -> None:
        first = cells[self._rank[cells] == 1]
        super().touch(cells, priority)
        if len(first):
            self._rank[first] = 2
            self._num_once -= len(first)
            for cell in self._index.leaves.intersection(first.tolist()):
                self._index.discard(cell)
                self._again.add(cell)

    def mark(self, cell: int, is_leaf: bool) -> None:
        index = self._index if self._rank[cell] == 1 else self._again
        (index.add if is_leaf else index.discard)(cell)

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        surplus = self._num_once - self._ghosts.share
        if self._index.leaves and (surplus > 0 or not self._again.leaves):
            cells = self._run(chain(self._index.pop()), self._index)
            return cells[:surplus] if surplus > 0 else cells
        return self._run(chain(self._again.pop()), self._again)

    def remove(self, cells: Cells, *, evicted: bool) -> Cells:
        kinds = self._rank[cells]
        self._num_once -= int(np.count_nonzero(kinds == 1))
        self._rank[cells] = -kinds if evicted else 0
        if evicted:
            self._ghosts.once.update(dict.fromkeys(cells[kinds == 1].tolist()))
            self._ghosts.again.update(dict.fromkeys(cells[kinds == 2].tolist()))
        forgotten = _cells(self._ghosts.trim(self._num_once))
        self._rank[forgotten] = 0
        return forgotten if evicted else np.concatenate((cells, forgotten))

    def check(self, cells: Cells, leaves: set[int]) -> None:
        known = np.flatnonzero(self._rank > 0)
        once = int(np.count_nonzero(self._rank == 1))
        if not np.array_equal(known, np.sort(cells)) or once != self._num_once:
            raise CheckFailed(f"ARC and the tree disagree about cells {np.setxor1d(known, cells)[:16].tolist()}")
        self._index.check({leaf for leaf in leaves if self._rank[leaf] == 1})
        self._again.check({leaf for leaf in leaves if self._rank[leaf] == 2})
        for kind, ghosts in ((-1, self._ghosts.once), (-2, self._ghosts.again)):
            if set(np.flatnonzero(self._rank == kind).tolist()) != ghosts.keys():
                raise CheckFailed("ARC counts a block that is cached among the ghosts, or has lost a ghost")

    def _goes(self, cells: Cells, below: Cells, rank: int, stamp: int) -> Mask:
        goes: Mask = (self._rank[cells] == self._rank[below]) & (self._stamp[cells] < stamp)
        return goes
