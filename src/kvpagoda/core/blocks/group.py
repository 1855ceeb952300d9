"""The blocks of one group: which request holds which, how many more each may allocate, and where they lie. No tensors.

Blocks have names and places, as addresses in virtual memory:

    name     the id of a block; it stays the same while the block lives       prefix tree, checkpoints, tiers, events
    place    where the block's bytes lie: a record of the group's memory      block tables, free lists, copies, kernels

A name that is passed to a kernel reads the bytes of another block, so the two are two types.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import AnyIds, Ids, Int64s
from kvpagoda.core.blocks.block_table import BlockTable
from kvpagoda.errors import CheckFailed
from kvpagoda.free_list import FreeStack
from kvpagoda.schema.plan import GroupPlan

# -- where blocks lie ------------------------------------------------------------------------------------------------

BlockNames = NewType("BlockNames", AnyIds)
"""Names of blocks: int32 in the prefix tree, intp where they index arrays."""
BlockPlaces = NewType("BlockPlaces", Ids)
"""Places of blocks: int32."""


class Move(NamedTuple):
    """Decision to exchange the places of blocks: ``names`` move to ``targets``, and the free blocks ``unused``, which
    lie there, to ``sources``."""

    sources: BlockPlaces
    targets: BlockPlaces
    names: npt.NDArray[np.intp]
    unused: npt.NDArray[np.intp]


class FixedPlaces:
    """The places of blocks that never move: name and place are the same number."""

    may_move = False

    def names_at(self, places: BlockPlaces) -> BlockNames:
        """Return the names of the blocks at ``places``: ``[n]``, a copy."""
        return BlockNames(places.copy())

    def places_of(self, names: BlockNames) -> BlockPlaces:
        """Return the places of the blocks ``names``: int32 ``[n]``."""
        same: Any = names  # the same numbers, where nothing moves
        return BlockPlaces(same if same.dtype == np.int32 else same.astype(np.int32))

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> Move:
        """Return the decision to move the blocks at ``sources`` to ``targets``, where free blocks lie. Not for blocks
        that never move."""
        raise NotImplementedError("blocks of a memory of their own never move")

    def commit(self, move: Move) -> None:
        """Apply ``move``. Cannot fail. O(blocks moved)."""

    def check(self) -> None:
        """Prove that every block has one place. Raises CheckFailed."""


class PlaceTable(FixedPlaces):
    """The places of ``num_rows`` blocks that may move: a permutation. Block 0, the padding block, stays at place 0.

    >>> table = PlaceTable(4)
    >>> table.commit(table.moving(np.array([1], np.int32), np.array([3], np.int32)))
    >>> table.places_of(np.array([1, 3])), table.names_at(np.array([3, 1], np.int32))
    (array([3, 1], dtype=int32), array([1, 3]))
    """

    may_move = True

    def __init__(self, num_rows: int) -> None:
        self._place_of: Ids = np.arange(num_rows, dtype=np.int32)  # by name
        self._name_at = np.arange(num_rows)  # by place; intp, since numpy takes several times as long to index by int32

    def names_at(self, places: BlockPlaces) -> BlockNames:
        return BlockNames(self._name_at[places])

    def places_of(self, names: BlockNames) -> BlockPlaces:
        return BlockPlaces(self._place_of[names])

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> Move:
        return Move(sources, targets, self._name_at[sources], self._name_at[targets])

    def commit(self, move: Move) -> None:
        self._place_of[move.names] = move.targets
        self._place_of[move.unused] = move.sources
        self._name_at[move.targets] = move.names
        self._name_at[move.sources] = move.unused

    def shuffle(self, order: Ids) -> None:
        """Give block ``i`` the place ``order[i]``, before any block is in use: a permutation with ``order[0] == 0``."""
        self._place_of[:] = order
        self._name_at[order] = np.arange(len(order))

    def check(self) -> None:
        wrong = np.flatnonzero(self._name_at[self._place_of] != np.arange(len(self._place_of)))
        if len(wrong) or self._place_of[0]:
            text = f"blocks {wrong[:16].tolist()} have a place that names another block"
            raise CheckFailed(text, available=wrong[:16].tolist())


def places_for(num_rows: int, *, may_move: bool) -> FixedPlaces:
    """Return the places of ``num_rows`` blocks: a table if they may move."""
    return PlaceTable(num_rows) if may_move else FixedPlaces()


# -- the blocks of a group -------------------------------------------------------------------------------------------

RowChange = tuple[int, npt.NDArray[np.intp], Ids]
"""(slot, columns, places that these cells show from now on)."""
_NONE = BlockPlaces(np.empty(0, np.int32))


class Growing(NamedTuple):
    """Decision to append the blocks ``own`` to rows of ``slots``, in the cells (``rows``, ``columns``): the rows then end at
    ``ends``, and ``num_reserved`` of the blocks were reserved. int64 arrays."""

    slots: Int64s
    ends: Int64s
    rows: Int64s
    columns: Int64s
    own: Ids
    num_reserved: int


class BlockGroup:
    """The blocks of the layers that grow together, and their block table.

    The blocks have the ids ``first_id .. first_id + num_blocks - 1``. Rows and the free list hold the *places* of
    blocks; ``names_at`` and ``places_of`` translate between these and their names (``kvpagoda.free_list``). The
    padding block absorbs the writes of padded rows, marks an empty cell of the table, and is never allocated. Its id is
    0, or -1 (the last record) where ids start from 0.

    The row of a request in the table:

        | empty | shared: first .. shared - 1 | own: .. end - 1 | empty |      left of ``first``: slid out of the window

    Own blocks are allocated to this request alone. Shared blocks belong to the prefix cache, which keeps them while the
    request runs. A request *reserves* the most blocks that it may come to hold; reserved blocks that it does not hold
    yet are *outstanding*. Outstanding blocks are not given to other requests, so an admitted request can always finish.

    ``first``, ``shared``, ``end``, ``reserved``: an int for each slot. ``firsts``, ``shares``, ``ends``, ``reserves``, int64
    ``[slots]``, are the same memory, for calls about many slots.

    Callers make sure that enough blocks are free. ``free.peek`` returns the blocks that are allocated next, so that they can
    be filled before a request holds them. The methods from ``take`` on change something and cannot fail.
    """

    def __init__(
        self,
        plan: GroupPlan,
        num_slots: int,
        num_columns: int,
        *,
        index: int = 0,
        first_id: int | None = None,
        name: str | None = None,
        places: FixedPlaces | None = None,
    ) -> None:
        self.plan, self.growth, self.block_size, self.index = plan, plan.growth, plan.block_size, index
        self.places = plan.places  #: blocks that a request holds for each of ``block_size`` tokens; 1 unless for states
        self.name = f"group {plan.name!r}" if name is None else name
        first_id = plan.first_id if first_id is None else first_id
        self._places = FixedPlaces() if places is None else places
        self.names_at, self.places_of = self._places.names_at, self._places.places_of
        self.may_move = self._places.may_move  #: whether names and places of blocks differ
        self.free = FreeStack(plan.num_blocks, first=first_id, what=f"blocks of {self.name}")
        self.table = BlockTable(num_slots, num_columns, empty=0 if first_id else -1)
        self._bounds: Int64s = np.zeros((4, num_slots), np.int64)
        self.firsts, self.shares, self.ends, self.reserves = self._bounds
        self.first, self.shared = memoryview(self.firsts), memoryview(self.shares)
        self.end, self.reserved = memoryview(self.ends), memoryview(self.reserves)
        self.outstanding = 0  #: blocks, of all requests
        self.num_held = self.peak_held = 0  #: blocks that requests or the prefix cache hold

    # -- queries: nothing changes ------------------------------------------------------------------------------------

    def have_outstanding(self, slots: Int64s, n: int) -> bool:
        """Return whether each of ``slots``, int64, has ``n`` outstanding blocks, and all of these are free. O(slots)."""
        return self.free.num_free >= n * len(slots) and bool((self._outstanding(slots) >= n).all())

    def lacking(self, slots: Int64s, ends: Int64s) -> tuple[Int64s, int]:
        """Return how many blocks each of ``slots`` lacks for its first ``ends`` tokens, int64 ``[n]``, and how many of all
        these are not reserved. O(slots)."""
        counts = -(-ends // self.block_size)
        if self.places != 1:
            counts *= self.places
        counts -= self.ends.take(slots)
        np.maximum(counts, 0, out=counts)
        return counts, int(np.maximum(counts - self._outstanding(slots), 0).sum())

    def growing(self, slots: Int64s, counts: Int64s, own: Ids) -> Growing:
        """Return the decision to append to the row of each of the distinct ``slots``, in turn, the next ``counts`` blocks of
        ``own``, from ``free.peek``. O(slots + n)."""
        rows, columns = slots, self.ends.take(slots)
        ends = columns + counts
        if len(own) != len(slots) or not counts.all():  # more than one block each, or none
            skipped = np.cumsum(counts) - counts
            rows, columns = np.repeat(slots, counts), np.arange(len(own)) + np.repeat(columns - skipped, counts)
        return Growing(slots, ends, rows, columns, own, int(np.minimum(counts, self._outstanding(slots)).sum()))

    def _outstanding(self, slots: Int64s) -> Int64s:
        """Return how many blocks each of ``slots`` reserved and does not hold yet: int64 ``[n]``."""
        outstanding: Int64s = self.reserves.take(slots)
        outstanding -= self.ends.take(slots)
        outstanding += self.firsts.take(slots)
        return np.maximum(outstanding, 0, out=outstanding)

    def held_places(self, slot: int) -> BlockPlaces:
        """Return the places that ``slot`` holds, shared and own, in the order of the text: int32, a copy."""
        return BlockPlaces(self.table.cells[slot, self.first[slot] : self.end[slot]].copy())

    def own_places(self, slot: int) -> BlockPlaces:
        """Return the places that ``slot`` alone holds, in the order of the text: int32, a copy."""
        first, shared = self.first[slot], self.shared[slot]
        return BlockPlaces(self.table.cells[slot, shared if shared > first else first : self.end[slot]].copy())

    def places_between(self, slot: int, first: int, end: int) -> BlockPlaces:
        """Return the places in columns ``first .. end - 1`` of ``slot``: int32, a copy."""
        return BlockPlaces(self.table.cells[slot, first:end].copy())

    def names_between(self, slot: int, first: int, end: int) -> BlockNames:
        """Return the names of the blocks in columns ``first .. end - 1`` of ``slot``."""
        return self.names_at(BlockPlaces(self.table.cells[slot, first:end]))

    def shared_names(self, slot: int) -> BlockNames:
        """Return the names of the blocks that ``slot`` may share with others, in the order of the text."""
        return self.names_at(BlockPlaces(self.table.cells[slot, self.first[slot] : self.shared[slot]]))

    def runs(self, slots: Iterable[int]) -> tuple[int, int]:
        """Return how many blocks the rows of ``slots`` show, and in how many runs of ids that follow one another; a block
        counts in each row. O(blocks)."""
        num_blocks = num_runs = 0
        for slot in slots:
            cells = self.table.cells[slot, self.first[slot] : self.end[slot]]
            if len(cells):
                num_blocks += len(cells)
                num_runs += 1 + int(np.count_nonzero(cells[1:] != cells[:-1] + 1))
        return num_blocks, num_runs

    def next_names(self, n: int) -> BlockNames:
        """Return the names of the blocks that ``free.peek(n)`` returns."""
        return self.names_at(BlockPlaces(self.free.peek(n)))

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> tuple[Move, list[RowChange]]:
        """Return the decision to move the blocks at ``sources``, ascending, to ``targets``, which are free: ``Move``,
        and (slot, columns, new places) for each row that shows any of them. O(cells)."""
        is_source = np.zeros(self.plan.num_rows, np.bool_)
        is_source[sources] = True
        rows: list[RowChange] = []
        for slot, end in enumerate(self.end):
            if end:
                cells = self.table.cells[slot, :end]
                columns = np.flatnonzero(is_source[cells])
                if len(columns):
                    rows.append((slot, columns, targets[np.searchsorted(sources, cells[columns])]))
        return self._places.moving(sources, targets), rows

    # -- changes -----------------------------------------------------------------------------------------------------

    def take(self, count: int) -> None:
        """Allocate the ``count`` blocks that ``free.peek`` returned to an owner that keeps account of them itself. O(1)."""
        self.free.num_free -= count
        self.num_held += count
        if self.num_held > self.peak_held:
            self.peak_held = self.num_held

    def release(self, places: BlockPlaces) -> None:
        """Free the blocks at ``places``, which no request and no cache holds any more. O(n)."""
        self.free.give(places)
        self.num_held -= len(places)

    def free_blocks(self, ids: BlockNames) -> BlockPlaces:
        """Free the blocks ``ids``, which no request and no cache holds any more; return their places. O(n)."""
        places = self.places_of(ids) if self.may_move else BlockPlaces(ids.astype(np.int32, copy=False))
        self.free.give(places)
        self.num_held -= len(places)
        return places

    def begin(self, slot: int, column: int, shared: Ids, own: Ids, reserved: int) -> None:
        """Begin the row of ``slot``, which holds nothing, at ``column``: ``shared`` blocks, then ``own`` blocks.

        ``shared``: kept by the prefix cache for this request. ``own``: from ``free.peek``. ``reserved``: the most blocks
        that the row may hold. O(blocks).
        """
        middle = column + len(shared)
        end = middle + len(own)
        self.take(len(own))
        table = self.table
        if len(shared):
            table.cells[slot, column:middle] = shared
            table.version[slot] += 1
        table.cells[slot, middle:end] = own
        self.first[slot], self.shared[slot], self.end[slot], self.reserved[slot] = column, middle, end, reserved
        outstanding = reserved - end + column  # the row held nothing before
        self.outstanding += outstanding if outstanding > 0 else 0

    def append(self, slot: int, own: Ids) -> None:
        """Append the blocks ``own``, from ``free.peek``, to the row of ``slot``. O(n)."""
        begin, count = self.end[slot], len(own)
        outstanding = self.reserved[slot] - begin + self.first[slot]
        self.free.num_free -= count
        self.num_held = held = self.num_held + count
        if held > self.peak_held:
            self.peak_held = held
        self.table.cells[slot, begin : begin + count] = own
        if outstanding > 0:
            self.outstanding -= count if count < outstanding else outstanding
        self.end[slot] = begin + count

    def append_each(self, growing: Growing) -> None:
        """Apply what ``growing`` returned. O(slots + n)."""
        self.take(len(growing.own))
        self.table.cells[growing.rows, growing.columns] = growing.own
        self.outstanding -= growing.num_reserved
        self.ends[growing.slots] = growing.ends

    def reserve(self, slot: int, num_blocks: int) -> None:
        """Set how many blocks ``slot`` reserves to ``num_blocks``; the caller has checked that they are available."""
        self._hold(slot, self.first[slot], self.end[slot], num_blocks)

    def put_shared(self, slot: int, places: BlockPlaces) -> None:
        """Show ``places`` as the last of the shared blocks of ``slot``, where the prefix cache had a block for the same tokens
        already."""
        self.table.put(slot, self.shared[slot] - len(places), places)

    def close(self, slot: int) -> None:
        """Empty the row of ``slot`` and end its reservation. The caller frees what ``own_places`` returned. O(n)."""
        first, end = self.first[slot], self.end[slot]
        outstanding = self.reserved[slot] - end + first
        if outstanding > 0:
            self.outstanding -= outstanding
        self.first[slot] = self.end[slot] = self.shared[slot] = self.reserved[slot] = 0
        self.table.cells[slot, first:end] = self.table.empty
        self.table.version[slot] += 1

    def cut(self, slot: int, columns: int, own: Ids) -> None:
        """End the row of ``slot`` after ``columns`` shared columns and then ``own``; the caller frees its other blocks.

        ``own``: blocks that the slot holds already or that were allocated for it. The reservation shrinks by the number
        of blocks that are no longer shared, because these may not become free.
        """
        lost = self.shared[slot] - columns
        reserved = self.reserved[slot] - lost
        self.table.drop(slot, columns, self.end[slot])
        self.table.put(slot, columns, own)
        self.shared[slot] = columns
        self._hold(slot, self.first[slot], columns + len(own), reserved if reserved > 0 else 0)

    def move(self, move: Move, rows: list[RowChange]) -> None:
        """Apply what ``moving`` returned: the blocks keep their names, and rows show their new places."""
        self._places.commit(move)
        for slot, columns, places in rows:
            self.table.replace(slot, columns, places)

    def clear(self) -> None:
        """Make every block free, whatever holds it, and empty every row."""
        self.free.clear()
        self.table.clear()
        self._bounds[:] = 0
        self.outstanding = self.num_held = 0

    def _hold(self, slot: int, first: int, end: int, reserved: int) -> None:
        """Set the bounds and the reservation of the row of ``slot``, and correct ``outstanding``."""
        before, after = self.reserved[slot] - self.end[slot] + self.first[slot], reserved - end + first
        self.first[slot], self.end[slot], self.reserved[slot] = first, end, reserved
        self.outstanding += (after if after > 0 else 0) - (before if before > 0 else 0)

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cached: BlockPlaces = _NONE, absent: Ids = _NONE) -> None:
        """Prove that every block is in exactly one place, and that shared cells name only cached blocks.

        These are: free; own in exactly one row; ``cached``, the prefix cache has it; ``absent``, its memory belongs to
        another group. Raises CheckFailed naming places or slots. O(blocks and cells).
        """
        self.free.check()
        self._places.check()
        columns = np.arange(self.table.cells.shape[1])
        first, shared, end, _ = self._bounds[:, :, None]
        inside = (columns >= first) & (columns < end)
        rows = self.table.cells[:-1]
        own = inside & (columns >= shared)
        named = np.bincount(np.concatenate((rows[own], cached, absent)), minlength=self.plan.num_rows)
        named[self.free.held_ids()] -= 1
        if named.any():
            odd = np.flatnonzero(named)[:16].tolist()
            text = f"{self.name}: tables and free list disagree about blocks {odd}"
            raise CheckFailed(text, available=odd, group=self.name)
        if self.num_held != self.free.num_ids - self.free.num_free - len(absent):
            raise CheckFailed(f"{self.name}: {self.num_held} blocks are counted as held")
        kept = np.zeros(self.plan.num_rows, np.bool_)
        kept[cached] = True
        used = rows[inside & ~own]
        if not kept[used].all():
            raise CheckFailed(
                f"{self.name}: requests share blocks that nobody keeps: {used[~kept[used]][:16].tolist()}"
            )
        if (rows[~inside] != self.table.empty).any() or (self.table.cells[-1] != self.table.empty).any():
            raise CheckFailed(f"{self.name}: a table names blocks outside of what its request holds")
        outstanding = int(self._outstanding(np.arange(len(self.end))).sum())
        if outstanding != self.outstanding:
            text = f"{self.name}: {outstanding} blocks are outstanding, {self.outstanding} are counted"
            raise CheckFailed(text, needed=outstanding, available=self.outstanding, group=self.name)
