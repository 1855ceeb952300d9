"""Suspended requests: their blocks and states lie in host memory until they are resumed. numpy only.

    suspend    what a request holds  ->  rows of one table of host memory; its blocks become free
    resume     what is still cached is shared again, and only the rest is copied back

All groups share the table. A row is as wide as a block of the group that keeps every token (without one: as the
narrowest block of any group). ``memory.host_copy`` says how wider and narrower blocks lie in it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.errors import CheckFailed, OutOfBlocks
from kvpagoda.free_list import FreeStack
from kvpagoda.pages import Bytes
from kvpagoda.units import ceil_div, format_bytes, table_rows


class Rate:
    """A running average of seconds per item: the latest measurement weighs as much as all earlier ones together."""

    def __init__(self, seconds: float = 0.0, count: float = 1.0) -> None:
        self._seconds, self._count = seconds, count

    @property
    def seconds(self) -> float:
        """Seconds per item."""
        return self._seconds / self._count

    def add(self, seconds: float, count: int) -> None:
        """Add a measurement: ``count`` items took ``seconds``."""
        self._seconds, self._count = self._seconds / 2 + seconds, self._count / 2 + count


class SwapPart(NamedTuple):
    """Columns ``begin .. end - 1`` of one group's table row, and the rows of the swap that have their bytes."""

    begin: int
    end: int
    rows: Ids


class Suspended(NamedTuple):
    """The copy of a suspended request, and what it held."""

    parts: tuple[SwapPart, ...]
    """For each group: what was copied, and where it lies."""
    firsts: tuple[int, ...]
    """For each group: the column where its row began. Columns from there to its part were left in the prefix cache."""
    reserved: tuple[int, ...]
    """For each group: the number of blocks that it had reserved."""
    capacity: int
    """The number of tokens that it had room for."""
    length: int
    """The number of tokens that were committed. Of states, those after them were copied, and no older ones."""

    @property
    def left_behind(self) -> list[range]:
        """For each group: the columns that were not copied. Their blocks were left in the prefix cache, and may have
        been evicted."""
        return [range(first, part.begin) for first, part in zip(self.firsts, self.parts)]


class Swap:
    """Host memory for suspended requests, at most ``nbytes``; allocated when it is first needed, and on a GPU, where its pages
    are locked ahead of use, at once.

    ``rate``: seconds per byte copied, in either direction; a guess until something was copied, and where nothing is
    stored."""

    def __init__(self, nbytes: int, groups: Many[BlockGroup], memory: NoMemory) -> None:
        self._groups, self._memory = tuple(groups), memory
        widths = [_width(group) for group in groups]
        full = [width for width, group in zip(widths, groups) if not group.growth.is_bounded]
        self.width = max(1, min(full or widths, default=1))
        self._rows = FreeStack(nbytes // self.width, what="rows of the swap")
        self._table: Bytes | None = None
        self.rate = Rate(1e-3, 1e6)
        if memory.locks_pages and self.nbytes:
            with suppress(OutOfBlocks):  # the first suspension says it
                self.table()  # addresses alone, of which the first piece is locked before it is used

    @property
    def num_rows(self) -> int:
        """The number of rows of ``width`` bytes."""
        return self._rows.num_ids

    @property
    def nbytes(self) -> int:
        """The most bytes that it takes."""
        return self._rows.num_ids * self.width

    @property
    def used_nbytes(self) -> int:
        """Bytes of the rows in use."""
        return (self._rows.num_ids - self._rows.num_free) * self.width

    def nbytes_of(self, slot: int, length: int, whole: bool) -> int:
        """Return the number of bytes that ``copy_out`` would copy."""
        columns = zip(self._groups, self._columns(slot, length, whole))
        return sum((end - begin) * _width(group) for group, (begin, end) in columns)

    def copy_out(self, slot: int, length: int, capacity: int, whole: bool) -> Suspended:
        """Copy what ``slot`` holds of its first ``length`` tokens to free rows. ``put`` then marks these rows as used.

        ``capacity``: the tokens that the request has room for, to be recorded. ``whole``: False: copy only blocks that
        it does not share. The blocks may be given away when this returns; on a GPU the copy is then under way. Raises
        OutOfBlocks, and whatever copying raises; nothing changed then."""
        columns = self._columns(slot, length, whole)
        counts = [table_rows(end - begin, _width(one), self.width) for one, (begin, end) in zip(self._groups, columns)]
        need, free = sum(counts), self._rows.num_free
        if need > free:
            wanted = f"{need} rows of {format_bytes(self.width)}"
            text = f"need {wanted} to suspend {length} tokens, {free} free of {self._rows.num_ids}"
            hint = f"resume or close what is suspended, or raise swap (now {format_bytes(self.nbytes)})"
            raise OutOfBlocks.with_hint(text, hint, needed=need, available=free)
        pieces = np.split(self._rows.peek(need), np.cumsum(counts)[:-1])
        parts = tuple(SwapPart(begin, end, rows) for (begin, end), rows in zip(columns, pieces))
        at = [
            length % max(1, group.places) for group in self._groups
        ]  # of states: the place that is read next, and no other
        ids = [
            group.table.cells[slot, begin + place : end + place].copy()
            for group, (begin, end, _), place in zip(self._groups, parts, at)
        ]
        self._copy(parts, ids, is_out=True)
        firsts, reserved = zip(*[(group.first[slot], group.reserved[slot]) for group in self._groups])
        return Suspended(parts, firsts, reserved, capacity, length)

    def copy_in(self, suspended: Suspended, targets: Many[Ids]) -> None:
        """Copy back to ``targets``: for each group int32 ids of blocks for the last columns of its part."""
        parts = []
        for (begin, end, rows), ids in zip(suspended.parts, targets):
            shared = end - begin - len(ids)  # shared again, not copied; such blocks are as wide as a row
            parts.append(SwapPart(begin + shared, end, rows[shared:]))
        self._copy(parts, targets, is_out=False)

    def put(self, suspended: Suspended) -> None:
        """Mark the rows that the latest ``copy_out`` filled as used."""
        for part in suspended.parts:
            self._rows.take(len(part.rows))

    def drop(self, suspended: Suspended) -> None:
        """Free the rows of ``suspended``."""
        for part in suspended.parts[::-1]:
            self._rows.give(part.rows[::-1])  # reversed: taken again in order, they are copied as one range

    def clear(self) -> None:
        """Free every row."""
        self._rows.clear()

    def check(self, suspended: Iterable[Suspended]) -> None:
        """Prove that every row is free or belongs to one of ``suspended``, which are all copies. Raises CheckFailed."""
        self._rows.check()
        rows = [part.rows for copy in suspended for part in copy.parts]
        named = np.bincount(np.concatenate([np.empty(0, np.int32), *rows]), minlength=self._rows.num_ids)
        named[self._rows.held_ids()] -= 1
        if named.any():
            text = f"swap: requests and free list disagree about rows {np.flatnonzero(named)[:16].tolist()}"
            raise CheckFailed(text, available=np.flatnonzero(named)[:16].tolist())

    def _columns(self, slot: int, length: int, whole: bool) -> list[tuple[int, int]]:
        """Return for each group the columns (begin, end) to copy out: all of an optional group, whose blocks are the first
        to be evicted."""
        are_whole = [whole or group.growth.is_optional for group in self._groups]
        return [
            (
                max(group.first[slot], 0 if all_of_it else group.shared[slot]),
                ceil_div(length, group.block_size) if group.places else 0,
            )
            for group, all_of_it in zip(self._groups, are_whole)
        ]

    def is_table(self, table: Bytes) -> bool:
        """Return whether ``table`` is this host memory, which may not be allocated yet."""
        return table is self._table

    def table(self) -> Bytes:
        """Return the host memory: uint8 ``[num_rows, width]``; where nothing is stored it takes no memory. Raises OutOfBlocks
        if it cannot be allocated."""
        if self._table is None and not self._memory.has_memory:
            self._table = np.broadcast_to(np.uint8(0), (self.num_rows, self.width))
        if self._table is None:
            # The C library's large copies are several times slower if the target lies a little further into its page
            # than the source, so the table begins at the same offset as the blocks.
            offset = self._memory.page_offset
            memory = self._memory.host_memory(offset + self.nbytes)
            self._table = memory[offset : offset + self.nbytes].reshape(-1, self.width)
        return self._table

    def _copy(self, parts: Iterable[SwapPart], ids: Iterable[Ids], *, is_out: bool) -> None:
        """Copy blocks ``ids[i]`` of group i to (``is_out``) or from the rows of its part."""
        copy = self._memory.to_host if is_out else self._memory.from_host
        start, nbytes = perf_counter(), 0
        for group, part, block_ids in zip(self._groups, parts, ids):
            if len(block_ids):
                copy(group.index, block_ids, self.table(), part.rows.tolist())
                nbytes += len(block_ids) * _width(group)
        if self._memory.has_memory:
            self._memory.when_copied(lambda: self.rate.add(perf_counter() - start, nbytes))


def _width(group: BlockGroup) -> int:
    return group.plan.layout.nbytes
