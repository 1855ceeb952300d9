"""The life of a running request, from its first step to its end.

    Admission.open ──► extend ──► commit ──► extend ──► commit ──► ... ──► close
                       ╰─ between two steps: rewind takes back tokens; suspend, later Admission.resume

``extend`` allocates blocks. ``commit`` records tokens; ``Settler.settle`` does what follows from it. While a fence is
around a request, rewind and suspend raise. ``Ending`` closes it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.abc import observable
from kvpagoda.arrays import Ids, Int64s, TokenIds, as_tokens
from kvpagoda.core.blocks.group import BlockPlaces
from kvpagoda.core.cache.admission import Admission
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import RequestState, positions_of
from kvpagoda.core.cache.settling import Settler
from kvpagoda.core.groups import CacheGroup
from kvpagoda.errors import BadInput, OutOfBlocks

_INT32 = np.dtype(np.int32)


class Lifecycle:
    """Extends, commits, rewinds and suspends the requests of ``core``, which ``admission`` started; ``ending`` closes
    them."""

    def __init__(self, core: Core, settler: Settler, admission: Admission) -> None:
        self.core, self.settler, self.admission, self.ending = core, settler, admission, admission.ending
        core.parts += (admission, self, self.ending)

    # -- growing -----------------------------------------------------------------------------------------------------

    def extend(self, slots: int | Int64s, ends: int | Int64s) -> None:
        """Allocate the blocks that the first ``ends`` tokens of a slot, or of each of the distinct ``slots``, need, in every
        group, or no block.

        Raises OutOfBlocks, and NeverFits past the longest context."""
        core, furthest = self.core, ends if isinstance(ends, int) else int(ends.max())
        counts, needs, more = _lacking(core.groups, slots, ends)
        if any(more) and not core.capacity.fits(more):
            if core.dropped:
                self.ending.close_dropped()
            self.settler.settle_waiting()  # frees duplicates of cached blocks, and what slid out
            counts, needs, more = _lacking(core.groups, slots, ends)
            if not core.capacity.fits(more):
                raise core.capacity.shortage(OutOfBlocks, more, core.plan.budget)
        if furthest > core.max_context:
            core.plan.blocks_wanted(furthest, longest=core.max_context)  # raises NeverFits
        if not any(needs):
            return
        core.capacity.ensure_free(needs, more)
        ids = [group.free.peek(need) for group, need in zip(core.groups, needs)]
        if core.states is not None:
            core.states.reset(ids[core.states.index])
        if not isinstance(slots, int):
            self._append_each(slots, counts, ids)
            return
        capacity = core.max_context
        core.guard.is_torn = True
        for group, own in zip(core.groups, ids):
            if len(own):
                group.append(slots, own)
            if group.places:
                capacity = min(capacity, group.end[slots] * group.block_size)
        core.running[slots].capacity = capacity
        core.guard.is_torn = False

    def _append_each(self, slots: Int64s, counts: Many[Int64s], ids: Many[Ids]) -> None:
        """Append the blocks ``ids`` of each group to the rows of ``slots``: ``counts`` to each, int64 ``[n]`` by group."""
        core = self.core
        growing = [group.growing(slots, each, own) for group, each, own in zip(core.groups, counts, ids)]
        room = np.full(len(slots), core.max_context)
        for group, one in zip(core.groups, growing):
            if group.places:
                np.minimum(room, one.ends * group.block_size, out=room)
        requests, capacities = [core.running[slot] for slot in slots.tolist()], room.tolist()
        core.guard.is_torn = True
        for group, one in zip(core.groups, growing):
            group.append_each(one)
        for request, capacity in zip(requests, capacities):
            request.capacity = capacity
        core.guard.is_torn = False

    def commit(self, request: RequestState, token_ids: TokenIds, checkpoints: TokenIds | None = None) -> None:
        """Record that the rows of the next tokens are written; see ``Sequence.commit``."""
        if request.rows is not None:
            request.detach()
        core, length, left = self.core, request.own_length, request.prompt_length - request.own_length
        if left > 0 and type(token_ids) is np.ndarray and token_ids.dtype == _INT32 and token_ids.ndim == 1:
            ids = token_ids  # tokens of the prompt were validated by ``open``
            if len(ids) > left:
                as_tokens(ids[left:], core.vocab_size)
        else:
            ids = as_tokens(token_ids, core.vocab_size)
        count, end, capacity = len(ids), length + len(ids), request.capacity
        if end > capacity:
            text = f"commit of {count} tokens after {length} passes the capacity of {capacity}"
            raise BadInput.with_hint(text, "extend first", needed=end, available=capacity)
        if left > 0 and count:
            known = request.tokens[length : length + left if left < count else end]
            same = known == (ids if count <= left else ids[:left])
            index = same.argmin()
            if not same[index]:
                text = f"commit names token {ids[index]} at {length + index}, the prompt has {known[index]}"
                raise BadInput(text, needed=int(ids[index]), available=int(known[index]))
        written = None if checkpoints is None else self._written(request, checkpoints, end)
        if count > left:
            request.append(ids)
        if written:
            assert core.states is not None
            core.guard.change(core.states.commit, request, written, end)
        else:
            request.own_length = end
        if end >= request.settle_at:
            self.settler.settle(request)
        elif end // core.block_size > length // core.block_size:
            core.waiting[request] = None

    def _written(self, request: RequestState, checkpoints: TokenIds, end: int) -> set[int]:
        """Return after how many blocks of ``request`` a step left states, which are ``checkpoints`` in tokens. ``end``: the
        tokens that are committed with it. Raises BadInput for positions that the step did not name."""
        size = self.core.block_size
        asked = step_positions(self.core, request)
        positions = positions_of(checkpoints)
        for position in positions:
            if position not in asked or position > end:
                text = (
                    f"commit up to {end} tokens says that the states after {position} were written; the step named "
                    f"{[*asked][:16]}"
                )
                raise BadInput.with_hint(text, "name positions of Sequence.step_checkpoints", needed=position)
        return {position // size for position in positions}

    # -- rewinding ---------------------------------------------------------------------------------------------------

    def rewind(self, request: RequestState, n: int) -> None:
        """Take back the last ``n`` tokens of ``request``; see ``Sequence.rewind``."""
        request.detach()
        if n > request.own_length:
            raise BadInput(f"cannot rewind {n} of {request.own_length} tokens", needed=n, available=request.own_length)
        if not n:
            return
        length = request.own_length - n
        self.ending.check_unfenced(request, "rewound")
        self._check_rewindable(request, length)
        if self.core.sanitizer is not None:
            self.core.sanitizer.follow((request,))  # what is taken back was written
        media_ids = {index: media_id for index, media_id in request.media_ids.items() if index < length}
        columns, epochs = length // self.core.block_size, request.epochs_until(length)
        due = [depth for depth in request.checkpoints.due if depth <= columns]
        if columns < request.lease.num_blocks:
            self._unshare(request, columns, length)
        states = self.core.states
        if states is not None and states.named:
            self.core.guard.change(self.core.give_back, request, [*states.named.get(request, ())])
        request.written = max(request.written, request.own_length)
        request.checkpoints.due, request.epochs = due, epochs
        request.own_length, request.media_ids = length, media_ids
        request.states.rounded_at = -1
        request.prompt_length = min(request.prompt_length, length)
        del request.records.block_hashes[columns + 1 :]
        self.settler.plan(request)
        self.ending.tidy()

    def _check_rewindable(self, request: RequestState, length: int) -> None:
        """Raise BadInput if the state or the window of a layer cannot go back to ``length`` tokens: a later token wrote
        over it, or the request started from more tokens."""
        core, slot = self.core, request.slot
        written, oldest = max(request.written, request.own_length), request.states.oldest
        short = [(layer, label, n) for layer, label, n in core.plan.rewinds if length < max(oldest, written - n)]
        if short:
            layers = ", ".join(f"layer {layer} ({label}) {n}" for layer, label, n in short[:8])
            least = min(n for _, _, n in short)
            furthest, hint = max(oldest, written - least), f"plan with a verify_width of {written - length}"
            if furthest == oldest:
                hint = "it began there, as a hit, a fork or after a suspend; open the shorter text instead"
            elif not least:
                hint += ", or fork before tokens that may be taken back"
            raise BadInput.with_hint(
                f"{request.own_length} tokens can be rewound to {furthest}, not to {length}: of {written} tokens written "
                f"after the first {oldest}, these layers take back at most: {layers}",
                hint, needed=request.own_length - length, available=max(0, request.own_length - furthest),
            )  # fmt: skip
        for group in core.groups:
            first = group.growth.first_needed(length) // group.block_size
            if first < group.first[slot]:
                furthest = group.first[slot] * group.block_size
                text = f"{group.name} no longer keeps positions before {furthest}; {length} tokens need them"
                raise BadInput(text, needed=length, available=furthest, group=group.plan.name)

    def _unshare(self, request: RequestState, columns: int, length: int) -> None:
        """Shorten ``request`` to ``length`` tokens, and stop sharing its blocks behind the first ``columns``.

        Other tokens will be written there, so the request gets a copy of the last block if that is partial. Raises
        OutOfBlocks, changing nothing."""
        core, slot = self.core, request.slot
        groups = [group for group in core.groups if group.shared[slot] > columns]
        tokens = request.tokens.copy()  # the tree keeps views of published tokens
        # group, its own block, blocks to free, is_new
        cuts: list[tuple[CacheGroup, BlockPlaces, BlockPlaces, bool]] = []
        shorter = core.guard.change(core.prefix.tree.pin, request.lease, columns)
        try:
            is_copied = length % core.block_size > 0
            taking = self._make_room_for_copies(groups, request) if is_copied else []
            released = [group.names_between(slot, columns, group.shared[slot]) for group in core.prefix.windows]
            for group in sorted(groups, key=lambda group: group not in taking):  # the overwritten block comes last
                freed, is_new = group.own_places(slot), group in taking
                own = BlockPlaces(group.free.peek(1) if is_new else freed[:is_copied])
                if is_copied:
                    last = group.places_between(slot, columns, columns + 1)
                    core.memory.copy(group.index, last, own, length % core.block_size)
                cuts.append((group, own, freed if is_new else BlockPlaces(freed[len(own) :]), is_new))
        except BaseException:
            if not core.guard.is_torn:
                core.guard.change(core.prefix.tree.unpin, shorter)
            raise
        core.guard.is_torn = True
        core.prefix.leave(released)
        reserved = [group.reserved[slot] for group in groups]
        for group, own, freed, is_new in cuts:
            if is_new:
                group.take(1)
            group.cut(slot, columns, own)
            core.capacity.release(group, freed)
        core.prefix.tree.unpin(request.lease)
        request.lease = shorter
        for group, n in zip(groups, reserved):
            available = max(0, core.capacity.available(group))
            group.reserve(slot, min(n, group.reserved[slot] + available))
        request.tokens, request.written = tokens, max(request.written, request.own_length)
        request.own_length = length
        core.allocated(request)
        core.guard.is_torn = False

    def _make_room_for_copies(self, groups: list[CacheGroup], request: RequestState) -> list[CacheGroup]:
        """Free one block in each of ``groups``, for the copy of a shared block; return the groups that have it.

        At most one group is left out: there ``request`` overwrites a block of its own, whose tokens are taken back.
        Raises OutOfBlocks."""
        capacity, slot = self.core.capacity, request.slot
        if self.core.dropped:
            self.ending.close_dropped()
        self.settler.settle_waiting(but=request)  # frees duplicates of cached blocks, and what slid out
        lacking = [group for group in groups if group.end[slot] <= group.shared[slot]]
        all_but_one = [[one for one in groups if one is not group] for group in groups if group not in lacking]
        for taking in (groups, *all_but_one):
            needs = [int(group in taking) for group in self.core.groups]
            try:
                if capacity.fits(needs):
                    capacity.ensure_free(needs, needs)
                    return taking
            except OutOfBlocks:
                continue
        names = ", ".join(group.name for group in groups)
        raise OutOfBlocks.with_hint(f"need 1 block in each of {names} for a copy", "close a sequence first", needed=1)

    # -- suspending ---------------------------------------------------------------------------------------------------

    @observable
    def suspend(self, request: RequestState, whole: bool) -> None:
        """Copy what ``request`` holds to host memory, and free its blocks and its slot; see ``Sequence.suspend``."""
        core = self.core
        if core.dropped:
            self.ending.close_dropped()
        request.detach()
        self.ending.check_unfenced(request, "suspended")
        self.settler.settle(request)
        self.settler.checkpoints.ending(request)
        suspended = core.swap.copy_out(request.slot, request.own_length, request.capacity, whole)
        if core.states is not None and core.states.places > 1:
            request.states.oldest = request.own_length
        core.release(request, suspended)
        self.ending.tidy()


def step_positions(core: Core, request: RequestState) -> tuple[int, ...]:
    """Return the positions, in tokens and ascending, at which the newest step of ``request`` leaves states and that are not
    committed yet."""
    depths = () if core.states is None else core.states.positions(request)
    length = request.length
    return tuple(at * core.block_size for at in depths if at * core.block_size > length)


def _lacking(
    groups: Many[CacheGroup], slots: int | Int64s, ends: int | Int64s
) -> tuple[list[Int64s], list[int], list[int]]:
    """Return what slots lack for ``ends`` tokens: by group, how many blocks each of ``slots`` does (nothing for one slot);
    how many blocks in all; and how many of these were not reserved."""
    if isinstance(slots, int):
        assert isinstance(ends, int)
        needs, more = [0] * len(groups), [0] * len(groups)
        for index, group in enumerate(groups):  # ``CacheGroup.lacking`` for one: numpy would take ten times as long
            n = -(-ends // group.block_size) * group.places - group.end[slots]
            if n > 0:
                needs[index], outstanding = n, group.reserved[slots] - group.end[slots] + group.first[slots]
                if n > outstanding:
                    more[index] = n - outstanding if outstanding > 0 else n
        return [], needs, more
    assert not isinstance(ends, int)
    each = [group.lacking(slots, ends) for group in groups]
    return [counts for counts, _ in each], [int(counts.sum()) for counts, _ in each], [n for _, n in each]
