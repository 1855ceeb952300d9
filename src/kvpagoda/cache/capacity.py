"""Room for requests: who must give up what, and the one place where that is done.

    decide (groups, sectors, prefix cache say what could go)  ──►  store below  ──►  copy  ──►  remap, free, hand over

Nobody is called back: what a decision entails comes back as a value, is applied here, and the question is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from math import inf
from operator import gt
from typing import Any

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.blocks.sectors import Grant, Sectors, Vacating
from kvpagoda.cache.checkpoints import Evicted
from kvpagoda.cache.event_log import EventLog
from kvpagoda.cache.guard import Guard
from kvpagoda.cache.observing import observable
from kvpagoda.cache.offload import Offloader
from kvpagoda.cache.prefix_cache import AT_ONCE, PrefixCache, num_ahead
from kvpagoda.cache.request import Request
from kvpagoda.errors import CheckFailed, Exhausted, OutOfBlocks
from kvpagoda.memory.no_memory import NoMemory
from kvpagoda.units import ceil_div, format_bytes

_MUCH = 16  # a sixteenth of a group's sectors idle: worth moving what lies in them
_PORTION, _MANY = 32, 64  # sectors that change hands at once where there is need: so many, at most one of so many, or a
# thousandth of all where that is more
_MOVED = 4  # of a portion: so much at least where blocks must move, since a move costs a look at every block
_SHARE = 32  # of what a group could have at most, that may stay its own for steps to come


class Capacity:
    """What requests can still be given, and how it is made free.

    Every reservation can be kept as long as ``slack`` is not below 0: the sectors that are free or could be freed cover
    what groups have outstanding beyond their own blocks. ``running``: slot -> request. ``num_moves``: how often blocks were
    moved: index arrays from before name the old places.
    """

    def __init__(
        self,
        groups: tuple[BlockGroup, ...],
        sectors: Sectors | None,
        prefix: PrefixCache,
        offloader: Offloader | None,
        memory: NoMemory,
        guard: Guard,
        running: dict[int, Request],
        events: EventLog | None = None,
    ) -> None:
        self._groups, self._sectors, self._prefix = groups, sectors, prefix
        self._offloader, self._memory, self._guard, self._running = offloader, memory, guard, running
        self._events, self._is_told = events, offloader is not None or memory.is_poisoning
        self._none = [0] * len(groups)
        many = 0 if sectors is None else len(sectors.owner)
        self._portion = max(min(_PORTION, many // _MANY), many // AT_ONCE)
        self._for_steps = [
            max(min(group.plan.most_blocks or 0, group.plan.num_blocks // _SHARE), num_ahead(group)) for group in groups
        ]
        self._fruitless = [0] * len(groups)  # idle sectors of a group when it last had none to give
        self.num_moves = 0

    # -- what there is -----------------------------------------------------------------------------------------------

    def surplus(self, group: BlockGroup) -> int:
        """Blocks of the group's own that are free or could be, beyond what is outstanding; below 0 where others' memory must
        serve."""
        return group.free.num_free + self._prefix.num_spare(group) - group.outstanding

    def slack(self, more: Many[int]) -> int:
        """Sectors that no reservation needs if ``more[i]`` further blocks of group i are reserved: free ones, and what groups
        could give up, less what they lack."""
        assert self._sectors is not None
        left = [(self.surplus(group) - n) // group.plan.per_sector for group, n in zip(self._groups, more)]
        return self._sectors.num_free + sum(left)

    def available(self, group: BlockGroup) -> int:
        """Blocks of ``group`` that can be had and that no request has reserved."""
        surplus = self.surplus(group)
        if self._sectors is None:
            return surplus
        per = group.plan.per_sector
        return surplus % per + per * self.slack(self._none)

    def fits(self, more: Many[int]) -> bool:
        """Whether every reservation can be kept if ``more[i]`` further blocks of group i are reserved."""
        if self._sectors is None:
            return not any(map(gt, more, map(self.surplus, self._groups)))
        return self.slack(more) >= 0

    # -- making room -------------------------------------------------------------------------------------------------

    def ensure_free(self, needs: Many[int], more: Many[int] | None = None) -> None:
        """See to it that ``needs[i]`` blocks of group i are free, all at once; they come out of what is reserved, or of
        ``more`` that is about to be. Raises OutOfBlocks if that cannot be, and whatever a copy raises; what was evicted until
        then stays so, and nothing else changed.

        Blocks may move: ids that were read before, and are in no table, may have changed their meaning.
        """
        more = self._none if more is None else more
        while True:
            for group, need in zip(self._groups, needs):
                if need > group.free.num_free:
                    break
            else:
                if self._memory.is_poisoning:
                    self._memory.poison_freed()  # before anybody is given these blocks
                return
            short = need - group.free.num_free
            if not (self._evict(group, short) if self._sectors is None else self._make_room(group, short, needs, more)):
                free, name = group.free.num_free, group.plan.name
                text = f"OOM: need {need} {group.free.what}, {free} free of {group.plan.num_blocks}"
                raise OutOfBlocks.with_hint(text, "close a sequence", needed=need, available=free, group=name)

    def _make_room(self, group: BlockGroup, short: int, needs: Many[int], more: Many[int]) -> bool:
        """Something for ``group``, which is ``short`` of blocks: free sectors first, then those that another group has empty,
        then what was used longest ago of all that is kept for reuse, in whichever group. False if there is nothing."""
        sectors, wanted = self._sectors, ceil_div(short, group.plan.per_sector)
        assert sectors is not None
        if not sectors.num_free and not self._take_idle(group, wanted, more):
            if self._prefix.num_cold(group):
                return self._evict(group, short)
            for one, until in self._by_age(group, more):
                if one is group:
                    return self._evict(group, short)
                if self._take_kept(one, wanted, needs[one.index], more, until):
                    wanted = sectors.num_free
                    break
            else:
                return False
        if wanted:
            self._grant(sectors.grant(group, wanted))
        return True

    def _by_age(self, group: BlockGroup, more: Many[int]) -> list[tuple[BlockGroup, float]]:
        """The groups that could give something to ``group``, the one whose next block was used longest ago first, each with
        the age of the one after it: up to there it is still the first. Where a policy does not go by use, ``group`` itself,
        and then those that have most to spare."""
        able, is_known = list[tuple[int, int, BlockGroup]](), True
        for one in self._groups:
            spare = (self.surplus(one) - more[one.index]) // one.plan.per_sector
            if self._prefix.num_evictable(one) if one is group else spare > 0:
                age = self._oldest(one)
                is_known &= age is not None or not self._prefix.num_evictable(one)
                able.append((age or 0, 0 if one is group else -spare, one))
        if len(able) > 1:
            able.sort(key=lambda a: (a[0], a[2] is not group) if is_known else (a[2] is not group, a[1]))
        ends = [*(age for age, _, _ in able[1:]), inf] if is_known else [inf] * len(able)
        return [(one, end) for (_, _, one), end in zip(able, ends)]

    def _oldest(self, group: BlockGroup) -> int | None:
        """When what goes next of ``group`` was used. What slid out of its windows counts as older than anything, beyond what
        its own requests have reserved and a step takes: they would soon take the memory back."""
        own = group.outstanding + self._for_steps[group.index] - group.free.num_free
        return self._guard.change(self._prefix.idle_since, group, max(0, own))

    def _take_idle(self, taker: BlockGroup, wanted: int, more: Many[int]) -> bool:
        """Take sectors away from the group other than ``taker`` that has most of them idle: whole sectors' worth of blocks
        that are free and not outstanding, beyond the portion that it may have taken ahead, and what its next step takes. Empty
        ones, or if much is idle any. False if there are none."""
        group, most, sectors = taker, -1, self._sectors
        assert sectors is not None
        for one in self._groups:
            idle = one.free.num_free - one.outstanding - more[one.index] - self._for_steps[one.index]
            idle = idle // one.plan.per_sector - self._portion
            if one is not taker and (group is taker or idle > most):
                group, most = one, idle
        fruitless = self._fruitless[group.index] = max(0, min(self._fruitless[group.index], most))
        if most <= fruitless:
            return False
        count, is_much = min(wanted, most), most * _MUCH > sectors.num_owned[group.index]
        if self._vacate(sectors.vacate(group, count, self._fixed_ids(group), least=count if is_much else 0)):
            return True
        self._fruitless[group.index] = most
        return False

    def _take_kept(self, group: BlockGroup, wanted: int, need: int, more: Many[int], until: float) -> bool:
        """Take sectors away from ``group``, which could give up one at least, after evicting what it keeps there, as long as
        that was used before ``until``: ``wanted``, or a small part of all, since it costs a look at every block to move any.
        ``need``: blocks that stay free in it. False if none may be emptied now and nothing was evicted."""
        assert self._sectors is not None
        per, has_evicted = group.plan.per_sector, False
        count = min(max(wanted, self._portion), (self.surplus(group) - more[group.index]) // per)
        while (lacking := count * per + need - group.free.num_free) > 0:
            if has_evicted and (self._oldest(group) or 0) > until:
                count = (group.free.num_free - need) // per
                break
            if not self._evict(group, lacking):
                return has_evicted
            has_evicted = True
        least, fixed = min(max(wanted, self._portion // _MOVED), count), self._fixed_ids(group)
        is_vacated = least > 0 and self._vacate(self._sectors.vacate(group, count, fixed, least=least))
        return is_vacated or has_evicted

    def _fixed_ids(self, group: BlockGroup) -> Ids:
        """Blocks of ``group`` that may not move now: those of fenced sequences."""
        fenced = [slot for slot, request in self._running.items() if request.num_fences]
        return np.concatenate([np.empty(0, np.int32), *(group.held_ids(slot) for slot in fenced)])

    # -- applying ----------------------------------------------------------------------------------------------------

    def _evict(self, group: BlockGroup, n: int) -> bool:
        """Let the prefix cache give up ``n`` blocks of ``group``, at most; False if it has none to give."""
        if not self._prefix.num_evictable(group):
            return False
        if self._memory.is_copying:
            self._memory.finish_copies(group.index)
        return self.forget(self._prefix.evict, group, n, is_evicted=True)

    @observable
    def forget(self, decide: Callable[..., Evicted], *args: Any, is_evicted: bool = False) -> bool:
        """Free what ``decide(*args)``, a method of the prefix cache, gives up; whether it is anything. ``is_evicted``: to make
        room."""
        guard = self._guard
        guard.is_torn = True
        try:
            evicted = decide(*args)
        except Exception:
            guard.is_torn = False
            raise
        self._free(evicted, is_evicted=is_evicted)
        return bool(evicted.blocks or evicted.checkpoints)

    def _free(self, evicted: Evicted, *, is_evicted: bool) -> None:
        """Free what the prefix cache gave up; first store it below, where it goes to make room. The cache is torn until the
        end of this."""
        offloader = self._offloader
        try:
            if is_evicted and offloader is not None:
                for group, ids in evicted.blocks:
                    if group is self._prefix.full:
                        offloader.evicted(ids)
                for name, kept in evicted.checkpoints:
                    offloader.store_checkpoint(name, self._prefix.kept.copies(kept), "evict")
        finally:
            if self._events is not None:
                self._events.evicted(evicted)
            for group, ids in evicted.blocks:
                if len(ids):
                    self.release(group, ids)
            if offloader is not None:
                for name, _ in evicted.checkpoints:
                    offloader.checkpoint_dropped(name)
            self._guard.is_torn = False

    def tidy(self) -> None:
        """Poison what was freed, where that is asked for. What fails is tried again before a block is handed out."""
        if self._memory.is_poisoning:
            with suppress(MemoryError, RuntimeError):
                self._memory.poison_freed()

    def release(self, group: BlockGroup, ids: Ids) -> None:
        """Nobody holds blocks ``ids`` any more: they are free, nothing below the device names them, and their bytes mean
        nothing."""
        group.release(ids)
        if self._is_told:
            self.freed(group, ids)

    def freed(self, group: BlockGroup, ids: Ids) -> None:
        """Tell who must know that blocks ``ids`` were freed."""
        if self._offloader is not None and group is self._prefix.full:
            self._offloader.freed(ids)
        self._memory.freed(group.index, ids)

    def _grant(self, grant: Grant) -> None:
        """What another group left in a sector could read as NaN in this one: it is cleared first."""
        self._memory.clear_sectors(grant.sectors)
        self._guard.is_torn = True
        assert self._sectors is not None
        self._sectors.commit_grant(grant)
        self._guard.is_torn = False

    def _vacate(self, vacating: Vacating | None) -> bool:
        """Move what lies in the sectors, and tell all who name it; False if there is none to vacate."""
        if vacating is None:
            return False
        assert self._sectors is not None
        group, sources, targets = vacating.group, vacating.sources, vacating.targets
        is_moving = len(sources) > 0
        self._memory.poison_freed()  # what was freed here may soon be others' memory
        if is_moving:
            new_ids = np.arange(group.plan.num_rows, dtype=np.int32)
            new_ids[sources] = targets
            slots = group.slots_naming(sources)
            self._memory.finish_copies(group.index)
            self._memory.copy(group.index, sources, targets)
        self._guard.is_torn = True
        if is_moving:
            if self._offloader is not None and group is self._prefix.full:
                self._guard.change(self._offloader.moved, new_ids)
                self._guard.is_torn = True
            self._prefix.remap(group, new_ids)
            group.remap(new_ids, slots)
            if self._events is not None:
                self._events.moved(group, sources, targets)
            self.num_moves += 1
        self._sectors.commit_vacating(vacating)
        self._guard.is_torn = False
        return True

    # -- words for it ------------------------------------------------------------------------------------------------

    def shortage(self, error: type[Exhausted], wanted: Many[int], budget: int) -> Exhausted:
        """The error that says which group lacks how many of the ``wanted`` blocks, and how they could become free; its
        attributes are those of the first one."""
        there = [self.available(group) for group in self._groups]
        short = [at for at, n in enumerate(wanted) if n > there[at]]
        if not short:
            text = f"need {list(wanted)} blocks in {[group.name for group in self._groups]} at once"
            return error.with_hint(text, "close a sequence first", needed=list(wanted), available=there)
        text = "; ".join(
            f"need {wanted[at]} blocks, {there[at]} available ({group.free.num_free} free, {group.outstanding} reserved by "
            f"running requests) of {group.plan.num_blocks} in {group.name}: {wanted[at] - there[at]} more must be freed by "
            f"running requests"
            for at, group in ((at, self._groups[at]) for at in short)
        )
        hint, first = f"close a sequence or raise the budget (now {format_bytes(budget)})", short[0]
        name = self._groups[first].plan.name
        return error.with_hint(text, hint, needed=wanted[first], available=there[first], group=name)

    def check(self) -> None:
        """Prove that sectors and groups agree, and that every reservation can be kept. Raises CheckFailed."""
        if self._sectors is not None:
            self._sectors.check()
        if not self.fits(self._none):
            lack = [group.name for group in self._groups if self.surplus(group) < 0]
            raise CheckFailed(f"more is reserved than can be had; short of their own blocks: {lack}")
        for group in self._groups:
            cached = self._prefix.owned_ids(group)
            absent = np.empty(0, np.int32) if self._sectors is None else self._sectors.absent_ids(group)
            group.check(cached, absent)
