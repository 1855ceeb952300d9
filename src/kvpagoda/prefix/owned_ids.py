"""Flags of the block ids that the tree owns, for every group."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.id_pool import grown
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, NotOwned


class OwnedIds:
    """One flag for each id of each group: ``flags`` bool ``[num_groups, more than the largest id]``.

    Arguments are int32 ``[num_groups, n]``; 0 is no id and is ignored.
    """

    def __init__(self, num_groups: int) -> None:
        self.flags = np.zeros((num_groups, 64), np.bool_)

    def prove_new(self, ids: Ids) -> None:
        """Prove that none of ``ids`` is owned or named twice. O(n log n).

        Raises NotOwned for an id that is, and BadInput for a negative id.
        """
        if not ids.size:
            return
        top = int(ids.view(np.uint32).max())
        if top >= 2**31:
            raise BadInput(f"block ids are at least 1, 0 for none, got {ids.min()}")
        self.flags = grown(self.flags, top + 1)
        for group, row in enumerate(ids):
            owned = self.flags[group, row]
            if owned.any():
                raise NotOwned(f"the tree owns id {row[owned][0]} of group {group} already; a block is in one place")
            if len(row) > 1:
                named = np.sort(row)
                again = named[1:][(named[1:] == named[:-1]) & (named[1:] > 0)]
                if len(again):
                    raise NotOwned(f"id {again[0]} is named twice in group {group}; a block is in one place")

    def add(self, ids: Ids) -> None:
        """Mark ``ids``, which were proven new, as owned."""
        self._set(ids, True)

    def remove(self, ids: Ids) -> None:
        """Mark ``ids`` as not owned."""
        self._set(ids, False)

    def _set(self, ids: Ids, owned: bool) -> None:
        for flags, row in zip(self.flags, ids):
            flags[row] = owned
            flags[0] = False
