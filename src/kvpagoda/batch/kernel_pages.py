"""Block tables in the units of kernels: where a block is several kernel pages, page ``p`` of block ``b`` is ``b * pages + p``.

Slots stay what they are: block * block_size + row is also page * page size + row of the page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.batch.table_snapshot import Array


class PagedCells:
    """``cells`` int32 ``[rows, columns]`` of blocks, read as ``[rows, columns * many]`` of kernel pages; nothing is copied but
    what is asked for.

    >>> PagedCells(np.array([[7, 3]], np.int32), 2)[0, 1:4].tolist()
    [15, 6, 7]
    """

    def __init__(self, cells: Array, many: int) -> None:
        self._cells, self._many, self.shape = cells, many, (cells.shape[0], cells.shape[1] * many)

    def __getitem__(self, at: tuple[Any, Any]) -> Array:
        """int32: ``[row, first:end]``, or ``[rows, columns]`` with an array of both."""
        rows, columns = at
        columns = np.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
        blocks = self._cells[rows, columns // self._many]
        pages: Array = blocks * self._many + (columns % self._many).astype(blocks.dtype)
        return pages
