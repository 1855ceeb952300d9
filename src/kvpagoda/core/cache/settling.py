"""What follows from commits. ``settle`` does it for one request in this order, and in one call for many that are due together:

    cache_blocks   whole blocks become shareable (``PrefixCache``), and are reported to tiers and events
    keep_due       checkpoints that are due are kept (``Checkpointer``)
    slide          each window group frees, or stops reading, the blocks that slid out (``WindowGroup``)

``commit`` only appends tokens, and settles the request once it has ``settle_at`` of them: where states must be copied, a
window has slid a step's worth, a tier or a router waits for a block, or enough blocks wait. Until then the request is in
``Core.waiting``; whoever reads the prefix tree or lacks memory settles what waits first, so the delay is never visible.

A checkpoint is kept where a text is likely to be resumed (``ResumePoints``), and at the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.core.cache.below import Hit
from kvpagoda.core.cache.checkpoints import Checkpointer, report
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import RequestState, TextPart
from kvpagoda.core.groups.base import Added

_MOST_WAITING = 64
"""Blocks that an answer completes before it is settled, if nobody asks for them earlier."""
_MOST_HELD = 8
"""The same where an answer holds blocks that slid out of its windows until then."""


class Settler:
    """Settles the requests of ``core``. All of it may be done later, so no commit fails for it."""

    def __init__(self, core: Core) -> None:
        self._core, size = core, core.block_size
        self.checkpoints = Checkpointer(core)
        self._windows = [group for group in core.prefix.windows if group.slides]
        in_step = [(group.plan.most_blocks or 0) - group.most_decoding for group in self._windows]
        self._is_bounded = bool(core.bounded or self._windows)
        self._step = size * min(in_step, default=0)
        """Tokens after which the windows of a prompt slide: what a request has reserved for a step, less a block. Below 0:
        steps are so short that not even a block was reserved for one."""
        self._is_followed = bool(core.tiers.levels) or core.settings.is_followed  # a tier or a router waits for blocks
        self._is_plain = core.full is not None and not (
            self.checkpoints.ends_steps or self.checkpoints.round_every or self._is_followed
        )
        """Whether settling a request does nothing but publish and slide, unless a checkpoint is due."""
        self._has_optional = bool(core.prefix.optional)
        self.patience = (
            1 if self.checkpoints.ends_steps or self._is_followed else _MOST_HELD if self._is_bounded else _MOST_WAITING
        )
        """Blocks that an answer completes between two settlings. One: its states are copied, or somebody waits, after each
        block."""

    # -- when --------------------------------------------------------------------------------------------------------

    def plan(self, request: RequestState) -> None:
        """Decide at which length ``request``, which was just settled or just started, is settled next."""
        size, length, end = self._core.block_size, request.own_length, request.prompt_length
        if length < end and (self._is_bounded or self._is_followed):
            at = end
            if self.checkpoints.ends_steps and request.checkpoints.due:
                at = min(at, request.checkpoints.due[0] * size)
            if self._windows:
                at = min(at, length + max(1, self._step))
            if self._is_followed:
                at = min(at, (length // size + 1) * size)
        else:  # requests that began together are settled in different steps
            blocks = max(length, end) // size
            at = (blocks + self.patience - (blocks + request.slot) % self.patience) * size
        if self._step < 0:
            at = min(at, self._next_slide(length))
        if self.checkpoints.round_every:
            at = min(at, (length // self.checkpoints.round_every + 1) * self.checkpoints.round_every)
        request.settle_at = at
        if request.rows is not None:
            request.rows.settle_at[request.rows.row_of[request]] = at

    def _next_slide(self, length: int) -> int:
        """Return the length above ``length`` at which a block slides out of a window next, at most a block further."""
        lengths = np.arange(length, length + self._core.block_size + 1)
        first = [group.growth.first_kept(lengths) // group.block_size for group in self._windows]
        slides = np.any([one > one[0] for one in first], axis=0)
        return length + (int(slides.argmax()) or len(lengths) - 1)

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self, *requests: RequestState) -> None:
        """Publish the whole blocks of each of ``requests``, keep the checkpoints that are due, and slide its windows: in turn,
        but in one call for those whose turns do not meet (``_together``).

        Does nothing for one with a fence around it; the end of the last fence calls this again. If memory is lacking, or a
        copy fails, the next commit of that request tries again."""
        core = self._core
        waiting: list[RequestState] = []
        for request in requests:
            core.waiting[request] = None
            if request.records.opened_at:
                core.tiers.computed(request)
            if not request.num_fences:
                waiting.append(request)
        at, end, is_plain = 0, len(waiting), self._is_plain
        while at < end:
            some, count = waiting[at : at + 1], 1
            if is_plain and end - at > 1:
                some = self._together(waiting, at)
            for request in some:
                if request.rows is not None:
                    request.rows.flush(request)
            try:
                if self.checkpoints.round_every:
                    self.checkpoints.round(some[0])
                if some[0].publishes:
                    count = self._publish_blocks(some)
                    if count < len(some):
                        some = some[:count]
                if self._is_bounded:
                    for request in some:
                        due, published = request.checkpoints.due, request.lease.num_blocks
                        is_due = due and (due[0] <= published or published + self.checkpoints.reach > due[-1])
                        if request.publishes and (is_due or self.checkpoints.ends_steps):
                            self.checkpoints.keep_due(request)
                    for group in self._windows:
                        leaving = group.leaving(some)
                        if leaving is not None:
                            core.guard.is_torn = True
                            group.slide(leaving)
                            if len(leaving.own):
                                core.capacity.release(group, leaving.own)
                            core.guard.is_torn = False
                if core.states is not None and core.states.named:
                    for request in some:
                        num_blocks, due = request.own_length // core.block_size, request.checkpoints.due
                        useless = core.states.useless(request, num_blocks, due)
                        core.guard.change(core.give_back, request, useless)
            except (MemoryError, RuntimeError) as error:
                for request in some[:count]:
                    self._failed(request, error)
            else:
                for request in some:
                    self.plan(request)
                    del core.waiting[request]
            at += count

    def _together(self, requests: list[RequestState], at: int) -> list[RequestState]:
        """Return request ``at`` and those that follow as long as it is all the same whether each of them is published and
        slides before the next, or all are published and then all slide: nothing is evicted for any of them, and none frees
        blocks of its own."""
        end = at
        for request in requests[at:]:
            is_lacking = self._has_optional and request.lacking_from is not None
            if request.checkpoints.due or not request.publishes or is_lacking:
                break
            end += 1
        return requests[at : max(at + 1, end)]

    def settle_waiting(self, but: RequestState | None = None) -> None:
        """Settle the requests that wait for it, all ``but`` one. Callers that read the prefix tree or lack blocks call
        this first."""
        waiting = [request for request in self._core.waiting if request is not but]
        if waiting:
            self.settle(*waiting)

    def begun(self, request: RequestState, hit: Hit | None) -> None:
        """Publish what ``request``, which just started, loaded from tiers (``hit``); keep or use the checkpoint where
        it started; and decide where its prompt keeps further ones."""
        core, found = self._core, request.match
        begin = found.resumable // core.block_size
        if core.bounded or request.checkpoints.asked is not None:
            self.checkpoints.begun(request, begin)
        self.plan(request)
        if not request.publishes:
            return
        first: int | None = None
        try:
            if found.loaded:
                self._publish_blocks([request], hit, found.resumable)
            if core.bounded or request.checkpoints.asked is not None:
                first = self.checkpoints.keep_first(request, begin, is_loaded=found.loaded > 0)
        except (MemoryError, RuntimeError) as error:
            self._failed(request, error)
            return
        if begin and not found.loaded and core.tiers.levels:
            core.tiers.on_hit(request, first)

    # -- parts of these ----------------------------------------------------------------------------------------------

    def _publish_blocks(self, requests: Many[RequestState], hit: Hit | None = None, length: int | None = None) -> int:
        """Make the whole blocks of ``requests`` shareable, and report them to events and tiers. ``hit``: what they were loaded
        from, if anything. ``length``: only those of the first so many tokens.

        Returns how many requests are done. It stops before one for which memory lacks, and raises MemoryError, changing
        nothing, if that is the first."""
        core, size = self._core, self._core.block_size
        rows: list[int] = []
        slots: list[int] = []
        begins: list[int] = []
        added: list[Added] = []
        has_entry = hit is None and bool(core.bounded)
        for row, request in enumerate(requests):
            lease = request.lease
            begin, end = lease.num_blocks, (request.own_length if length is None else length) // size
            if begin < end:
                rows.append(row)
                slots.append(request.slot)
                begins.append(begin)
                added.append(request.added(begin, end, size, has_entry=has_entry))
        if not rows:
            return len(requests)
        is_whole, guard = not self._has_optional or requests[0].lacking_from is None, core.guard
        guard.is_torn = True
        try:
            num_done, duplicates = core.prefix.cache_blocks(slots, begins, added, is_whole)
        except Exception:
            guard.is_torn = False
            raise
        for group, places in duplicates:
            core.capacity.release(group, places)
        if core.observers.cached:
            for row, begin in zip(rows[:num_done], begins):
                core.observers.note_cached(requests[row], begin, requests[row].namespace not in core.stale)
        guard.is_torn = False
        if core.full is None:
            core.capacity.forget(core.prefix.evict_unbacked, is_evicted=True)
        if core.tiers.levels:
            for row, begin in zip(rows[:num_done], begins):
                core.tiers.on_cached(requests[row], begin, hit)
        return len(requests) if num_done == len(rows) else rows[num_done]

    def last_blocks(self, request: RequestState) -> TextPart | None:
        """Return the blocks that ``request``, which ends, has not published; None if there are none. Only for models
        without bounded groups, whose hits may end inside a block. A partial block at the end is one of them: the tree
        treats it as a whole one, with ``NO_TOKEN`` behind its tokens, and it can be reused up to there."""
        core, size, grid = self._core, self._core.block_size, self._core.prefix.points.grid_tokens
        begin, end = request.lease.num_blocks, request.own_length // size
        if request.own_length // grid * grid > end * size:
            end += 1
        has_computed = request.own_length > request.match.resumable
        if begin == end or not has_computed or core.bounded or not request.publishes:
            return None
        return request.last_keys(begin * size, end * size)

    def _failed(self, request: RequestState, error: MemoryError | RuntimeError) -> None:
        """Let the next commit of ``request`` try again what ``error`` stopped."""
        self._core.waiting[request] = None
        request.settle_at = 0
        if request.rows is not None:
            request.rows.settle_at[request.rows.row_of[request]] = 0
        report(self._core, error)
