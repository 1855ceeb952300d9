"""One group's blocks: which request holds which of them, and how many more each may come to hold. No tensors."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.block_table import BlockTable
from kvpagoda.blocks.free_list import FreeStack
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.schema.plan import GroupPlan

_NONE: Ids = np.empty(0, np.int32)


class BlockGroup:
    """Blocks ``first_id .. first_id + num_blocks - 1`` of the layers that grow together. The padding block takes what padded
    rows write, marks an empty cell, and is never handed out: 0, or -1, the last record, where ids start from 0.

    A request's row of the table is

        | empty | shared: first .. shared - 1 | own: .. end - 1 | empty |      left of ``first``: slid out of the window

    Its own blocks are handed out to it alone; shared ones belong to the prefix cache, which keeps them while the request
    runs. A request *reserves* the most blocks that it may come to hold; what it does not hold yet is *outstanding*, and
    nobody else is given blocks that are outstanding. So a request that was admitted can always finish.

    Who calls has made sure that there are enough free blocks; ``peek`` names those that come next, so that they can be
    filled before anybody holds them. The methods below ``peek`` change something and cannot fail.
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
    ) -> None:
        self.plan, self.growth, self.block_size, self.index = plan, plan.growth, plan.block_size, index
        self.name = f"group {plan.name!r}" if name is None else name
        first_id = plan.first_id if first_id is None else first_id
        self.free = FreeStack(plan.num_blocks, first=first_id, what=f"blocks of {self.name}")
        self.table = BlockTable(num_slots, num_columns, empty=0 if first_id else -1)
        self.first = [0] * num_slots
        self.end = [0] * num_slots
        self.shared = [0] * num_slots
        self.reserved = [0] * num_slots
        self.outstanding = 0  #: of all requests
        self.num_held = self.peak_held = 0  #: blocks that requests or the prefix cache hold

    # -- what is, and what would be needed ---------------------------------------------------------------------------

    def outstanding_of(self, slot: int) -> int:
        """Blocks that ``slot`` reserved and does not hold yet."""
        outstanding = self.reserved[slot] - self.end[slot] + self.first[slot]
        return outstanding if outstanding > 0 else 0

    def are_promised(self, slots: list[int], n: int) -> bool:
        """Whether each of ``slots`` may have ``n`` blocks more of what it reserved, and all of these are free. O(slots)."""
        return self.free.num_free >= n * len(slots) and all(self.outstanding_of(slot) >= n for slot in slots)

    def held_ids(self, slot: int) -> Ids:
        """The ids that ``slot`` holds, shared and own, in the order of the text: int32, the caller's copy."""
        ids: Ids = self.table.cells[slot, self.first[slot] : self.end[slot]].copy()
        return ids

    def own_ids(self, slot: int) -> Ids:
        """The ids that ``slot`` alone holds, in the order of the text: int32, the caller's copy."""
        first, shared = self.first[slot], self.shared[slot]
        ids: Ids = self.table.cells[slot, shared if shared > first else first : self.end[slot]].copy()
        return ids

    def shared_ids(self, slot: int) -> Ids:
        """The ids that ``slot`` holds and others may hold too, in the order of the text: int32, the caller's copy."""
        ids: Ids = self.table.cells[slot, self.first[slot] : self.shared[slot]].copy()
        return ids

    def leaving(self, slot: int, first: int) -> tuple[Ids, Ids]:
        """The shared blocks, and the own ones, that the row of ``slot`` loses when it begins at ``first``, int32 each."""
        row, middle = self.table.cells[slot], min(max(self.shared[slot], self.first[slot]), first)
        return row[self.first[slot] : middle].copy(), row[middle:first].copy()

    def slots_naming(self, ids: Ids) -> list[int]:
        """The slots whose rows name any of ``ids``. O(cells)."""
        named = np.zeros(self.plan.num_rows, np.bool_)
        named[ids] = True
        return [slot for slot, end in enumerate(self.end) if end and named[self.table.cells[slot, :end]].any()]

    def peek(self, n: int) -> Ids:
        """The ``n`` blocks that are handed out next, int32: still free. There are so many."""
        return self.free.peek(n)

    # -- changes -----------------------------------------------------------------------------------------------------

    def take(self, count: int) -> None:
        """Hand out the ``count`` blocks that ``peek`` said to somebody who keeps account of them. O(1)."""
        self.free.num_free -= count
        self.num_held += count
        if self.num_held > self.peak_held:
            self.peak_held = self.num_held

    def release(self, ids: Ids) -> None:
        """Take back ``ids``, which nobody names any more. O(n)."""
        self.free.give(ids)
        self.num_held -= len(ids)

    def begin(self, slot: int, column: int, shared: Ids, own: Ids, reserved: int) -> None:
        """Begin the row of ``slot``, which holds nothing, at ``column``: with ``shared`` blocks, which somebody keeps for it,
        and then ``own`` ones, from ``peek``. It may come to hold ``reserved`` in all. O(blocks)."""
        middle = column + len(shared)
        end = middle + len(own)
        self.take(len(own))
        if len(shared):
            self.table.put(slot, column, shared)
        self.table.cells[slot, middle:end] = own
        self.shared[slot] = middle
        self._hold(slot, column, end, reserved)

    def append(self, slot: int, own: Ids) -> None:
        """Give ``slot`` the blocks ``own``, from ``peek``. O(n)."""
        begin, count = self.end[slot], len(own)
        outstanding = self.reserved[slot] - begin + self.first[slot]
        self.take(count)
        self.table.cells[slot, begin : begin + count] = own
        if outstanding > 0:
            self.outstanding -= count if count < outstanding else outstanding
        self.end[slot] = begin + count

    def append_each(self, slots: list[int], own: Ids) -> None:
        """Give each of ``slots``, which are different, the next one of ``own``, from ``peek``. O(n)."""
        self.take(len(own))
        self.table.cells[slots, [self.end[slot] for slot in slots]] = own
        for slot in slots:
            if self.reserved[slot] - self.end[slot] + self.first[slot] > 0:
                self.outstanding -= 1
            self.end[slot] += 1

    def reserve(self, slot: int, num_blocks: int) -> None:
        """Let ``slot`` reserve ``num_blocks`` in all; the caller has looked whether they can be had."""
        self._hold(slot, self.first[slot], self.end[slot], num_blocks)

    def share(self, slot: int, columns: int, ids: Ids | None = None) -> None:
        """The first ``columns`` blocks of ``slot`` now belong to the prefix cache; where it had the last of them already, it
        says by which ``ids``."""
        if ids is not None:
            self.table.put(slot, columns - len(ids), ids)
        self.shared[slot] = columns

    def slide(self, slot: int, first: int) -> None:
        """Let the row of ``slot`` begin at ``first``; what ``leaving`` said is to be released. O(n)."""
        self.table.cells[slot, self.first[slot] : first] = self.table.empty
        self._hold(slot, first, self.end[slot], self.reserved[slot])

    def close(self, slot: int) -> None:
        """Let go of everything that ``slot`` holds and reserved; what ``own_ids`` said is to be released. O(n)."""
        first, end = self.first[slot], self.end[slot]
        outstanding = self.reserved[slot] - end + first
        if outstanding > 0:
            self.outstanding -= outstanding
        self.first[slot] = self.end[slot] = self.shared[slot] = self.reserved[slot] = 0
        self.table.drop(slot, first, end)

    def cut(self, slot: int, columns: int, own: Ids) -> None:
        """End the row of ``slot`` after ``columns`` shared blocks and ``own``, which it holds or were taken for it; its other
        blocks are to be released. What it reserved shrinks by the blocks that are shared no more, for they may not become
        free."""
        lost = self.shared[slot] - columns
        reserved = self.reserved[slot] - lost
        self.table.drop(slot, columns, self.end[slot])
        self.table.put(slot, columns, own)
        self.shared[slot] = columns
        self._hold(slot, self.first[slot], columns + len(own), reserved if reserved > 0 else 0)

    def remap(self, new_ids: Ids, slots: list[int]) -> None:
        """Block ``i`` is now block ``new_ids[i]``; ``slots``: from ``slots_naming``. O(their cells)."""
        for slot in slots:
            self.table.remap(slot, self.end[slot], new_ids)

    def clear(self) -> None:
        """Make every block free, whoever held it."""
        self.free.clear()
        self.table.clear()
        for slot in range(len(self.end)):
            self.first[slot] = self.end[slot] = self.shared[slot] = self.reserved[slot] = 0
        self.outstanding = self.num_held = 0

    def _hold(self, slot: int, first: int, end: int, reserved: int) -> None:
        before, after = self.reserved[slot] - self.end[slot] + self.first[slot], reserved - end + first
        self.first[slot], self.end[slot], self.reserved[slot] = first, end, reserved
        self.outstanding += (after if after > 0 else 0) - (before if before > 0 else 0)

    # -- proof -------------------------------------------------------------------------------------------------------

    def check(self, cached: Ids = _NONE, absent: Ids = _NONE) -> None:
        """Prove that every block is free, in exactly one row as its own, one of those that are ``cached``, or one of those
        that are ``absent``, their memory being another group's; and that shared cells name only what is cached. Raises
        CheckFailed naming ids or slots. O(blocks and cells)."""
        self.free.check()
        columns = np.arange(self.table.cells.shape[1])
        first, end, shared = (np.array(column)[:, None] for column in (self.first, self.end, self.shared))
        inside = (columns >= first) & (columns < end)
        rows = self.table.cells[:-1]
        own = inside & (columns >= shared)
        named = np.bincount(np.concatenate((rows[own], cached, absent)), minlength=self.plan.num_rows)
        named[self.free.held_ids()] -= 1
        if named.any():
            odd = np.flatnonzero(named)[:16].tolist()
            raise CheckFailed(f"{self.name}: tables and free list disagree about blocks {odd}")
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
        outstanding = sum(self.outstanding_of(slot) for slot in range(len(self.end)))
        if outstanding != self.outstanding:
            raise CheckFailed(f"{self.name}: {outstanding} blocks are outstanding, {self.outstanding} are counted")
