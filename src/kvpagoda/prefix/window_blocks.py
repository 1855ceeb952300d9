"""The cached blocks of one group that keeps a window or a chunk: their readers and keepers, and their eviction order.

A cell of the prefix tree names such a block by two numbers: a *handle*, which stays the same when the block moves, and
the *generation* of the handle, which counts how often it was cached. So blocks are evicted and moved without access to
the tree; cells that name an evicted block are stale from then on.

    read   by running requests, in whose window it lies, and by pins       not evictable
    kept   by checkpoints, as the last window before a resumable place     evicted with the last of these, by age
    cold   outside of every window, and not kept                           evicted first, the oldest first
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
"""Handles index arrays; numpy takes several times as long to index by int32."""
_KEEPER = 1 << 32  # a keeper in the count of a block's uses; a reader is 1
_READERS = _KEEPER - 1
_NONE: Ids = np.empty(0, np.int32)


class WindowBlocks:
    """Blocks of ``block_size`` tokens with ids below ``num_rows``, of layers that grow as ``growth`` says.

    ``num_cached``: blocks that the tree names. ``num_read``: cached blocks with a reader. ``num_reads``: the sum of
    their readers. ``num_cold``: cached blocks without a reader or keeper.

    Callers name each block once in a call: by its handle, intp ``[n]``, by its id, or by its cell. Cells are int32
    ``[2, n]``; 0 and 0 mean no block. Methods are O(their arguments), array work, unless another cost is named. Methods
    that change something allocate only small temporaries.
    """

    def __init__(self, growth: Growth, block_size: int, num_rows: int) -> None:
        self.growth, self.block_size = growth, block_size
        self._all: Ids = np.arange(num_rows, dtype=np.int32)
        self._handle_of: Handles = np.arange(num_rows)  # by id; what follows is by handle
        self._id_of = self._all.copy()
        self._generation = np.ones(num_rows, np.int32)
        self._uses = np.zeros(num_rows, np.int64)  # readers and keepers; -turn: cold since that turn
        self._queue: deque[tuple[int, Handles]] = deque()  # (turn, handles), also of blocks with other uses by now
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0

    # -- names and queries -------------------------------------------------------------------------------------------

    def write_cells(self, handles: Handles, out: Ids) -> None:
        """Write the cells of these blocks to ``out``, int32 ``[2, n]``."""
        out[0], out[1] = handles, self._generation[handles]

    def handles(self, ids: Ids) -> Handles:
        """Return the handles of ``ids``, intp ``[n]``."""
        handles: Handles = self._handle_of.take(ids)
        return handles

    def ids(self, handles: Handles) -> Ids:
        """Return the ids that ``handles`` have now, int32 ``[n]``."""
        ids: Ids = self._id_of[handles]
        return ids

    def are_there(self, cells: Ids) -> Flags:
        """Return which of ``cells`` still name a block: bool ``[n]``."""
        there: Flags = self._generation[cells[0]] == cells[1]
        return there

    def first_needed(self, num_blocks: int) -> int:
        """Return the first block that a text still reads after ``num_blocks`` blocks of it."""
        return int(self.growth.first_needed(num_blocks * self.block_size)) // self.block_size

    def can_resume(self, cells: Ids) -> bool:
        """Return whether a text can be continued behind its blocks ``cells``."""
        return bool(self.are_there(cells[:, self.first_needed(cells.shape[1]) :]).all())

    def boundaries(self, cells: Ids) -> Flags:
        """Return behind how many of the blocks ``cells`` the text can be continued: bool ``[n + 1]``."""
        n = cells.shape[1]
        ends = np.arange(n + 1)
        needed = self.growth.first_needed(ends * self.block_size) // self.block_size
        missing = np.where(self.are_there(cells), -1, ends[:-1])
        last_missing = np.concatenate(([-1], np.maximum.accumulate(missing))) if n else np.array([-1])
        flags: Flags = last_missing < needed
        return flags

    @property
    def num_idle(self) -> int:
        """Cached blocks without a reader."""
        return self.num_cached - self.num_read

    # -- readers and keepers -----------------------------------------------------------------------------------------

    def publish(self, handles: Handles) -> None:
        """Register ``handles`` as cached, with the request that published them as their reader."""
        self._uses[handles] = 1
        self.num_cached += len(handles)
        self.num_read += len(handles)
        self.num_reads += len(handles)

    def read(self, handles: Handles) -> None:
        """Add one reader to ``handles``."""
        uses = self._warm(handles)
        self.num_reads += len(handles)
        self.num_read += len(uses[uses & _READERS == 0])
        self._uses[handles] = uses + 1

    def leave(self, handles: Handles) -> None:
        """Remove one reader from ``handles``; blocks without a reader or keeper become cold, to be evicted last."""
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
        """Add one keeper to ``handles``."""
        self._uses[handles] = self._warm(handles) + _KEEPER

    def drop(self, handles: Handles) -> None:
        """Remove one keeper from ``handles``; blocks without a reader or keeper become cold and are evicted next."""
        uses = self._uses[handles] - _KEEPER
        self._uses[handles] = uses
        handles = handles[uses == 0]
        if len(handles):
            self._first_turn -= 1
            self._cool(handles, self._first_turn)
            self._queue.appendleft((self._first_turn, handles))

    def _warm(self, handles: Handles) -> npt.NDArray[np.int64]:
        """Return the uses of ``handles``, which get one more use now, and count them as not cold."""
        uses: npt.NDArray[np.int64] = self._uses[handles]
        are_cold = uses < 0
        self.num_cold -= len(uses[are_cold])
        uses[are_cold] = 0
        return uses

    def _cool(self, handles: Handles, turn: int) -> None:
        """Mark ``handles``, which have no uses, as cold since ``turn``."""
        self.num_cold += len(handles)
        self._uses[handles] = -turn

    # -- eviction and moves ------------------------------------------------------------------------------------------

    def evict(self, n: int) -> Ids:
        """Evict ``n`` cold blocks, or all if there are fewer; return their ids, int32. Amortised O(n)."""
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
        """Remove the blocks of ``cells``, which the tree no longer has and nothing reads or keeps; return their ids."""
        handles = cells[0, self.are_there(cells)]
        if not len(handles):
            return _NONE
        self._uses[handles] = 0
        return self._forget(handles)

    def _still_cold(self, turn: int, handles: Handles) -> Handles:
        """Return the ``handles`` of a queue entry that were not read or kept since ``turn``."""
        are_cold = self._uses[handles] == -turn
        return handles if are_cold[are_cold.argmin()] else handles[are_cold]

    def _forget(self, handles: Handles | Ids) -> Ids:
        """Count ``handles`` as not cached, make their cells stale, and return their ids."""
        self.num_cached -= len(handles)
        self.num_cold -= len(handles)
        self._generation[handles] += 1
        ids: Ids = self._id_of[handles]
        return ids

    def remap(self, new_ids: Ids) -> None:
        """Rename block ``i`` to ``new_ids[i]``, int32 ``[num_rows]``, which was a free block. O(rows)."""
        sources = self._all[new_ids != self._all]
        targets = new_ids[sources]
        moved, free = self._handle_of[sources], self._handle_of[targets]
        self._id_of[moved], self._id_of[free] = targets, sources
        self._handle_of[targets], self._handle_of[sources] = moved, free

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cells: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that the tree has exactly these ``cells``, that the counts are right, and that cold blocks are queued.

        ``readers`` and ``keepers``, int64 ``[num_rows]``: the number of readers of each id and of keepers of each
        handle. Raises CheckFailed.
        """
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
