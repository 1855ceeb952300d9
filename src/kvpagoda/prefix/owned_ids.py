"""Which block ids the tree owns, in every group."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.prefix.id_pool import grown


class OwnedIds:
    """One flag for each id of each group, ``flags`` bool ``[num_groups, more than the largest id]``.

    Arguments are int32 ``[num_groups, n]``; 0 is no id and is passed over.
    """

    def __init__(self, num_groups: int) -> None:
        self.flags = np.zeros((num_groups, 64), np.bool_)

    def prove_new(self, ids: Ids) -> None:
        """None of ``ids`` is owned or named twice. Raises NotOwned, and BadInput for a negative one. O(n log n)."""
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
        """These, proven new, are owned now."""
        self._set(ids, True)

    def remove(self, ids: Ids) -> None:
        """These are owned no more."""
        self._set(ids, False)

    def remap(self, group: int, names: Ids) -> None:
        """What was owned as ``id`` is now owned as ``names[id]``, no two of them the same."""
        ids = names[np.flatnonzero(self.flags[group])]
        self.flags = grown(self.flags, int(ids.max(initial=0)) + 1)
        self.flags[group] = False
        self.flags[group, ids] = True

    def _set(self, ids: Ids, owned: bool) -> None:
        for flags, row in zip(self.flags, ids):
            flags[row] = owned
            flags[0] = False
