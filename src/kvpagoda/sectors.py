"""One memory for all groups: who has which sector of the arena, and how a sector changes hands. numpy only.

    arena   | padding | full | full | window | free | full | state | ...      sectors, all of one size

A group carves its sectors into its own blocks. When a group needs more than it has, sectors that nobody has go first, then
those that another group has empty, then what this group keeps for reuse, then what others do. Blocks that are left in a
sector which changes hands move to free places in the group's other sectors: a block id lives in block tables, in the tree
and in checkpoints and nowhere else, so any block may move between steps. So no place is lost to having been taken in the
wrong order, and what is left over in one group counts for all.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial
from typing import Protocol

import numpy as np

from kvpagoda.blocks import FreeStack
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.units import ceil_div

NOBODY = -1
_MUCH = 16  # a sixteenth of a group's sectors idle: worth moving what lies in them


class Mover(Protocol):
    """Who moves the bytes and knows where ids are kept."""

    def move_blocks(self, ledger: BlockGroup, sources: Ids, targets: Ids) -> None: ...

    def sectors_given(self, ledger: BlockGroup, sectors: Ids) -> None: ...

    def fixed_ids(self, ledger: BlockGroup) -> Ids: ...


class Sectors:
    """The sectors ``1 .. num_sectors - 1``; the first one takes what padded rows write, in every group.

    Every promise can be kept as long as ``slack() >= 0``: the sectors that are free or could be freed cover what groups
    have promised beyond their own blocks.
    """

    def __init__(self, num_sectors: int, ledgers: Many[BlockGroup], mover: Mover) -> None:
        self._ledgers, self._mover = tuple(ledgers), mover
        self.owner = np.full(num_sectors, NOBODY, np.int64)
        self._num_owned = [0] * len(self._ledgers)
        self._free = FreeStack(num_sectors - 1, first=1, what="sectors")
        self._fruitless = [0] * len(self._ledgers)  # idle sectors of a group when it last had none to give
        for ledger in self._ledgers:
            ledger.free.acquire(ledger.free.num_free)
            ledger.reach, ledger.fetch = partial(self._reach, ledger), partial(self._fetch, ledger)

    @property
    def num_free(self) -> int:
        """Sectors that nobody has."""
        return self._free.num_free

    def slack(self) -> int:
        """Sectors that no promise needs: free ones, and what groups could give up, less what they lack."""
        slack = self._free.num_free
        for ledger in self._ledgers:
            slack += ledger.surplus() // ledger.plan.per_sector
        return slack

    def num_owned(self, ledger: BlockGroup) -> int:
        """Sectors that the group has."""
        return self._num_owned[self._ledgers.index(ledger)]

    def absent_ids(self, ledger: BlockGroup) -> Ids:
        """The block ids of the group whose memory is not the group's now, ascending."""
        others = np.flatnonzero(self.owner[1:] != self._ledgers.index(ledger)) + 1
        return self._ids(ledger, others)

    def check(self) -> None:
        """Prove that every sector is free or some group's, and that all promises can be kept. Raises CheckFailed."""
        free = np.flatnonzero(self.owner[1:] == NOBODY) + 1
        self._free.check()
        listed = self._free.free_ids()
        if listed.tolist() != free.tolist():
            raise CheckFailed(f"sectors: {listed[:16].tolist()} are listed as free, {free[:16].tolist()} are nobody's")
        counts = [int((self.owner[1:] == number).sum()) for number in range(len(self._ledgers))]
        if counts != self._num_owned:
            raise CheckFailed(f"sectors: groups have {counts}, {self._num_owned} are counted")
        if self.slack() < 0:
            raise CheckFailed(f"sectors: {-self.slack()} are promised that cannot be had")

    def _left_over(self, ledger: BlockGroup) -> int:
        """Whole sectors beyond what is claimed; below 0: sectors that claims need from others."""
        return ledger.surplus() // ledger.plan.per_sector

    def _reach(self, ledger: BlockGroup, surplus: int) -> int:
        per = ledger.plan.per_sector
        return surplus % per + per * self.slack()

    def _fetch(self, ledger: BlockGroup, n: int) -> None:
        """See to it that ``n`` blocks of ``ledger`` are free, if that can be."""
        while (short := n - ledger.free.num_free) > 0:
            wanted = ceil_div(short, ledger.plan.per_sector)
            if self._free.num_free:
                self._give(ledger, wanted)
                continue
            others = [other for other in self._ledgers if other is not ledger]
            if self._take_idle(max(others, key=self._idle), wanted):
                continue
            if ledger.spare():
                ledger.reclaim(min(short, ledger.spare()))
                continue
            richest = max(others, key=self._left_over)
            count = min(wanted, self._left_over(richest))
            if count <= 0:
                return
            richest.reclaim(max(0, count * richest.plan.per_sector - richest.free.num_free))
            if not self._vacate(richest, count):
                return

    def _idle(self, ledger: BlockGroup) -> int:
        """Whole sectors' worth of blocks that are free and not claimed."""
        return (ledger.free.num_free - ledger.claimed) // ledger.plan.per_sector

    def _take_idle(self, ledger: BlockGroup, wanted: int) -> bool:
        """Take sectors away that ``ledger`` has idle: empty ones, or if much is idle any. False if there are none."""
        number, idle = self._ledgers.index(ledger), max(0, self._idle(ledger))
        self._fruitless[number] = min(self._fruitless[number], idle)
        if idle <= self._fruitless[number]:
            return False
        if self._vacate(ledger, min(wanted, idle), moving=idle * _MUCH > self._num_owned[number]):
            return True
        self._fruitless[number] = idle
        return False

    def _give(self, ledger: BlockGroup, count: int) -> None:
        given = self._free.acquire(min(count, self._free.num_free))
        self.owner[given] = self._ledgers.index(ledger)
        self._num_owned[self._ledgers.index(ledger)] += len(given)
        ledger.free.give(self._ids(ledger, given))
        self._mover.sectors_given(ledger, given)

    def _vacate(self, ledger: BlockGroup, count: int, moving: bool = True) -> bool:
        """Take the ``count`` emptiest sectors of ``ledger`` away, which has as many free blocks as they hold; not ``moving``:
        those that are empty. False if there is none, or none may be emptied now. O(free blocks and sectors)."""
        per, free = ledger.plan.per_sector, ledger.free
        ids = free.free_ids()
        num_free = np.bincount(ids // per, minlength=len(self.owner))
        num_free[self.owner != self._ledgers.index(ledger)] = -1
        num_free[self._mover.fixed_ids(ledger) // per] = -1
        chosen = np.flatnonzero(num_free == per)[:count]
        if moving and len(chosen) < count:
            chosen = np.argsort(-num_free, kind="stable")[:count]
            chosen = np.sort(chosen[num_free[chosen] >= 0])
        if not len(chosen):
            return False
        leaves = np.zeros(len(self.owner), np.bool_)
        leaves[chosen] = True
        inside = leaves[ids // per]
        free.acquire(free.num_free)
        free.give(ids[~inside][::-1])
        if np.count_nonzero(inside) < len(chosen) * per:
            left = np.setdiff1d(self._ids(ledger, chosen), ids[inside], assume_unique=True)
            self._mover.move_blocks(ledger, left, free.acquire(len(left)))
        self.owner[chosen] = NOBODY
        self._num_owned[self._ledgers.index(ledger)] -= len(chosen)
        self._free.give(chosen[::-1].astype(np.int32))
        return True

    @staticmethod
    def _ids(ledger: BlockGroup, sectors: np.ndarray) -> Ids:
        per = ledger.plan.per_sector
        ids: Ids = (sectors[:, None] * per + np.arange(per, dtype=sectors.dtype)).astype(np.int32, copy=False).ravel()
        return ids
