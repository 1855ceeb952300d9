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
Handles = npt.NDArray[np.intp]
"""Handles by which arrays are indexed: numpy takes int32 several times as long."""
_KEEPER = 1 << 32  # one who keeps a block, in the count of its uses; a reader is 1
_READERS = _KEEPER - 1
_NONE: Ids = np.empty(0, np.int32)


class WindowBlocks:
    """Blocks of ``block_size`` tokens with ids below ``num_rows``, of layers that grow as ``growth`` says.

    ``num_cached``: blocks that the tree names; ``num_read``: of these, those that somebody reads; ``num_reads``: how often
    these are read in all; ``num_cold``: those that nobody reads or keeps. Callers name each block once in a call: by its
    handle, intp ``[n]``, by its id, or by its cell, int32 ``[2, n]``, in which 0 and 0 are no block. Methods are O(their
    arguments), array work, but where another cost is named; those that change something ask for no memory but small
    temporaries.
    """

    def __init__(self, growth: Growth, block_size: int, num_rows: int) -> None:
        self.growth, self.block_size = growth, block_size
        self._all: Ids = np.arange(num_rows, dtype=np.int32)
        self._handle_of: Handles = np.arange(num_rows)  # by id; what follows is by handle
        self._id_of = self._all.copy()
        self._generation = np.ones(num_rows, np.int32)
        self._uses = np.zeros(num_rows, np.int64)  # readers and keepers; below 0: cold since that turn
        self._queue: deque[tuple[int, Handles]] = (
            deque()
        )  # (turn, handles): those with other uses by now are passed over
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0

    # -- what is there -----------------------------------------------------------------------------------------------

    def write_cells(self, handles: Handles, out: Ids) -> None:
        """Write to ``out``, int32 ``[2, n]``, the cells that name ``handles`` in the tree."""
        out[0], out[1] = handles, self._generation[handles]

    def handles(self, ids: Ids) -> Handles:
        """The handles of ``ids``, intp ``[n]``."""
        handles: Handles = self._handle_of.take(ids)
        return handles

    def ids(self, handles: Handles) -> Ids:
        """The ids that ``handles`` have now, int32 ``[n]``."""
        ids: Ids = self._id_of[handles]
        return ids

    def are_there(self, cells: Ids) -> Flags:
        """Which of ``cells`` still name a block: bool ``[n]``."""
        there: Flags = self._generation[cells[0]] == cells[1]
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

    def publish(self, handles: Handles) -> None:
        """``handles`` are named in the tree from now on, and read by the one who published them."""
        self._uses[handles] = 1
        self.num_cached += len(handles)
        self.num_read += len(handles)
        self.num_reads += len(handles)

    def read(self, handles: Handles) -> None:
        """One more reads ``handles``."""
        uses = self._warm(handles)
        self.num_reads += len(handles)
        self.num_read += len(uses[uses & _READERS == 0])
        self._uses[handles] = uses + 1

    def leave(self, handles: Handles) -> None:
        """One less reads ``handles``; those that nobody reads or keeps then are cold."""
        if not len(handles):
            return
        uses = self._uses[handles] - 1
        self.num_reads -= len(handles)
        if uses[uses.argmax()]:
            self.num_read -= len(uses[uses & _READERS == 0])
            self._uses[handles] = uses
            handles = handles[uses == 0]
        else:
            self.num_read -= len(handles)
        if len(handles):
            self._cool(handles, self._next_turn)
            self._queue.append((self._next_turn, handles))
            self._next_turn += 1

    def keep(self, handles: Handles) -> None:
        """One more keeps ``handles``."""
        self._uses[handles] = self._warm(handles) + _KEEPER

    def drop(self, handles: Handles) -> None:
        """One less keeps ``handles``; those that nobody reads or keeps then go next."""
        uses = self._uses[handles] - _KEEPER
        self._uses[handles] = uses
        handles = handles[uses == 0]
        if len(handles):
            self._first_turn -= 1
            self._cool(handles, self._first_turn)
            self._queue.appendleft((self._first_turn, handles))

    def _warm(self, handles: Handles) -> npt.NDArray[np.int64]:
        """The uses of ``handles``, one of which comes now: they are cold no more."""
        uses: npt.NDArray[np.int64] = self._uses[handles]
        are_cold = uses < 0
        self.num_cold -= len(uses[are_cold])
        uses[are_cold] = 0
        return uses

    def _cool(self, handles: Handles, turn: int) -> None:
        """``handles``, which nobody uses, are queued under ``turn``."""
        self.num_cold += len(handles)
        self._uses[handles] = -turn

    # -- blocks that go or move --------------------------------------------------------------------------------------

    def evict(self, n: int) -> Ids:
        """Give up ``n`` cold blocks, or all if there are fewer: their ids, int32. Amortised O(n)."""
        count, done = min(n, self.num_cold), 0
        gone = np.empty(count, np.intp)
        while done < count:
            turn, handles = self._queue.popleft()
            handles = self._still_cold(turn, handles)
            end = done + len(handles)
            if end > count:
                self._queue.appendleft((turn, handles[count - done :]))
                handles, end = handles[: count - done], count
            gone[done:end] = handles
            done = end
        return self._forget(gone)

    def forget(self, cells: Ids) -> Ids:
        """The tree has no ``cells`` any more, which nobody reads or keeps: the ids of their blocks, cached no more."""
        handles = cells[0, self.are_there(cells)]
        if not len(handles):
            return _NONE
        self._uses[handles] = 0
        return self._forget(handles)

    def _still_cold(self, turn: int, handles: Handles) -> Handles:
        """Of a part of the queue those that were not read or kept since."""
        are_cold = self._uses[handles] == -turn
        return handles if are_cold[are_cold.argmin()] else handles[are_cold]

    def _forget(self, handles: Handles | Ids) -> Ids:
        self.num_cached -= len(handles)
        self.num_cold -= len(handles)
        self._generation[handles] += 1
        ids: Ids = self._id_of[handles]
        return ids

    def remap(self, new_ids: Ids) -> None:
        """Block ``i`` is block ``new_ids[i]`` from now on, int32 ``[num_rows]``, which was a free one. O(rows)."""
        sources = self._all[new_ids != self._all]
        targets = new_ids[sources]
        moved, free = self._handle_of[sources], self._handle_of[targets]
        self._id_of[moved], self._id_of[free] = targets, sources
        self._handle_of[targets], self._handle_of[sources] = moved, free

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cells: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that the tree has ``cells``, that ``readers`` and ``keepers``, int64 ``[num_rows]``, say how many read each id
        and keep each handle, and that every cold block will come up. Raises CheckFailed."""
        where, handles = self.growth.name, np.sort(cells[0, self.are_there(cells)])
        if (handles[1:] == handles[:-1]).any() or (self._id_of[self._handle_of] != self._all).any():
            raise CheckFailed(f"{where}: a cached block is at two places, or handles and ids disagree")
        counted = len(handles), int(np.count_nonzero(readers)), int(readers.sum())
        if counted != (self.num_cached, self.num_read, self.num_reads):
            raise CheckFailed(
                f"{where}: {counted} blocks are cached, read, and reads in all; "
                f"{self.num_cached, self.num_read, self.num_reads} are counted"
            )
        odd = np.flatnonzero(np.maximum(self._uses, 0) != readers[self._id_of] + keepers * _KEEPER)
        if len(odd):
            raise CheckFailed(f"{where}: readers and keepers of blocks {self._id_of[odd][:16].tolist()} are miscounted")
        cold = handles[self._uses[handles] < 0]
        queued = [self._still_cold(turn, one) for turn, one in self._queue]
        listed = np.sort(np.concatenate([_NONE, *queued]))
        if len(cold) != self.num_cold or not np.array_equal(cold, listed):
            raise CheckFailed(f"{where}: {len(cold)} cold blocks, {len(listed)} in the queue, {self.num_cold} counted")
