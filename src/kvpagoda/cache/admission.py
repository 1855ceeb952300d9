"""How a request starts: it gets a slot, the cached blocks that it starts from, and room for its tokens.

    open      match the prefix ──► look up tiers ──► make room, copy, load ──► commit: it runs
    fork      share the blocks of the parent ──► make room, copy its partial block and states ──► commit
    resume    match what is still cached ──► make room, copy the rest back from host memory ──► commit

Each call does all of this; or it raises, and the request holds no slot, no block and no pin.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from time import perf_counter

from kvpagoda.blocks.places import BlockPlaces
from kvpagoda.cache.core import Core
from kvpagoda.cache.ending import Ending
from kvpagoda.cache.observing import observable
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.request import Request, State
from kvpagoda.cache.settling import Settler
from kvpagoda.cache.start import AdmissionRequest, Allotment, allot, fill, make_room, shared_columns
from kvpagoda.cache.tier_hit import Prefetch, TierHit
from kvpagoda.errors import RetryLater
from kvpagoda.prefix import Lease, Match
from kvpagoda.prefix.hybrid import Holding
from kvpagoda.units import ceil_div

_log = logging.getLogger(__name__)


class Admission:
    """Opens, forks and resumes the requests of ``core``."""

    def __init__(self, core: Core, settler: Settler) -> None:
        self._core, self._settler, self.ending = core, settler, Ending(core, settler)

    # -- three ways to start -----------------------------------------------------------------------------------------

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
        """Start ``request``, which is new; see ``KVCache.open``. Without ``lookup`` it starts from nothing."""
        core, length = self._core, request.prompt_length
        if core.dropped_fences:
            self.ending.leave_dropped_fences()
        hit: TierHit | None = None
        try:
            reserved = core.plan.blocks_wanted(reserve, capacity, core.max_context)
            self._check_slot()
            self._settler.settle_waiting()
            match, found = core.prefix.find(request.keys(0, length if lookup else 0), request.namespace)
            if self._settler.checkpoint_running_request(match, found):
                match, found = core.prefix.find_again(match)
            if core.offloader is not None and lookup:
                hashes = core.hashes_of(request, length // core.block_size)[: (length - 1) // core.block_size + 1]
                hit = self._look_below(hashes, reserved, match, found, prefetch)
            if hit is not None:
                hit.layerwise = layerwise
            self._begin(AdmissionRequest(request, reserved, capacity, match, found, hit))
            request.tally = core.counters.began(request.namespace, request.match, length if lookup else 0)
            request.tally.requests += 1
            self._settler.begun(request, hit)
            if hit is not None:
                hit.release()
            if core.offloader is not None and core.memory.has_memory:
                request.opened_at = perf_counter()
        except BaseException:
            if request.state is State.RUNNING and not core.guard.is_torn:  # the caller gets no handle
                core.release(request)
            request.handle = None  # nothing is left to be closed
            if hit is not None:
                hit.release()
            raise

    @staticmethod
    def child_of(parent: Request) -> Request:
        """Return a new request with the committed tokens of ``parent``, for ``fork`` to start."""
        length = parent.length
        media_ids = {index: media_id for index, media_id in parent.media_ids.items() if index < length}
        child = Request(
            parent.tokens.copy(), length, parent.namespace, parent.priority, media_ids, publishes=parent.publishes
        )
        child.stays, child.epochs, child.tally = parent.stays, [*parent.epochs], parent.tally
        return child

    def fork(self, parent: Request, child: Request, reserve: int) -> None:
        """Start ``child``, which is new, beside ``parent``; see ``Sequence.fork``."""
        core, length, slot = self._core, parent.length, parent.slot
        self._check_slot()
        self._settler.settle_waiting()
        ends = [ceil_div(length, group.block_size) for group in core.groups]
        wanted = core.plan.blocks_wanted(reserve, 0, core.max_context)
        reserved = [max(n, end - group.first[slot]) for group, n, end in zip(core.groups, wanted, ends)]
        shared = [range(group.first[slot], max(group.first[slot], group.shared[slot])) for group in core.groups]
        needs = [end - span.stop for span, end in zip(shared, ends)]
        windows = [group.shared_names(slot) for group, _ in core.prefix.windows]
        holding = core.guard.change(core.prefix.index.hold, parent.lease, parent.lease.num_blocks, windows)
        try:
            more = [max(n - len(span), need) for n, span, need in zip(reserved, shared, needs)]
            while not make_room(core.capacity, needs, more):
                if not core.dropped or not self.ending.close_dropped():
                    raise core.capacity.shortage(RetryLater, reserved, core.plan.budget)
            allotments = []
            for group, span, end, n in zip(core.groups, shared, ends, reserved):
                own = BlockPlaces(group.free.peek(end - span.stop))
                if len(own):
                    core.memory.copy(group.index, group.places_between(slot, span.stop, end), own)
                allotments.append(Allotment(span.start, group.places_between(slot, span.start, span.stop), own, n))
            self._commit(child, PrefixMatch(length, length, "nothing"), holding, allotments)
        except BaseException:
            self._undo(holding, None)
            raise
        self._settler.plan(child)
        child.tally.requests += 1

    @observable
    def resume(self, request: Request, capacity: int | None, reserve: int | None) -> None:
        """Start ``request``, which is suspended, again; see ``Sequence.resume``."""
        core, length, namespace = self._core, request.own_length, request.namespace
        self._settler.settle_waiting()
        suspended, keys, more = core.suspended[request], request.keys(0, length), max(capacity or 0, reserve or 0)
        if not request.publishes and not core.namespaces.is_current(namespace):
            # it was continued with other weights: only blocks that it published itself have its content
            keys = keys[: max((span.stop for span in suspended.left_behind if span), default=0) * core.block_size]
        match = core.prefix.tree.match(keys, namespace)
        is_whole = core.prefix.index.are_there(match, suspended.left_behind)
        reserved = [0 if reserve is not None else blocks for blocks in suspended.reserved]
        if not is_whole or reserve is not None or more > suspended.capacity:
            least = core.plan.blocks_wanted(max(length, more), capacity or 0, core.max_context)
            reserved = [max(blocks) for blocks in zip(reserved, least)]
        self._check_slot()
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
            as_it_was = suspended if is_whole else None
            computed = length - request.match.resumable
            self._begin(AdmissionRequest(request, reserved, capacity or 0, match, found, hit, as_it_was))
            if is_whole:
                self._settler.settle(request)
            else:
                request.tally.computed += computed
                core.counters.began(namespace, request.match, length)
                self._settler.begun(request, hit)

    # -- preparing and committing a start ----------------------------------------------------------------------------

    def _check_slot(self) -> None:
        """Raise RetryLater if every request slot is in use."""
        core = self._core
        if not core.free_slots and core.dropped:
            self.ending.close_dropped()
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
        """Return what tiers have of a text beyond what is cached. None if they have nothing, or if the ``reserved``
        blocks are not available now."""
        core = self._core
        assert core.offloader is not None
        if any(blocks > core.capacity.available(group) for group, blocks in zip(core.groups, reserved)):
            return None
        return core.offloader.reader.find(hashes, match.num_blocks, found.resumable // core.block_size, prefetch)

    def _begin(self, attempt: AdmissionRequest) -> None:
        """Start the request; while there is no room, close what was dropped, then end the oldest pin, and try again.
        Raises RetryLater if there is no room and no pin; the request then holds nothing."""
        core = self._core
        while not self._start_from_most(attempt):
            if core.dropped and self.ending.close_dropped():
                attempt = self._again(attempt)
                continue
            pin = core.prefix.oldest_pin()
            if pin is None:
                raise core.capacity.shortage(RetryLater, attempt.reserved, core.plan.budget)
            _log.info("a pin of %d blocks is ended to make room for a request", pin.holding.lease.num_blocks)
            core.guard.change(core.prefix.unpin, pin)
            attempt = self._again(attempt)

    def _start_from_most(self, attempt: AdmissionRequest) -> bool:
        """Start from what was suspended, else from what tiers have, else from what was found. If there is no room for
        that, start from what needs no copy: the source of a copy may be what must be evicted. Return whether one of
        these succeeded; nothing is held if not."""
        if attempt.suspended is not None:
            return self._start(attempt)
        size, hit, found = self._core.block_size, attempt.hit, attempt.found
        if hit is not None:
            is_more = hit.begin <= attempt.match.num_blocks and hit.end * size > found.resumable
            if is_more and self._start(attempt._replace(found=_with_hit(found, hit.end * size))):
                return True
            attempt = self._again(attempt._replace(hit=None))  # making room for it may have evicted blocks
        if self._start(attempt):
            return True
        if attempt.found.checkpoint is None and attempt.found.resumable % size == 0:
            return False
        attempt = self._again(attempt)
        return self._start(attempt._replace(found=self._core.prefix.without_copies(attempt.match, attempt.found)))

    def _again(self, attempt: AdmissionRequest) -> AdmissionRequest:
        """Return ``attempt`` with what is found now, since blocks may have been evicted. Raises RetryLater if blocks
        that a suspended request left in the prefix cache were evicted: the next ``resume`` then has tokens to
        compute."""
        prefix, suspended = self._core.prefix, attempt.suspended
        match, found = prefix.find_again(attempt.match)
        if suspended is not None:
            if not prefix.index.are_there(match, suspended.left_behind):
                raise self._core.capacity.shortage(RetryLater, attempt.reserved, self._core.plan.budget)
            found = PrefixMatch(match.num_tokens, match.num_blocks * self._core.block_size, "nothing")
        return attempt._replace(match=match, found=found)

    def _start(self, attempt: AdmissionRequest) -> bool:
        """Prepare what ``attempt`` starts from, and start the request. Return False, with nothing held, if there is no
        room for it, or if tiers could not deliver it."""
        core, match, found = self._core, attempt.match, attempt.found
        prefix, change = core.prefix, core.guard.change
        whole, rest = divmod(found.resumable, core.block_size)
        if attempt.hit is not None:
            whole = min(whole, match.num_blocks)
        shared, partial = shared_columns(core, attempt, whole), None
        windows = prefix.index.names_in(match.ids, shared)
        holding = change(prefix.index.hold, match, whole, windows, found.checkpoint)
        try:
            if rest:
                partial = change(prefix.tree.pin_partial, match)
            allotments = allot(core, attempt, shared, holding)
            if allotments is not None and whole:
                change(prefix.tree.touch, holding.lease, priority=attempt.request.priority)
            filled = None if allotments is None else fill(core, attempt, shared, allotments, partial)
            if allotments is None or filled is None:
                self._undo(holding, partial)
                return False
            self._commit(attempt.request, filled, holding, allotments, partial, is_same=attempt.suspended is not None)
        except BaseException:
            self._undo(holding, partial)
            raise
        return True

    def _undo(self, holding: Holding, partial: Lease | None) -> None:
        """Unpin what a failed start was prepared from, unless an interrupt tore the cache."""
        core = self._core
        if not core.guard.is_torn:
            if partial is not None:
                core.guard.change(core.prefix.tree.unpin, partial)
            core.guard.change(core.prefix.index.release, holding)

    def _commit(
        self,
        request: Request,
        found: PrefixMatch,
        holding: Holding,
        allotments: list[Allotment],
        partial: Lease | None = None,
        *,
        is_same: bool = False,
    ) -> None:
        """Give ``request`` a slot and its ``allotments``: it runs. Nothing here may fail.

        ``holding``: the pins, which the request takes over. ``partial``: the pin of the block whose beginning was
        copied; it ends here. ``is_same``: the request continues exactly as it was suspended.
        """
        core = self._core
        core.guard.is_torn = True
        slot = core.free_slots.pop()
        for group, allotment in zip(core.groups, allotments):
            group.begin(slot, *allotment)
        core.prefix.index.release_checkpoint(holding)
        if partial is not None:
            core.prefix.tree.unpin(partial)
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


def _with_hit(found: PrefixMatch, end: int) -> PrefixMatch:
    """Return ``found`` as it will be once tiers have loaded all that is needed to resume after ``end`` tokens."""
    groups = {name: max(tokens, end) for name, tokens in found.groups.items()}
    known = max(found.num_tokens, end)
    limited_by = "nothing" if known == end else found.limited_by
    return PrefixMatch(known, end, limited_by, groups, None, end - found.resumable)
