"""How a request begins, or goes on after it was suspended: a slot, what it starts from, and room; all of it or nothing."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from time import perf_counter

from kvpagoda.cache.core import Core
from kvpagoda.cache.observing import observable
from kvpagoda.cache.prefix_cache import Holding
from kvpagoda.cache.prefix_match import PrefixMatch
from kvpagoda.cache.publishing import Publisher
from kvpagoda.cache.request import Request, State
from kvpagoda.cache.start import AdmissionRequest, Allotment, allot, fill, make_room, shared_columns
from kvpagoda.cache.tier_hit import Prefetch, TierHit
from kvpagoda.errors import RetryLater
from kvpagoda.prefix import Lease, Match
from kvpagoda.units import ceil_div

_log = logging.getLogger(__name__)


class Admission:
    """Opens, forks and resumes the requests of ``core``."""

    def __init__(self, core: Core, publisher: Publisher) -> None:
        self._core, self._publisher = core, publisher

    # -- three ways to begin -----------------------------------------------------------------------------------------

    @observable
    def open(
        self,
        request: Request,
        capacity: int,
        reserve: int,
        prefetch: Prefetch | None = None,
        *,
        layerwise: bool = False,
        lookup: bool = True,
    ) -> None:
        """Let ``request``, which is new, run; see ``KVCache.open``."""
        core, length = self._core, request.prompt_length
        reserved = core.plan.blocks_wanted(reserve, capacity, core.max_context)
        self._check_slot()
        self._publisher.settle_waiting()
        match, found = core.prefix.find(request.keys(0, length if lookup else 0), request.namespace)
        if self._publisher.keep_where_one_stands(match, found):
            match, found = core.prefix.find_again(match)
        hit: TierHit | None = None
        if core.offloader is not None and lookup:
            hashes = core.hashes_of(request, length // core.block_size)[: (length - 1) // core.block_size + 1]
            hit = self._look_below(hashes, reserved, match, found, prefetch)
        try:
            if hit is not None:
                hit.layerwise = layerwise
            self._begin(AdmissionRequest(request, reserved, capacity, match, found, hit))
            request.tally = core.counters.began(request.namespace, request.match, length if lookup else 0)
            request.tally.requests += 1
            self._publisher.begun(request, hit)
            if hit is not None:
                hit.release()
            if core.offloader is not None and core.memory.has_memory:
                request.opened_at = perf_counter()
        except BaseException:
            if request.state is State.RUNNING and not core.guard.is_torn:  # nobody has a handle on it
                core.release(request)
            if hit is not None:
                hit.release()
            raise

    def fork(self, parent: Request, reserve: int) -> Request:
        """A running request with the committed tokens of ``parent``; see ``Sequence.fork``."""
        core, length, slot = self._core, parent.length, parent.slot
        self._check_slot()
        self._publisher.settle_waiting()
        media_ids = {at: media_id for at, media_id in parent.media_ids.items() if at < length}
        child = Request(
            parent.tokens.copy(), length, parent.namespace, parent.priority, media_ids, publishes=parent.publishes
        )
        child.stays, child.epochs = parent.stays, [*parent.epochs]
        ends = [ceil_div(length, group.block_size) for group in core.groups]
        wanted = core.plan.blocks_wanted(reserve, 0, core.max_context)
        reserved = [max(n, end - group.first[slot]) for group, n, end in zip(core.groups, wanted, ends)]
        shared = [range(group.first[slot], max(group.first[slot], group.shared[slot])) for group in core.groups]
        needs = [end - some.stop for some, end in zip(shared, ends)]
        read = core.prefix.windows.shared_by(slot)
        holding = core.guard.change(core.prefix.hold, parent.lease, parent.lease.num_blocks, read)
        try:
            more = [max(n - len(some), need) for n, some, need in zip(reserved, shared, needs)]
            if not make_room(core.capacity, needs, more):
                raise core.capacity.shortage(RetryLater, reserved, core.plan.budget)
            allotments = []
            for group, some, end, n in zip(core.groups, shared, ends, reserved):
                cells, own = group.table.cells[slot], group.peek(end - some.stop)
                if len(own):
                    core.memory.copy(group.index, cells[some.stop : end].copy(), own)
                allotments.append(Allotment(some.start, cells[some.start : some.stop].copy(), own, n))
            self._commit(child, PrefixMatch(length, length, "nothing"), holding, allotments)
        except BaseException:
            self._undo(holding, None)
            raise
        child.tally = parent.tally
        child.tally.requests += 1
        return child

    @observable
    def resume(self, request: Request, capacity: int | None, reserve: int | None) -> None:
        """``request``, which is suspended, runs again; see ``Sequence.resume``."""
        core, length, namespace = self._core, request.own_length, request.namespace
        self._publisher.settle_waiting()
        suspended, keys, more = core.suspended[request], request.keys(0, length), max(capacity or 0, reserve or 0)
        if not request.publishes and not core.namespaces.is_current(namespace):
            # it went on with other weights: what others left of the same text is not what it has
            keys = keys[: max((some.stop for some in suspended.left_behind if some), default=0) * core.block_size]
        match = core.prefix.tree.match(keys, namespace)
        is_whole = core.prefix.has_all(match, suspended.left_behind)
        reserved = [0 if reserve is not None else blocks for blocks in suspended.reserved]
        if not is_whole or reserve is not None or more > suspended.capacity:
            least = core.plan.blocks_wanted(max(length, more), capacity or 0, core.max_context)
            reserved = [max(blocks) for blocks in zip(reserved, least)]
        hit: TierHit | None = None
        if is_whole:
            capacity = max(length, suspended.capacity if capacity is None else capacity)
            held = [ceil_div(capacity, group.block_size) - first for group, first in zip(core.groups, suspended.firsts)]
            reserved = [max(blocks) for blocks in zip(reserved, held)]
            found = PrefixMatch(match.num_tokens, match.num_blocks * core.block_size, "nothing")
        else:
            match, found = core.prefix.find(keys, namespace)
            if core.offloader is not None:
                end = max(0, len(keys) - 1) // core.block_size
                hit = self._look_below(core.hashes_of(request, end)[: end + 1], reserved, match, found)
        with nullcontext() if hit is None else hit:
            self._check_slot()
            as_it_was = suspended if is_whole else None
            computed = length - request.match.resumable
            self._begin(AdmissionRequest(request, reserved, capacity or 0, match, found, hit, as_it_was))
            if is_whole:
                self._publisher.settle(request)
            else:
                request.tally.computed += computed
                core.counters.began(namespace, request.match, length)
                self._publisher.begun(request, hit)

    # -- all or nothing ----------------------------------------------------------------------------------------------

    def _check_slot(self) -> None:
        core = self._core
        if not core.free_slots:
            text, hint = f"all {core.plan.max_requests} request slots are in use", "close one, or raise max_requests"
            raise RetryLater.with_hint(text, hint, needed=1, available=0)

    def _look_below(
        self,
        hashes: list[bytes],
        reserved: list[int],
        match: Match,
        found: PrefixMatch,
        prefetch: Prefetch | None = None,
    ) -> TierHit | None:
        """What tiers have of a text beyond what is cached, if there may be room for the request at all."""
        core = self._core
        assert core.offloader is not None
        if any(blocks > core.capacity.available(group) for group, blocks in zip(core.groups, reserved)):
            return None
        return core.offloader.reader.find(hashes, match.num_blocks, found.resumable // core.block_size, prefetch)

    def _begin(self, wish: AdmissionRequest) -> None:
        """Let the request run, at the price of pins if need be. Raises RetryLater; nothing is kept then."""
        core = self._core
        while not self._start_from_most(wish):
            pin = core.prefix.oldest_pin()
            if pin is None:
                raise core.capacity.shortage(RetryLater, wish.reserved, core.plan.budget)
            _log.info("a pin of %d blocks is given up for a request", pin.holding.lease.num_blocks)
            core.guard.change(core.prefix.unpin, pin)
            wish = self._again(wish)

    def _start_from_most(self, wish: AdmissionRequest) -> bool:
        """Begin from what was suspended, else from what tiers have, else from what was found; else, since what would be copied
        may itself be what is in the way, from what needs no copy. False, with nothing kept, if none of it can be."""
        if wish.suspended is not None:
            return self._start(wish)
        size, hit, found = self._core.block_size, wish.hit, wish.found
        if hit is not None:
            is_more = hit.begin <= wish.match.num_blocks and hit.end * size > found.resumable
            if is_more and self._start(wish._replace(found=_with_hit(found, hit.end * size))):
                return True
            wish = self._again(wish._replace(hit=None))  # room was made for what did not come
        if self._start(wish):
            return True
        if wish.found.checkpoint is None and wish.found.resumable % size == 0:
            return False
        wish = self._again(wish)
        return self._start(wish._replace(found=self._core.prefix.without_copies(wish.match, wish.found)))

    def _again(self, wish: AdmissionRequest) -> AdmissionRequest:
        """``wish``, where something was evicted meanwhile: with what is found now. Raises RetryLater where what a suspended
        request left behind went; it has something to compute then, when it is resumed again."""
        prefix, suspended = self._core.prefix, wish.suspended
        match, found = prefix.find_again(wish.match)
        if suspended is not None:
            if not prefix.has_all(match, suspended.left_behind):
                raise self._core.capacity.shortage(RetryLater, wish.reserved, self._core.plan.budget)
            found = PrefixMatch(match.num_tokens, match.num_blocks * self._core.block_size, "nothing")
        return wish._replace(match=match, found=found)

    def _start(self, wish: AdmissionRequest) -> bool:
        """Prepare what ``wish`` starts from, and let the request run. False, with nothing kept, if there is no room for it, or
        if tiers did not have it."""
        core, match, found = self._core, wish.match, wish.found
        prefix, change = core.prefix, core.guard.change
        whole, rest = divmod(found.resumable, core.block_size)
        if wish.hit is not None:
            whole = min(whole, match.num_blocks)
        shared, beyond = shared_columns(core, wish, whole), None
        read = prefix.windows.handles_of(match.ids, [shared[window.group.index] for window in prefix.windows])
        holding = change(prefix.hold, match, whole, read, found.checkpoint)
        try:
            if rest:
                beyond = change(prefix.tree.pin_partial, match)
            allotments = allot(core, wish, shared, holding)
            if allotments is not None and whole:
                change(prefix.tree.touch, holding.lease, priority=wish.request.priority)
            filled = None if allotments is None else fill(core, wish, shared, allotments, beyond)
            if allotments is None or filled is None:
                self._undo(holding, beyond)
                return False
            self._commit(wish.request, filled, holding, allotments, beyond, is_same=wish.suspended is not None)
        except BaseException:
            self._undo(holding, beyond)
            raise
        return True

    def _undo(self, holding: Holding, beyond: Lease | None) -> None:
        """Let go of what a start was prepared from, unless a signal came in the middle of a change."""
        core = self._core
        if not core.guard.is_torn:
            if beyond is not None:
                core.guard.change(core.prefix.tree.unpin, beyond)
            core.guard.change(core.prefix.release, holding)

    def _commit(
        self,
        request: Request,
        found: PrefixMatch,
        holding: Holding,
        allotments: list[Allotment],
        beyond: Lease | None = None,
        *,
        is_same: bool = False,
    ) -> None:
        """``request`` runs, with what was allotted to it; ``is_same``: just as it was when it was suspended."""
        core = self._core
        core.guard.is_torn = True
        slot = core.free_slots.pop()
        for group, allotment in zip(core.groups, allotments):
            group.begin(slot, *allotment)
        core.prefix.release_checkpoint(holding)
        if beyond is not None:
            core.prefix.tree.unpin(beyond)
        is_resumed = request.state is State.SUSPENDED
        if is_resumed:
            core.swap.drop(core.suspended[request])
        if not is_same:
            request.start_at(found, core.block_size)
        request.lease, request.slot, request.state = holding.lease, slot, State.RUNNING
        request.resumed_at = core.counters.stopped
        if is_resumed:
            del core.suspended[request]
        core.running[slot] = request
        core.guard.is_torn = False


def _with_hit(found: PrefixMatch, there: int) -> PrefixMatch:
    """``found``, where the first ``there`` tokens, and what goes on from them needs, are there too."""
    groups = {name: max(tokens, there) for name, tokens in found.groups.items()}
    known = max(found.num_tokens, there)
    limited_by = "nothing" if known == there else found.limited_by
    return PrefixMatch(known, there, limited_by, groups, None, there - found.resumable)
