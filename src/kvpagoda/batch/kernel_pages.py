"""Block tables in the units of kernels: where a block is several kernel pages, page ``p`` of block ``b`` is ``b * pages + p``.

Slots stay what they are: block * block_size + row is also page * page size + row of the page.
"""

from __future__ import annotations

import numpy as np

from kvpagoda.batch.table_snapshot import Array, TableSnapshot, cells_between
from kvpagoda.blocks.block_table import BlockTable


class PagedTables:
    """What a step shows of one group's ``table``, in kernel pages of ``size`` tokens, ``many`` of them a block. ``lengths``:
    tokens of each row, int64 ``[B]``. Made anew each step: O(cells)."""

    def __init__(self, shown: TableSnapshot, table: BlockTable, lengths: Array, size: int, many: int) -> None:
        self._shown, self._table, self._lengths, self._size, self._many = shown, table, lengths, size, many
        self.first, self.end = shown.first * many, -(-lengths // size)
        self.starts = np.concatenate(([0], np.cumsum(np.maximum(self.end - self.first, 0))))

    def rows(self, is_fixed: bool) -> Array:
        """int64 ``[B, columns]``: the pages of each row, 0 left of what is shown; ``is_fixed``: all columns there can be."""
        shown = self._shown
        columns = self._table.cells.shape[1] if is_fixed else int(shown.end.max(initial=0))
        at = np.arange(columns)
        is_shown = (at >= shown.first[:, None]) & (at < shown.end[:, None])
        blocks = np.where(is_shown, self._table.cells[shown.slots, :columns], 0)
        pages: Array = blocks[..., None] * self._many + np.arange(self._many)
        return pages.reshape(len(blocks), -1)

    def runs(self, is_fixed: bool) -> Array:
        """int64 ``[starts[-1]]``: the pages in use, row behind row; ``is_fixed``: as many as there can be, 0 behind them."""
        row, column = cells_between(self.first, self.end)
        blocks = self._table.cells[self._shown.slots[row], column // self._many].astype(np.int64)
        pages = blocks * self._many + column % self._many
        most = len(self._shown) * self._table.cells.shape[1] * self._many
        return np.concatenate((pages, np.zeros(most - len(pages), np.int64))) if is_fixed else pages

    def last_page_len(self) -> Array:
        """int64 ``[B]``: rows in use of each row's last page; 0 for padded rows."""
        return np.where(self._lengths > 0, (self._lengths - 1) % self._size + 1, 0)
