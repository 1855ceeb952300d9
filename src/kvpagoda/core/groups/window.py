"""Windows and chunks: a text can go on after its blocks n if those that the next token reads are cached.

A block that slid out of every window is cold: evicted before all others, unless a checkpoint keeps it. Blocks of an optional
group (``Growth.is_optional``) are kept as those of windows are, but a text can be resumed without them, and no checkpoint
keeps them: they are cold as soon as no request reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockNames, BlockPlaces
from kvpagoda.core.groups.base import NO_IDS, CacheGroup, Freed, Leaving, Running, ToCache
from kvpagoda.core.prefix.node import Inserted, Lease, Match
from kvpagoda.core.prefix.tree import PrefixTree
from kvpagoda.errors import CheckFailed
from kvpagoda.schema.plan import GroupPlan

Flags = npt.NDArray[np.bool_]
_KEEPER = 1 << 32  # a keeper in the count of a block's uses; a reader is 1
_READERS = _KEEPER - 1
_NO_PLACES = BlockPlaces(np.empty(0, np.int32))


class WindowGroup(CacheGroup):
    """The blocks of layers that read a window, or a chunk, of the newest tokens.

    ``num_cached``: blocks that the tree names. ``num_read``: cached blocks with a reader. ``num_reads``: the sum of
    their readers. ``num_cold``: cached blocks without a reader or keeper. ``slides``: whether blocks leave the window.

    The uses of a block are one number, so that most changes are one operation on an array:

        | keepers: 31 bits | readers: 32 bits |     0 or more: it is in use, or not cached
        - turn                                      below 0: it is cold since that turn

    Callers name each block once in a call: by its id, intp ``[n]`` (numpy takes several times as long to index by
    int32), or by its cell. Cells are int32 ``[2, n]``: id and generation; 0 and 0 mean no block. Methods are O(their
    arguments), array work, unless another cost is named. Methods that change something allocate only small temporaries.
    """

    num_tree_rows = 2
    num_cached = num_read = num_reads = num_cold = 0

    def __init__(self, plan: GroupPlan, num_slots: int, num_columns: int, index: int, *, may_move: bool) -> None:
        super().__init__(plan, num_slots, num_columns, index, may_move=may_move)
        growth = plan.growth
        self.slides, self.is_optional = growth.span is not None, growth.is_optional
        self.most_decoding = growth.most_blocks(self.block_size, self.block_size) or 0
        """The most blocks that a request holds while it commits at most a block at a time."""
        self._has_reserved = self.most_decoding <= (plan.most_blocks or 0)

    def begin_empty(self, tree: PrefixTree, row: int) -> None:
        super().begin_empty(tree, row)
        self._generation = np.ones(self.plan.num_rows, np.int32)  # by id, as all that follows
        self._uses = np.zeros(self.plan.num_rows, np.int64)
        self._queue: deque[tuple[int, BlockNames]] = deque()  # (turn, ids), also of blocks with other uses by now
        self._first_turn = self._next_turn = 1 << 40
        self.num_cached = self.num_read = self.num_reads = self.num_cold = 0
        self._most_adopted = 0  # blocks that ``adopt`` has room for
        self._scratch: Ids = np.empty((2, 2, 0), np.int32)

    # -- hits --------------------------------------------------------------------------------------------------------

    def cells_of(self, rows: Ids) -> Ids:
        """Return the cells of this group, int32 ``[2, n]``, of ``rows``, int32 ``[rows of the tree, n]``; a view."""
        cells: Ids = rows[self.row : self.row + 2]
        return cells

    def are_there(self, cells: Ids) -> Flags:
        """Return which of ``cells`` still name a block: bool ``[n]``."""
        there: Flags = self._generation[cells[0]] == cells[1]
        return there

    def shared_columns(self, num_blocks: int) -> range:
        return range(int(self.growth.first_needed(num_blocks * self.block_size)) // self.block_size, num_blocks)

    def can_resume(self, rows: Ids) -> bool:
        """Return whether a text can be continued behind its blocks, of which the tree has ``rows``."""
        first = int(self.growth.first_needed(rows.shape[1] * self.block_size)) // self.block_size
        cells = rows[self.row : self.row + 2, first:]
        return bool((self._generation[cells[0]] == cells[1]).all())

    def boundaries(self, rows: Ids) -> Flags:
        """Return behind how many of its blocks a text can be continued: bool ``[n + 1]``. ``rows``: what the tree has of
        them."""
        n = rows.shape[1]
        ends = np.arange(n + 1)
        needed = self.growth.first_needed(ends * self.block_size) // self.block_size
        missing = np.where(self.are_there(self.cells_of(rows)), -1, ends[:-1])
        last_missing = np.concatenate(([-1], np.maximum.accumulate(missing))) if n else np.array([-1])
        flags: Flags = last_missing < needed
        return flags

    def columns_there(self, match: Match, num_tokens: int) -> range:
        """Return which whole blocks of ``match`` a text shares to go on after its first ``num_tokens``: those before the first
        that ``match`` lacks; an empty range where it lacks all. For an optional group."""
        first = int(self.growth.first_needed(num_tokens)) // self.block_size
        span = range(first, max(first, min(num_tokens // self.block_size, match.num_blocks)))
        lacking = np.flatnonzero(~self.are_there(self.cells_of(match.ids)[:, span.start : span.stop]))
        return span[: int(lacking[0])] if len(lacking) else span

    def tail(self, lease: Lease, num_blocks: int, more: int) -> tuple[BlockNames, int] | None:
        """Return the blocks that a text needs to be resumed after ``num_blocks`` blocks of ``lease``, and up to ``more``
        blocks before these as far as they are cached; and how many of them are needed. None if one of these is not cached."""
        span = self.shared_columns(num_blocks)
        first = max(0, span.start - more)
        cells = np.empty((2, num_blocks - first), np.int32)
        self.tree.read_ids(lease, first, self.row, cells)
        begin = 0
        if not (there := self.are_there(cells)).all():
            begin = int(np.flatnonzero(~there)[-1]) + 1
        if cells.shape[1] - begin < len(span):
            return None
        return BlockNames(cells[0, begin:].astype(np.intp)), len(span)

    @property
    def num_evictable(self) -> int:
        return self.num_cached - self.num_read

    @property
    def surplus(self) -> int:
        # Each reader counts as a block in use, because its reservation expects a free block when its window slides on;
        # without a window nothing slides.
        spare = self.num_cached - (self.num_reads if self.slides else self.num_read)
        return self.free.num_free + spare - self.outstanding

    # -- readers and keepers -----------------------------------------------------------------------------------------

    def read(self, ids: BlockNames) -> None:
        """Add one reader to ``ids``."""
        uses = self._warm(ids)
        self.num_reads += len(ids)
        self.num_read += len(uses[uses & _READERS == 0])
        self._uses[ids] = uses + 1

    @staticmethod
    def apart(ids: BlockNames, counts: Many[int]) -> list[BlockNames]:
        """Return ``ids``, of which each of several readers leaves ``counts[i]``, in parts in which no block is twice."""
        if len(counts) > 1 and len(np.unique(ids)) < len(ids):  # readers of one block leave it one after another
            return [BlockNames(part) for part in np.split(ids, np.cumsum(counts)[:-1])]
        return [ids]

    def leave(self, ids: BlockNames) -> None:
        """Remove one reader from ``ids``; blocks without a reader or keeper become cold, to be evicted last."""
        if not len(ids):
            return
        uses = self._uses[ids] - 1
        are_in_use = uses[uses.argmax()] > 0
        self.num_reads -= len(ids)
        if are_in_use:
            self.num_read -= len(uses[uses & _READERS == 0])
            self._uses[ids] = uses
            ids = BlockNames(ids[uses == 0])
        else:
            self.num_read -= len(ids)
        if len(ids):
            self.num_cold += len(ids)
            self._uses[ids] = -self._next_turn
            self._queue.append((self._next_turn, ids))
            self._next_turn += 1

    def keep(self, ids: BlockNames) -> None:
        """Add one keeper to ``ids``."""
        self._uses[ids] = self._warm(ids) + _KEEPER

    def drop(self, ids: BlockNames) -> None:
        """Remove one keeper from ``ids``; blocks without a reader or keeper become cold and are evicted next."""
        uses = self._uses[ids] - _KEEPER
        self._uses[ids] = uses
        ids = BlockNames(ids[uses == 0])
        if len(ids):
            self._first_turn -= 1
            self.num_cold += len(ids)
            self._uses[ids] = -self._first_turn
            self._queue.appendleft((self._first_turn, ids))

    def _warm(self, ids: BlockNames) -> npt.NDArray[np.int64]:
        """Return the uses of ``ids``, which get one more use now, and count them as not cold."""
        uses: npt.NDArray[np.int64] = self._uses[ids]
        are_cold = uses < 0
        self.num_cold -= len(uses[are_cold])
        uses[are_cold] = 0
        return uses

    # -- sliding -----------------------------------------------------------------------------------------------------

    def leaving(self, requests: Many[Running]) -> Leaving | None:
        """Return what ``requests`` do not need any more; None if that is nothing.

        An answer keeps what is needed to resume it at its last whole block. Once the prompt is computed, the request
        reserves room for a block at a time only. If steps are so short that not even that was reserved, an answer loses
        all that slides out, and reservations stay as they are."""
        growth, size, most, slack = self.growth, self.block_size, self.most_decoding, self.growth.slack
        slots: list[int] = []
        firsts: list[int] = []
        positions: list[int] = []
        for request in requests:
            slot, length = request.slot, request.own_length
            position = length - slack if length > slack else 0
            if self._has_reserved and length >= request.prompt_length:
                if request.publishes:
                    position = min(position, request.lease.num_blocks * size)
                if self.reserved[slot] > most:
                    self.reserve(slot, most)
            positions.append(position)
        one = len(positions) == 1
        needed = [growth.first_needed(positions[0])] if one else growth.first_needed(np.array(positions)).tolist()
        for request, position in zip(requests, needed):
            slot, first = request.slot, min(position // size, self.end[request.slot])
            if first > self.first[slot]:
                slots.append(slot)
                firsts.append(first)
        if not slots:
            return None
        cells, shared, own, counts = self.table.cells, [], [], []
        for slot, first in zip(slots, firsts):
            begin = self.first[slot]
            middle = min(max(self.shared[slot], begin), first)
            shared.append(cells[slot, begin:middle])
            counts.append(middle - begin)
            if middle < first:
                own.append(cells[slot, middle:first])
        places = BlockPlaces(shared[0] if len(shared) == 1 else np.concatenate(shared))
        ids = self.names_at(places) if self.may_move else BlockNames(places.astype(np.intp))
        parts = [ids] if len(counts) == 1 else self.apart(ids, counts)
        return Leaving(slots, firsts, parts, BlockPlaces(np.concatenate(own)) if own else _NO_PLACES)

    def slide(self, leaving: Leaving) -> None:
        """Begin the rows of requests at later columns; nobody reads there what is ``leaving`` any more. The caller frees the
        own blocks."""
        cells, empty = self.table.cells, self.table.empty
        for slot, first in zip(leaving.slots, leaving.firsts):
            begin = self.first[slot]
            cells[slot, begin:first] = empty
            self.first[slot] = first
            outstanding = self.reserved[slot] - self.end[slot] + first
            if outstanding > 0:  # each block that leaves is one more, but those above what was reserved
                self.outstanding += min(outstanding, first - begin)
        for ids in leaving.shared:
            self.leave(ids)

    # -- publishing --------------------------------------------------------------------------------------------------

    def rows_to_cache(
        self, slots: list[int], begins: list[int], ends: list[int], rows: Ids, *, is_whole: bool
    ) -> ToCache:
        # The last blocks of each text: as many as its request has and does not share yet, also of earlier blocks of the text,
        # which the tree may lack. Of an optional group that lacks rows, none.
        counts: list[int] = []
        parts: list[Ids] = []
        cells = self.table.cells
        for slot, end in zip(slots, ends):
            begin = max(self.first[slot], self.shared[slot]) if is_whole or not self.is_optional else end
            parts.append(cells[slot, begin:end])
            counts.append(end - begin if begin < end else 0)
        places = BlockPlaces(parts[0] if len(parts) == 1 else np.concatenate(parts))
        ids = self.names_at(places) if self.may_move else BlockNames(places.astype(np.intp))
        out = rows[self.row : self.row + 2]
        sizes = [end - begin for begin, end in zip(begins, ends)]
        if counts == sizes:
            out[0] = ids
            out[1] = self._generation[ids]
        else:
            self._write_last(ids, counts, sizes, out)
        if len(ids) > self._most_adopted and (most := max(counts)) > self._most_adopted:
            self._scratch, self._most_adopted = (
                np.empty((2, 2, 2 * most), np.int32),
                2 * most,
            )  # ``adopt`` must not allocate
        return ToCache(ids, counts)

    def _write_last(self, ids: BlockNames, counts: list[int], sizes: list[int], out: Ids) -> None:
        """Write the cells of the last blocks of several texts, ``counts[i]`` of ``ids`` each, to the end of its
        ``sizes[i]`` columns of ``out``, int32 ``[2, n]``, and no block before them."""
        out[:] = 0
        end = column = 0
        for count, n in zip(counts, sizes):
            end, column = end + count, column + n
            if new := min(count, n):
                last = ids[end - new : end]
                out[0, column - new : column] = last
                out[1, column - new : column] = self._generation[last]

    def cache_blocks(self, slots: list[int], ends: list[int], ids: BlockNames) -> None:
        count = len(ids)
        self._uses[ids] = 1
        self.num_cached += count
        self.num_read += count
        self.num_reads += count
        shared = self.shared
        for slot, end in zip(slots, ends):
            shared[slot] = end

    def adopt(
        self, lease: Lease, ids: BlockNames, inserted: Inserted, *, takes_over: bool
    ) -> tuple[BlockNames, BlockNames]:
        first, end = lease.num_blocks - len(ids), lease.num_blocks
        ours, theirs = self._scratch[:, :, : end - first]
        ours[0], ours[1] = ids, self._generation[ids]
        self.tree.read_ids(lease, first, self.row, theirs)
        lacking = ~self.are_there(theirs)
        theirs[:, lacking] = ours[:, lacking]
        self.tree.put_ids(lease, first, self.row, theirs)
        found = BlockNames(theirs[0].astype(np.intp))
        is_own = found == ids
        self.cache_blocks([], [], BlockNames(ids[is_own]))
        if takes_over:
            self.read(BlockNames(found[~is_own]))
        return found, BlockNames(ids[~is_own])

    # -- eviction ----------------------------------------------------------------------------------------------------

    def oldest(self) -> int | None:
        return self.tree.checkpoints.oldest()

    def evict(self, n: int) -> Freed | None:
        # cold blocks, in the order in which they became cold; amortised O(n)
        if not self.num_cold:
            return None
        count, done, uses, queue = min(n + self.num_ahead, self.num_cold), 0, self._uses, self._queue
        gone = np.empty(count, np.intp)
        while done < count:
            turn, ids = queue.popleft()
            are_cold = uses[ids] == -turn
            if not are_cold[are_cold.argmin()]:  # some were read or kept since then
                ids = BlockNames(ids[are_cold])
            end = done + len(ids)
            if end > count:
                queue.appendleft((turn, BlockNames(ids[count - done :])))
                ids = BlockNames(ids[: count - done])
                end = count
            gone[done:end] = ids
            done = end
        self.num_evicted += count
        self.num_cached -= count
        self.num_cold -= count
        self._generation[gone] += 1  # their cells are stale from now on
        return Freed(((self.index, BlockNames(gone)),))

    @property
    def turns(self) -> int:
        """How often blocks became cold so far. O(1)."""
        return self._next_turn - self._first_turn

    def cold_among(self, ids: BlockNames) -> BlockNames:
        uses = self._uses[ids]
        are_cold = uses < 0
        return BlockNames(ids[are_cold][np.argsort(-uses[are_cold], kind="stable")])

    def evict_cold(self, ids: BlockNames) -> Freed:
        self._uses[ids] = 0
        self.num_cached -= len(ids)
        self.num_cold -= len(ids)
        self._generation[ids] += 1
        return Freed(((self.index, ids),))

    def removed(self, rows: Ids) -> BlockNames:
        """Forget the blocks in ``rows``, which the tree no longer has and nothing reads or keeps; return their ids."""
        cells = rows[self.row : self.row + 2]
        ids = BlockNames(cells[0, self._generation[cells[0]] == cells[1]])
        if len(ids):
            self.evict_cold(ids)
        return ids

    def cached_in(self, rows: Ids) -> BlockNames:
        cells = self.cells_of(rows)
        return BlockNames(cells[0, self.are_there(cells)])

    def cached_ids(self) -> BlockNames:
        return self.cached_in(self.tree.all_ids())

    # -- proof -------------------------------------------------------------------------------------------------------

    def check_cached(self, rows: Ids, readers: npt.NDArray[np.int64], keepers: npt.NDArray[np.int64]) -> None:
        """Prove that ``rows``, all of the tree, are right, that the counts are right, and that cold blocks are queued.

        ``readers`` and ``keepers``, int64 ``[num_rows]``: how many there are of each name. Raises CheckFailed.
        """
        cells = self.cells_of(rows)
        where, ids = self.growth.name, np.sort(cells[0, self.are_there(cells)])
        if (ids[1:] == ids[:-1]).any():
            raise CheckFailed(f"{where}: the tree names a cached block twice")
        counted = len(ids), int(np.count_nonzero(readers)), int(readers.sum())
        if counted != (self.num_cached, self.num_read, self.num_reads):
            raise CheckFailed(
                f"{where}: {counted} blocks are cached, read, and reads in all; "
                f"{self.num_cached, self.num_read, self.num_reads} are counted"
            )
        odd = np.flatnonzero(np.maximum(self._uses, 0) != readers + keepers * _KEEPER)
        if len(odd):
            raise CheckFailed(f"{where}: readers and keepers of blocks {odd[:16].tolist()} are miscounted")
        cold = ids[self._uses[ids] < 0]
        queued = [ids[self._uses[ids] == -turn] for turn, ids in self._queue]
        listed = np.sort(np.concatenate([NO_IDS, *queued]))
        if len(cold) != self.num_cold or not np.array_equal(cold, listed):
            raise CheckFailed(f"{where}: {len(cold)} cold blocks, {len(listed)} in the queue, {self.num_cold} counted")
