"""Checkpoints of running requests: what a text needs to be resumed in the middle, kept where that is likely to happen.

    begun      where a prompt will keep them (``ResumePoints``), and where its caller asked for them
    keep_due   those that are due are kept, after the blocks before them are shared
    ending     one at the end of an answer

A checkpoint keeps the last window of each window group, and a copy of the states. Where a step passes a position at which one
is due, it can leave its states in a block that is named for it before (``name_states``).
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Sequence as Many
from itertools import islice

from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.cache.request import Breakpoints, RequestState
from kvpagoda.core.groups.base import NO_IDS, CachedPart
from kvpagoda.core.groups.state import Named
from kvpagoda.core.prefix import Entry, Match
from kvpagoda.errors import Exhausted

_log = logging.getLogger(__name__)


def report(core: Core, error: MemoryError | RuntimeError) -> None:
    """Log and count ``error``, unless memory was lacking, which is expected; it does not fail the call. Raises it if
    it tore the cache."""
    if core.guard.is_torn:
        raise error
    if not isinstance(error, MemoryError | Exhausted):
        core.counters.failed += 1
        _log.error("publishing failed; it is tried again with a later step", exc_info=error)


class Checkpointer:
    """Keeps the checkpoints of the requests of ``core``, and is the only one that writes ``request.checkpoints``.

    ``ends_steps``: whether a step should end where one is due, since states must be copied there. ``round_every``: tokens
    after which the states of requests are rounded; 0: they are not."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._points = core.prefix.points
        self.ends_steps = self._points.ends_steps
        self._most_ahead = min((n for _, _, n in core.plan.rewinds), default=0)
        """How many tokens steps may have written after a text whose states are still there."""
        self._most_named = (core.settings.limits.step_checkpoints or 0) if self.ends_steps else 0
        """Positions inside a step of one request at which it leaves states."""
        rounds = core.settings.retention.rounds_states and core.states is not None and core.states.scratch is not None
        self.round_every = core.settings.limits.hit_grid if rounds else 0
        longest = max((group.growth.span or 0 for group in core.prefix.windows if group.slides), default=0)
        self.reach = self._points.slack + longest // core.block_size
        """Blocks before the last due one of a prompt from which on its newest checkpoint moves along."""

    # -- where -------------------------------------------------------------------------------------------------------

    def begun(self, request: RequestState, begin: int) -> None:
        """Decide where the prompt of ``request``, which starts after ``begin`` blocks, keeps checkpoints."""
        core, found, of = self._core, request.match, request.checkpoints
        if core.bounded and request.publishes:
            of.due = self._points.due(begin, found.num_tokens // core.block_size, request.prompt_length)
        if of.asked is not None:
            self._ask(request, of.asked, begin)

    def _ask(self, request: RequestState, asked: Breakpoints, begin: int) -> None:
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
        request.checkpoints.due = sorted(
            {*request.checkpoints.due, *(at // size for at, state in asked.states.items() if state == "due")}
        )

    def also_at(self, request: RequestState, length: int) -> bool:
        """Where states are copied, keep a checkpoint after the first ``length`` tokens of the prompt of ``request`` too.
        Return False if a step in flight goes past them and does not leave the states there."""
        states, depth, due = self._core.states, length // self._core.block_size, request.checkpoints.due
        if states is None:
            return True
        if not self._has_states(request, length) and depth not in states.named.get(request, ()):
            return False
        if depth not in due:
            insort(due, depth)
        request.settle_at = min(request.settle_at, length)
        return True

    def step_limit(self, request: RequestState) -> int:
        """Return the most tokens that the next step of ``request`` should compute; see ``KVCache.step_limit``."""
        request.check_running()
        length, size = request.length, self._core.block_size
        due = request.checkpoints.due if self.ends_steps else ()
        ends = (depth * size for depth in due if depth * size > length)
        end = next(islice(ends, self._most_named, None), self._core.max_context)
        if self.round_every:
            end = min(end, (length // self.round_every + 1) * self.round_every)
        return end - length

    # -- kept --------------------------------------------------------------------------------------------------------

    def keep_first(self, request: RequestState, begin: int, *, is_loaded: bool) -> int | None:
        """Keep or use the checkpoint where ``request`` starts, after ``begin`` blocks, and those before it that its caller
        asked for; return the name of the first, None if there is none. ``is_loaded``: tiers have it."""
        core, asked, saved = self._core, request.checkpoints.asked, None
        if begin and core.bounded:
            saved = self._save(request, begin, 0)
        if saved is not None:
            core.prefix.tree.checkpoints.use(saved[0])
            if saved[1] and not is_loaded and core.tiers.levels:
                self._store(saved[0])
        if asked is not None:
            self._keep_before(request, asked, begin)
        return saved[0] if saved is not None and saved[0] in core.prefix.kept else None

    def keep_due(self, request: RequestState) -> None:
        """Keep the checkpoints of the prompt that are due. With states, also keep the newest one of an answer in
        progress; without, the newest one near the end of the prompt, so that window blocks there stay cached until the
        end is reached."""
        core, size, published = self._core, self._core.block_size, request.lease.num_blocks
        first = request.own_length - self._most_ahead  # the states of fewer tokens are overwritten
        while request.checkpoints.due and request.checkpoints.due[0] <= published:
            depth, is_last = request.checkpoints.due[0], len(request.checkpoints.due) == 1
            is_left = core.states is not None and core.states.is_written(request, depth)
            is_over = self.ends_steps and depth * size < first and not is_left
            if is_over and core.prefix.checkpoint_at(request.lease, depth) is None:
                core.counters.passed += 1  # a step went past it
                del request.checkpoints.due[0]
                self._became(request, depth, "passed")
                continue
            saved = self._save(request, depth, self._points.slack if is_last else 0, is_left=is_left)
            del request.checkpoints.due[0]  # not before: if that fails, the next commit does it
            if request.checkpoints.asked is not None:
                self._became(request, depth, "memory" if saved is None else "kept")
            if saved is not None and saved[1] and core.tiers.levels:
                self._store(saved[0])
        if self.ends_steps:
            if published * size >= first and request.own_length >= request.prompt_length:
                self._move_tail(request, published, 0)
        elif request.checkpoints.due and published + self.reach > (end := request.checkpoints.due[-1]):
            self._move_tail(request, published, self._points.slack - (end - published))

    def ending(self, request: RequestState) -> None:
        """Prepare ``request`` for being closed or suspended. Keep a checkpoint at the end of its answer, where it can
        be resumed."""
        core = self._core
        if request.num_fences or not core.bounded or not request.publishes:
            return
        try:
            if not self.ends_steps and request.own_length >= request.prompt_length:
                self._move_tail(request, request.lease.num_blocks, 0)
        except (MemoryError, RuntimeError) as error:
            report(core, error)
        if core.tiers.levels:
            self._store(request.checkpoints.tail)

    def of_running(self, match: Match, found: PrefixMatch) -> bool:
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
                    report(core, error)
                return True
        return False

    # -- states inside a step ----------------------------------------------------------------------------------------

    def name_states(self, requests: Many[RequestState], ends: Many[int]) -> list[Named]:
        """Name blocks for the states that a step of ``requests``, up to token ``ends[i]`` of each, leaves at positions
        inside of it where checkpoints are due, and return them.

        They are allocated while there is room, after evictions if necessary; a position that an earlier step named, and
        nobody committed, keeps its block. If it raises, nothing is named anew. ``named`` follows when there is a batch."""
        core, group, size, found = self._core, self._core.states, self._core.block_size, list[Named]()
        if group is None:
            return found
        needs = [int(one is group) for one in core.groups]
        try:
            for row, (request, end) in enumerate(zip(requests, ends)):
                known = group.named.get(request, {})
                in_flight = known if request.num_fences else ()
                inside = [
                    at for at in request.checkpoints.due if request.length < at * size < end and at not in in_flight
                ]
                for depth in inside[: self._most_named]:
                    is_new = depth not in known
                    if is_new and not core.capacity.make_room(needs, needs):
                        return found
                    block = group.next_names(1) if is_new else known[depth]
                    found.append((row, depth, block, is_new))
                    if is_new:
                        core.guard.is_torn = True
                        group.take(1)
                        group.leave_in(request, depth, block)
                        core.guard.is_torn = False
        except (MemoryError, RuntimeError) as error:
            report(core, error)
        except BaseException:
            self.unname(requests, found)
            raise
        return found

    def unname(self, requests: Many[RequestState], found: Many[Named]) -> None:
        """Free what ``name_states`` named anew, for a step of which there is no batch."""
        core, states = self._core, self._core.states
        for row, depth, _, is_new in found:
            is_named = is_new and states is not None and depth in states.named.get(requests[row], ())
            if is_named and not core.guard.is_torn:
                core.guard.change(core.give_back, requests[row], [depth])

    def named(self, requests: Many[RequestState], found: Many[Named]) -> None:
        """Free what earlier steps of ``requests`` named and nobody committed, unless it is in ``found``, or a fence is around
        the request: there is a batch of the step for which ``found`` was named."""
        core, states, now = self._core, self._core.states, {one[:2] for one in found}
        if states is None or not states.named:
            return
        for row, request in enumerate(requests):
            named = () if request.num_fences else states.named.get(request, ())
            old = [at for at in named if (row, at) not in now and not states.is_written(request, at)]
            core.guard.change(core.give_back, request, old)

    def round(self, request: RequestState) -> None:
        """Round the states of ``request``, if it has computed them and stands at a multiple of the hit grid."""
        length = request.own_length
        is_new = length > request.match.resumable and length != request.states.rounded_at
        states = self._core.states
        if states is not None and is_new and length % self.round_every == 0 and request.most_written <= length:
            states.round(request.slot, length)
            request.states.rounded_at = length

    # -- parts of these ----------------------------------------------------------------------------------------------

    def _keep_before(self, request: RequestState, asked: Breakpoints, begin: int) -> None:
        """Keep or use checkpoints at the positions ``asked`` that lie in the ``begin`` blocks from which ``request``
        starts, where what they need is cached. Raises as ``_save`` does."""
        core, size = self._core, self._core.block_size
        for at, state in asked.states.items():
            if state == "skipped":
                is_there = core.prefix.checkpoint_at(request.lease, at // size) is not None
                if not is_there and self.ends_steps:
                    continue  # its states are not computed
                saved = self._save(request, at // size, 0)
                asked.states[at] = "memory" if saved is None else "kept" if saved[1] else "cached"
                if saved is not None and saved[1]:
                    self._store(saved[0])

    def _became(self, request: RequestState, depth: int, state: str) -> None:
        """Note for the caller of ``request``, if it asked for that position, what became of it after ``depth`` blocks."""
        at, asked = depth * self._core.block_size, request.checkpoints.asked
        if asked is not None and at in asked.states:
            asked.states[at] = state

    def _move_tail(self, request: RequestState, num_blocks: int, more: int) -> None:
        """Keep a checkpoint after ``num_blocks`` blocks, and drop the one that the previous call kept."""
        core, previous = self._core, request.checkpoints.tail
        if not num_blocks or core.prefix.last_checkpoint(request.lease, num_blocks) == (num_blocks, previous):
            return
        saved = self._save(request, num_blocks, max(0, more))
        if saved is None:
            return
        name, is_new = saved
        request.checkpoints.tail = name if is_new else -1
        if previous >= 0:
            core.capacity.forget(core.prefix.drop, previous, reason="dropped")

    def _save(
        self, request: RequestState, num_blocks: int, more: int, *, is_left: bool = False
    ) -> tuple[int, bool] | None:
        """Keep a checkpoint after ``num_blocks`` published blocks, and up to ``more`` window blocks before those that
        it needs. Return (its name, True), or (name, False) if there is one already. ``is_left``: a step left the states in a
        block, which becomes the checkpoint's; where it does not, ``settle`` frees it.

        Returns None if there is no room for it, if a window block is gone, or if the states after these blocks are
        overwritten, perhaps by a step that computed more tokens than were committed. For room the least recently used
        checkpoint is evicted, but nothing that requests have reserved is used."""
        core, prefix, states = self._core, self._core.prefix, self._core.states
        before, name = prefix.last_checkpoint(request.lease, num_blocks)
        if before == num_blocks:
            prefix.tree.checkpoints.use(name)
            return name, False
        if len(prefix.kept) >= prefix.most_checkpoints:
            core.capacity.forget(prefix.evict_checkpoint, is_evicted=True)
        if not is_left and states is not None and not self._has_states(request, num_blocks * core.block_size):
            return None
        as_left = is_left and states is not None and states.scratch is None
        if len(prefix.kept) >= prefix.most_checkpoints:
            return None
        if states is not None and not as_left:
            needs = [int(group is states.copies) for group in core.groups]
            if not core.capacity.make_room(needs, needs):
                return None
        tails = prefix.tails(request.lease, num_blocks, more)
        if tails is None:
            return None
        copy = NO_IDS
        if states is not None and is_left:
            left = states.named[request][num_blocks]
            copy = left if as_left else states.copied_from(left)
        elif states is not None:
            copy = states.copied(request.slot, num_blocks * core.block_size)
        if before and name == request.checkpoints.tail:  # it is dropped next
            before, _ = prefix.last_checkpoint(request.lease, before - 1)
        entry = Entry(num_blocks - before, request.found)
        core.guard.is_torn = True
        if states is not None and as_left:
            states.pop(request, num_blocks)
        elif states is not None:
            states.copies.take(1)
        name = prefix.keep(request.lease, num_blocks, CachedPart(*tails, copy), entry)
        if core.observers.cached:
            core.observers.note_checkpoint(request, num_blocks, copy, request.namespace not in core.stale)
        core.guard.is_torn = False
        if core.tiers.levels:
            core.tiers.checkpoint_saved(name, request, num_blocks)
        return name, True

    def _has_states(self, request: RequestState, length: int) -> bool:
        """Return whether the states of the first ``length`` tokens of ``request``, which are committed, are there: it
        started with them or wrote them later, and no step wrote those of so many more tokens that they are
        overwritten."""
        written = max(request.own_length, request.most_written)
        return request.states.oldest <= length and written - length <= self._most_ahead

    def _store(self, name: int) -> None:
        """Store checkpoint ``name`` in tiers, if it is still kept."""
        core = self._core
        if name in core.prefix.kept:
            core.tiers.store_checkpoint(name, core.prefix.kept[name], "commit")
