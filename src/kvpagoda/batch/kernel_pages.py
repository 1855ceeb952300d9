"""Block tables in the units of kernels: where a block is several kernel pages, page ``p`` of block ``b`` is ``b * pages + p``.

Slots stay what they are: block * block_size + row is also page * page size + row of the page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.batch.table_snapshot import Array
from kvpagoda.blocks.block_table import BlockTable


class PagedTable:
    """One group's ``table`` as a step shows it, with ``many`` cells for each of a block.

    >>> table = BlockTable(num_slots=2, num_columns=2)
    >>> table.append(0, 0, np.array([7, 3], np.int32))
    >>> PagedTable(table, 2).cells[0, 1:4].tolist()
    [15, 6, 7]
    """

    def __init__(self, table: BlockTable, many: int) -> None:
        self.version, self.cells = table.version, PagedCells(table.cells, many)


class PagedCells:
    """``cells`` int32 ``[rows, columns]`` of blocks, read as ``[rows, columns * many]`` of kernel pages; nothing is copied but
    what is asked for."""

    def __init__(self, cells: Array, many: int) -> None:
        self._cells, self._many, self.shape = cells, many, (cells.shape[0], cells.shape[1] * many)

    def __getitem__(self, at: tuple[Any, Any]) -> Array:
        """int32: ``[row, first:end]``, or ``[rows, columns]`` with an array of both."""
        rows, columns = at
        columns = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
        blocks = self._cells[rows, columns // self._many]
        pages: Array = blocks * self._many + (columns % self._many).astype(blocks.dtype)
        return pages
