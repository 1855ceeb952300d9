"""How a request starts: it gets a slot, the blocks that it starts from, and room for its tokens.

    open      what is cached of its prompt, or what tiers have  ──┐
    fork      what its parent holds                               ├──► hold ──► make room ──► fill ──► commit: it runs
    resume    what it had, or what is cached of its text        ──┘

``cache/sources.py`` has what a request may start from. Each call does all of this; or it raises, and the request holds no
slot, no block and no pin.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from kvpagoda.blocks.places import BlockPlaces
from kvpagoda.cache.below import Hit
from kvpagoda.cache.core import Core
from kvpagoda.cache.ending import Ending
from kvpagoda.cache.observing import observable
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.request import Request, State, Tokens
from kvpagoda.cache.settling import Settler
from kvpagoda.cache.sources import Cached, Forked, Loaded, Source, Swapped
from kvpagoda.cache.swap import Suspended
from kvpagoda.errors import RetryLater
from kvpagoda.prefix import Match
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
        prefetch: Any = None,
        *,
        layerwise: bool = False,
        lookup: bool = True,
    ) -> None:
        """Start ``request``, which is new; see ``KVCache.open``. Without ``lookup`` it starts from nothing."""
        core, length = self._core, request.prompt_length
        if core.dropped_fences:
            self.ending.leave_dropped_fences()
        hit: Hit | None = None
        try:
            reserved = core.plan.blocks_wanted(reserve, capacity, core.max_context)
            self._check_slot()
            if core.waiting:
                self._settler.settle_waiting()
            match, found = core.prefix.find(request.keys(0, length if lookup else 0), request.namespace)
            if core.prefix.points.ends_steps and self._settler.checkpoint_running_request(match, found):
                match, found = core.prefix.find_again(match)
            if lookup and core.tiers.levels:
                hit = self._look_below(request, length, reserved, match, found, prefetch)
            if hit is not None:
                hit.layerwise = layerwise
            self._begin(request, reserved, capacity, self._cached(match, found, hit))
            request.tally = core.counters.began(request.namespace, request.match, length if lookup else 0)
            request.tally.requests += 1
            self._settler.begun(request, hit)
            if hit is not None:
                hit.release()
            if core.tiers.levels and core.memory.has_memory:
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

    @observable
    def fork(self, parent: Request, child: Request, reserve: int) -> None:
        """Start ``child``, which is new, beside ``parent``; see ``Sequence.fork``."""
        core, length, slot = self._core, parent.length, parent.slot
        self._check_slot()
        self._settler.settle_waiting()
        wanted = core.plan.blocks_wanted(reserve, 0, core.max_context)
        held = [ceil_div(length, group.block_size) * group.places - group.first[slot] for group in core.groups]
        self._begin(child, [max(*blocks) for blocks in zip(wanted, held)], length, _always(Forked(core, parent)))
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
        if is_whole:
            capacity = max(length, suspended.capacity if capacity is None else capacity)
            held = [
                ceil_div(capacity, group.block_size) * group.places - first
                for group, first in zip(core.groups, suspended.firsts)
            ]
            reserved = [max(blocks) for blocks in zip(reserved, held)]
            self._begin(request, reserved, capacity, self._swapped(match, suspended, reserved))
            self._settler.settle(request)
            return
        match, found = core.prefix.find(keys, namespace)
        hit = self._look_below(request, len(keys), reserved, match, found)
        with nullcontext() if hit is None else hit:
            computed = length - request.match.resumable
            self._begin(request, reserved, capacity or 0, self._cached(match, found, hit))
            request.tally.computed += computed
            core.counters.began(namespace, request.match, length)
            self._settler.begun(request, hit)

    @observable
    def receive(self, request: Request, length: int, reserve: int, source_of: Callable[[Match], Source]) -> None:
        """Start ``request``, which is new, with its first ``length`` tokens, from what ``source_of`` makes of what is cached
        of them. Raises what the source raises, too."""
        core = self._core
        if core.dropped_fences:
            self.ending.leave_dropped_fences()
        wanted = core.plan.blocks_wanted(reserve, 0, core.max_context)
        held = [
            ceil_div(length, group.block_size) * group.places - group.growth.first_needed(length) // group.block_size
            for group in core.groups
        ]
        self._check_slot()
        self._settler.settle_waiting()
        try:
            sources = self._received(request.keys(0, length), request.namespace, source_of)
            self._begin(request, [max(*blocks) for blocks in zip(wanted, held)], length, sources)
            request.tally = core.counters.tally(request.namespace)
            self._settler.begun(request, None)
        except BaseException:
            if request.state is State.RUNNING and not core.guard.is_torn:  # the caller gets no handle
                core.release(request)
            request.handle = None  # nothing is left to be closed
            raise
        request.tally.requests += 1

    def _received(
        self, keys: Tokens, namespace: bytes, source_of: Callable[[Match], Source]
    ) -> Iterator[Source | None]:
        """Yield what ``source_of`` makes of what is cached of the text ``keys``, then None, for ever."""
        while True:
            yield source_of(self._core.prefix.tree.match(keys, namespace))
            yield None

    # -- what a request may start from, in the order in which it is tried ---------------------------------------------

    def _cached(self, match: Match, found: PrefixMatch, hit: Hit | None) -> Iterator[Source | None]:
        """Yield what tiers have beyond what was ``found``, what was found, and what of it needs no copy, since the source
        of a copy may be what must be evicted. Then None, and the same again, as it is by then."""
        prefix, size, first = self._core.prefix, self._core.block_size, found
        while True:
            if hit is not None and hit.begin <= match.num_blocks and hit.end * size > found.resumable:
                yield Loaded(self._core, match, found, hit)
                match, found = prefix.left_of(first, match)  # making room for it may have evicted blocks
            yield Cached(self._core, match, found)
            if found.checkpoint is not None or found.resumable % size:
                match, found = prefix.left_of(first, match)
                yield Cached(self._core, match, prefix.without_copies(match, found))
            yield None
            match, found = prefix.left_of(first, match)

    def _swapped(self, match: Match, suspended: Suspended, reserved: list[int]) -> Iterator[Source | None]:
        """Yield what a request had when it was ``suspended``, and then None, as long as all of it is there. Raises
        RetryLater if blocks that it left in the prefix cache were evicted: the next ``resume`` then has tokens to
        compute."""
        prefix = self._core.prefix
        while prefix.index.are_there(match, suspended.left_behind):
            yield Swapped(self._core, match, suspended)
            yield None
            match, _ = prefix.find_again(match)
        raise self._core.capacity.shortage(RetryLater, reserved, self._core.plan.budget)

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
        request: Request,
        length: int,
        reserved: list[int],
        match: Match,
        found: PrefixMatch,
        prefetch: Any = None,
    ) -> Hit | None:
        """Return what tiers have of all but the last of the first ``length`` tokens of ``request``, beyond what is
        cached. None if they have nothing, or if the ``reserved`` blocks are not available now."""
        core = self._core
        if any(blocks > core.capacity.available(group) for group, blocks in zip(core.groups, reserved)):
            return None
        return core.tiers.find(request, length, match.num_blocks, found.resumable // core.block_size, prefetch)

    # -- one start ----------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, reserved: list[int], capacity: int, sources: Iterator[Source | None]) -> None:
        """Start ``request`` from the first of ``sources`` for which there is room, with ``reserved[i]`` blocks of group i
        reserved and room for ``capacity`` tokens. At each None close what was dropped, else end the pin of the lowest
        priority. Raises RetryLater if there is no room and no pin; the request then holds nothing."""
        core = self._core
        for source in sources:
            if source is not None:
                if self._start(request, source, reserved, capacity):
                    return
            elif not core.dropped or not self.ending.close_dropped():
                pin = core.prefix.next_pin()
                if pin is None:
                    raise core.capacity.shortage(RetryLater, reserved, core.plan.budget)
                _log.info("a pin of %d blocks is ended to make room for a request", pin.num_blocks)
                core.guard.change(core.prefix.unpin, pin)

    def _start(self, request: Request, source: Source, reserved: list[int], capacity: int) -> bool:
        """Start ``request`` from ``source``. Return False, with nothing held, if there is no room for it, or if tiers
        could not deliver it."""
        core = self._core
        holding, names = source.hold()
        try:
            own = self._own_blocks(source, reserved, capacity)
            if own is not None and holding.lease.num_blocks:
                core.guard.change(core.prefix.tree.touch, holding.lease, priority=request.priority)
            found = None if own is None else source.fill(holding, own)
            if own is None or found is None:
                core.guard.change(core.prefix.index.release, holding)
                return False
            if source.scratch is not None:
                own[source.scratch] = BlockPlaces(own[source.scratch][:-1])  # free again
            shared = [group.places_of(named) for group, named in zip(core.groups, names)]
            is_same = isinstance(source, Swapped)
            if (residency := core.prefix.residency) is not None:
                for group, named in zip(core.groups, names):
                    residency.used(group.index, named)
            self._commit(request, found, holding, is_same, list(zip(source.shared, shared, own, reserved)))
        except BaseException:
            if not core.guard.is_torn:
                core.guard.change(core.prefix.index.release, holding)
            raise
        return True

    def _own_blocks(self, source: Source, reserved: list[int], capacity: int) -> list[BlockPlaces] | None:
        """Make room for ``reserved[i]`` blocks of group i, and return which free blocks are to follow the shared ones, up
        to ``capacity`` tokens; None if there is no room."""
        core, capacity = self._core, max(capacity, source.found.resumable)
        needs: list[int] = []
        more: list[int] = []
        for group, span, most in zip(core.groups, source.shared, reserved):
            need, lacking = -(-capacity // group.block_size) * group.places - span.stop, most - len(span)
            needs.append(need if need > 0 else 0)
            more.append(lacking if lacking > needs[-1] else needs[-1])
        if source.scratch is not None:
            needs[source.scratch] += 1
            more[source.scratch] += 1
        if not core.capacity.make_room(needs, more):
            return None
        return [BlockPlaces(group.free.peek(need)) for group, need in zip(core.groups, needs)]

    def _commit(
        self,
        request: Request,
        found: PrefixMatch,
        holding: Holding,
        is_same: bool,
        rows: list[tuple[range, BlockPlaces, BlockPlaces, int]],
    ) -> None:
        """Give ``request`` a slot and its ``rows``: it runs. Nothing here may fail.

        ``holding``: what it takes over. ``is_same``: it continues exactly as it was suspended. ``rows``: for each group
        the shared columns and their blocks, its own blocks, and how many it reserves in all."""
        core = self._core
        core.guard.is_torn = True
        slot = core.free_slots.pop()
        for group, (columns, shared, own, most) in zip(core.groups, rows):
            group.begin(slot, columns.start, shared, own, most)
        core.prefix.index.release_copied(holding)
        is_resumed = request.state is State.SUSPENDED
        if is_resumed:
            core.swap.drop(core.suspended[request])
        if not is_same:
            request.start_at(found, core.block_size)
        request.lease, request.slot, request.state = holding.lease, slot, State.RUNNING
        request.resumed_at = core.counters.stopped
        if is_resumed:
            del core.suspended[request]
        core.allocated(request)
        core.running[slot] = request
        core.guard.is_torn = False


def _always(source: Source) -> Iterator[Source | None]:
    """Yield ``source``, then None, for ever."""
    while True:
        yield source
        yield None
