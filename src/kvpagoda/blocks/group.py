"""One group's books: which request holds which blocks, and how many more each was promised. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvpagoda.blocks import BlockTable, FreeStack
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.schema.plan import GroupPlan

_NONE: Ids = np.empty(0, np.int32)


class BlockGroup:
    """Blocks ``first_id .. first_id + num_blocks - 1`` of one group. The padding block absorbs the writes of padded rows,
    marks an empty cell, and is never handed out: 0, or -1, the last record, where ids start from 0.

    A request's table row is

        | empty | shared: first .. shared - 1 | private: .. end - 1 | empty |    left of ``first``: slid out of the window

    The private blocks are the request's own; the shared ones belong to somebody else (a prefix tree), who keeps them while
    the request runs. Blocks that others own and would give up are ``spare``; ``reclaim(n)`` makes ``n`` of them free.
    Where groups share an arena, ``reach`` says how far a surplus of this group goes with what the others have left over,
    and ``fetch(n)`` sees to it that ``n`` blocks are free. ``prepare(ids)`` is told of blocks that a request is given.

    A *promise* is the most blocks that a request may come to hold; what it does not hold yet is its *claim*, and nobody
    else is given blocks that are claimed. So a request that was admitted can always finish.
    """

    def __init__(
        self,
        plan: GroupPlan,
        num_slots: int,
        num_columns: int,
        *,
        first_id: int | None = None,
        name: str | None = None,
    ) -> None:
        self.plan, self.growth, self.block_size = plan, plan.demand.growth, plan.block_size
        self.name = f"group {plan.name!r}" if name is None else name
        first_id = plan.first_id if first_id is None else first_id
        self.free = FreeStack(plan.num_blocks, first=first_id, what=f"blocks of {self.name}")
        self.table = BlockTable(num_slots, num_columns, empty=0 if first_id else -1)
        self.first = [0] * num_slots
        self.end = [0] * num_slots
        self.shared = [0] * num_slots
        self.promised = [0] * num_slots
        self.claimed = 0
        self.num_held = self.peak_held = 0
        self.spare: Callable[[], int] = lambda: 0
        self.reclaim: Callable[[int], None] = lambda n: None
        self.reach: Callable[[int], int] | None = None
        self.fetch: Callable[[int], None] | None = None
        self.prepare: Callable[[Ids], None] | None = None

    def wanted(self, slot: int, num_tokens: int) -> int:
        """Blocks that ``slot`` lacks to have room for its first ``num_tokens`` tokens."""
        lacking = -(-num_tokens // self.block_size) - self.end[slot]
        return lacking if lacking > 0 else 0

    def surplus(self) -> int:
        """Blocks of this group that are free or spare beyond what is claimed; below 0 where others' memory must serve."""
        return self.free.num_free + self.spare() - self.claimed

    def available(self, slot: int | None = None) -> int:
        """Blocks that can be had and that no other request has a claim on."""
        surplus = self.free.num_free + self.spare() - self.claimed
        if self.reach is not None:
            surplus = self.reach(surplus)
        return surplus if slot is None else surplus + self.claim(slot)

    def claim(self, slot: int) -> int:
        """Blocks that ``slot`` was promised and does not hold yet."""
        claim = self.promised[slot] - self.end[slot] + self.first[slot]
        return claim if claim > 0 else 0

    def held_ids(self, slot: int) -> Ids:
        """The ids that ``slot`` holds, shared and private, in the order of the text: int32, the caller's own."""
        ids: Ids = self.table.cells[slot, self.first[slot] : self.end[slot]].copy()
        return ids

    def promise(self, slot: int, num_blocks: int) -> None:
        """Set aside blocks for ``slot``; the caller has checked ``available``."""
        self._hold(slot, self.first[slot], self.end[slot], num_blocks)

    def adopt(self, slot: int, ids: Ids) -> None:
        """Begin the row of ``slot``, which was promised nothing yet, with blocks that somebody else owns and keeps for it."""
        if len(ids):
            self.table.put(slot, 0, ids)
            self.shared[slot] = self.end[slot] = len(ids)

    def begin_at(self, slot: int, column: int) -> None:
        """Begin the row of ``slot``, which holds nothing, at ``column``: what is left of it will not be read."""
        self.shared[slot] = self.first[slot] = self.end[slot] = column

    def share(self, slot: int, columns: int, ids: Ids) -> None:
        """The first ``columns`` blocks of ``slot`` now belong to somebody else, who says which blocks ``ids`` they are."""
        if self.table.cells[slot, columns - len(ids) : columns].tobytes() != ids.tobytes():
            self.table.put(slot, columns - len(ids), ids)
        self.shared[slot] = columns

    def take_free(self, n: int) -> Ids:
        """``n`` free blocks, after fetching more if need be; they are the caller's. Raises OutOfBlocks.

        Fetching may move blocks: ids that were read before, and are in no table, may have changed their meaning.
        """
        free = self.free
        if n > free.num_free:
            if self.fetch is None:
                self.reclaim(n - free.num_free)
            else:
                self.fetch(n)
        ids = free.acquire(n)
        self.num_held += n
        if self.num_held > self.peak_held:
            self.peak_held = self.num_held
        return ids

    def release(self, ids: Ids) -> Ids:
        """Give back blocks from ``take_free``, or that a request's row no longer names; returns them."""
        self.free.give(ids)
        self.num_held -= len(ids)
        return ids

    def grow(self, slot: int, num_blocks: int) -> None:
        """Hand ``num_blocks`` more blocks to ``slot``. Raises OutOfBlocks, changing nothing. O(num_blocks)."""
        if num_blocks:
            self._append(slot, self.take_free(num_blocks))

    def lacking(self, ends: Mapping[int, int]) -> dict[int, int]:
        """What ``wanted`` says of every slot in ``ends``, slot -> tokens, but 0."""
        lacking = {}
        for slot, end in ends.items():
            need = -(-end // self.block_size) - self.end[slot]
            if need > 0:
                lacking[slot] = need
        return lacking

    def grow_each(self, num_blocks: Mapping[int, int]) -> None:
        """Hand every slot so many more blocks, all or none. Raises OutOfBlocks, changing nothing. O(blocks)."""
        ids, begin = self.take_free(sum(num_blocks.values())), 0
        for slot, count in num_blocks.items():
            self._append(slot, ids[begin : begin + count])
            begin += count

    def _append(self, slot: int, ids: Ids) -> None:
        end, count = self.end[slot], len(ids)
        claim = self.promised[slot] - end + self.first[slot]
        self.table.append(slot, end, ids)
        if self.prepare is not None:
            self.prepare(ids)
        if claim > 0:
            self.claimed -= count if count < claim else claim
        self.end[slot] = end + count

    def slide(self, slot: int, length: int) -> Ids:
        """Let go of the blocks that are not kept when ``length`` tokens are written; returns those freed. O(n)."""
        before, end = self.first[slot], self.end[slot]
        first = self.growth.first_kept(length) // self.block_size
        if first > end:
            first = end
        if first <= before:
            return _NONE
        ids = self.table.take_first(slot, before, first)[max(0, self.shared[slot] - before) :]
        self._hold(slot, first, end, self.promised[slot])
        return self.release(ids)

    def close(self, slot: int) -> Ids:
        """Let go of everything that ``slot`` holds and was promised; returns the ids freed: its private blocks."""
        first, end = self.first[slot], self.end[slot]
        private = self.shared[slot] - first if self.shared[slot] > first else 0
        self.claimed -= self.claim(slot)
        self.first[slot] = self.end[slot] = self.shared[slot] = self.promised[slot] = 0
        ids = self.table.take(slot, first, end)
        return ids if first == end else self.release(ids[private:])

    def cut(self, slot: int, columns: int, private: Ids) -> Ids:
        """End the row of ``slot`` after ``columns`` shared blocks and ``private``, which are its own or from ``take_free``;
        what else it held behind is let go. Its promise shrinks by the shared blocks among that, for they may not become
        free. Returns the ids freed."""
        shared, end = self.shared[slot], self.end[slot]
        ids = self.table.take(slot, columns, end)[shared - columns :]
        self.shared[slot] = columns
        self.table.put(slot, columns, private)
        promised = max(0, self.promised[slot] - (shared - columns))
        self._hold(slot, self.first[slot], columns + len(private), promised)
        return self.release(ids[~np.isin(ids, private)])

    def rename(self, names: Ids) -> None:
        """Block ``i`` is called ``names[i]`` from now on."""
        self.table.rename(names, self.end)

    def check(self, elsewhere: Ids | None = None, absent: Ids | None = None) -> None:
        """Prove that every block is free, private in exactly one row, one of those that are owned ``elsewhere``, or one of
        those that are ``absent``, their memory being another group's; and that shared cells name only what is owned
        elsewhere. Raises CheckFailed naming ids or slots."""
        none = np.empty(0, np.int32)
        others, absent = none if elsewhere is None else elsewhere, none if absent is None else absent
        self.free.check()
        columns = np.arange(self.table.cells.shape[1])
        first, end, shared = (np.array(column)[:, None] for column in (self.first, self.end, self.shared))
        inside = (columns >= first) & (columns < end)
        rows = self.table.cells[:-1]
        private = inside & (columns >= shared)
        named = np.bincount(np.concatenate((rows[private], others, absent)), minlength=self.plan.num_rows)
        named[self.free.held_ids()] -= 1
        if named.any():
            odd = np.flatnonzero(named)[:16].tolist()
            raise CheckFailed(f"{self.name}: tables and free list disagree about blocks {odd}")
        kept = np.zeros(self.plan.num_rows, np.bool_)
        kept[others] = True
        shared = rows[inside & ~private]
        if not kept[shared].all():
            raise CheckFailed(
                f"{self.name}: requests share blocks that nobody keeps: {shared[~kept[shared]][:16].tolist()}"
            )
        outside = rows[~inside]
        if (outside != self.table.empty).any() or (self.table.cells[-1] != self.table.empty).any():
            raise CheckFailed(f"{self.name}: a table names blocks outside of what its request holds")
        claims = sum(self.claim(slot) for slot in range(len(self.end)))
        if claims != self.claimed or self.available() < 0:
            raise CheckFailed(f"{self.name}: {claims} claims, {self.claimed} counted, {self.free.num_free} free")

    def _hold(self, slot: int, first: int, end: int, promised: int) -> None:
        before, after = self.promised[slot] - self.end[slot] + self.first[slot], promised - end + first
        self.first[slot], self.end[slot], self.promised[slot] = first, end, promised
        self.claimed += (after if after > 0 else 0) - (before if before > 0 else 0)
