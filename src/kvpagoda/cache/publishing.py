"""What follows from a commit: whole blocks become shareable, windows slide, checkpoints are kept, tiers are told.

A checkpoint is kept where a text is likely to be taken up again: at the end of a prompt, where it parted from what was cached,
where it began, and at the end of its answer.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.checkpoints import Kept
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_match import PrefixMatch
from kvpagoda.cache.request import Request, TextPart
from kvpagoda.cache.start import make_room
from kvpagoda.cache.tier_hit import TierHit
from kvpagoda.prefix import Match

_NONE: Ids = np.empty(0, np.int32)
_SLACK = 512  # tokens: prompts that go on from another one often part a little before its end, so windows before that stay too
_COARSE = 1024  # tokens: of a model with states one checkpoint more, at the last multiple in a prompt, serves those


class Publisher:
    """Publishes what the requests of ``core`` committed. All of it can be done later: a commit never fails for it."""

    def __init__(self, core: Core) -> None:
        self._core, size = core, core.block_size
        self.publishes_later = core.states is None and core.offloader is None
        """Whether a commit leaves it for later: no states must be copied, and nothing below waits for it. Until then windows
        keep what slid out of them, as long as memory does not lack."""
        self._every = core.settings.retention.checkpoint_every
        self._slack, self._coarse = _SLACK // size, max(1, _COARSE // size)
        self._spans = [window.group.growth.span or 0 for window in core.prefix.windows]
        self._at_rest = [window.group.growth.most_blocks(size, size) or 0 for window in core.prefix.windows]
        self.sliding_in_blocks = [
            window.group.growth
            for window, at_rest in zip(core.prefix.windows, self._at_rest)
            if at_rest > (window.group.plan.most_blocks or 0)
        ]
        """How windows grow that slide inside a block too: steps are so short that no block more is reserved for them.
        All others of an answer slide when a block of it is complete."""

    def is_due(self, request: Request, before: int) -> bool:
        """Whether something follows from tokens of an answer that ``request``, which had ``before`` of them, committed."""
        size = self._core.block_size
        return request.own_length // size > before // size or not request.is_settled or bool(self.sliding_in_blocks)

    def settle(self, request: Request) -> None:
        """Publish the whole blocks of ``request``, keep the checkpoints that are due, let its windows slide. While a step or a
        copy of it is in flight all of that waits; where memory for it lacks, it is tried again with the next commit."""
        request.is_settled = False
        self._core.unsettled.pop(request, None)
        if request.num_fences:
            return
        publishes = request.publishes
        try:
            if publishes:
                self._publish(request, request.own_length, None)
            if self._core.bounded:
                if publishes:
                    self._keep_due(request)
                self._slide(request, publishes)
        except (MemoryError, RuntimeError):
            return
        request.is_settled = True

    def settle_later(self, request: Request) -> None:
        """``request`` completed a block: it is published when somebody looks, or with the request's next step."""
        request.is_settled = False
        self._core.unsettled[request] = None

    def settle_waiting(self, most: int | None = None) -> None:
        """Publish what was left for later, of all requests or of the ``most`` that wait longest. Whoever reads the prefix
        tree, or lacks blocks, calls this first, so that nobody can tell."""
        waiting = self._core.unsettled
        while waiting and most != 0:
            request = next(iter(waiting))
            if request.rows is not None:
                request.rows.flush(request)
            self.settle(request)
            most = None if most is None else most - 1

    def settle_alone(self) -> None:
        """As ``settle_waiting``, of the requests that no persistent batch steps."""
        for request in [one for one in self._core.unsettled if one.rows is None]:
            self.settle(request)

    def begun(self, request: Request, hit: TierHit | None) -> None:
        """What ``request`` begins with was loaded: it is cached from now on. Or it was cached: it is in use again."""
        core, found = self._core, request.match
        if not request.publishes:
            return
        if core.bounded:
            request.due = self._due_of(request)
        begin = found.resumable // core.block_size
        try:
            if found.loaded:
                self._publish(request, found.resumable, hit)
            saved = self._save(request, begin, 0) if begin and core.bounded else None
        except (MemoryError, RuntimeError):
            return
        name = None if saved is None else saved[0]
        if name is not None:
            request.kept.append(name)
        if begin and core.offloader is not None and not found.loaded:
            copies = None if name is None else core.prefix.kept.copies(core.prefix.kept[name])
            core.offloader.reused(request.block_hashes, self._ids(request), name, copies or ())

    def keep_where_one_stands(self, match: Match, found: PrefixMatch) -> bool:
        """A running request that is just behind all of ``match`` has the states that this text needs there: it keeps a
        checkpoint, if that saves much beside what was ``found``. Whether one is there: something may have been evicted for it
        then, also in vain. O(running requests)."""
        core, depth, size = self._core, match.num_blocks, self._core.block_size
        if core.states is None or depth - found.resumable // size < self._coarse or depth % core.prefix.grid:
            return False
        for one in core.running.values():
            is_there = one.lease.node is match.node and one.lease.num_blocks == depth and one.own_length == depth * size
            if is_there and one.written <= one.own_length and not one.num_fences and one.rows is None:
                with suppress(MemoryError, RuntimeError):
                    self._save(one, depth, 0)
                return True
        return False

    def step_limit(self, request: Request) -> int:
        """See ``KVCache.step_limit``."""
        request.check_running()
        length, size = request.length, self._core.block_size
        due = request.due if self._core.states is not None else ()
        at = next((at * size for at in due if at * size > length), self._core.max_context)
        return at - length

    def ending(self, request: Request) -> None:
        """``request`` is closed or set aside: where its answer ends it can be taken up again, and where others may part from
        it was in use until now."""
        core = self._core
        if request.num_fences or not core.bounded or not request.publishes:
            return
        try:
            if core.states is None and request.own_length >= request.prompt_length:
                self._move_tail(request, request.lease.num_blocks, 0)
        except (MemoryError, RuntimeError):
            pass
        for name in (*request.kept, request.tail):
            core.prefix.use(name)
        self._store(request.tail)

    # -- steps of it -------------------------------------------------------------------------------------------------

    def _due_of(self, request: Request) -> list[int]:
        """Behind how many blocks of its prompt ``request`` keeps a checkpoint, in the order of the text: at the last one from
        which the same prompt can be resumed with a token left to compute, where it parts from what was cached, every so many
        blocks where that was asked for, and, of a model with states, once before the end."""
        size, begin = self._core.block_size, request.match.resumable // self._core.block_size
        end = (request.prompt_length - 1) // size
        due = {end, request.match.num_tokens // size}
        grid = self._core.prefix.grid
        if self._every:
            due.update(range((begin // self._every + 1) * self._every, end, self._every))
        if self._core.states is not None:
            due.add(end // self._coarse * self._coarse)
        return sorted({at // grid * grid for at in due if begin < at // grid * grid <= end})

    def _publish(self, request: Request, length: int, source: TierHit | None) -> None:
        """Make the whole blocks of the first ``length`` tokens shareable, here and below. ``source``: where they were loaded
        from. Raises MemoryError, changing nothing."""
        core, size, begin = self._core, self._core.block_size, request.lease.num_blocks
        end = length // size
        if begin == end:
            return
        offloader = core.offloader
        hashes = None if offloader is None else core.hashes_of(request, end)
        keys, guard = request.keys(begin * size, end * size), core.guard
        guard.is_torn = True
        try:
            spared = core.prefix.publish(request.slot, request.lease, keys, request.text, request.priority)
        except Exception:
            guard.is_torn = False
            raise
        for group, ids in spared:
            core.capacity.release(group, ids)
        if core.events is not None and request.namespace not in core.stale:
            core.events.published(request, begin)
        guard.is_torn = False
        if core.full is None:
            core.capacity.forget(core.prefix.evict_unbacked, is_evicted=True)
        if offloader is not None and hashes is not None:
            offloader.published(hashes, begin, self._ids(request), source)

    def last_blocks(self, request: Request) -> TextPart | None:
        """What ``request``, which ends, has not published, of a model whose hits may end anywhere. The block inside which it
        ends is reusable up to there: to the tree a whole one, with ``NO_TOKEN`` behind. None if there is none."""
        core, size, grid = self._core, self._core.block_size, self._core.settings.limits.hit_grid
        begin, end = request.lease.num_blocks, request.own_length // size
        if request.own_length // grid * grid > end * size:
            end += 1
        has_computed = request.own_length > request.match.resumable
        if begin == end or not has_computed or core.bounded or not request.publishes:
            return None
        return request.last_keys(begin * size, end * size)

    def _ids(self, request: Request) -> Ids:
        """The blocks that ``request`` shares with the prefix cache, int32."""
        full = self._core.full
        return _NONE if full is None else full.table.cells[request.slot, : request.lease.num_blocks]

    def _slide(self, request: Request, publishes: bool) -> None:
        """Let windows lose what nobody reads any more: of an answer not what is needed to take it up at its last whole block.
        Once the prompt is computed a request needs room for a block at a time only. Where steps are so short that not even
        that was reserved, an answer loses what slides out, and claims stay as they are."""
        core, slot, length = self._core, request.slot, request.own_length
        in_answer = length >= request.prompt_length
        for number, (group, blocks, _) in enumerate(core.prefix.windows):
            first = group.growth.first_kept(length) // group.block_size
            at_rest = self._at_rest[number]
            if in_answer and at_rest <= (group.plan.most_blocks or 0):
                if publishes:
                    first = min(first, blocks.first_needed(request.lease.num_blocks))
                if group.reserved[slot] > at_rest:
                    group.reserve(slot, at_rest)
            first = min(first, group.end[slot])
            if first > group.first[slot]:
                shared, own = group.leaving(slot, first)
                left = blocks.handles(shared)
                core.guard.is_torn = True
                group.slide(slot, first)
                blocks.leave(left)
                if len(own):
                    core.capacity.release(group, own)
                core.guard.is_torn = False

    def _keep_due(self, request: Request) -> None:
        """Keep the checkpoints of a prompt that are due, and the newest one of an answer in progress; of a prompt without
        states also the newest one near its end, so that what windows lose there stays until the end is reached."""
        core, size = self._core, self._core.block_size
        published, is_whole = request.lease.num_blocks, request.own_length % size == 0
        while request.due and request.due[0] <= published:
            at = request.due.pop(0)
            if core.states is not None and not (at == published and is_whole):
                core.counters.passed += 1
                continue
            saved = self._save(request, at, 0 if request.due or core.states is not None else self._slack)
            if saved is not None:
                request.kept.append(saved[0])
                if saved[1]:
                    self._store(saved[0])
        if core.states is not None:
            if is_whole and request.own_length >= request.prompt_length:
                self._move_tail(request, published, 0)
        elif request.due:
            end = request.due[-1]
            if published + self._slack + max(self._spans, default=0) // size > end:
                self._move_tail(request, published, self._slack - (end - published))

    def _move_tail(self, request: Request, num_blocks: int, more: int) -> None:
        """Keep a checkpoint after ``num_blocks`` blocks, in place of the last one that this kept."""
        core, last = self._core, request.tail
        if not num_blocks or core.prefix.checkpoint_at(request.lease, num_blocks) == last:
            return
        saved = self._save(request, num_blocks, max(0, more))
        if saved is None:
            return
        name, is_new = saved
        request.tail = name if is_new else -1
        if not is_new:
            request.kept.append(name)
        core.capacity.forget(core.prefix.drop, last)

    def _save(self, request: Request, num_blocks: int, more: int) -> tuple[int, bool] | None:
        """Keep a checkpoint after ``num_blocks`` blocks that are published, and up to ``more`` window blocks before those that
        it needs: (its name, True), or (the name, False) if there is one already. None where there is no room for it, or a
        window is not there any more: the least recently used one gives up its place, but what requests have reserved is not
        touched."""
        core, capacity, prefix, states = self._core, self._core.capacity, self._core.prefix, self._core.states
        name = prefix.checkpoint_at(request.lease, num_blocks)
        if name is not None:
            prefix.use(name)
            return name, False
        if prefix.is_full:
            capacity.forget(prefix.evict_checkpoint, is_evicted=True)
        needs = [int(group is states) for group in core.groups]
        if prefix.is_full or (states is not None and not make_room(capacity, needs, needs)):
            return None
        tail = prefix.kept.tail(prefix.tree, request.lease, request.slot, num_blocks, more)
        if tail is None:
            return None
        copy = _NONE
        if states is not None:
            copy = states.peek(1)
            core.memory.copy(states.index, states.held_ids(request.slot), copy)
        core.guard.is_torn = True
        if states is not None:
            states.take(1)
        name = prefix.save(request.lease, num_blocks, Kept(tail, copy))
        if core.events is not None and states is not None and request.namespace not in core.stale:
            core.events.kept(request, num_blocks, states, copy)
        core.guard.is_torn = False
        if core.offloader is not None:
            core.offloader.checkpoint_saved(name, core.hashes_of(request, num_blocks)[num_blocks])
        return name, True

    def _store(self, name: int) -> None:
        """Checkpoint ``name``, if it is still kept, is worth keeping below."""
        core = self._core
        if core.offloader is not None and name in core.prefix.kept:
            core.offloader.store_checkpoint(name, core.prefix.kept.copies(core.prefix.kept[name]), "commit")
