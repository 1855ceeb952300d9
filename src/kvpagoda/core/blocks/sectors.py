"""One memory for all groups: which group owns which sector of it. numpy only.

    arena   | padding | full | full | window | free | full | state | ...      sectors, all of one size

A group carves its sectors into its own blocks. A sector changes its owner in two ways. Each is first decided, as a
value, and later committed:

    grant     a free sector goes to a group; all of its blocks are free
    vacate    a group frees sectors; blocks in use there move to free places in its other sectors

Only block tables and free lists hold places of blocks, all else holds their names. So any block may move between steps,
and the order of allocations does not fragment the memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup, BlockPlaces
from kvpagoda.errors import CheckFailed
from kvpagoda.free_list import FreeStack

NOBODY = -1


class Grant(NamedTuple):
    """Decision to give the free ``sectors`` to ``group``; ``ids`` are the blocks that they make. int32 each."""

    group: BlockGroup
    sectors: Ids
    ids: Ids


class Vacating(NamedTuple):
    """Decision that ``group`` frees ``sectors``. int32 each.

    ``sources``: the places there that are in use, ascending; their blocks move to ``targets``, which are free. ``free``:
    the places that are free in its other sectors after that.
    """

    group: BlockGroup
    sectors: Ids
    sources: BlockPlaces
    targets: BlockPlaces
    free: BlockPlaces


class Sectors:
    """The sectors ``1 .. num_sectors - 1``. Sector 0 absorbs the writes of padded rows, in every group.

    ``owner``: int64 ``[num_sectors]``, the index of the group that owns each sector, or ``NOBODY``.
    """

    def __init__(self, num_sectors: int, groups: Many[BlockGroup]) -> None:
        self._groups = tuple(groups)
        self.owner = np.full(num_sectors, NOBODY, np.int64)
        self.num_owned = [0] * len(self._groups)  #: sectors, by group index
        self._free = FreeStack(num_sectors - 1, first=1, what="sectors")
        self.clear()

    @property
    def num_free(self) -> int:
        """Sectors without an owner."""
        return self._free.num_free

    def absent_ids(self, group: BlockGroup) -> Ids:
        """Return the block ids of ``group`` whose sectors it does not own now, ascending."""
        return _ids(group, np.flatnonzero(self.owner[1:] != group.index) + 1)

    # -- decisions: nothing changes ----------------------------------------------------------------------------------

    def grant(self, group: BlockGroup, count: int) -> Grant:
        """Decide to give up to ``count`` free sectors to ``group``. At least one sector must be free."""
        sectors = self._free.peek(min(count, self._free.num_free))
        return Grant(group, sectors, _ids(group, sectors))

    def vacate(self, group: BlockGroup, count: int, fixed: Ids, *, least: int) -> Vacating | None:
        """Decide which sectors ``group`` frees, at most ``count``; None if there is no such sector.

        Empty sectors are chosen if there are at least ``least`` of them. Otherwise the ``least`` emptiest sectors are
        chosen, and the blocks in use there move; the caller has made sure that the other sectors have enough free
        blocks for them. Sectors with any of the ``fixed`` blocks, which may not move, are not chosen.
        O(sectors + f log f) for f free blocks.
        """
        per, ids = group.plan.per_sector, group.free.free_ids()
        sector_of = ids // per
        begins = np.flatnonzero(np.diff(sector_of, prepend=-1))
        able, num_free = sector_of[begins], np.diff(begins, append=len(ids))
        if len(fixed):
            is_able = ~np.isin(able, fixed // per)
            able, num_free = able[is_able], num_free[is_able]
        chosen = able[num_free == per][:count]
        if len(chosen) < least:
            chosen = able[np.argsort(-num_free, kind="stable")[:least]]
            if len(fixed) and len(chosen) < least:
                others = np.setdiff1d(np.flatnonzero(self.owner == group.index), np.concatenate((able, fixed // per)))
                chosen = np.concatenate((chosen, others[: least - len(chosen)].astype(np.int32)))
        if not len(chosen):
            return None
        sectors = np.sort(chosen)
        is_chosen = np.zeros(len(self.owner), np.bool_)
        is_chosen[sectors] = True
        inside, all_ids = is_chosen[sector_of], _ids(group, sectors)
        is_used = np.ones(len(all_ids), np.bool_)
        is_used[np.searchsorted(all_ids, ids[inside])] = False
        sources = all_ids[is_used]
        left = ids[~inside][::-1]  # the lowest is handed out first
        kept = len(left) - len(sources)
        targets = BlockPlaces(left[kept:][::-1].copy())
        return Vacating(group, sectors, BlockPlaces(sources), targets, BlockPlaces(left[:kept]))

    # -- changes: they cannot fail -----------------------------------------------------------------------------------

    def commit_grant(self, grant: Grant) -> None:
        """Give the sectors of ``grant`` to its group. O(blocks)."""
        count = len(grant.sectors)
        self._free.take(count)
        self.owner[grant.sectors] = grant.group.index
        self.num_owned[grant.group.index] += count
        grant.group.free.give(grant.ids)

    def commit_vacating(self, vacating: Vacating) -> None:
        """Free the sectors of ``vacating``. The caller moves the blocks at its ``sources``."""
        group, sectors = vacating.group, vacating.sectors
        group.free.keep_only(vacating.free)
        self.owner[sectors] = NOBODY
        self.num_owned[group.index] -= len(sectors)
        self._free.give(sectors)

    def clear(self) -> None:
        """Free every sector; no group has a block then."""
        self.owner[:] = NOBODY
        self.num_owned[:] = [0] * len(self._groups)
        self._free.clear()
        for group in self._groups:
            group.free.keep_only(np.empty(0, np.int32))

    def check(self) -> None:
        """Prove that every sector is free or owned by one group. Raises CheckFailed."""
        free = np.flatnonzero(self.owner[1:] == NOBODY) + 1
        self._free.check()
        listed = self._free.free_ids()
        if listed.tolist() != free.tolist():
            raise CheckFailed(f"sectors: {listed[:16].tolist()} are listed as free, {free[:16].tolist()} have no owner")
        counts = [int((self.owner[1:] == group.index).sum()) for group in self._groups]
        if counts != self.num_owned:
            raise CheckFailed(f"sectors: groups have {counts}, {self.num_owned} are counted")


def _ids(group: BlockGroup, sectors: np.ndarray) -> Ids:
    """Return the block ids of ``group`` in ``sectors``, int32."""
    per = group.plan.per_sector
    ids: Ids = (sectors[:, None] * per + np.arange(per, dtype=sectors.dtype)).astype(np.int32, copy=False).ravel()
    return ids
