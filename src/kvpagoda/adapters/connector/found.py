"""The records that exist of one text: which tier has each, and after which of them a request can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from kvpagoda.adapters.connector.groups import LayerGroup, RecordGrid
from kvpagoda.adapters.connector.messages import Find
from kvpagoda.tiers import Lease, Status
from kvpagoda.tiers.level import Level

_FIRST_STEP = 64  # records in the first lookup; four times as many in the next if all are found
_HOLD = 10.0  # seconds that a tier keeps what a lookup found
Record = tuple[int, int]
"""The index of a group, and the number of a record of the text."""


def record_kind(group: int) -> bytes:
    """Return the kind (see ``Level.key``) of the records of ``group``."""
    return b"group %d" % group


@dataclass(eq=False)
class FoundRecords:
    """What ``levels`` have of the text of ``find``. It owns leases and staging rows until ``release``."""

    find: Find
    levels: Sequence[Level]
    grid: RecordGrid
    source: dict[Record, Level] = field(init=False, default_factory=dict)
    """Record -> the first level that has it."""
    ends: tuple[int, ...] = field(init=False, default=())
    """The numbers of records after which a request can go on, in their order."""
    rows: dict[Record, tuple[Level, int]] = field(init=False, default_factory=dict)
    """Records that are read: record -> level and staging row."""
    is_released: bool = field(init=False, default=False)
    _leases: list[Lease] = field(init=False, default_factory=list)

    @property
    def first(self) -> int:
        """The first record that is not cached as a whole."""
        return self.find.begin // self.grid.tokens

    def key(self, level: Level, record: Record) -> bytes:
        """Return the key of ``record`` in ``level``."""
        return level.key(self.find.hashes[record[1]], record_kind(record[0]))

    def look_up(self) -> None:
        """Set ``source`` and ``ends``. Waits for the tiers, each at most its timeout."""
        full = [group for group in self.grid.groups if group.keeps_all]
        bounded = [group for group in self.grid.groups if not group.keeps_all]
        at, last, step = self.first, len(self.find.hashes), _FIRST_STEP
        while full and at < last:
            stop, step = min(last, at + step), 4 * step
            self._ask([(group.index, number) for number in range(at, stop) for group in full])
            while at < stop and all((group.index, at) in self.source for group in full):
                at += 1
            last = last if at == stop else at
        records = [
            (group.index, number)
            for number in range(self.first, last)
            for group in bounded
            if len(self.grid.blocks(group, number))
        ]
        self._ask(records)
        self.ends = tuple(end for end in range(self.first + 1, last + 1))
        for group in bounded:
            self.ends = self._possible(group)

    def _possible(self, group: LayerGroup) -> tuple[int, ...]:
        """Return those of ``ends`` before which ``group`` lacks no record."""
        has = [
            (group.index, number) in self.source or not len(self.grid.blocks(group, number))
            for number in range(self.first, max(self.ends, default=self.first))
        ]
        before = np.concatenate(([0], np.cumsum(has)))
        kept = []
        for end in self.ends:
            begin = max(self.first, self.grid.needed(group, end).start)
            if before[end - self.first] - before[begin - self.first] == end - begin:
                kept.append(end)
        return tuple(kept)

    def _ask(self, records: Sequence[Record]) -> None:
        """Ask all levels at once for ``records``."""
        if not records:
            return
        deadlines = {level: monotonic() + level.spec.timeout for level in self.levels}
        futures = {
            level: level.tier.lookup([self.key(level, one) for one in records], deadlines[level], _HOLD)
            for level in self.levels
        }
        for level, future in futures.items():
            lease = future.result()
            self._leases.append(lease)
            for record, status in zip(records, lease.statuses):
                if status is Status.OK:
                    self.source.setdefault(record, level)

    def needed(self, end: int) -> list[Record]:
        """Return the records to load so that a request goes on after ``end`` records, in the order of the text."""
        wanted = {group.index: self.grid.needed(group, end) for group in self.grid.groups}
        return [
            (group.index, number)
            for number in range(self.first, end)
            for group in self.grid.groups
            if number in wanted[group.index] and len(self.grid.blocks(group, number))
        ]

    def release(self) -> None:
        """Give back leases and staging rows. Releasing twice does no harm."""
        while self._leases:
            self._leases.pop().release()
        self.rows = {}
        for level in self.levels:
            level.buffer.release_all(self)
        self.is_released = True


def batches(records: Sequence[Record], source: Mapping[Record, Level]) -> list[tuple[Level, list[Record]]]:
    """Return ``records`` in their order, as batches of one group and one level, at most ``Level.batch`` in each.

    Records of different groups may change places; those of one group do not.
    """
    made = list[tuple[Level, list[Record]]]()
    open_: dict[tuple[int, Level], list[Record]] = {}
    for record in records:
        level = source[record]
        batch = open_.get((record[0], level))
        if batch is None or len(batch) >= max(1, level.batch):
            batch = open_[record[0], level] = []
            made.append((level, batch))
        batch.append(record)
    return made
