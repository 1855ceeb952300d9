"""The part of a block table that a step shows, and how it differs from what an earlier step showed."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Cells = Any
"""The cells of a ``BlockTable``, or ``PagedCells``: int32, indexed by ``[row, first:end]`` or ``[rows, columns]``."""


class PagedCells:
    """A block table ``cells``, int32 ``[rows, columns]``, read as a table ``[rows, columns * many]`` of kernel pages.

    ``many``: kernel pages per block; page ``p`` of block ``b`` has the id ``b * many + p``. Slots are the same numbers in
    both units: ``block * block_size + row`` equals ``page * page_size + row of the page``. Only the cells that are
    indexed are computed.

    >>> PagedCells(np.array([[7, 3]], np.int32), 2)[0, 1:4].tolist()
    [15, 6, 7]
    """

    def __init__(self, cells: Array, many: int) -> None:
        self._cells, self._many, self.shape = cells, many, (cells.shape[0], cells.shape[1] * many)

    def __getitem__(self, at: tuple[Any, Any]) -> Array:
        """Return cells as a new int32 array: index with ``[row, first:end]``, or with arrays ``[rows, columns]``."""
        rows, columns = at
        columns = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
        blocks = self._cells[rows, columns // self._many]
        pages: Array = blocks * self._many + (columns % self._many).astype(blocks.dtype)
        return pages


class TableSnapshot:
    """For each of the ``B`` rows of a step, the cells of the block table that the step shows.

    Columns, int64 ``[B]`` each: ``slots``, ``versions`` of their cells, and the range ``first .. end - 1`` of cells.
    ``keys``: the columns as bytes.
    """

    def __init__(self, columns: tuple[Array, ...], keys: list[bytes]) -> None:
        self.slots, self.versions, self.first, self.end = self.columns = columns
        self.keys = keys
        self._last_cells: Array | None = None

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def starts(self) -> Array:
        """int64 ``[B + 1]``: where the cells of each row begin if the rows follow one another in one array."""
        return np.concatenate((_ZERO, np.cumsum(self.end - self.first)))

    def last_cells(self, cells: Cells) -> Array:
        """Return the last cell that is shown of each row, int64 ``[B]``."""
        if self._last_cells is None:
            self._last_cells = cells[self.slots, self.end - 1].astype(np.int64)
        return self._last_cells

    def since(self, before: TableSnapshot, cells: Cells) -> TableDelta:
        """Return how a copy of ``cells`` as shown ``before`` must be changed to show this snapshot.

        O(B + cells in the difference).
        """
        slots, first, end = self.slots, self.first, self.end
        same = [now is old for now, old in zip(self.columns, before.columns)]
        if same == [True, True, True, False]:
            renewed, begin = _NO_ROWS, before.end
        else:
            n = min(len(self), len(before))
            is_same, begin = np.zeros(len(self), np.bool_), end.copy()
            is_same[:n] = (slots[:n] == before.slots[:n]) & (self.versions[:n] == before.versions[:n])
            is_same[:n] &= first[:n] >= before.first[:n]
            old_end = np.where(first[:n] > before.first[:n], before.first[:n], before.end[:n])
            begin[:n] = np.where(is_same[:n], old_end, end[:n])
            renewed = np.flatnonzero(~is_same)
        grown = (end > begin).nonzero()[0]
        columns, ends = begin[grown], end[grown]
        if not np.count_nonzero(ends - columns != 1):  # each row grew by one cell
            rows = grown
        else:
            rows, columns = cells_between(columns, ends)
            rows = grown[rows]
        values = cells[slots[rows], columns]
        if first is not before.first:
            values *= columns >= first[rows]
        return TableDelta(renewed, rows, columns, values)


class TableDelta(NamedTuple):
    """The difference between two snapshots of a table; int64 arrays."""

    renewed: Array
    """Rows that are new, or hold another slot or version: all their cells must be copied."""
    rows: Array
    columns: Array
    values: Array
    """Cells of the other rows to write: newly shown ones, and 0 for those left of the range that are hidden now."""


_NO_ROWS, _ZERO = np.empty(0, np.int64), np.zeros(1, np.int64)
EMPTY = TableSnapshot((np.empty(0, np.int64),) * 4, [b""] * 4)


def cells_between(begin: Array, end: Array) -> tuple[Array, Array]:
    """Return the rows and columns of the cells ``begin[i] .. end[i] - 1`` of all rows ``i``: int64 ``[n]``, in
    order."""
    counts = np.maximum(end - begin, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (np.cumsum(counts) - counts - begin)[rows]
