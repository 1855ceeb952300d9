"""Requests that are set aside: their blocks and states in host memory until they go on. numpy only.

    suspend    what a request holds  ->  rows of one table of host memory; its blocks are free
    resume     what is still cached is shared again, and only the rest is copied back

All groups share the table. A row of it is as wide as a block of the group that keeps every token, or as the narrowest
block there is; ``memory.host_copy`` says how wider and narrower ones lie in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from time import perf_counter
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.free_list import FreeStack
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed, OutOfBlocks
from kvpagoda.memory.no_memory import NoMemory
from kvpagoda.memory.pages import Bytes
from kvpagoda.units import ceil_div, format_bytes, table_rows


class Rate:
    """Seconds of each of many things, as it was of late: what was measured last counts for as much as all before."""

    def __init__(self, seconds: float = 0.0, count: float = 1.0) -> None:
        self._seconds, self._count = seconds, count

    @property
    def seconds(self) -> float:
        """For one of them."""
        return self._seconds / self._count

    def add(self, seconds: float, count: int) -> None:
        """``count`` more of them took so long."""
        self._seconds, self._count = self._seconds / 2 + seconds, self._count / 2 + count


class Part(NamedTuple):
    """Columns ``begin .. end - 1`` of one group's table row, and the rows of the swap that have their bytes."""

    begin: int
    end: int
    rows: Ids


class Suspended(NamedTuple):
    """A request that is set aside."""

    parts: tuple[Part, ...]
    """Of each group."""
    firsts: tuple[int, ...]
    """Where its row began; what lies between that and its part was left in the prefix cache."""
    reserved: tuple[int, ...]
    """Blocks that it had reserved in each group."""
    capacity: int
    """Tokens that it had room for."""

    @property
    def left_behind(self) -> list[range]:
        """Of each group the blocks of the text that are not here, and may have been evicted."""
        return [range(first, part.begin) for first, part in zip(self.firsts, self.parts)]


class Swap:
    """At most ``nbytes`` of host memory, asked for when it is first needed, for what is suspended.

    ``rate``: of bytes that are copied, in either direction; before any were, a guess.
    """

    def __init__(self, nbytes: int, groups: Many[BlockGroup], memory: NoMemory) -> None:
        self._groups, self._memory = tuple(groups), memory
        widths = [_width(group) for group in groups]
        full = [width for width, group in zip(widths, groups) if not group.growth.is_bounded]
        self.width = max(1, min(full or widths, default=1))
        self._rows = FreeStack(nbytes // self.width, what="rows of the swap")
        self._table: Bytes | None = None
        self.rate = Rate(1e-3, 1e6)

    @property
    def nbytes(self) -> int:
        """Bytes that it may take."""
        return self._rows.num_ids * self.width

    @property
    def used_nbytes(self) -> int:
        """Bytes of the rows that hold something."""
        return (self._rows.num_ids - self._rows.num_free) * self.width

    def nbytes_of(self, slot: int, length: int, whole: bool) -> int:
        """Bytes that ``copy_out`` would copy."""
        columns = zip(self._groups, self._columns(slot, length, whole))
        return sum((end - begin) * _width(group) for group, (begin, end) in columns)

    def copy_out(self, slot: int, length: int, capacity: int, whole: bool) -> Suspended:
        """Copy what ``slot`` holds of its first ``length`` tokens to free rows; not ``whole``: only what it does not share.
        ``put`` makes the rows its own.

        Waits until the bytes are there. Raises OutOfBlocks, and whatever copying does; nothing changed then.
        """
        columns = self._columns(slot, length, whole)
        counts = [table_rows(end - begin, _width(one), self.width) for one, (begin, end) in zip(self._groups, columns)]
        need, free = sum(counts), self._rows.num_free
        if need > free:
            rows = f"{need} rows of {format_bytes(self.width)}"
            text = f"need {rows} to suspend {length} tokens, {free} free of {self._rows.num_ids}"
            hint = f"resume or close what is suspended, or raise swap (now {format_bytes(self.nbytes)})"
            raise OutOfBlocks.with_hint(text, hint, needed=need, available=free)
        pieces = np.split(self._rows.peek(need), np.cumsum(counts)[:-1])
        parts = tuple(Part(begin, end, some) for (begin, end), some in zip(columns, pieces))
        ids = [group.table.cells[slot, begin:end].copy() for group, (begin, end, _) in zip(self._groups, parts)]
        self._copy(parts, ids, is_out=True)
        firsts, reserved = zip(*[(group.first[slot], group.reserved[slot]) for group in self._groups])
        return Suspended(parts, firsts, reserved, capacity)

    def copy_in(self, suspended: Suspended, targets: Many[Ids]) -> None:
        """Copy back to ``targets``, int32 for each group: the last blocks of those that were suspended."""
        parts = []
        for (begin, end, rows), ids in zip(suspended.parts, targets):
            shared = end - begin - len(ids)  # only blocks that are as wide as a row are shared
            parts.append(Part(begin + shared, end, rows[shared:]))
        self._copy(parts, targets, is_out=False)

    def put(self, suspended: Suspended) -> None:
        """The rows that ``copy_out`` filled just now are taken."""
        for part in suspended.parts:
            self._rows.take(len(part.rows))

    def drop(self, suspended: Suspended) -> None:
        """The rows of ``suspended`` are free."""
        for part in suspended.parts[::-1]:
            self._rows.give(part.rows[::-1])  # so that they go out again in their order, and are copied as one

    def clear(self) -> None:
        """Every row is free."""
        self._rows.clear()

    def check(self, suspended: Iterable[Suspended]) -> None:
        """Prove that every row is free or of one of ``suspended``, which are all there are. Raises CheckFailed."""
        self._rows.check()
        rows = [part.rows for one in suspended for part in one.parts]
        named = np.bincount(np.concatenate([np.empty(0, np.int32), *rows]), minlength=self._rows.num_ids)
        named[self._rows.held_ids()] -= 1
        if named.any():
            raise CheckFailed(f"swap: requests and free list disagree about rows {np.flatnonzero(named)[:16].tolist()}")

    def _columns(self, slot: int, length: int, whole: bool) -> list[tuple[int, int]]:
        """Of each group the columns that are to be copied out."""
        return [
            (max(group.first[slot], 0 if whole else group.shared[slot]), ceil_div(length, group.block_size))
            for group in self._groups
        ]

    def _copy(self, parts: Iterable[Part], ids: Iterable[Ids], *, is_out: bool) -> None:
        """Copy blocks ``ids[i]`` of group i to or from the rows of its part."""
        if self._table is None and self.nbytes:
            # The C library's large copies are several times slower to addresses that lie a little ahead in their page.
            offset = self._memory.page_offset
            memory = self._memory.host_memory(offset + self.nbytes)
            self._table = memory[offset : offset + self.nbytes].reshape(-1, self.width)
        copy = self._memory.to_host if is_out else self._memory.from_host
        start, nbytes = perf_counter(), 0
        for group, part, some in zip(self._groups, parts, ids):
            if len(some):
                assert self._table is not None, "there are rows of it"
                copy(group.index, some, self._table, part.rows.tolist())
                nbytes += len(some) * _width(group)
        self.rate.add(perf_counter() - start, nbytes)


def _width(group: BlockGroup) -> int:
    return group.plan.layout.nbytes
