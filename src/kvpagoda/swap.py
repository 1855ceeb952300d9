"""Requests that are set aside: their blocks and states in host memory until they go on. numpy only.

    suspend    what a request holds  ->  rows of one table of host memory; its blocks are free
    resume     what is still cached is shared again, and only the rest is copied back

All groups share the table. A row of it is as wide as a block of the group that keeps every token, or as the narrowest
block there is; ``memory.host_copy`` says how wider and narrower ones lie in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from kvpagoda.blocks import FreeStack
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed, OutOfBlocks
from kvpagoda.memory.pages import Bytes
from kvpagoda.units import ceil_div, format_bytes, table_rows

Copy = Callable[[BlockGroup, Ids, Bytes, Many[int]], None]


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


class HostMemory(Protocol):
    """Who has the host's memory and moves the bytes. A cache with no memory behind it does nothing."""

    page_offset: int

    def host_memory(self, nbytes: int) -> Bytes: ...

    def blocks_out(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None: ...

    def blocks_in(self, ledger: BlockGroup, ids: Ids, payloads: Bytes, rows: Many[int]) -> None: ...


class Part(NamedTuple):
    """Columns ``begin .. end - 1`` of one group's table row, and the rows of the swap that have their bytes."""

    begin: int
    end: int
    rows: Ids


class Suspended(NamedTuple):
    """A request that is set aside."""

    parts: tuple[Part, ...]
    """Of each group."""
    promised: tuple[int, ...]
    """Blocks that were promised to it in each group."""
    room: int
    """Tokens that it had room for."""
    published: int
    """Leading blocks of the text that are not here: they were left in the prefix tree, and may be evicted."""


class Swap:
    """At most ``nbytes`` of host memory, asked for when it is first needed, for what is suspended.

    ``rate``: of bytes that are copied, in either direction; before any were, a guess.
    """

    def __init__(self, nbytes: int, ledgers: Many[BlockGroup], memory: HostMemory) -> None:
        self._ledgers, self._memory = tuple(ledgers), memory
        widths = [_width(ledger) for ledger in ledgers]
        full = [width for width, ledger in zip(widths, ledgers) if not ledger.growth.is_bounded]
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
        """Bytes that ``put`` would copy."""
        columns = zip(self._ledgers, self._columns(slot, length, whole))
        return sum((end - begin) * _width(ledger) for ledger, (begin, end) in columns)

    def put(self, slot: int, length: int, room: int, whole: bool) -> Suspended:
        """Copy out what ``slot`` holds of its first ``length`` tokens; not ``whole``: only what it does not share.

        Waits until the bytes are there. Raises OutOfBlocks, and whatever copying does; nothing changed then.
        """
        columns = self._columns(slot, length, whole)
        counts = [table_rows(end - begin, _width(one), self.width) for one, (begin, end) in zip(self._ledgers, columns)]
        need, free = sum(counts), self._rows.num_free
        if need > free:
            raise OutOfBlocks(
                f"need {need} rows of {format_bytes(self.width)} to suspend {length} tokens, {free} free of "
                f"{self._rows.num_ids}; resume or close what is suspended, or raise swap (now {format_bytes(self.nbytes)})"
            )
        rows = self._rows.acquire(need)
        ends = np.cumsum(counts)[:-1]
        parts = tuple(Part(begin, end, some) for (begin, end), some in zip(columns, np.split(rows, ends)))
        try:
            self._copy(self._memory.blocks_out, slot, parts)
        except BaseException:
            self._rows.give(rows[::-1])
            raise
        published = sum(part.begin for one, part in zip(self._ledgers, parts) if not one.growth.is_bounded)
        return Suspended(parts, tuple(ledger.promised[slot] for ledger in self._ledgers), room, published)

    def restore(self, slot: int, suspended: Suspended, room: int) -> None:
        """Make room for ``room`` tokens of ``slot``, at least those that were suspended, and copy back what it does not share.
        The room is promised."""
        for ledger, part in zip(self._ledgers, suspended.parts):
            if ledger.growth.is_bounded:
                ledger.begin_at(slot, part.begin)
            ledger.grow(slot, ledger.wanted(slot, room))
        lacking = []
        for ledger, (begin, end, rows) in zip(self._ledgers, suspended.parts):
            shared = max(0, ledger.shared[slot] - begin)  # only blocks that are as wide as a row are shared
            lacking.append(Part(begin + shared, end, rows[shared:]))
        self._copy(self._memory.blocks_in, slot, lacking)

    def drop(self, suspended: Suspended) -> None:
        """Forget what was suspended."""
        for part in suspended.parts[::-1]:
            self._rows.give(part.rows[::-1])  # so that they go out again in their order, and are copied as one

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
            (max(ledger.first[slot], 0 if whole else ledger.shared[slot]), ceil_div(length, ledger.block_size))
            for ledger in self._ledgers
        ]

    def _copy(self, copy: Copy, slot: int, parts: Iterable[Part]) -> None:
        if self._table is None and self.nbytes:
            # The C library's large copies are several times slower to addresses that lie a little ahead in their page.
            offset = self._memory.page_offset
            memory = self._memory.host_memory(offset + self.nbytes)
            self._table = memory[offset : offset + self.nbytes].reshape(-1, self.width)
        start, nbytes = perf_counter(), 0
        for ledger, (begin, end, rows) in zip(self._ledgers, parts):
            if end > begin:
                assert self._table is not None, "there are rows of it"
                copy(ledger, ledger.table.cells[slot, begin:end].copy(), self._table, rows.tolist())
                nbytes += (end - begin) * _width(ledger)
        self.rate.add(perf_counter() - start, nbytes)


def _width(ledger: BlockGroup) -> int:
    return ledger.plan.demand.layout.nbytes
