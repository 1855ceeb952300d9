"""What a step shows of a block table, and how that differs from what an earlier step showed."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


Cells = Any
"""Those of a ``BlockTable``, or ``PagedCells``: int32, read as ``[row, first:end]`` or ``[rows, columns]``."""


class TableSnapshot:
    """Of each row of a step its slot, the version of what it holds, and its cells ``first .. end - 1``, int64 ``[B]`` each."""

    def __init__(self, columns: tuple[Array, ...], keys: list[bytes]) -> None:
        self.slots, self.versions, self.first, self.end = self.columns = columns
        self.keys = keys  # the columns as bytes
        self._last_cells: Array | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def starts(self) -> Array:
        """int64 ``[B + 1]``: where the cells of each row begin if they lie row behind row."""
        return np.concatenate((_ZERO, np.cumsum(self.end - self.first)))

    def last_cells(self, cells: Cells) -> Array:
        """int64 ``[B]``: the last cell of each row that is shown."""
        if self._last_cells is None:
            self._last_cells = cells[self.slots, self.end - 1].astype(np.int64)
        return self._last_cells

    def since(self, before: TableSnapshot, cells: Cells) -> TableDelta:
        """How to come here from ``before``."""
        slots, first, end = self.slots, self.first, self.end
        same = [now is old for now, old in zip(self.columns, before.columns)]
        if same == [True, True, True, False]:
            renewed, begin = _NO_ROWS, before.end
        else:
            n = min(len(self), len(before))
            goes_on, begin = np.zeros(len(self), np.bool_), end.copy()
            goes_on[:n] = (slots[:n] == before.slots[:n]) & (self.versions[:n] == before.versions[:n])
            goes_on[:n] &= first[:n] >= before.first[:n]
            old_end = np.where(first[:n] > before.first[:n], before.first[:n], before.end[:n])
            begin[:n] = np.where(goes_on[:n], old_end, end[:n])
            renewed = np.flatnonzero(~goes_on)
        grown = (end > begin).nonzero()[0]
        columns, ends = begin[grown], end[grown]
        if not np.count_nonzero(ends - columns != 1):  # by a cell each
            rows = grown
        else:
            rows, columns = cells_between(columns, ends)
            rows = grown[rows]
        values = cells[slots[rows], columns]
        if first is not before.first:
            values *= columns >= first[rows]
        return TableDelta(renewed, rows, columns, values)


class TableDelta(NamedTuple):
    """How a table is shown differently from before."""

    renewed: Array
    """Rows that mean something else, or are new."""
    rows: Array
    columns: Array
    values: Array
    """Cells of the other rows that are shown now, and 0 for those that are no longer shown, left of the rest."""


_NO_ROWS, _ZERO = np.empty(0, np.int64), np.zeros(1, np.int64)
EMPTY = TableSnapshot((np.empty(0, np.int64),) * 4, [b""] * 4)


def cells_between(begin: Array, end: Array) -> tuple[Array, Array]:
    """Row and column of each cell ``begin .. end - 1`` of each row: int64 ``[n]``, in order."""
    counts = np.maximum(end - begin, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts - begin)[rows]
