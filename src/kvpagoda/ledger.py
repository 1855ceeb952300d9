"""One group's books: which request holds which blocks, and how many more each was promised. No tensors."""

from __future__ import annotations

import numpy as np

from kvpagoda.alloc import BlockTable, FreeList
from kvpagoda.errors import CheckFailed
from kvpagoda.schema.plan import GroupPlan
from kvpagoda.units import ceil_div


class GroupLedger:
    """Blocks ``first_id .. first_id + num_blocks - 1`` of one group. The id before them is the padding block: it absorbs
    the writes of padded rows, marks an empty cell, and is never handed out (0, or -1: the last record).

    A request's table row is

        | empty | held: first .. end - 1 | empty |      the cells left of ``first`` have slid out of the window

    A *promise* is the most blocks that a request may come to hold; what it does not hold yet is its *claim*, and nobody
    else is given blocks that are claimed. So a request that was admitted can always finish.
    """

    def __init__(
        self,
        plan: GroupPlan,
        num_slots: int,
        num_columns: int,
        *,
        first_id: int = 1,
        name: str | None = None,
    ) -> None:
        self.plan, self.growth, self.block_size = plan, plan.demand.growth, plan.block_size
        self.name = f"group {plan.name!r}" if name is None else name
        self.free = FreeList(plan.num_blocks, first=first_id, what=f"blocks of {self.name}")
        self.table = BlockTable(num_slots, num_columns, empty=first_id - 1)
        self.first = np.zeros(num_slots, np.int64)
        self.end = np.zeros(num_slots, np.int64)
        self.promised = np.zeros(num_slots, np.int64)
        self.claimed = 0

    def wanted(self, slot: int, num_tokens: int) -> int:
        """Blocks that ``slot`` lacks to have room for its first ``num_tokens`` tokens."""
        return max(0, ceil_div(num_tokens, self.block_size) - int(self.end[slot]))

    def available(self, slot: int | None = None) -> int:
        """Free blocks that no other request has a claim on."""
        return self.free.num_free - self.claimed + (0 if slot is None else self._claim(slot))

    def promise(self, slot: int, num_blocks: int) -> None:
        """Set aside blocks for ``slot``; the caller has checked ``available``."""
        self._hold(slot, int(self.first[slot]), int(self.end[slot]), num_blocks)

    def grow(self, slot: int, num_blocks: int) -> None:
        """Hand ``num_blocks`` more blocks to ``slot``. Raises OutOfBlocks, changing nothing. O(num_blocks)."""
        if num_blocks:
            end = int(self.end[slot])
            self.table.put(slot, end, self.free.acquire(num_blocks))
            self._hold(slot, int(self.first[slot]), end + num_blocks, int(self.promised[slot]))

    def slide(self, slot: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Free the blocks that the token at position ``length`` no longer reads; returns their ids. O(freed)."""
        needed = min(self.growth.first_needed(length) // self.block_size, int(self.end[slot]))
        first = int(self.first[slot])
        ids = self.table.take(slot, first, max(first, needed))
        if len(ids):
            self.free.release(ids)
            self._hold(slot, needed, int(self.end[slot]), int(self.promised[slot]))
        return ids

    def close(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Free everything that ``slot`` holds and was promised; returns the ids."""
        ids = self.table.take(slot, int(self.first[slot]), int(self.end[slot]))
        self.free.release(ids)
        self._hold(slot, 0, 0, 0)
        return ids

    def check(self) -> None:
        """Prove that every block is free or in exactly one table row. Raises CheckFailed naming ids or slots."""
        self.free.check()
        columns = np.arange(self.table.cells.shape[1])
        inside = (columns >= self.first[:, None]) & (columns < self.end[:, None])
        rows = self.table.cells[:-1]
        held = np.sort(rows[inside])
        if not np.array_equal(held, self.free.held_ids()):
            odd = np.setxor1d(held, self.free.held_ids())[:16].tolist()
            raise CheckFailed(f"{self.name}: tables and free list disagree about blocks {odd or 'held twice'}")
        outside = rows[~inside]
        if (outside != self.table.empty).any() or (self.table.cells[-1] != self.table.empty).any():
            raise CheckFailed(f"{self.name}: a table names blocks outside of what its request holds")
        claims = sum(self._claim(slot) for slot in range(len(self.end)))
        if claims != self.claimed or self.claimed > self.free.num_free:
            raise CheckFailed(f"{self.name}: {claims} claims, {self.claimed} counted, {self.free.num_free} free")

    def _claim(self, slot: int) -> int:
        return max(0, int(self.promised[slot] - (self.end[slot] - self.first[slot])))

    def _hold(self, slot: int, first: int, end: int, promised: int) -> None:
        self.claimed -= self._claim(slot)
        self.first[slot], self.end[slot], self.promised[slot] = first, end, promised
        self.claimed += self._claim(slot)
