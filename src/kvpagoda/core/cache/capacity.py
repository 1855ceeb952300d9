"""Room for requests: what can be allocated, what is evicted for it, and the one place where evictions are applied.

    decide (prefix cache, sectors: what can be freed) ──► store in tiers ──► copy ──► free, hand over

Methods that decide return values; they never call the objects above them. ``Capacity`` applies their decisions and
asks again, until enough blocks are free. Without sectors every group has memory of its own, and cached blocks of the
group that needs room are evicted. With sectors all groups share one memory. Then the order is: free sectors, idle
sectors of another group, cold window blocks of the group itself, and last the least recently used cached blocks of all
groups.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress
from math import inf
from typing import Any

import numpy as np

from kvpagoda.abc import observable
from kvpagoda.core.blocks.group import BlockPlaces
from kvpagoda.core.blocks.sectors import Grant, Sectors, Vacating
from kvpagoda.core.cache.below import NoTiers
from kvpagoda.core.cache.guard import Guard
from kvpagoda.core.cache.observers import Observers
from kvpagoda.core.cache.prefix_cache import PrefixCache
from kvpagoda.core.cache.request import RequestState
from kvpagoda.core.groups import CacheGroup, StateGroup
from kvpagoda.core.groups.base import Freed
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.errors import CheckFailed, Exhausted, OutOfBlocks
from kvpagoda.units import ceil_div, format_bytes

_MUCH = 16  # if more than 1/16 of a group's sectors are idle, the blocks in them are moved to take these sectors
_PORTION = 32  # sectors that change hands at once: so many, but at most 1/64 of all, or 1/256 of all if that is more
_MOVED = 4  # at least 1/4 of a portion is taken where blocks must move, since each move scans every block of the group


class Capacity:
    """What can still be allocated or reserved, and how it is made free.

    Every reservation can be kept as long as ``slack`` is not negative: the sectors that are free or could be freed
    cover what groups have outstanding beyond their own blocks. ``running``: slot -> request. ``watermark``: see ``Limits``.
    ``num_moves``: how often blocks were moved; index arrays that were made before a move name the old places.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        sectors: Sectors | None,
        prefix: PrefixCache,
        tiers: NoTiers,
        memory: NoMemory,
        guard: Guard,
        running: dict[int, RequestState],
        observers: Observers,
    ) -> None:
        self._groups, self._sectors, self._prefix = groups, sectors, prefix
        self._tiers, self._memory, self._guard, self._running = tiers, memory, guard, running
        self._observers, self.watermark = observers, 0.0
        self._has_tiers = bool(tiers.levels)
        self.tells_freed = self._has_tiers or memory.is_poisoning
        self._none = [0] * len(groups)
        many = 0 if sectors is None else len(sectors.owner)
        self._portion = max(min(_PORTION, many // 64), many // 256)
        self._for_steps = [group.num_ahead for group in groups]  # stay free for the next steps
        self._fruitless = [0] * len(groups)  # by group: idle sectors when none could be vacated
        self.num_moves = 0
        if prefix.quota is not None:
            guard.over, guard.evict_over = prefix.quota.over, self.evict_over

    # -- queries: nothing changes ------------------------------------------------------------------------------------

    def slack(self, more: Many[int]) -> int:
        """Return the number of sectors that no reservation needs if ``more[i]`` further blocks of group i are reserved:
        free ones, and those that groups could free, less those that they lack."""
        assert self._sectors is not None
        left = [(group.surplus - n) // group.plan.per_sector for group, n in zip(self._groups, more)]
        return self._sectors.num_free + sum(left)

    def available(self, group: CacheGroup) -> int:
        """Return how many blocks of ``group`` are free or could be, and no request has reserved."""
        surplus = group.surplus
        if self._sectors is None:
            return surplus
        per = group.plan.per_sector
        return surplus % per + per * self.slack(self._none)

    def fits(self, more: Many[int]) -> bool:
        """Return whether every reservation can be kept if ``more[i]`` further blocks of group i are reserved."""
        if self._sectors is None:
            return not any(n > group.surplus for n, group in zip(more, self._groups))
        return self.slack(more) >= 0

    def keeps_watermark(self, more: Many[int]) -> bool:
        """Return whether ``more[i]`` further blocks of group i can be reserved beside running requests, and what
        ``watermark`` asks for stays free or could be freed."""
        if not self._running:
            return True
        if self._sectors is None:
            return self.fits([n + int(self.watermark * group.plan.num_blocks) for n, group in zip(more, self._groups)])
        return self.slack(more) >= int(self.watermark * len(self._sectors.owner))

    # -- making room -------------------------------------------------------------------------------------------------

    def ensure_free(self, needs: Many[int], more: Many[int] | None = None) -> None:
        """Make ``needs[i]`` blocks of group i free, in all groups at once. They are part of what is reserved, or of
        ``more``, which the caller is about to reserve. Raises OutOfBlocks if that is impossible, and whatever a copy
        raises; blocks evicted until then stay evicted, and nothing else changed.

        Blocks may move: places that were read before may be wrong afterwards, names are not."""
        more = self._none if more is None else more
        while True:
            for group, need in zip(self._groups, needs):
                if need > group.free.num_free:
                    break
            else:
                if self._memory.is_poisoning:
                    self._memory.poison_freed()  # before these blocks are allocated
                return
            short = need - group.free.num_free
            if self._sectors is not None:
                has_freed = self._free_some(group, short, needs, more)
            else:
                if self._memory.is_copying:
                    self._memory.finish_copies(group.index)
                has_freed = self.forget(group.evict, short, is_evicted=True)
            if not has_freed:
                free, name = group.free.num_free, group.plan.name
                text = f"OOM: need {need} {group.free.what}, {free} free of {group.plan.num_blocks}"
                raise OutOfBlocks.with_hint(text, "close a sequence", needed=need, available=free, group=name)

    def make_room(self, needs: Many[int], more: Many[int]) -> bool:
        """Return whether ``more[i]`` further blocks of group i can be reserved; if so, ``needs[i]`` of them are free now,
        after evictions if necessary."""
        if not self.fits(more):
            return False
        try:
            self.ensure_free(needs, more)
        except OutOfBlocks:
            return False
        return True

    def _free_some(self, group: CacheGroup, short: int, needs: Many[int], more: Many[int]) -> bool:
        """Free blocks of ``group``, which is ``short`` of some, in the order that the module's docstring gives. Return
        False if nothing can be freed. The caller repeats this until it has enough."""
        sectors, wanted = self._sectors, ceil_div(short, group.plan.per_sector)
        assert sectors is not None
        if not sectors.num_free and not self._take_idle_sectors(group, wanted, more):
            if group.num_cold:
                return self._evict(group, short)
            for source, until in self._by_age(group, more):
                if source is group:
                    return self._evict(group, short)
                if self._take_evicted_sectors(source, wanted, needs[source.index], more, until):
                    wanted = sectors.num_free
                    break
            else:
                return False
        if wanted:
            self._grant(sectors.grant(group, wanted))
        return True

    def _by_age(self, group: CacheGroup, more: Many[int]) -> list[tuple[CacheGroup, float]]:
        """Return the groups that could free blocks for ``group``, the one with the least recently used block first.
        Each comes with the age of the next group's block: up to there it stays first. If a policy does not order by
        use: ``group`` itself, then the groups with the most to spare."""
        able: list[tuple[int, int, CacheGroup]] = []
        is_known = True
        for source in self._groups:
            spare = (source.surplus - more[source.index]) // source.plan.per_sector
            num_evictable = source.num_evictable
            if num_evictable if source is group else spare > 0:
                age = self._oldest(source)
                is_known &= age is not None or not num_evictable
                able.append((age or 0, 0 if source is group else -spare, source))
        if len(able) > 1:
            able.sort(key=lambda a: (a[0], a[2] is not group) if is_known else (a[2] is not group, a[1]))
        ends = [*(age for age, _, _ in able[1:]), inf] if is_known else [inf] * len(able)
        return [(source, end) for (_, _, source), end in zip(able, ends)]

    def _oldest(self, group: CacheGroup) -> int | None:
        """Return when the block of ``group`` that is evicted next was last used, None if unknown. Cold window blocks
        count as oldest of all, except as many as its requests have reserved and its next step takes: these are needed
        soon."""
        own = group.outstanding + self._for_steps[group.index] - group.free.num_free
        return 0 if group.num_cold > max(0, own) else self._guard.change(group.oldest)

    def _take_idle_sectors(self, taker: CacheGroup, wanted: int, more: Many[int]) -> bool:
        """Take up to ``wanted`` idle sectors from the group, other than ``taker``, that has most: its free blocks that
        are not outstanding, beyond a portion and what its next step takes. Takes empty sectors, or any sectors if much
        is idle. Return False if there are none."""
        group, most, sectors = taker, -1, self._sectors
        assert sectors is not None
        for source in self._groups:
            idle = source.free.num_free - source.outstanding - more[source.index] - self._for_steps[source.index]
            idle = idle // source.plan.per_sector - self._portion
            if source is not taker and (group is taker or idle > most):
                group, most = source, idle
        fruitless = self._fruitless[group.index] = max(0, min(self._fruitless[group.index], most))
        if most <= fruitless:
            return False
        count, is_much = min(wanted, most), most * _MUCH > sectors.num_owned[group.index]
        if self.vacate(sectors.vacate(group, count, self._fixed_places(group), least=count if is_much else 0)):
            return True
        self._fruitless[group.index] = most
        return False

    def _take_evicted_sectors(self, group: CacheGroup, wanted: int, need: int, more: Many[int], until: float) -> bool:
        """Evict cached blocks of ``group``, which could free a sector, that were used before ``until``, and take its
        sectors: ``wanted``, or a portion if that is more, since each move scans all blocks. ``need`` blocks stay free
        in it. Return False if no sector can be vacated now and nothing was evicted."""
        assert self._sectors is not None
        per, has_evicted = group.plan.per_sector, False
        count = min(max(wanted, self._portion), (group.surplus - more[group.index]) // per)
        while (lacking := count * per + need - group.free.num_free) > 0:
            if has_evicted and (self._oldest(group) or 0) > until:
                count = (group.free.num_free - need) // per
                break
            if not self._evict(group, lacking):
                return has_evicted
            has_evicted = True
        least, fixed = min(max(wanted, self._portion // _MOVED), count), self._fixed_places(group)
        is_vacated = least > 0 and self.vacate(self._sectors.vacate(group, count, fixed, least=least))
        return is_vacated or has_evicted

    def _fixed_places(self, group: CacheGroup) -> BlockPlaces:
        """Return the places in ``group`` whose blocks may not move now: those of fenced requests. int32."""
        fenced = [request for request in self._running.values() if request.num_fences]
        places = [np.empty(0, np.int32), *(group.held_places(request.slot) for request in fenced)]
        if isinstance(group, StateGroup):
            places += [group.places_of_steps(request) for request in fenced]
        return BlockPlaces(np.concatenate(places))

    # -- applying ----------------------------------------------------------------------------------------------------

    def _evict(self, group: CacheGroup, n: int) -> bool:
        """Evict ``n`` cached blocks of ``group`` or fewer, and some ahead; return False if it has none to evict."""
        if self._memory.is_copying:
            self._memory.finish_copies(group.index)
        return self.forget(group.evict, n, is_evicted=True)

    def evict_over(self) -> None:
        """Evict what nothing uses of each namespace that is over its quota, until it is within. A failure is repeated at the
        end of the next call. O(1) for one of which all is in use, as long as nothing becomes unused."""
        prefix = self._prefix
        assert prefix.quota is not None
        with suppress(MemoryError, RuntimeError):
            for account in [*prefix.quota.over]:
                before: tuple[int, ...] = account.stuck_at
                while account.is_over and before != (account.nbytes, *prefix.unused):
                    before = account.nbytes, *prefix.unused
                    if self._memory.is_copying:
                        self._memory.finish_copies()
                    self.forget(prefix.evict_of, account, is_evicted=True)
                account.stuck_at = before if account.is_over else ()

    @observable
    def forget(
        self, decide: Callable[..., Freed | None], *args: Any, is_evicted: bool = False, reason: str = "evicted"
    ) -> bool:
        """Free what ``decide(*args)``, a method of the prefix cache or ``evict`` of a group, evicts; return whether that is
        anything. ``is_evicted``: it makes room, so tiers store it first. Whatever a tier raises, the rest is done. ``reason``:
        see ``CacheObserver.on_evicted``."""
        guard, has_freed = self._guard, False
        guard.is_torn = True
        try:
            freed = decide(*args)
            if freed is None:
                freed = self._prefix.evict_checkpoint()
        except Exception:
            guard.is_torn = False
            raise
        try:
            if self._has_tiers:
                self._tiers.on_evicted(freed, is_evicted)
        finally:
            if self._observers.evicted:
                self._observers.note_evicted(freed, reason)
            if self._prefix.quota is not None:
                self._prefix.quota.freed(freed)
            for number, ids in freed.blocks:
                if len(ids):
                    has_freed = True
                    group = self._groups[number]
                    places = group.free_blocks(ids)
                    if self.tells_freed or self._observers.freed:
                        self.freed(group, places)
            guard.is_torn = False
        return has_freed or bool(freed.checkpoints)

    def tidy(self) -> None:
        """Poison freed blocks, if the memory does so. A failure is repeated before a block is allocated."""
        if self._memory.is_poisoning:
            with suppress(MemoryError, RuntimeError):
                self._memory.poison_freed()

    def release(self, group: CacheGroup, places: BlockPlaces) -> None:
        """Free the blocks at ``places``, which nothing holds any more. Tiers forget their names; their bytes may be
        overwritten."""
        group.release(places)
        if self.tells_freed or self._observers.freed:
            self.freed(group, places)

    def freed(self, group: CacheGroup, places: BlockPlaces) -> None:
        """Tell the tiers, the memory and observers that the blocks at ``places`` were freed."""
        self._tiers.on_freed(group, places)
        self._memory.freed(group.index, places)
        if self._observers.freed:
            self._observers.note_freed(group, places)

    def _grant(self, grant: Grant) -> None:
        """Hand over free sectors. They are cleared first: bytes of another group could read as NaN in this one."""
        self._memory.clear_sectors(grant.sectors)
        self._guard.is_torn = True
        assert self._sectors is not None
        self._sectors.commit_grant(grant)
        self._guard.is_torn = False

    @observable
    def vacate(self, vacating: Vacating | None) -> bool:
        """Move the blocks in the sectors, show their new places in the rows of requests, and free the sectors; return
        False for None. The blocks keep their names, so nothing else changes."""
        if vacating is None:
            return False
        assert self._sectors is not None
        group, sources, targets = vacating.group, vacating.sources, vacating.targets
        is_moving = len(sources) > 0
        self._memory.poison_freed()  # the memory of freed blocks may soon be another group's
        if is_moving:
            decided = group.moving(sources, targets)
            self._memory.finish_copies(group.index)
            self._memory.move(group.index, sources, targets)
        self._guard.is_torn = True
        if is_moving:
            group.move(*decided)
            self.num_moves += 1
        self._sectors.commit_vacating(vacating)
        self._guard.is_torn = False
        return True

    # -- errors and proof --------------------------------------------------------------------------------------------

    def shortage(self, error: type[Exhausted], wanted: Many[int], budget: int) -> Exhausted:
        """Return an ``error`` that says which groups lack how many of the ``wanted`` blocks, and what frees them. Its
        attributes are those of the first such group."""
        available = [self.available(group) for group in self._groups]
        short = [i for i, n in enumerate(wanted) if n > available[i]]
        if not short:
            text = f"need {list(wanted)} blocks in {[group.name for group in self._groups]} at once"
            return error.with_hint(text, "close a sequence first", needed=list(wanted), available=available)
        text = "; ".join(
            f"need {wanted[i]} blocks, {available[i]} available ({group.free.num_free} free, {group.outstanding} "
            f"reserved by running requests) of {group.plan.num_blocks} in {group.name}: {wanted[i] - available[i]} "
            f"more must be freed by running requests"
            for i, group in ((i, self._groups[i]) for i in short)
        )
        hint, first = f"close a sequence or raise the budget (now {format_bytes(budget)})", short[0]
        name = self._groups[first].plan.name
        return error.with_hint(text, hint, needed=wanted[first], available=available[first], group=name)

    def check(self) -> None:
        """Prove that sectors and groups agree, and that every reservation can be kept. Raises CheckFailed."""
        if self._sectors is not None:
            self._sectors.check()
        if not self.fits(self._none):
            lack = [group.name for group in self._groups if group.surplus < 0]
            raise CheckFailed(f"more blocks are reserved than could be free; groups short of their own: {lack}")
        for group in self._groups:
            absent = np.empty(0, np.int32) if self._sectors is None else self._sectors.absent_ids(group)
            elsewhere = [group.places_of(group.cached_ids())]
            if isinstance(group, StateGroup):
                elsewhere.append(group.places_of_steps())
            group.check(BlockPlaces(np.concatenate(elsewhere)), absent)
