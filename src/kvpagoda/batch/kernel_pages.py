"""Block tables in kernel pages, if a block is several of them: page ``p`` of block ``b`` has the id ``b * pages + p``.

Slots are the same numbers in both units: ``block * block_size + row`` equals ``page * page_size + row of the page``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.batch.table_snapshot import Array


class PagedCells:
    """A block table ``cells``, int32 ``[rows, columns]``, read as a table ``[rows, columns * many]`` of kernel pages.

    ``many``: kernel pages per block. Only the cells that are indexed are computed.

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
