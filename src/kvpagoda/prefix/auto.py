"""LRU or ARC, whichever the workload rewards: watched on a sample of the blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.ghosts import ARC, Ghosts, Queue
from kvpagoda.prefix.keyed import Mask
from kvpagoda.prefix.numbers import grown
from kvpagoda.prefix.policy import Cells

_SHADOW = 128  # a shadow holds so many blocks, or up to twice as many; all, of a smaller cache
_WINDOW = 8  # uses of sampled blocks between two judgements, in sizes of a shadow
_MARGIN = 200  # one hit in so many uses must speak for ARC before it takes over
_CACHED, _SAMPLED = 1, 2  # who remembers a cell: ARC, cached or as a ghost; a shadow


class ShadowLRU:
    """What LRU would hold in ``capacity`` blocks if each of them were a leaf."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: Queue = OrderedDict()
        self.hits = 0

    def __contains__(self, cell: int) -> bool:
        return cell in self._queue

    def use(self, cell: int) -> list[int]:
        """Use ``cell``; returns the cells that are forgotten."""
        if cell in self._queue:
            self.hits += 1
            self._queue.move_to_end(cell)
            return []
        self._queue[cell] = None
        return [self._queue.popitem(last=False)[0]] if len(self._queue) > self._capacity else []


class ShadowARC:
    """What ARC would hold in ``capacity`` blocks if each of them were a leaf, and its ghosts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: Queue = OrderedDict()
        self._again: Queue = OrderedDict()
        self.ghosts = Ghosts(capacity)
        self.hits = 0

    def __contains__(self, cell: int) -> bool:
        return any(cell in queue for queue in (self._once, self._again, self.ghosts.once, self.ghosts.again))

    def use(self, cell: int) -> list[int]:
        """Use ``cell``; returns the cells that are forgotten."""
        if cell in self._once or cell in self._again:
            self.hits += 1
            self._once.pop(cell, None)
            self._again[cell] = None
            self._again.move_to_end(cell)
            return []
        (self._again if self.ghosts.recall(cell) else self._once)[cell] = None
        if len(self._once) + len(self._again) <= self._capacity:
            return []
        if self._once and (len(self._once) > self.ghosts.share or not self._again):
            self.ghosts.once[self._once.popitem(last=False)[0]] = None
        else:
            self.ghosts.again[self._again.popitem(last=False)[0]] = None
        return self.ghosts.trim(len(self._once))


class Auto(ARC):
    """ARC, or LRU as long as ARC would not hit more often.

    Both lie in ARC's two lists of leaves: LRU takes the older of their first ones, so that to change over moves nothing.
    Every k-th block that is not remembered is sampled, and shadows of a k-th of the capacity are shown the uses of these;
    their hits, the older ones counting half with each judgement, say who leads. O(1) for each block more than ARC.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._every = max(1, capacity // _SHADOW)
        size = max(1, capacity // self._every)
        self._shadow_lru, self._shadow_arc = ShadowLRU(size), ShadowARC(size)
        self._window = _WINDOW * size
        self._uses = self._phase = 0
        self._is_lru = True
        self._known = np.zeros(0, np.uint8)  # who remembers a cell
        self._dropped: list[int] = []  # cells that the shadows forgot since the last removal

    def add(self, cells: Cells, priority: int) -> None:
        super().add(cells, priority)
        self._known = grown(self._known, len(self._rank))
        fresh = cells[self._known[cells] == 0]
        self._known[fresh[self._phase :: self._every]] = _SAMPLED
        self._phase = (self._phase - len(fresh)) % self._every
        self._known[cells] |= _CACHED
        self._watch(cells)

    def touch(self, cells: Cells, priority: int) -> None:
        super().touch(cells, priority)
        self._watch(cells)

    def choose(self, chain: Callable[[int], Cells]) -> Cells:
        if not self._is_lru:
            return super().choose(chain)
        once, again = self._index.first(), self._again.first()
        oldest = self._index if once and not (again and again[1] < once[1]) else self._again
        return self._run(chain(oldest.pop()), self._index, self._again)

    def remove(self, cells: Cells, *, evicted: bool) -> Cells:
        forgotten = super().remove(cells, evicted=evicted)
        self._known[forgotten] &= ~np.uint8(_CACHED)
        if self._dropped:
            forgotten = np.unique(np.concatenate((forgotten, np.array(self._dropped, np.int32))))
            self._dropped.clear()
        meaningless: Cells = forgotten[self._known[forgotten] == 0]
        return meaningless

    def check(self, cells: Cells, leaves: set[int]) -> None:
        super().check(cells, leaves)
        if not np.array_equal(np.flatnonzero(self._known & _CACHED), np.flatnonzero(self._rank)):
            raise CheckFailed("the monitor and ARC disagree about the cells that are remembered")

    def _goes(self, cells: Cells, below: Cells, rank: int, stamp: int) -> Mask:
        if not self._is_lru:
            return super()._goes(cells, below, rank, stamp)
        goes: Mask = self._stamp[cells] < stamp
        return goes

    def _watch(self, cells: Cells) -> None:
        """Show the sampled ones of ``cells`` to the shadows; judge now and then."""
        sampled = cells[self._known[cells] >= _SAMPLED]
        lru, arc = self._shadow_lru, self._shadow_arc
        for cell in sampled[::-1].tolist():
            gone = [one for one in lru.use(cell) if one not in arc] + [one for one in arc.use(cell) if one not in lru]
            if gone:
                self._known[gone] &= _CACHED
                self._dropped += gone
        self._uses += len(sampled)
        if self._uses >= self._window:
            gain = arc.hits - lru.hits
            if self._is_lru and gain * _MARGIN > self._uses:
                self._is_lru = False
                self._ghosts.share = arc.ghosts.share * self._every
            elif gain < 0:
                self._is_lru = True
            for counted in (lru, arc):
                counted.hits //= 2
            self._uses //= 2
