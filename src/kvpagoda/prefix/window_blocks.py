"""The cached blocks of one group that keeps a window or a chunk: who reads them, who keeps them, and which go first.

A cell of the prefix tree names such a block by two numbers, its id and its *generation*: how often the id was cached. So a
block can be evicted without a look at the tree; what names it there is stale from then on.

    read   by running requests, whose window it lies in, and by pins       stays
    kept   by checkpoints, as the last window before a place to resume     goes with the last of them, by age
    cold   slid out of every window, and at no such place                  goes first, the oldest first
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.schema.fields import Growth

Flags = npt.NDArray[np.bool_]
_KEEPER = 1 << 32  # one who keeps a block, in the count of its uses; a reader is 1
_NONE: Ids = np.empty(0, np.int32)


class WindowBlocks:
    """Blocks of ``block_size`` tokens with ids below ``num_rows``, of layers that grow as ``growth`` says.

    ``num_cached``: blocks that the tree names; ``num_read``: of these, those that somebody reads; ``num_reads``: how often
    these are read in all; ``num_cold``: those that nobody reads or keeps. Callers name each id once in a call. Methods are
    O(their arguments), array work, but where another cost is named.
    """

    def __init__(self, growth: Growth, block_size: int, num_rows: int) -> None:
        self.growth, self.block_size = growth, block_size
        self._uses = np.zeros(num_rows, np.int64)
        self._generation = np.ones(num_rows, np.int32)
        self._is_cached = np.zeros(num_rows, np.bool_)
        self._turn = np.zeros(num_rows, np.int64)  # of a cold block: its part of the queue
        self._queue: deque[tuple[int, Ids]] = deque()  # (turn, ids): those of another turn by now are passed over
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0

    # -- what is there -----------------------------------------------------------------------------------------------

    def cells(self, ids: Ids) -> Ids:
        """What the tree calls ``ids``, int32 ``[2, n]``; 0, no block, stays 0."""
        return np.stack((ids, np.where(ids > 0, self._generation[ids], 0)))

    def are_there(self, cells: Ids) -> Flags:
        """Which of ``cells``, int32 ``[2, n]``, still name a block: bool ``[n]``."""
        there: Flags = (cells[0] > 0) & (self._generation[cells[0]] == cells[1])
        return there

    def first_needed(self, num_blocks: int) -> int:
        """The first block that a text still reads after ``num_blocks`` of it."""
        return int(self.growth.first_needed(num_blocks * self.block_size)) // self.block_size

    def can_resume(self, cells: Ids) -> bool:
        """Whether a text can go on behind its blocks ``cells``, int32 ``[2, n]``."""
        return bool(self.are_there(cells[:, self.first_needed(cells.shape[1]) :]).all())

    def boundaries(self, cells: Ids) -> Flags:
        """Behind how many of the blocks ``cells``, int32 ``[2, n]``, the text can go on: bool ``[n + 1]``."""
        n = cells.shape[1]
        ends = np.arange(n + 1)
        needed = self.growth.first_needed(ends * self.block_size) // self.block_size
        missing = np.where(self.are_there(cells), -1, ends[:-1])
        last_missing = np.concatenate(([-1], np.maximum.accumulate(missing))) if n else np.array([-1])
        flags: Flags = last_missing < needed
        return flags

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody reads."""
        return self.num_cached - self.num_read

    # -- readers and keepers -----------------------------------------------------------------------------------------

    def publish(self, ids: Ids) -> None:
        """``ids`` are named in the tree from now on, and read by the one who published them."""
        self._is_cached[ids] = True
        self._uses[ids] = 1
        self.num_cached += len(ids)
        self.num_read += len(ids)
        self.num_reads += len(ids)

    def read(self, ids: Ids) -> None:
        """One more reads ``ids``."""
        uses = self._uses[ids]
        self.num_reads += len(ids)
        self.num_read += int(np.count_nonzero(uses % _KEEPER == 0))
        self._warm(uses)
        self._uses[ids] = uses + 1

    def leave(self, ids: Ids) -> None:
        """One less reads ``ids``; those that nobody reads or keeps then are cold."""
        uses = self._uses[ids] - 1
        self._uses[ids] = uses
        self.num_reads -= len(ids)
        self.num_read -= int(np.count_nonzero(uses % _KEEPER == 0))
        self._cool(ids[uses == 0], is_newest=True)

    def keep(self, ids: Ids) -> None:
        """One more keeps ``ids``."""
        uses = self._uses[ids]
        self._warm(uses)
        self._uses[ids] = uses + _KEEPER

    def drop(self, ids: Ids) -> None:
        """One less keeps ``ids``; those that nobody reads or keeps then go next."""
        uses = self._uses[ids] - _KEEPER
        self._uses[ids] = uses
        self._cool(ids[uses == 0], is_newest=False)

    def _warm(self, uses: npt.NDArray[np.int64]) -> None:
        self.num_cold -= len(uses) - int(np.count_nonzero(uses))

    def _cool(self, ids: Ids, *, is_newest: bool) -> None:
        if not len(ids):
            return
        self.num_cold += len(ids)
        if is_newest:
            turn = self._next_turn
            self._next_turn += 1
            self._queue.append((turn, ids))
        else:
            self._first_turn -= 1
            turn = self._first_turn
            self._queue.appendleft((turn, ids))
        self._turn[ids] = turn

    # -- blocks that go or move --------------------------------------------------------------------------------------

    def evict(self, n: int) -> Ids:
        """Give up ``n`` cold blocks, or all if there are fewer: their ids, int32. Amortised O(n)."""
        gone: list[Ids] = []
        lacking = min(n, self.num_cold)
        while lacking:
            turn, ids = self._queue.popleft()
            ids = self._still_cold(turn, ids)
            if len(ids) > lacking:
                self._queue.appendleft((turn, ids[lacking:]))
                ids = ids[:lacking]
            lacking -= len(ids)
            gone.append(ids)
        found = np.concatenate(gone) if gone else _NONE
        self._forget(found)
        return found

    def forget(self, cells: Ids) -> Ids:
        """The tree has no ``cells``, int32 ``[2, n]``, any more, which nobody reads or keeps: the ids of their blocks, which
        are cached no more."""
        ids: Ids = cells[0, self.are_there(cells)]
        self._forget(ids)
        return ids

    def _still_cold(self, turn: int, ids: Ids) -> Ids:
        """Of the part ``ids`` of the queue those that were not read or kept since."""
        cold: Ids = ids[(self._turn[ids] == turn) & (self._uses[ids] == 0)]
        return cold

    def _forget(self, ids: Ids) -> None:
        self.num_cached -= len(ids)
        self.num_cold -= len(ids)
        self._generation[ids] += 1
        self._is_cached[ids] = False
        self._turn[ids] = 0

    def moved(self, new_ids: Ids, cells: Ids) -> Ids:
        """``cells``, int32 ``[2, n]``, once block ``i`` is block ``new_ids[i]`` and ``remap`` was called; stale ones name
        nothing then."""
        there = self.are_there(cells)
        return np.where(there, np.stack((new_ids[cells[0]], cells[1])), 0)

    def remap(self, new_ids: Ids) -> None:
        """Block ``i`` is block ``new_ids[i]`` from now on, int32 ``[num_rows]``; the tree has what ``moved`` said. O(rows and
        cold blocks)."""
        sources = np.flatnonzero(new_ids != np.arange(len(new_ids)))
        targets = new_ids[sources]
        queue = [(turn, new_ids[self._still_cold(turn, ids)]) for turn, ids in self._queue]
        for of_block in (self._uses, self._generation, self._is_cached, self._turn):
            of_block[targets] = of_block[sources]
        self._uses[sources] = self._turn[sources] = 0
        self._is_cached[sources] = False
        self._queue = deque(queue)

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, ids: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that ``ids`` are the blocks that the tree names, that ``readers`` and ``keepers``, int64 ``[num_rows]``, say
        how many read and keep each, and that every cold block will come up. Raises CheckFailed."""
        counted = len(ids), int(np.count_nonzero(readers)), int(readers.sum())
        if counted != (self.num_cached, self.num_read, self.num_reads) or not self._is_cached[ids].all():
            raise CheckFailed(
                f"{self.growth.name}: {counted} blocks are cached, read, and reads in all; "
                f"{self.num_cached, self.num_read, self.num_reads} are counted"
            )
        odd = np.flatnonzero(self._uses != readers + keepers * _KEEPER)
        if len(odd):
            raise CheckFailed(f"{self.growth.name}: readers and keepers of blocks {odd[:16].tolist()} are miscounted")
        cold = np.sort(ids[self._uses[ids] == 0])
        queued = [self._still_cold(turn, one) for turn, one in self._queue]
        listed = np.sort(np.concatenate([_NONE, *queued]))
        if len(cold) != self.num_cold or not np.array_equal(cold, listed):
            raise CheckFailed(
                f"{self.growth.name}: {len(cold)} cold blocks, {len(listed)} in the queue, {self.num_cold}"
            )
