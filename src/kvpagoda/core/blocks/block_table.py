"""The block table: one row of block ids for every request slot."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import Ids
from kvpagoda.errors import Exhausted


class BlockTable:
    """Block table of the requests of one group: which block holds which tokens of a request.

    ``cells``: int32 ``[num_slots + 1, num_columns]`` block ids. The last row is for padded rows of a batch and stays
    empty.

    ``version``: int64 ``[num_slots + 1]``. It increases when cells of a row change their meaning; appending to a row,
    or removing cells at its beginning, does not count.

    Args:
        num_slots: requests.
        num_columns: blocks of a request.
        empty: marks a cell without a block.

    Examples:
        >>> table = BlockTable(num_slots=2, num_columns=4)
        >>> table.append(0, 0, np.array([7, 9], np.int32))
        >>> table.cells[0].tolist()
        [7, 9, 0, 0]
    """

    def __init__(self, num_slots: int, num_columns: int, empty: int = 0) -> None:
        self.empty = empty
        shape = num_slots + 1, num_columns
        try:  # zeros take no memory until they are written
            self.cells: Ids = np.full(shape, empty, np.int32) if empty else np.zeros(shape, np.int32)
        except MemoryError:
            text = f"no memory for a block table of {num_slots:,} rows and {num_columns:,} columns"
            raise Exhausted.with_hint(
                text, "lower Limits.max_context or max_requests", needed=4 * math.prod(shape)
            ) from None
        self.version = np.zeros(num_slots + 1, np.int64)

    def append(self, slot: int, column: int, ids: Ids) -> None:
        """Write ids where a row ended; the version stays.

        Args:
            slot: the row.
            column: where it ended.
            ids: int32 ``[n]``.
        """
        self.cells[slot, column : column + len(ids)] = ids

    def put(self, slot: int, column: int, ids: Ids) -> None:
        """Replace cells of a row. The version increases.

        Args:
            slot: the row.
            column: the first cell.
            ids: int32 ``[n]``.
        """
        self.append(slot, column, ids)
        self.version[slot] += 1

    def drop(self, slot: int, first: int, end: int) -> None:
        """Empty cells of a row. The version increases.

        Args:
            slot: the row.
            first: the first cell.
            end: the cell behind the last.
        """
        self.cells[slot, first:end] = self.empty
        self.version[slot] += 1

    def clear(self) -> None:
        """Empty every cell."""
        self.cells[:] = self.empty
        self.version += 1

    def replace(self, slot: int, columns: npt.NDArray[np.intp], ids: Ids) -> None:
        """Replace some cells of a row. The version increases. O(n).

        Args:
            slot: the row.
            columns: intp ``[n]``.
            ids: int32 ``[n]``.
        """
        self.cells[slot, columns] = ids
        self.version[slot] += 1
