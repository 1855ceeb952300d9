"""How a request starts and ends. To start, it gets a slot, the blocks that it starts from, and room for its tokens.

    open      what is cached of its prompt, or what tiers have  ──┐
    fork      what its parent holds                               ├──► hold ──► make room ──► fill ──► commit: it runs
    resume    what it had, or what is cached of its text        ──┘

Each call does all of this; or it raises, and the request holds no slot, no block and no pin. What it may start from are
blocks that it shares with others, and what is copied into blocks of its own:

    Cached     whole blocks of the prefix tree; copies of the block after them and of the states of a checkpoint
    Loaded     whole blocks of the prefix tree; what tiers have after them
    Swapped    what it left in the prefix tree when it was suspended; the rest from host memory
    Forked     whole blocks of a running request; copies of its last block and its states

Each keeps what it shares and copies from eviction (``hold``), and fills the request's own blocks (``fill``) before anybody
owns them, so nothing that others see changes until ``Admission`` commits the start.

A request ends by ``close``, with the last fence around it, or because nobody can name it any more. A fence means that a step
or a copy of it is in flight: publishing and ``close`` wait for its end. A fence object or a sequence may be collected before
that, in any thread, in the middle of any call: after an interrupt, or because a caller dropped it. Finalizers only append it
to a list of ``Core``; the rest is done here, by later calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import nullcontext, suppress
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from kvpagoda.abc import observable
from kvpagoda.arrays import Tokens
from kvpagoda.core.blocks.group import BlockNames, BlockPlaces
from kvpagoda.core.cache.below import Hit
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.cache.request import RequestState, State
from kvpagoda.core.cache.settling import Settler
from kvpagoda.core.cache.swap import Suspended
from kvpagoda.core.groups.base import Holding
from kvpagoda.core.prefix import Match
from kvpagoda.errors import RetryLater
from kvpagoda.units import ceil_div

# -- what a request starts from --------------------------------------------------------------------------------------

_NONE = BlockNames(np.empty(0, np.int32))


class StartSource(Protocol):
    """What a request can start from. Each has blocks of the core's groups, so no user implements one."""

    found: PrefixMatch
    """How much of the text that is."""
    shared: list[range]
    """For each group: the columns of the text that are shared. The row of the group begins where its range begins, also
    if the range is empty."""

    scratch: int | None
    """The index of the group of which ``fill`` needs one free block more, in ``own``, while it runs; None: of no group."""

    ids: list[BlockNames]
    """For each group: the ids of the shared blocks."""

    def hold(self) -> Holding:
        """Keep from eviction what is shared and copied, and return the hold. Raises StaleHandle, holding nothing."""

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        """Copy or load into ``own``, by group the free blocks behind the shared ones, what the request starts from beyond
        these. ``holding``: from ``hold``. Return what it can start from then; None if that is no more than without this
        source."""


class Cached:
    """What was ``found`` in the prefix tree, in ``match``."""

    scratch: int | None = None

    def __init__(self, core: Core, match: Match, found: PrefixMatch) -> None:
        self._core, self._match = core, match
        self.found = found
        self.shared = self._columns(found.resumable)
        prefix = core.prefix
        if prefix.optional:
            self.found = found._replace(lacking_from=prefix.lacking_from(self.shared, found.resumable))
        self._num_whole = min(self.found.resumable // core.block_size, match.num_blocks)
        self._windows = prefix.read_in(match, self.shared) if prefix.windows else ()
        self.ids = [_NONE] * len(core.groups)
        if prefix.full is not None:
            self.ids[prefix.full.index] = BlockNames(match.ids[0, : self._num_whole])
        for group, read in zip(prefix.windows, self._windows):
            self.ids[group.index] = read

    def _columns(self, num_tokens: int) -> list[range]:
        """Return for each group the columns that are shared to go on after ``num_tokens`` tokens."""
        core = self._core
        if core.prefix.optional:
            return core.prefix.columns(self._match, num_tokens)
        return [group.shared_columns(num_tokens // core.block_size) for group in core.groups]

    def hold(self) -> Holding:
        prefix, found = self._core.prefix, self.found
        has_partial = found.resumable % prefix.block_size > 0
        return prefix.hold(self._match, self._num_whole, self._windows, found.checkpoint, has_partial=has_partial)

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, partial, checkpoint = self._core, holding.partial, self.found.checkpoint
        if partial is not None and core.full is not None:
            source = core.full.places_of(BlockNames(core.prefix.tree.last_ids(partial)[:1]))
            rows = self.found.resumable % core.block_size
            core.memory.copy(core.full.index, source, own[core.full.index][:1], rows)
        if (states := core.states) is not None:
            if checkpoint is None:
                states.reset(own[states.index])
            else:
                states.restore(core.prefix.kept[checkpoint].states, self.found.resumable, own)
        return self.found


class Loaded(Cached):
    """What was ``found``, and what tiers have beyond it: the ``hit``, which ends further on."""

    def __init__(self, core: Core, match: Match, found: PrefixMatch, hit: Hit) -> None:
        end = hit.end * core.block_size
        groups = {name: max(tokens, end) for name, tokens in found.groups.items()}
        known = max(found.num_tokens, end)
        limited_by = "nothing" if known == end else found.limited_by
        super().__init__(core, match, PrefixMatch(known, end, limited_by, groups, None, end - found.resumable))
        self._hit, self.scratch = hit, None if core.states is None else core.states.scratch

    def _columns(self, num_tokens: int) -> list[range]:
        core, num_blocks = self._core, num_tokens // self._core.block_size
        whole = min(num_blocks, self._match.num_blocks)
        columns = [group.shared_columns(num_blocks) for group in core.groups]
        return [range(whole) if group is core.full else span[:0] for group, span in zip(core.groups, columns)]

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, found, hit = self._core, self.found, self._hit
        whole, grid = 0 if core.full is None else self.shared[core.full.index].stop, core.prefix.points.grid
        targets: Many[BlockPlaces] = own
        if core.states is not None and self.scratch is None:
            targets = core.states.begin_at(found.resumable, own)
        end = whole + core.tiers.load(hit, targets, whole)
        if core.states is not None:
            core.states.loaded(found.resumable, own)
        if core.full is None:
            return found
        lost = (hit.end - end // grid * grid) * core.block_size
        if end < hit.end and (core.bounded or found.loaded <= lost):
            return None
        return found._replace(resumable=found.resumable - lost, loaded=found.loaded - lost)


class Swapped(Cached):
    """The bytes of a ``suspended`` request, and what it left in the prefix tree, which ``match`` has."""

    def __init__(self, core: Core, match: Match, suspended: Suspended) -> None:
        self._suspended = suspended
        found = PrefixMatch(match.num_tokens, match.num_blocks * core.block_size, "nothing")
        super().__init__(core, match, found)

    def _columns(self, num_tokens: int) -> list[range]:
        core, left = self._core, self._suspended.left_behind
        return [
            range(num_tokens // core.block_size) if group is core.full else left[group.index] for group in core.groups
        ]

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, suspended = self._core, self._suspended
        counts = [max(0, part.end - span.stop) for part, span in zip(suspended.parts, self.shared)]
        states = core.states
        targets = own if states is None else states.begin_at(suspended.length, own)
        core.swap.copy_in(suspended, [places[:count] for places, count in zip(targets, counts)])
        if states is not None and not counts[states.index]:
            states.reset(own[states.index])
        return self.found


class Forked:
    """What the running request ``parent`` holds."""

    scratch: int | None = None

    def __init__(self, core: Core, parent: RequestState) -> None:
        self._core, self._parent, slot = core, parent, parent.slot
        lacking = parent.lacking_from
        self.found = PrefixMatch(parent.length, parent.length, "nothing", lacking_from=lacking)
        self.shared = [range(group.first[slot], max(group.first[slot], group.shared[slot])) for group in core.groups]
        self.ids = [group.shared_names(slot) for group in core.groups]

    def hold(self) -> Holding:
        prefix, lease = self._core.prefix, self._parent.lease
        return prefix.hold(lease, lease.num_blocks, [self.ids[group.index] for group in prefix.windows])

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        states, slot = self._core.states, self._parent.slot
        for group, span, places in zip(self._core.groups, self.shared, own):
            if len(places) and group is not states:
                last = group.places_between(slot, span.stop, span.stop + len(places))
                rows = self.found.resumable - span.stop * group.block_size
                self._core.memory.copy(group.index, last, places, min(rows, len(places) * group.block_size))
        if states is not None:
            states.fork(slot, self.found.resumable, own)
        return self.found


# -- how a request ends ----------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


class Ending:
    """Closes the requests of ``core``, and counts the fences around them."""

    def __init__(self, core: Core, settler: Settler) -> None:
        self._core, self._settler = core, settler

    @observable
    def close(self, request: RequestState) -> None:
        """End ``request``: free its own blocks and its slot; what it published stays cached, unpinned. If a fence is
        around it, only mark it as closing: the end of the last fence closes it."""
        core, counters = self._core, self._core.counters
        if request.rows is not None:
            request.detach()
        if request.num_fences and core.dropped_fences:
            self.leave_dropped_fences()
        if request.num_fences:
            request.state = State.CLOSING
            return
        computed = request.own_length - request.match.resumable
        if request.state is State.SUSPENDED:
            core.guard.is_torn = True
            core.swap.drop(core.suspended[request])
            del core.suspended[request]
            request.state, request.handle = State.CLOSED, None
            if core.observers.ended:
                core.observers.note_end(request)
            core.guard.is_torn = False
        else:
            if request in core.waiting and (core.bounded or core.prefix.windows or core.tiers.levels):
                self._settler.settle(request)
            if core.bounded:
                self._settler.checkpoints.ending(request)
                core.release(request)
            else:
                core.release(request, last=self._settler.last_blocks(request))
        counters.closed += 1
        request.tally.computed += computed
        if core.stale or core.memory.is_poisoning:
            self.tidy()

    def close_dropped(self) -> bool:
        """Close the requests whose sequences were collected, after leaving the fences that were. Return whether there
        were any such requests or fences. O(requests).

        Called where slots, blocks or swap memory are lacking. If it raises, the next such call does the rest."""
        core = self._core
        has_left = self.leave_dropped_fences()
        num_dropped, before = len(core.dropped), core.counters.dropped
        for request in [*core.running.values(), *core.suspended]:
            if request.is_dropped:
                self.close(request)
                core.counters.dropped += 1
                text = "a sequence of %d tokens was dropped without close(), and is closed now"
                _log.warning(text, request.own_length)
        for _ in range(num_dropped):
            core.dropped.popleft()
        return has_left or core.counters.dropped > before

    def close_all(self) -> None:
        """Close every request, running or suspended, except that those in a fence only end with it."""
        self.leave_dropped_fences()
        for request in [*self._core.running.values(), *self._core.suspended]:
            if request.state is not State.CLOSING or not request.num_fences:
                self.close(request)

    def tidy(self) -> None:
        """Poison freed blocks, and drop what is stale, now that blocks may have been freed."""
        if self._core.memory.is_poisoning:
            self._core.capacity.tidy()
        if self._core.stale:
            self.clear_stale()

    def clear_stale(self) -> None:
        """Drop the cached blocks of the stale namespaces that are not in use any more."""
        core = self._core
        waiting = {request.namespace for request in core.suspended}  # resumed requests may publish there again
        for namespace in [*core.stale]:
            with suppress(RetryLater):
                core.capacity.forget(core.prefix.clear, namespace, reason="dropped")
                core.stale -= {namespace} - waiting

    # -- fences ------------------------------------------------------------------------------------------------------

    def check_unfenced(self, request: RequestState, what: str) -> None:
        """Raise RetryLater if a fence is around ``request``, which therefore cannot be ``what``."""
        if request.num_fences and self._core.dropped_fences:
            self.leave_dropped_fences()
        if request.num_fences:
            text = f"slot {request.slot} has {request.num_fences} fences and cannot be {what}"
            raise RetryLater.with_hint(text, "leave them first", available=request.num_fences)

    def enter_fence(self, requests: Many[RequestState], fenced: list[RequestState]) -> None:
        """Add one fence around each of ``requests``, and append each to ``fenced``. Raises StaleHandle, adding none."""
        for request in requests:
            request.check_running()
        for request in requests:
            request.num_fences += 1
            fenced.append(request)

    def leave_fence(self, fenced: list[RequestState], num_left: int = 0) -> None:
        """Remove one fence around each request of ``fenced``, and the request from the list, from the last one on until
        ``num_left`` are left; then do what waited for a last fence. An error in one request does not stop the others;
        the first error is raised at the end."""
        ended, errors = list[RequestState](), list[BaseException]()
        while len(fenced) > num_left:
            request = fenced[-1]
            if request.num_fences == 1:
                ended.append(request)
            if request.num_fences:  # 0 after a reset
                request.num_fences -= 1
            fenced.pop()
        for request in () if self._core.guard.is_torn else ended:  # ``reset`` will end them
            try:
                self._leave(request)
            except BaseException as error:
                errors.append(error)
                if self._core.guard.is_torn:
                    break
                try:
                    self._leave(request)  # once more: no later call but ``KVCache.close`` would do it
                except BaseException as again:
                    errors.append(again)
        if errors:
            raise errors[0]

    def leave_dropped_fences(self) -> bool:
        """Leave the fences that were collected inside their ``with`` block; return whether there were any. If it
        raises, the next call does the rest."""
        fences = self._core.dropped_fences
        num_fences = len(fences)
        for _ in range(num_fences):
            self.leave_fence(fences[0])
            fences.popleft()
        return num_fences > 0

    def _leave(self, request: RequestState) -> None:
        """Do what waited for the last fence around ``request``: close it, or publish what it committed."""
        if request.state is State.CLOSING:
            self.close(request)
        elif request.state is State.RUNNING and request in self._core.waiting:
            request.detach()
            self._settler.settle(request)


# -- how a request starts --------------------------------------------------------------------------------------------


class Admission:
    """Opens, forks and resumes the requests of ``core``."""

    def __init__(self, core: Core, settler: Settler) -> None:
        self._core, self._settler, self.ending = core, settler, Ending(core, settler)

    # -- three ways to start -----------------------------------------------------------------------------------------

    @observable
    def open(
        self,
        request: RequestState,
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
            if not core.free_slots or core.dropped:
                self._check_slot()
            if core.waiting:
                self._settler.settle_waiting()
            match, found = core.prefix.find(request.keys(0, length if lookup else 0), request.namespace)
            if core.prefix.points.ends_steps and self._settler.checkpoints.of_running(match, found):
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
                request.records.opened_at = perf_counter()
        except BaseException:
            if request.state is State.RUNNING and not core.guard.is_torn:  # the caller gets no handle
                core.release(request)
            request.handle = None  # nothing is left to be closed
            if hit is not None:
                hit.release()
            raise

    @staticmethod
    def child_of(parent: RequestState) -> RequestState:
        """Return a new request with the committed tokens of ``parent``, for ``fork`` to start."""
        length = parent.length
        media_ids = {index: media_id for index, media_id in parent.media_ids.items() if index < length}
        child = RequestState(
            parent.tokens.copy(), length, parent.namespace, parent.priority, media_ids, publishes=parent.publishes
        )
        child.stays, child.epochs, child.tally = parent.stays, [*parent.epochs], parent.tally
        return child

    @observable
    def fork(self, parent: RequestState, child: RequestState, reserve: int) -> None:
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
    def resume(self, request: RequestState, capacity: int | None, reserve: int | None) -> None:
        """Start ``request``, which is suspended, again; see ``Sequence.resume``."""
        core, length, namespace = self._core, request.own_length, request.namespace
        self._settler.settle_waiting()
        suspended, keys, more = core.suspended[request], request.keys(0, length), max(capacity or 0, reserve or 0)
        if not request.publishes and not core.namespaces.is_current(namespace):
            # it was continued with other weights: only blocks that it published itself have its content
            keys = keys[: max((span.stop for span in suspended.left_behind if span), default=0) * core.block_size]
        match = core.prefix.tree.match(keys, namespace)
        is_whole = core.prefix.are_there(match, suspended.left_behind)
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
    def receive(
        self, request: RequestState, length: int, reserve: int, source_of: Callable[[Match], StartSource]
    ) -> None:
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
        self, keys: Tokens, namespace: bytes, source_of: Callable[[Match], StartSource]
    ) -> Iterator[StartSource | None]:
        """Yield what ``source_of`` makes of what is cached of the text ``keys``, then None, for ever."""
        while True:
            yield source_of(self._core.prefix.tree.match(keys, namespace))
            yield None

    # -- what a request may start from, in the order in which it is tried ---------------------------------------------

    def _cached(self, match: Match, found: PrefixMatch, hit: Hit | None) -> Iterator[StartSource | None]:
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

    def _swapped(self, match: Match, suspended: Suspended, reserved: list[int]) -> Iterator[StartSource | None]:
        """Yield what a request had when it was ``suspended``, and then None, as long as all of it is there. Raises
        RetryLater if blocks that it left in the prefix cache were evicted: the next ``resume`` then has tokens to
        compute."""
        prefix = self._core.prefix
        while prefix.are_there(match, suspended.left_behind):
            yield Swapped(self._core, match, suspended)
            yield None
            match, _ = prefix.find_again(match)
        raise self._core.capacity.shortage(RetryLater, reserved, self._core.plan.budget)

    def _check_slot(self) -> None:
        """Raise RetryLater if every request slot is in use. Close what was dropped if that, or a watermark, asks for it."""
        core = self._core
        if core.dropped and (not core.free_slots or core.capacity.watermark):
            self.ending.close_dropped()
        if not core.free_slots:
            text, hint = f"all {core.plan.max_requests} request slots are in use", "close one, or raise max_requests"
            raise RetryLater.with_hint(text, hint, needed=1, available=0)

    def _look_below(
        self, request: RequestState, length: int, reserved: list[int], match: Match, found: PrefixMatch,
        prefetch: Any = None,
    ) -> Hit | None:  # fmt: skip
        """Return what tiers have of all but the last of the first ``length`` tokens of ``request``, beyond what is
        cached. None if they have nothing, or if the ``reserved`` blocks are not available now."""
        core, num_blocks = self._core, found.resumable // self._core.block_size
        if any(blocks > core.capacity.available(group) for group, blocks in zip(core.groups, reserved)):
            return None
        if core.capacity.watermark:
            shared = [len(group.shared_columns(num_blocks)) for group in core.groups]
            if not core.capacity.keeps_watermark([max(0, most - n) for most, n in zip(reserved, shared)]):
                return None
        return core.tiers.find(request, length, match.num_blocks, num_blocks, prefetch)

    # -- one start ----------------------------------------------------------------------------------------------------

    def _begin(
        self, request: RequestState, reserved: list[int], capacity: int, sources: Iterator[StartSource | None]
    ) -> None:
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

    def _start(self, request: RequestState, source: StartSource, reserved: list[int], capacity: int) -> bool:
        """Start ``request`` from ``source``. Return False, with nothing held, if there is no room for it, or if tiers
        could not deliver it."""
        core, guard = self._core, self._core.guard
        guard.is_torn = True
        try:
            holding = source.hold()
        except Exception:
            guard.is_torn = False
            raise
        guard.is_torn = False
        try:
            own = self._own_blocks(source, reserved, capacity)
            if own is not None and holding.lease.num_blocks:
                guard.is_torn = True
                try:
                    core.prefix.tree.touch(holding.lease, priority=request.priority)
                except Exception:
                    guard.is_torn = False
                    raise
                guard.is_torn = False
            found = None if own is None else source.fill(holding, own)
            if own is None or found is None:
                core.guard.change(core.prefix.release, holding)
                return False
            if source.scratch is not None:
                own[source.scratch] = BlockPlaces(own[source.scratch][:-1])  # free again
            shared = [group.places_of(named) for group, named in zip(core.groups, source.ids)]
            is_same = isinstance(source, Swapped)
            self._commit(request, found, holding, is_same, list(zip(source.shared, shared, own, reserved)))
        except BaseException:
            if not core.guard.is_torn:
                core.guard.change(core.prefix.release, holding)
            raise
        if core.observers.started or core.observers.hit:
            core.observers.note_start(request, source.shared, source.ids)
        return True

    def _own_blocks(self, source: StartSource, reserved: list[int], capacity: int) -> list[BlockPlaces] | None:
        """Make room for ``reserved[i]`` blocks of group i, and return which free blocks are to follow the shared ones, up
        to ``capacity`` tokens; None if there is no room. Raises RetryLater where the watermark forbids it."""
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
        if core.capacity.watermark and not core.capacity.keeps_watermark(more):
            text = f"less than {core.capacity.watermark:.0%} of the memory would stay free beside {len(core.running)} that run"
            hint = "open it when one of them has ended, or lower Limits(watermark=)"
            available = [core.capacity.available(group) for group in core.groups]
            raise RetryLater.with_hint(text, hint, needed=more, available=available)
        if not core.capacity.make_room(needs, more):
            return None
        return [BlockPlaces(group.free.peek(need)) for group, need in zip(core.groups, needs)]

    def _commit(
        self, request: RequestState, found: PrefixMatch, holding: Holding, is_same: bool,
        rows: list[tuple[range, BlockPlaces, BlockPlaces, int]],
    ) -> None:  # fmt: skip
        """Give ``request`` a slot and its ``rows``: it runs. Nothing here may fail.

        ``holding``: what it takes over. ``is_same``: it continues exactly as it was suspended. ``rows``: for each group
        the shared columns and their blocks, its own blocks, and how many it reserves in all."""
        core = self._core
        core.guard.is_torn = True
        slot = core.free_slots.pop()
        for group, (columns, shared, own, most) in zip(core.groups, rows):
            group.begin(slot, columns.start, shared, own, most)
        if holding.checkpoint is not None or holding.partial is not None:
            core.prefix.release_copied(holding)
        is_resumed = request.state is State.SUSPENDED
        if is_resumed:
            core.swap.drop(core.suspended[request])
        if not is_same:
            request.start_at(found, core.block_size)
        request.lease, request.slot, request.state = holding.lease, slot, State.RUNNING
        request.resumed_at = core.counters.stopped
        core.running[slot] = request  # before it is no longer suspended: ``reset`` closes what is in either
        if is_resumed:
            del core.suspended[request]
        core.allocated(request)
        core.guard.is_torn = False


def _always(source: StartSource) -> Iterator[StartSource | None]:
    """Yield ``source``, then None, for ever."""
    while True:
        yield source
        yield None
