"""Which block of a request holds which tokens: one row of block ids for every request slot."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.ids import Ids


class BlockTable:
    """``cells``: int32 ``[num_slots + 1, num_columns]`` block ids; ``empty`` marks a cell without a block, and the last
    row, the dummy, has no others. ``changed``: the slots whose row was written since somebody last cleared it.
    ``version`` int64 ``[num_slots + 1]``: how often what a row held came to mean something else; that it goes on at its
    end, or is let go at its beginning, does not count.
    """

    def __init__(self, num_slots: int, num_columns: int, empty: int = 0) -> None:
        self.empty = empty
        self.cells: Ids = np.full((num_slots + 1, num_columns), empty, np.int32)
        self.changed: set[int] = set()
        self.version = np.zeros(num_slots + 1, np.int64)

    def put(self, slot: int, column: int, ids: Ids) -> None:
        """Write ``ids`` into the row of ``slot`` from ``column`` on, in place of others."""
        self.append(slot, column, ids)
        self.version[slot] += 1

    def append(self, slot: int, column: int, ids: Ids) -> None:
        """Write ``ids`` into the row of ``slot`` from ``column`` on, where it ended."""
        self.cells[slot, column : column + len(ids)] = ids
        self.changed.add(slot)

    def take(self, slot: int, first: int, end: int) -> Ids:
        """Empty the cells ``first .. end - 1`` of ``slot`` and return what they held."""
        self.version[slot] += 1
        return self.take_first(slot, first, end)

    def take_first(self, slot: int, first: int, end: int) -> Ids:
        """Empty the cells ``first .. end - 1``, where the row of ``slot`` began, and return what they held."""
        ids: Ids = self.cells[slot, first:end].copy()
        self.cells[slot, first:end] = self.empty
        self.changed.add(slot)
        return ids

    def rename(self, names: Ids, ends: list[int]) -> None:
        """Let every cell name ``names[cell]`` from now on; row ``slot`` has cells up to ``ends[slot]``. O(these cells)."""
        for slot, end in enumerate(ends):
            if end:
                row = self.cells[slot, :end]
                renamed = names[row]
                if not np.array_equal(renamed, row):
                    self.put(slot, 0, renamed)
