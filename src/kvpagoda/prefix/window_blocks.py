"""The cached blocks of one group that keeps a window or a chunk: who reads them, who keeps them, and which go first.

A cell of the prefix tree names such a block by two numbers: a *handle*, which stays the same when the block moves, and the
*generation* of that, how often it was cached. So blocks are evicted and moved without a look at the tree; what names an
evicted one there is stale from then on.

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
    these are read in all; ``num_cold``: those that nobody reads or keeps. Callers name each block once in a call, those that
    requests hold by their ids, those that the tree has by their cells, int32 ``[2, n]``. Methods are O(their arguments), array
    work, but where another cost is named.
    """

    def __init__(self, growth: Growth, block_size: int, num_rows: int) -> None:
        self.growth, self.block_size = growth, block_size
        self._id_of: Ids = np.arange(num_rows, dtype=np.int32)  # by handle; what follows too
        self._handle_of: Ids = self._id_of.copy()  # by id
        self._uses = np.zeros(num_rows, np.int64)
        self._generation = np.ones(num_rows, np.int32)
        self._turn = np.zeros(num_rows, np.int64)  # of a cold block: its part of the queue
        self._queue: deque[tuple[int, Ids]] = deque()  # (turn, handles): those of another turn by now are passed over
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0

    # -- what is there -----------------------------------------------------------------------------------------------

    def cells(self, ids: Ids) -> Ids:
        """What the tree calls ``ids``, int32 ``[2, n]``; 0, no block, stays 0: it is a handle of itself."""
        cells = np.empty((2, len(ids)), np.int32)
        cells[0] = self._handle_of[ids]
        cells[1] = self._generation[cells[0]]
        return cells

    def ids(self, cells: Ids) -> Ids:
        """The blocks that ``cells`` name, which are there, int32 ``[n]``."""
        ids: Ids = self._id_of[cells[0]]
        return ids

    def are_there(self, cells: Ids) -> Flags:
        """Which of ``cells`` still name a block: bool ``[n]``."""
        there: Flags = (cells[0] > 0) & (self._generation[cells[0]] == cells[1])
        return there

    def first_needed(self, num_blocks: int) -> int:
        """The first block that a text still reads after ``num_blocks`` of it."""
        return int(self.growth.first_needed(num_blocks * self.block_size)) // self.block_size

    def can_resume(self, cells: Ids) -> bool:
        """Whether a text can go on behind its blocks ``cells``."""
        return bool(self.are_there(cells[:, self.first_needed(cells.shape[1]) :]).all())

    def boundaries(self, cells: Ids) -> Flags:
        """Behind how many of the blocks ``cells`` the text can go on: bool ``[n + 1]``."""
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
        self._uses[self._handle_of[ids]] = 1
        self.num_cached += len(ids)
        self.num_read += len(ids)
        self.num_reads += len(ids)

    def read(self, ids: Ids) -> None:
        """One more reads ``ids``."""
        handles = self._handle_of[ids]
        uses = self._uses[handles]
        self.num_reads += len(ids)
        self.num_read += int(np.count_nonzero(uses % _KEEPER == 0))
        self._warm(uses)
        self._uses[handles] = uses + 1

    def leave(self, ids: Ids) -> None:
        """One less reads ``ids``; those that nobody reads or keeps then are cold."""
        handles = self._handle_of[ids]
        uses = self._uses[handles] - 1
        self._uses[handles] = uses
        self.num_reads -= len(ids)
        self.num_read -= int(np.count_nonzero(uses % _KEEPER == 0))
        self._cool(handles[uses == 0], is_newest=True)

    def keep(self, cells: Ids) -> None:
        """One more keeps ``cells``, which are there."""
        uses = self._uses[cells[0]]
        self._warm(uses)
        self._uses[cells[0]] = uses + _KEEPER

    def drop(self, cells: Ids) -> None:
        """One less keeps ``cells``; those that nobody reads or keeps then go next."""
        uses = self._uses[cells[0]] - _KEEPER
        self._uses[cells[0]] = uses
        self._cool(cells[0, uses == 0], is_newest=False)

    def _warm(self, uses: npt.NDArray[np.int64]) -> None:
        self.num_cold -= len(uses) - int(np.count_nonzero(uses))

    def _cool(self, handles: Ids, *, is_newest: bool) -> None:
        if not len(handles):
            return
        self.num_cold += len(handles)
        if is_newest:
            turn = self._next_turn
            self._next_turn += 1
            self._queue.append((turn, handles))
        else:
            self._first_turn -= 1
            turn = self._first_turn
            self._queue.appendleft((turn, handles))
        self._turn[handles] = turn

    # -- blocks that go or move --------------------------------------------------------------------------------------

    def evict(self, n: int) -> Ids:
        """Give up ``n`` cold blocks, or all if there are fewer: their ids, int32. Amortised O(n)."""
        gone: list[Ids] = []
        lacking = min(n, self.num_cold)
        while lacking:
            turn, handles = self._queue.popleft()
            handles = self._still_cold(turn, handles)
            if len(handles) > lacking:
                self._queue.appendleft((turn, handles[lacking:]))
                handles = handles[:lacking]
            lacking -= len(handles)
            gone.append(handles)
        return self._forget(np.concatenate(gone) if gone else _NONE)

    def forget(self, cells: Ids) -> Ids:
        """The tree has no ``cells`` any more, which nobody reads or keeps: the ids of their blocks, cached no more."""
        return self._forget(cells[0, self.are_there(cells)])

    def _still_cold(self, turn: int, handles: Ids) -> Ids:
        """Of a part of the queue those that were not read or kept since."""
        cold: Ids = handles[(self._turn[handles] == turn) & (self._uses[handles] == 0)]
        return cold

    def _forget(self, handles: Ids) -> Ids:
        self.num_cached -= len(handles)
        self.num_cold -= len(handles)
        self._generation[handles] += 1
        self._turn[handles] = 0
        ids: Ids = self._id_of[handles]
        return ids

    def remap(self, new_ids: Ids) -> None:
        """Block ``i`` is block ``new_ids[i]`` from now on, int32 ``[num_rows]``, which was a free one. O(rows)."""
        sources = np.flatnonzero(new_ids != np.arange(len(new_ids)))
        targets = new_ids[sources]
        moved, free = self._handle_of[sources], self._handle_of[targets]
        self._id_of[moved], self._id_of[free] = targets, sources
        self._handle_of[targets], self._handle_of[sources] = moved, free

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cells: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that the tree has ``cells``, that ``readers`` and ``keepers``, int64 ``[num_rows]``, say how many read each id
        and keep each handle, and that every cold block will come up. Raises CheckFailed."""
        where, handles = self.growth.name, np.sort(cells[0, self.are_there(cells)])
        if (handles[1:] == handles[:-1]).any() or not np.array_equal(
            self._id_of[self._handle_of], np.arange(len(readers))
        ):
            raise CheckFailed(f"{where}: a cached block is at two places, or handles and ids disagree")
        counted = len(handles), int(np.count_nonzero(readers)), int(readers.sum())
        if counted != (self.num_cached, self.num_read, self.num_reads):
            raise CheckFailed(
                f"{where}: {counted} blocks are cached, read, and reads in all; "
                f"{self.num_cached, self.num_read, self.num_reads} are counted"
            )
        odd = np.flatnonzero(self._uses != readers[self._id_of] + keepers * _KEEPER)
        if len(odd):
            raise CheckFailed(f"{where}: readers and keepers of blocks {self._id_of[odd][:16].tolist()} are miscounted")
        cold = handles[self._uses[handles] == 0]
        queued = [self._still_cold(turn, one) for turn, one in self._queue]
        listed = np.sort(np.concatenate([_NONE, *queued]))
        if len(cold) != self.num_cold or not np.array_equal(cold, listed):
            raise CheckFailed(f"{where}: {len(cold)} cold blocks, {len(listed)} in the queue, {self.num_cold} counted")
