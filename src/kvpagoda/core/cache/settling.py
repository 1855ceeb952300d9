"""What follows from commits. ``settle`` does it for one request in this order, and in one call for many that are due together:

    publish     whole blocks become shareable, and are reported to tiers and events
    keep        checkpoints that are due are kept
    slide       window groups free, or stop reading, the blocks that slid out

``commit`` only appends tokens, and settles the request once it has ``settle_at`` of them: where states must be copied, a
window has slid a step's worth, a tier or a router waits for a block, or enough blocks wait. Until then the request is in
``Core.waiting``; whoever reads the prefix tree or lacks memory settles what waits first, so the delay is never visible.

A checkpoint is kept where a text is likely to be resumed (``ResumePoints``), and at the end of an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from itertools import islice

import numpy as np

from kvpagoda.core.blocks.places import BlockNames
from kvpagoda.core.cache.below import Hit
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.cache.request import Breakpoints, Request, TextPart
from kvpagoda.core.cache.step_states import Named
from kvpagoda.core.prefix import Entry, Match
from kvpagoda.core.prefix.hybrid import Added, Kept
from kvpagoda.errors import Exhausted

_log = logging.getLogger(__name__)
_NONE = BlockNames(np.empty(0, np.int32))
_MOST_WAITING = 64
"""Blocks that an answer completes before it is settled, if nobody asks for them earlier."""
_MOST_HELD = 8
"""The same where an answer holds blocks that slid out of its windows until then."""


class Settler:
    """Settles the requests of ``core``. All of it may be done later, so no commit fails for it."""

    def __init__(self, core: Core) -> None:
        self._core, size = core, core.block_size
        self._points = core.prefix.points
        self._most_ahead = min((n for _, _, n in core.plan.rewinds), default=0)
        """How many tokens steps may have written after a text whose states are still there."""
        self._most_named = (core.settings.limits.step_checkpoints or 0) if self._points.ends_steps else 0
        """Positions inside a step of one request at which it leaves states."""
        rounds = core.settings.retention.rounds_states and core.states.scratch is not None
        self._round_every = core.settings.limits.hit_grid if rounds else 0
        """Tokens after which the states of requests are rounded; 0: they are not."""
        self._windows = [(group, window) for group, window in core.prefix.windows if group.growth.span is not None]
        self._spans = [group.growth.span or 0 for group, _ in self._windows]
        # by window: the most blocks that a request holds while it commits at most a block at a time
        self._most_decoding = [group.growth.most_blocks(size, size) or 0 for group, _ in self._windows]
        in_step = [(group.plan.most_blocks or 0) - most for (group, _), most in zip(self._windows, self._most_decoding)]
        self._is_bounded = bool(core.bounded or self._windows)
        self._step = size * min(in_step, default=0)
        """Tokens after which the windows of a prompt slide: what a request has reserved for a step, less a block. Below 0:
        steps are so short that not even a block was reserved for one."""
        self._is_followed = bool(core.tiers.levels) or core.settings.is_followed  # a tier or a router waits for blocks
        self._is_plain = core.full is not None and not (
            self._points.ends_steps or self._round_every or self._is_followed
        )
        """Whether settling a request does nothing but publish and slide, unless a checkpoint is due."""
        self._has_optional = bool(core.prefix.index.optional)
        self.patience = (
            1 if self._points.ends_steps or self._is_followed else _MOST_HELD if self._is_bounded else _MOST_WAITING
        )
        """Blocks that an answer completes between two settlings. One: its states are copied, or somebody waits, after each
        block."""

    # -- when --------------------------------------------------------------------------------------------------------

    def plan(self, request: Request) -> None:
        """Decide at which length ``request``, which was just settled or just started, is settled next."""
        size, length, end = self._core.block_size, request.own_length, request.prompt_length
        if length < end and (self._is_bounded or self._is_followed):
            at = end
            if self._points.ends_steps and request.due:
                at = min(at, request.due[0] * size)
            if self._windows:
                at = min(at, length + max(1, self._step))
            if self._is_followed:
                at = min(at, (length // size + 1) * size)
        else:  # requests that began together are settled in different steps
            blocks = max(length, end) // size
            at = (blocks + self.patience - (blocks + request.slot) % self.patience) * size
        if self._step < 0:
            at = min(at, self._next_slide(length))
        if self._round_every:
            at = min(at, (length // self._round_every + 1) * self._round_every)
        request.settle_at = at
        if request.rows is not None:
            request.rows.settle_at[request.rows.row_of[request]] = at

    def _next_slide(self, length: int) -> int:
        """Return the length above ``length`` at which a block slides out of a window next, at most a block further."""
        lengths = np.arange(length, length + self._core.block_size + 1)
        first = [group.growth.first_kept(lengths) // group.block_size for group, _ in self._windows]
        slides = np.any([one > one[0] for one in first], axis=0)
        return length + (int(slides.argmax()) or len(lengths) - 1)

    # -- settling ----------------------------------------------------------------------------------------------------

    def settle(self, *requests: Request) -> None:
        """Publish the whole blocks of each of ``requests``, keep the checkpoints that are due, and slide its windows: in turn,
        but in one call for those whose turns do not meet (``_together``).

        Does nothing for one with a fence around it; the end of the last fence calls this again. If memory is lacking, or a
        copy fails, the next commit of that request tries again."""
        core = self._core
        waiting: list[Request] = []
        for request in requests:
            core.waiting[request] = None
            if request.opened_at:
                core.tiers.computed(request)
            if not request.num_fences:
                waiting.append(request)
        at, end, is_plain = 0, len(waiting), self._is_plain
        while at < end:
            some, count = self._together(waiting, at) if is_plain else waiting[at : at + 1], 1
            for request in some:
                if request.rows is not None:
                    request.rows.flush(request)
            try:
                if self._round_every:
                    self._round(some[0])
                if some[0].publishes:
                    count = self._publish_blocks(some)
                    if count < len(some):
                        some = some[:count]
                if self._is_bounded:
                    for request in some:
                        if core.bounded and request.publishes and (request.due or self._points.ends_steps):
                            self._keep_due(request)
                    self._slide(some)
                if core.step_states.named:
                    for request in some:
                        useless = core.step_states.useless(request, request.own_length // core.block_size)
                        core.guard.change(core.give_back, request, useless)
            except (MemoryError, RuntimeError) as error:
                for request in some[:count]:
                    self._failed(request, error)
            else:
                for request in some:
                    self.plan(request)
                    del core.waiting[request]
            at += count

    def _together(self, requests: list[Request], at: int) -> list[Request]:
        """Return request ``at`` and those that follow as long as it is all the same whether each of them is published and
        slides before the next, or all are published and then all slide: nothing is evicted for any of them, and none frees
        blocks of its own."""
        if len(requests) == 1:
            return requests
        end = at
        for request in requests[at:]:
            if request.due or not request.publishes or (self._has_optional and request.lacking_from is not None):
                break
            end += 1
        return requests[at : max(at + 1, end)]

    def settle_waiting(self, but: Request | None = None) -> None:
        """Settle the requests that wait for it, all ``but`` one. Callers that read the prefix tree or lack blocks call
        this first."""
        waiting = [request for request in self._core.waiting if request is not but]
        if waiting:
            self.settle(*waiting)

    def begun(self, request: Request, hit: Hit | None) -> None:
        """Publish what ``request``, which just started, loaded from tiers (``hit``); keep or use the checkpoint where
        it started; and decide where its prompt keeps further ones."""
        core, found = self._core, request.match
        begin = found.resumable // core.block_size
        if core.bounded and request.publishes:
            request.due = self._points.due(begin, found.num_tokens // core.block_size, request.prompt_length)
        if request.breakpoints is not None:
            self._ask(request, request.breakpoints, begin)
        self.plan(request)
        if not request.publishes:
            return
        try:
            if found.loaded:
                self._publish_blocks([request], hit, found.resumable)
            saved = self._save(request, begin, 0) if begin and core.bounded else None
            if saved is not None:
                core.prefix.index.use(saved[0])
                request.kept.append(saved[0])
                if saved[1] and not found.loaded:
                    self._store(saved[0])
            if request.breakpoints is not None:
                self._keep_before(request, request.breakpoints, begin)
        except (MemoryError, RuntimeError) as error:
            self._failed(request, error)
            return
        if begin and not found.loaded:  # one that was kept later may have evicted the checkpoint
            core.tiers.on_hit(request, saved[0] if saved is not None and saved[0] in core.prefix.kept else None)

    def checkpoint_running_request(self, match: Match, found: PrefixMatch) -> bool:
        """Keep a checkpoint of a running request whose tokens end exactly where ``match`` ends, if that saves much
        compared with ``found``: its states are those that the text of ``match`` needs. Return whether there is such a
        request; then something may have been evicted, even if no checkpoint was kept. O(running requests)."""
        core, depth, size = self._core, match.num_blocks, self._core.block_size
        if not self._points.is_worth_keeping(depth, found.resumable // size):
            return False
        for peer in core.running.values():
            fits = peer.lease.node is match.node and peer.lease.num_blocks == depth
            if fits and self._has_states(peer, depth * size) and not peer.num_fences and peer.rows is None:
                try:
                    self._save(peer, depth, 0)
                except (MemoryError, RuntimeError) as error:
                    self._report(error)
                return True
        return False

    def step_limit(self, request: Request) -> int:
        """Return the most tokens that the next step of ``request`` should compute; see ``KVCache.step_limit``."""
        request.check_running()
        length, size = request.length, self._core.block_size
        due = request.due if self._points.ends_steps else ()
        ends = (depth * size for depth in due if depth * size > length)
        end = next(islice(ends, self._most_named, None), self._core.max_context)
        if self._round_every:
            end = min(end, (length // self._round_every + 1) * self._round_every)
        return end - length

    def name_states(self, requests: Many[Request], ends: Many[int]) -> list[Named]:
        """Name blocks for the states that a step of ``requests``, up to token ``ends[i]`` of each, leaves at positions
        inside of it where checkpoints are due, and return them.

        They are allocated while there is room, after evictions if necessary; a position that an earlier step named, and
        nobody committed, keeps its block. If it raises, nothing is named anew. ``named`` follows when there is a batch."""
        core, steps, size, found = self._core, self._core.step_states, self._core.block_size, list[Named]()
        group, needs = steps.group, [int(one is steps.group) for one in core.groups]
        try:
            for row, (request, end) in enumerate(zip(requests, ends)):
                known = steps.named.get(request, {})
                in_flight = known if request.num_fences else ()
                inside = [at for at in request.due if request.length < at * size < end and at not in in_flight]
                for depth in inside[: self._most_named]:
                    assert group is not None, "checkpoints end steps where there are states"
                    is_new = depth not in known
                    if is_new and not core.capacity.make_room(needs, needs):
                        return found
                    block = group.next_names(1) if is_new else known[depth]
                    found.append((row, depth, block, is_new))
                    if is_new:
                        core.guard.is_torn = True
                        group.take(1)
                        steps.name(request, depth, block)
                        core.guard.is_torn = False
        except (MemoryError, RuntimeError) as error:
            self._report(error)
        except BaseException:
            self.unname(requests, found)
            raise
        return found

    def unname(self, requests: Many[Request], found: Many[Named]) -> None:
        """Free what ``name_states`` named anew, for a step of which there is no batch."""
        core = self._core
        for row, depth, _, is_new in found:
            if is_new and depth in core.step_states.named.get(requests[row], ()) and not core.guard.is_torn:
                core.guard.change(core.give_back, requests[row], [depth])

    def named(self, requests: Many[Request], found: Many[Named]) -> None:
        """Free what earlier steps of ``requests`` named and nobody committed, unless it is in ``found``, or a fence is around
        the request: there is a batch of the step for which ``found`` was named."""
        core, steps, now = self._core, self._core.step_states, {one[:2] for one in found}
        for row, request in enumerate(requests if steps.named else ()):
            named = () if request.num_fences else steps.named.get(request, ())
            old = [at for at in named if (row, at) not in now and not steps.is_written(request, at)]
            core.guard.change(core.give_back, request, old)

    def ending(self, request: Request) -> None:
        """Prepare ``request`` for being closed or suspended. Keep a checkpoint at the end of its answer, where it can
        be resumed."""
        core = self._core
        if request.num_fences or not core.bounded or not request.publishes:
            return
        try:
            if not self._points.ends_steps and request.own_length >= request.prompt_length:
                self._move_tail(request, request.lease.num_blocks, 0)
        except (MemoryError, RuntimeError) as error:
            self._report(error)
        self._store(request.tail)

    # -- parts of these ----------------------------------------------------------------------------------------------

    def _ask(self, request: Request, asked: Breakpoints, begin: int) -> None:
        """Decide what becomes of the positions ``asked`` of ``request``, which starts after ``begin`` blocks; those that
        it computes become due."""
        core, size = self._core, self._core.block_size
        is_bounded = bool(core.bounded)
        asked.granted.clear()
        asked.states.clear()
        for position in asked.asked:
            if position > request.prompt_length:
                continue
            at = asked.granted[position] = self._points.rounded(position, is_bounded=is_bounded)
            if not is_bounded or not at:
                asked.states[at] = "always" if request.publishes or not at else "private"
            elif not request.publishes:
                asked.states[at] = "private"
            else:
                asked.states[at] = "due" if at // size > begin else "skipped"
        request.due = sorted({*request.due, *(at // size for at, state in asked.states.items() if state == "due")})

    def _keep_before(self, request: Request, asked: Breakpoints, begin: int) -> None:
        """Keep or use checkpoints at the positions ``asked`` that lie in the ``begin`` blocks from which ``request``
        starts, where what they need is cached. Raises as ``_save`` does."""
        core, size = self._core, self._core.block_size
        for at, state in asked.states.items():
            if state == "skipped":
                is_there = core.prefix.index.checkpoint_at(request.lease, at // size) is not None
                if not is_there and self._points.ends_steps:
                    continue  # its states are not computed
                saved = self._save(request, at // size, 0)
                asked.states[at] = "memory" if saved is None else "kept" if saved[1] else "cached"
                if saved is not None:
                    request.kept.append(saved[0])
                    if saved[1]:
                        self._store(saved[0])

    def _publish_blocks(self, requests: Many[Request], source: Hit | None = None, length: int | None = None) -> int:
        """Make the whole blocks of ``requests`` shareable, and report them to events and tiers. ``source``: the hit that they
        were loaded from, if any. ``length``: only those of the first so many tokens.

        Returns how many requests are done. It stops before one for which memory lacks, and raises MemoryError, changing
        nothing, if that is the first."""
        core, size = self._core, self._core.block_size
        rows: list[int] = []
        slots: list[int] = []
        begins: list[int] = []
        added: list[Added] = []
        has_entry = source is None and bool(core.bounded)
        for row, request in enumerate(requests):
            lease = request.lease
            begin, end = lease.num_blocks, (request.own_length if length is None else length) // size
            if begin < end:
                rows.append(row)
                slots.append(request.slot)
                begins.append(begin)
                entry = request.entry(begin, size) if has_entry else None
                keys = request.keys(begin * size, end * size)
                added.append(Added(lease, keys, request.text, request.priority, entry))
        if not rows:
            return len(requests)
        has_optional, guard = not self._has_optional or requests[0].lacking_from is None, core.guard
        guard.is_torn = True
        try:
            num_done, duplicates = core.prefix.publish(slots, begins, added, has_optional)
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
                core.tiers.on_cached(requests[row], begin, source)
        return len(requests) if num_done == len(rows) else rows[num_done]

    def last_blocks(self, request: Request) -> TextPart | None:
        """Return the blocks that ``request``, which ends, has not published; None if there are none. Only for models
        without bounded groups, whose hits may end inside a block. A partial block at the end is one of them: the tree
        treats it as a whole one, with ``NO_TOKEN`` behind its tokens, and it can be reused up to there."""
        core, size, grid = self._core, self._core.block_size, self._points.grid_tokens
        begin, end = request.lease.num_blocks, request.own_length // size
        if request.own_length // grid * grid > end * size:
            end += 1
        has_computed = request.own_length > request.match.resumable
        if begin == end or not has_computed or core.bounded or not request.publishes:
            return None
        return request.last_keys(begin * size, end * size)

    def _round(self, request: Request) -> None:
        """Round the states of ``request``, if it has computed them and stands at a multiple of the hit grid."""
        length = request.own_length
        is_new = length > request.match.resumable and length != request.rounded_at
        if is_new and length % self._round_every == 0 and request.most_written <= length:
            self._core.states.round(request.slot, length)
            request.rounded_at = length

    def _slide(self, requests: Many[Request]) -> None:
        """Free, or stop reading, the window blocks that each of ``requests`` does not need any more.

        An answer keeps what is needed to resume it at its last whole block. Once the prompt is computed, the request
        reserves room for a block at a time only. If steps are so short that not even that was reserved, an answer loses
        all that slides out, and reservations stay as they are."""
        core, size = self._core, self._core.block_size
        for (group, window), num_blocks in zip(self._windows, self._most_decoding):
            growth, has_reserved = group.growth, num_blocks <= (group.plan.most_blocks or 0)
            slots: list[int] = []
            firsts: list[int] = []
            kept: list[int] = []
            needed: list[int] = []
            if len(requests) > 1:
                kept = growth.first_kept(np.array([request.own_length for request in requests])).tolist()
                needed = growth.first_needed(
                    np.array([request.lease.num_blocks for request in requests]) * size
                ).tolist()
            for row, request in enumerate(requests):
                slot, length = request.slot, request.own_length
                first = kept[row] if kept else growth.first_kept(length)
                if has_reserved and length >= request.prompt_length:
                    if request.publishes:
                        resumed = needed[row] if needed else growth.first_needed(request.lease.num_blocks * size)
                        if resumed < first:
                            first = resumed
                    if group.reserved[slot] > num_blocks:
                        group.reserve(slot, num_blocks)
                first = min(first // size, group.end[slot])
                if first > group.first[slot]:
                    slots.append(slot)
                    firsts.append(first)
            if slots:
                shared, counts, own = group.leaving(slots, firsts)
                left = window.apart(shared, counts)
                core.guard.is_torn = True
                group.slide(slots, firsts)
                for names in left:
                    window.leave(names)
                if len(own):
                    core.capacity.release(group, own)
                core.guard.is_torn = False

    def _keep_due(self, request: Request) -> None:
        """Keep the checkpoints of the prompt that are due. With states, also keep the newest one of an answer in
        progress; without, the newest one near the end of the prompt, so that window blocks there stay cached until the
        end is reached."""
        core, size, published = self._core, self._core.block_size, request.lease.num_blocks
        first = request.own_length - self._most_ahead  # the states of fewer tokens are overwritten
        while request.due and request.due[0] <= published:
            depth, is_last = request.due[0], len(request.due) == 1
            is_left = bool(core.step_states.wrote) and core.step_states.is_written(request, depth)
            is_over = self._points.ends_steps and depth * size < first and not is_left
            if is_over and core.prefix.index.checkpoint_at(request.lease, depth) is None:
                core.counters.passed += 1  # a step went past it
                del request.due[0]
                self._became(request, depth, "passed")
                continue
            saved = self._save(request, depth, self._points.slack if is_last else 0, is_left=is_left)
            del request.due[0]  # not before: if that fails, the next commit does it
            if request.breakpoints is not None:
                self._became(request, depth, "memory" if saved is None else "kept")
            if saved is not None:
                request.kept.append(saved[0])
                if saved[1]:
                    self._store(saved[0])
        if self._points.ends_steps:
            if published * size >= first and request.own_length >= request.prompt_length:
                self._move_tail(request, published, 0)
        elif request.due:
            end = request.due[-1]
            if published + self._points.slack + max(self._spans, default=0) // size > end:
                self._move_tail(request, published, self._points.slack - (end - published))

    def _became(self, request: Request, depth: int, state: str) -> None:
        """Note for the caller of ``request``, if it asked for that position, what became of it after ``depth`` blocks."""
        at, asked = depth * self._core.block_size, request.breakpoints
        if asked is not None and at in asked.states:
            asked.states[at] = state

    def _move_tail(self, request: Request, num_blocks: int, more: int) -> None:
        """Keep a checkpoint after ``num_blocks`` blocks, and drop the one that the previous call kept."""
        core, previous = self._core, request.tail
        if not num_blocks or core.prefix.index.checkpoint_at(request.lease, num_blocks) == previous:
            return
        saved = self._save(request, num_blocks, max(0, more))
        if saved is None:
            return
        name, is_new = saved
        request.tail = name if is_new else -1
        if not is_new:
            request.kept.append(name)
        core.capacity.forget(core.prefix.index.drop, previous, reason="dropped")

    def _save(self, request: Request, num_blocks: int, more: int, *, is_left: bool = False) -> tuple[int, bool] | None:
        """Keep a checkpoint after ``num_blocks`` published blocks, and up to ``more`` window blocks before those that
        it needs. Return (its name, True), or (name, False) if there is one already. ``is_left``: a step left the states in a
        block of ``step_states``, which becomes the checkpoint's; where it does not, ``settle`` frees it.

        Returns None if there is no room for it, if a window block is gone, or if the states after these blocks are
        overwritten, perhaps by a step that computed more tokens than were committed. For room the least recently used
        checkpoint is evicted, but nothing that requests have reserved is used."""
        core, prefix, states = self._core, self._core.prefix, self._core.states
        index = prefix.index
        before, name = index.last_checkpoint(request.lease, num_blocks)
        if before == num_blocks:
            index.use(name)
            return name, False
        if prefix.is_full:
            core.capacity.forget(prefix.evict_checkpoint, is_evicted=True)
        if not is_left and states.group is not None and not self._has_states(request, num_blocks * core.block_size):
            return None
        as_left = is_left and states.scratch is None
        if prefix.is_full or not (as_left or states.make_room(core.capacity)):
            return None
        tails = index.tails(request.lease, num_blocks, more)
        if tails is None:
            return None
        if is_left:
            left = core.step_states.named[request][num_blocks]
            copy = left if as_left else states.copied_from(left)
        else:
            copy = states.copied(request.slot, num_blocks * core.block_size)
        if before and name == request.tail:  # it is dropped next
            before, _ = index.last_checkpoint(request.lease, before - 1)
        entry = Entry(num_blocks - before, request.found)
        core.guard.is_torn = True
        if as_left:
            core.step_states.pop(request, num_blocks)
        else:
            states.take()
        name = index.keep(request.lease, num_blocks, Kept(*tails, copy), entry)
        if core.observers.cached:
            core.observers.note_checkpoint(request, num_blocks, copy, request.namespace not in core.stale)
        core.guard.is_torn = False
        core.tiers.checkpoint_saved(name, request, num_blocks)
        return name, True

    def _has_states(self, request: Request, length: int) -> bool:
        """Return whether the states of the first ``length`` tokens of ``request``, which are committed, are there: it
        started with them or wrote them later, and no step wrote those of so many more tokens that they are
        overwritten."""
        written = max(request.own_length, request.most_written)
        return request.oldest <= length and written - length <= self._most_ahead

    def _store(self, name: int) -> None:
        """Store checkpoint ``name`` in tiers, if it is still kept."""
        core = self._core
        if name in core.prefix.kept:
            core.tiers.store_checkpoint(name, core.prefix.kept[name], "commit")

    def _failed(self, request: Request, error: MemoryError | RuntimeError) -> None:
        """Let the next commit of ``request`` try again what ``error`` stopped."""
        self._core.waiting[request] = None
        request.settle_at = 0
        if request.rows is not None:
            request.rows.settle_at[request.rows.row_of[request]] = 0
        self._report(error)

    def _report(self, error: MemoryError | RuntimeError) -> None:
        """Log and count ``error``, unless memory was lacking, which is expected; it does not fail the call. Raises it if
        it tore the cache."""
        core = self._core
        if core.guard.is_torn:
            raise error
        if not isinstance(error, MemoryError | Exhausted):
            core.counters.failed += 1
            _log.error("publishing failed; it is tried again with a later step", exc_info=error)
