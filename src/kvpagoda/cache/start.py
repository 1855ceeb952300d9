"""Prepare what a request starts from: make room, choose the shared blocks, copy or load the rest into free blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.places import BlockNames, BlockPlaces
from kvpagoda.cache.capacity import Capacity
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.request import Request
from kvpagoda.cache.swap import Suspended
from kvpagoda.cache.tier_hit import TierHit
from kvpagoda.errors import OutOfBlocks
from kvpagoda.prefix import Lease, Match
from kvpagoda.prefix.hybrid import Holding

_NONE = BlockNames(np.empty(0, np.int32))


class AdmissionRequest(NamedTuple):
    """One attempt to start ``request``, with room for its first ``capacity`` tokens.

    It is to reserve ``reserved[i]`` blocks of group i. It starts from what was ``found`` in ``match``, or from more:
    from what tiers have (``hit``), or from its own bytes in host memory (``suspended``).
    """

    request: Request
    reserved: list[int]
    capacity: int
    match: Match
    found: PrefixMatch
    hit: TierHit | None = None
    suspended: Suspended | None = None


class Allotment(NamedTuple):
    """What one group allocates to a request that starts.

    Its row begins at column ``begin``, with ``shared`` blocks, which the prefix cache keeps for it, and then ``own``
    blocks, which are free until the start is committed. ``reserved``: blocks that it reserves in all.
    """

    begin: int
    shared: BlockPlaces
    own: BlockPlaces
    reserved: int


def shared_columns(core: Core, attempt: AdmissionRequest, whole: int) -> list[range]:
    """Return, for each group, the range of blocks of its text that the request shares with the prefix cache.

    Full group: the first ``whole`` blocks. Window groups: the blocks that the text needs to be resumed, unless they are
    copied or loaded. State group: none. The row of a group begins where its range begins, also if the range is empty.
    """
    resumable, suspended = attempt.found.resumable // core.block_size, attempt.suspended
    shared: list[range] = []
    for group, cached in zip(core.groups, core.prefix.cached):
        if group is core.full:
            span = range(whole)
        elif suspended is not None:
            span = suspended.left_behind[group.index]
        else:
            span = cached.span(resumable)
            if attempt.hit is not None:
                span = span[:0]
        shared.append(span)
    return shared


def allot(core: Core, attempt: AdmissionRequest, shared: list[range], holding: Holding) -> list[Allotment] | None:
    """Make room for the request, and return what each group allocates to it; None if there is no room.

    ``shared``: from ``shared_columns``. ``holding``: the pins that keep these blocks. Changes no block table yet.
    """
    capacity = attempt.capacity
    if attempt.suspended is None and attempt.found.resumable > capacity:
        capacity = attempt.found.resumable
    needs: list[int] = []
    more: list[int] = []
    for group, span, reserved in zip(core.groups, shared, attempt.reserved):
        need, lacking = -(-capacity // group.block_size) - span.stop, reserved - len(span)
        needs.append(need if need > 0 else 0)
        more.append(lacking if lacking > needs[-1] else needs[-1])
    if not make_room(core.capacity, needs, more):
        return None
    names: list[BlockNames] = [_NONE] * len(core.groups)
    if core.full is not None:
        names[core.full.index] = BlockNames(attempt.match.ids[0, : holding.lease.num_blocks])
    for (group, _), read in zip(core.prefix.windows, holding.windows):
        names[group.index] = read
    return [
        Allotment(span.start, group.places_of(shared_names), BlockPlaces(group.free.peek(need)), reserved)
        for group, span, need, reserved, shared_names in zip(core.groups, shared, needs, attempt.reserved, names)
    ]


def make_room(capacity: Capacity, needs: list[int], more: list[int]) -> bool:
    """Return whether ``more[i]`` further blocks of group i can be reserved; if so, ``needs[i]`` of them are free now,
    after evictions if necessary."""
    if not capacity.fits(more):
        return False
    try:
        capacity.ensure_free(needs, more)
    except OutOfBlocks:
        return False
    return True


def fill(
    core: Core, attempt: AdmissionRequest, shared: list[range], allotments: list[Allotment], partial: Lease | None
) -> PrefixMatch | None:
    """Copy or load into the own blocks of each allotment, which are still free, what the request starts from beyond
    its ``shared`` blocks.

    ``partial``: the pin of the cached block of the full group that begins with the last matching tokens. Returns what
    the request can start from then, or None if tiers delivered no more than is cached.
    """
    memory, found, own, states = core.memory, attempt.found, [allotment.own for allotment in allotments], core.states
    is_new = states is not None
    if attempt.suspended is not None:
        counts = [max(0, part.end - span.stop) for part, span in zip(attempt.suspended.parts, shared)]
        core.swap.copy_in(attempt.suspended, [ids[:count] for ids, count in zip(own, counts)])
        is_new = states is not None and not counts[states.index]
    elif attempt.hit is not None:
        return _load(core, attempt, shared, own)
    else:
        if partial is not None and core.full is not None:
            source = core.full.places_of(BlockNames(core.prefix.tree.last_ids(partial)[:1]))
            memory.copy(core.full.index, source, own[core.full.index][:1])
        if states is not None and found.checkpoint is not None:
            source = states.places_of(core.prefix.kept[found.checkpoint].states)
            memory.copy(states.index, source, own[states.index][:1])
            is_new = False
    if is_new and states is not None and len(own[states.index]):
        memory.reset(states.index, own[states.index])
    return found


def _load(core: Core, attempt: AdmissionRequest, shared: list[range], own: list[BlockPlaces]) -> PrefixMatch | None:
    """Load into ``own`` what tiers have beyond the ``shared`` blocks. Return what the request can start from then, or
    None if that is no more than was found without tiers."""
    found, hit, whole = attempt.found, attempt.hit, 0 if core.full is None else shared[core.full.index].stop
    assert core.offloader is not None and hit is not None
    reader = core.offloader.reader
    if core.bounded:
        reader.load_checkpoint(hit, [own[group.index] for group in core.bounded])
    if core.full is not None:  # last, since layers may still arrive afterwards
        end = whole + reader.load(hit, own[core.full.index][: hit.end - whole], whole)
        grid = core.prefix.points.grid
        lost = (hit.end - end // grid * grid) * core.block_size
        if end < hit.end and (core.bounded or found.loaded <= lost):
            return None
        found = found._replace(resumable=found.resumable - lost, loaded=found.loaded - lost)
    return found
