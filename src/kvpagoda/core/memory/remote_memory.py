"""The memory of a cache that a worker has, in another process: nothing is moved here, and every copy is noted for it."""

from __future__ import annotations

import os
from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.memory.copies import Copy, Noted
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.pages import Bytes
from kvpagoda.schema import Plan
from kvpagoda.units import ceil_div

_NONE: Ids = np.empty(0, np.int32)
_LEAST_IDS, _TURNS = 1 << 14, 4  # out and in, twice
_LEAST, _EACH = 1 << 12, 16  # operations, and those of each request in each group


class RemoteMemory(NoMemory):
    """Notes the operations on the memory of ``plan`` between two batches, for ``batch.copies``. ``poison``: blocks that are
    freed, too.

    A simulator that makes no batch takes none of them away. So no more ids are noted than suspend all that the memory holds
    and resume it, twice, and a few operations for each request; if there are more, all of them are dropped, and the next
    batch has no copies. After a reset nothing is held, so the notes begin anew.
    """

    def __init__(self, plan: Plan, poison: bool) -> None:
        super().__init__([group.layout.nbytes for group in plan.groups])
        self.is_poisoning = poison
        self._name = os.urandom(8).hex()
        self._are_states = [group.growth.is_state for group in plan.groups]
        self._tokens = [0 if group.growth.is_state else group.block_size for group in plan.groups]
        width = min((group.layout.nbytes for group in plan.groups), default=1)  # of the swap, or less
        ids = [group.num_rows * (1 + ceil_div(group.layout.nbytes, width)) for group in plan.groups]
        self._most_ids = _LEAST_IDS + _TURNS * sum(ids)
        self._most = _LEAST + _EACH * plan.max_requests * len(plan.groups)
        self._operations: list[Copy] | None = []
        self._num_ids = self._resets = self._number = 0

    def take(self) -> Noted:
        noted = Noted(self._name, self._resets, self._number, self._operations)
        self._operations = []
        self._num_ids = 0
        self._number += 1
        return noted

    def restart(self) -> None:
        self._operations = []
        self._num_ids = self._number = 0
        self._resets += 1

    def note(
        self, kind: str, group: int, source: Ids, target: Ids, rows: int | None = 0, into: int | None = None
    ) -> None:
        """Note an operation. The ids are copied, as their arrays may change. ``rows``: None: all rows."""
        if self._operations is None:
            return
        self._num_ids += len(target) + (len(source) if kind != "wrote" else 0)  # of these, one for each token
        if self._num_ids > self._most_ids or len(self._operations) == self._most:
            self._operations = None
            return
        if rows is None:
            rows = len(source) * self._tokens[group]
        source, target = np.array(source, np.int32), np.array(target, np.int32)
        self._operations.append(Copy(kind, group, source, target, rows, group if into is None else into))

    def copy(self, group: int, sources: Ids, targets: Ids, rows: int | None = None) -> None:
        self.note("state" if self._are_states[group] else "block", group, sources, targets, rows)

    def move(self, group: int, sources: Ids, targets: Ids) -> None:
        self.note("move", group, sources, targets, None)

    def convert(self, group: int, sources: Ids, other: int, targets: Ids) -> None:
        self.note("state", group, sources, targets, into=other)

    def round(self, group: int, ids: Ids, other: int) -> None:
        self.note("round", group, _NONE, ids, into=other)

    def reset(self, group: int, ids: Ids) -> None:
        self.note("reset", group, _NONE, ids)

    def clear_sectors(self, sectors: Ids) -> None:
        self.note("clear", 0, _NONE, sectors)

    def freed(self, group: int, ids: Ids) -> None:
        if self.is_poisoning and len(ids):
            self.note("poison", group, _NONE, ids)

    def to_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int], layer: int | None = None) -> None:
        self.note("swap_out", group, ids, np.array(rows, np.int32))

    def from_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        self.note("swap_in", group, np.array(rows, np.int32), ids)
