"""The cached blocks of one group that keeps a window or a chunk: their readers and keepers, and their eviction order.

A cell of the prefix tree holds two numbers for such a block: its *name*, and the *generation* of the name, which counts
how often the block was evicted. So blocks are evicted without access to the tree; their cells are stale from then on.

    read   by running requests, in whose window it lies, and by pins       not evictable
    kept   by checkpoints, as the last window before a resumable place     evicted with the last of these, by age
    cold   outside of every window, and not kept                           evicted first, the oldest first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids
from kvpagoda.blocks.places import BlockNames
from kvpagoda.errors import CheckFailed
from kvpagoda.schema.fields import Growth

Flags = npt.NDArray[np.bool_]
_KEEPER = 1 << 32  # a keeper in the count of a block's uses; a reader is 1
_READERS = _KEEPER - 1
_NONE = BlockNames(np.empty(0, np.intp))


class WindowBlocks:
    """Blocks of ``block_size`` tokens with names below ``num_rows``, of layers that grow as ``growth`` says.

    ``num_cached``: blocks that the tree names. ``num_read``: cached blocks with a reader. ``num_reads``: the sum of
    their readers. ``num_cold``: cached blocks without a reader or keeper.

    The uses of a block are one number, so that most changes are one operation on an array:

        | keepers: 31 bits | readers: 32 bits |     0 or more: it is in use, or not cached
        - turn                                      below 0: it is cold since that turn

    Callers name each block once in a call: by its name, intp ``[n]`` (numpy takes several times as long to index by
    int32), or by its cell. Cells are int32 ``[2, n]``; 0 and 0 mean no block. Methods are O(their arguments), array
    work, unless another cost is named. Methods that change something allocate only small temporaries.
    """

    def __init__(self, growth: Growth, block_size: int, num_rows: int) -> None:
        self.growth = growth
        self.block_size = block_size
        self.num_rows = num_rows
        self._slides = growth.span is not None
        self._generation = np.ones(num_rows, np.int32)  # by name, as all that follows
        self._uses = np.zeros(num_rows, np.int64)
        self._queue: deque[tuple[int, BlockNames]] = deque()  # (turn, names), also of blocks with other uses by now
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0

    # -- queries -----------------------------------------------------------------------------------------------------

    def write_cells(self, names: BlockNames, out: Ids) -> None:
        """Write the cells of these blocks to ``out``, int32 ``[2, n]``."""
        out[0] = names
        out[1] = self._generation[names]

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
    def num_evictable(self) -> int:
        """Cached blocks without a reader, which can be evicted now."""
        return self.num_cached - self.num_read

    @property
    def num_spare(self) -> int:
        """How many evictable blocks reservations can count on. Each reader counts as a block in use, because its
        reservation expects a free block when its window slides on; without a window nothing slides."""
        return self.num_cached - (self.num_reads if self._slides else self.num_read)

    def span(self, num_blocks: int) -> range:
        """Return which blocks of a text are read to go on after its first ``num_blocks``."""
        return range(self.first_needed(num_blocks), num_blocks)

    # -- readers and keepers -----------------------------------------------------------------------------------------

    def publish(self, names: BlockNames) -> None:
        """Register ``names`` as cached, with the request that published them as their reader."""
        self._uses[names] = 1
        self.num_cached += len(names)
        self.num_read += len(names)
        self.num_reads += len(names)

    def read(self, names: BlockNames) -> None:
        """Add one reader to ``names``."""
        uses = self._warm(names)
        self.num_reads += len(names)
        self.num_read += len(uses[uses & _READERS == 0])
        self._uses[names] = uses + 1

    @staticmethod
    def apart(names: BlockNames, counts: Many[int]) -> list[BlockNames]:
        """Return ``names``, of which each of several readers leaves ``counts[i]``, in parts in which no block is twice."""
        if len(counts) > 1 and len(np.unique(names)) < len(names):  # readers of one block leave it one after another
            return [BlockNames(part) for part in np.split(names, np.cumsum(counts)[:-1])]
        return [names]

    def leave(self, names: BlockNames) -> None:
        """Remove one reader from ``names``; blocks without a reader or keeper become cold, to be evicted last."""
        if not len(names):
            return
        uses = self._uses[names] - 1
        are_in_use = uses[uses.argmax()] > 0
        self.num_reads -= len(names)
        if are_in_use:
            self.num_read -= len(uses[uses & _READERS == 0])
            self._uses[names] = uses
            names = BlockNames(names[uses == 0])
        else:
            self.num_read -= len(names)
        if len(names):
            self._cool(names, self._next_turn)
            self._queue.append((self._next_turn, names))
            self._next_turn += 1

    def keep(self, names: BlockNames) -> None:
        """Add one keeper to ``names``."""
        self._uses[names] = self._warm(names) + _KEEPER

    def drop(self, names: BlockNames) -> None:
        """Remove one keeper from ``names``; blocks without a reader or keeper become cold and are evicted next."""
        uses = self._uses[names] - _KEEPER
        self._uses[names] = uses
        names = BlockNames(names[uses == 0])
        if len(names):
            self._first_turn -= 1
            self._cool(names, self._first_turn)
            self._queue.appendleft((self._first_turn, names))

    def _warm(self, names: BlockNames) -> npt.NDArray[np.int64]:
        """Return the uses of ``names``, which get one more use now, and count them as not cold."""
        uses: npt.NDArray[np.int64] = self._uses[names]
        are_cold = uses < 0
        self.num_cold -= len(uses[are_cold])
        uses[are_cold] = 0
        return uses

    def _cool(self, names: BlockNames, turn: int) -> None:
        """Mark ``names``, which have no uses, as cold since ``turn``."""
        self.num_cold += len(names)
        self._uses[names] = -turn

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict_cold(self, n: int) -> BlockNames:
        """Evict ``n`` cold blocks, or all if there are fewer; return their names, intp. Amortised O(n)."""
        count, done = min(n, self.num_cold), 0
        gone = np.empty(count, np.intp)
        while done < count:
            turn, names = self._queue.popleft()
            names = self._still_cold(turn, names)
            end = done + len(names)
            if end > count:
                self._queue.appendleft((turn, BlockNames(names[count - done :])))
                names = BlockNames(names[: count - done])
                end = count
            gone[done:end] = names
            done = end
        return self._forget(BlockNames(gone))

    def forget(self, cells: Ids) -> BlockNames:
        """Remove the blocks of ``cells``, which the tree no longer has and nothing reads or keeps; return their
        names."""
        names = BlockNames(cells[0, self.are_there(cells)])
        if not len(names):
            return _NONE
        self._uses[names] = 0
        return self._forget(names)

    def _still_cold(self, turn: int, names: BlockNames) -> BlockNames:
        """Return the ``names`` of a queue entry that were not read or kept since ``turn``."""
        are_cold = self._uses[names] == -turn
        return names if are_cold[are_cold.argmin()] else BlockNames(names[are_cold])

    def _forget(self, names: BlockNames) -> BlockNames:
        """Count ``names`` as not cached, and make their cells stale. Return them."""
        self.num_cached -= len(names)
        self.num_cold -= len(names)
        self._generation[names] += 1
        return names

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cells: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that the tree has exactly these ``cells``, that the counts are right, and that cold blocks are queued.

        ``readers`` and ``keepers``, int64 ``[num_rows]``: how many there are of each name. Raises CheckFailed.
        """
        where, names = self.growth.name, np.sort(cells[0, self.are_there(cells)])
        if (names[1:] == names[:-1]).any():
            raise CheckFailed(f"{where}: the tree names a cached block twice")
        counted = len(names), int(np.count_nonzero(readers)), int(readers.sum())
        if counted != (self.num_cached, self.num_read, self.num_reads):
            raise CheckFailed(
                f"{where}: {counted} blocks are cached, read, and reads in all; "
                f"{self.num_cached, self.num_read, self.num_reads} are counted"
            )
        odd = np.flatnonzero(np.maximum(self._uses, 0) != readers + keepers * _KEEPER)
        if len(odd):
            raise CheckFailed(f"{where}: readers and keepers of blocks {odd[:16].tolist()} are miscounted")
        cold = names[self._uses[names] < 0]
        queued = [self._still_cold(turn, one) for turn, one in self._queue]
        listed = np.sort(np.concatenate([_NONE, *queued]))
        if len(cold) != self.num_cold or not np.array_equal(cold, listed):
            raise CheckFailed(f"{where}: {len(cold)} cold blocks, {len(listed)} in the queue, {self.num_cold} counted")
