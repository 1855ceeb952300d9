"""Which block of a request holds which tokens: one row of block ids for every request slot."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.ids import Ids


class BlockTable:
    """``cells``: int32 ``[num_slots + 1, num_columns]`` block ids; ``empty`` marks a cell without a block. The last row is
    that of padded rows and stays empty.

    ``version`` int64 ``[num_slots + 1]``: how often cells of a row came to mean something else; that a row got longer, or lost
    cells at its beginning, does not count.

    >>> table = BlockTable(num_slots=2, num_columns=4)
    >>> table.append(0, 0, np.array([7, 9], np.int32))
    >>> table.cells[0].tolist()
    [7, 9, 0, 0]
    """

    def __init__(self, num_slots: int, num_columns: int, empty: int = 0) -> None:
        self.empty = empty
        self.cells: Ids = np.full((num_slots + 1, num_columns), empty, np.int32)
        self.version = np.zeros(num_slots + 1, np.int64)

    def append(self, slot: int, column: int, ids: Ids) -> None:
        """Write ``ids`` into the row of ``slot`` from ``column`` on, where it ended."""
        self.cells[slot, column : column + len(ids)] = ids

    def put(self, slot: int, column: int, ids: Ids) -> None:
        """Write ``ids`` into the row of ``slot`` from ``column`` on, in place of others."""
        self.append(slot, column, ids)
        self.version[slot] += 1

    def drop(self, slot: int, first: int, end: int) -> None:
        """Empty the cells ``first .. end - 1`` of ``slot``."""
        self.cells[slot, first:end] = self.empty
        self.version[slot] += 1

    def clear(self) -> None:
        """Empty every cell."""
        self.cells[:] = self.empty
        self.version += 1

    def remap(self, slot: int, end: int, new_ids: Ids) -> None:
        """Let the cells up to ``end`` of ``slot`` name ``new_ids[cell]`` from now on. O(end)."""
        row = self.cells[slot, :end]
        row[:] = new_ids[row]
        self.version[slot] += 1
