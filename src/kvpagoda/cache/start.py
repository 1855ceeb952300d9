"""What a request starts from, prepared in blocks that nobody holds yet: room, what is shared, and what is copied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.capacity import Capacity
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.request import Request
from kvpagoda.cache.swap import Suspended
from kvpagoda.cache.tier_hit import TierHit
from kvpagoda.errors import OutOfBlocks
from kvpagoda.prefix import Lease, Match
from kvpagoda.units import ceil_div

_NONE: Ids = np.empty(0, np.int32)


class AdmissionRequest(NamedTuple):
    """``request`` wants to reserve ``reserved[i]`` blocks of group i, room for its first ``capacity`` tokens, and to start
    from what was ``found``, or from more: what tiers have (``hit``), or what was ``suspended`` of it."""

    request: Request
    reserved: list[int]
    capacity: int
    match: Match
    found: PrefixMatch
    hit: TierHit | None = None
    suspended: Suspended | None = None


class Allotment(NamedTuple):
    """What one group gives a request that begins: its row starts at column ``begin`` with ``shared`` blocks, which the prefix
    cache keeps for it, and then ``own`` ones, which are still free; it reserves ``reserved`` in all."""

    begin: int
    shared: Ids
    own: Ids
    reserved: int


def allot(core: Core, wish: AdmissionRequest, whole: int) -> list[Allotment] | None:
    """What each group gives the request, whose first ``whole`` blocks of the full group are shared; None if there is no
    room for it."""
    match = wish.match
    begins, needs, more = _needs(core, wish, whole)
    moves = core.capacity.num_moves
    if not make_room(core.capacity, needs, more):
        return None
    shared = match.ids[0, :whole] if core.full is not None else _NONE
    if whole and moves != core.capacity.num_moves:
        shared = core.prefix.tree.match(match.tokens[: whole * core.block_size], match.namespace).ids[0]
    return [
        Allotment(begin, shared if group is core.full else _NONE, group.peek(need), reserved)
        for group, begin, need, reserved in zip(core.groups, begins, needs, wish.reserved)
    ]


def _needs(core: Core, wish: AdmissionRequest, whole: int) -> tuple[list[int], list[int], list[int]]:
    """For each group the first column of the row, the blocks to be taken at once, and those to be reserved beyond the
    shared ones: where the first ``whole`` blocks of the full group are shared."""
    found = wish.found
    capacity = max(wish.capacity, found.resumable) if wish.suspended is None else wish.capacity
    begins, needs, more = [], [], []
    for group, reserved in zip(core.groups, wish.reserved):
        begin = 0
        end = ceil_div(capacity, group.block_size)
        if group is core.full:
            need, more_needed = max(0, end - whole), reserved - whole
        else:
            if wish.suspended is not None:
                begin = wish.suspended.parts[group.index].begin
            elif wish.hit is not None or found.checkpoint is not None:
                begin = group.growth.first_needed(found.resumable) // group.block_size
            need, more_needed = max(0, end - begin), reserved
        begins.append(begin)
        needs.append(need)
        more.append(max(need, more_needed))
    return begins, needs, more


def make_room(capacity: Capacity, needs: list[int], more: list[int]) -> bool:
    """Whether ``more`` can be reserved; ``needs`` of it are free then."""
    if not capacity.fits(more):
        return False
    try:
        capacity.ensure_free(needs, more)
    except OutOfBlocks:
        return False
    return True


def fill(
    core: Core, wish: AdmissionRequest, whole: int, allotments: list[Allotment], beyond: Lease | None
) -> PrefixMatch | None:
    """Copy to each group's own blocks, which nobody holds yet, what the request starts from beyond the shared ones; what it
    can start from then, or None if tiers had no more than is cached."""
    memory, found, own = core.memory, wish.found, [one.own for one in allotments]
    states, copies = core.states, None
    if wish.suspended is not None:
        parts = zip(core.groups, wish.suspended.parts)
        counts = [part.end - (whole if group is core.full else part.begin) for group, part in parts]
        core.swap.copy_in(wish.suspended, [ids[: max(0, count)] for ids, count in zip(own, counts)])
        is_new = states is not None and not counts[states.index]
    elif wish.hit is not None:
        return _load(core, wish, whole, own)
    else:
        if beyond is not None and core.full is not None:
            memory.copy(core.full.index, core.prefix.tree.last_ids(beyond), own[core.full.index][:1])
        copies = None if found.checkpoint is None else core.prefix.copies_of(found.checkpoint)
        for group, ids in zip(core.bounded, copies or ()):
            memory.copy(group.index, ids, own[group.index][: len(ids)])
        is_new = copies is None
    if is_new and states is not None and len(own[states.index]):
        memory.reset(states.index, own[states.index])
    return found


def _load(core: Core, wish: AdmissionRequest, whole: int, own: list[Ids]) -> PrefixMatch | None:
    """Load what tiers have from block ``whole`` on; what can be started from then, None if that is no more than before."""
    found, hit = wish.found, wish.hit
    assert core.offloader is not None and hit is not None
    reader = core.offloader.reader
    if core.bounded:
        reader.load_checkpoint(hit, [own[group.index] for group in core.bounded])
    if core.full is not None:  # last, for layers may go on coming in afterwards
        lacking = hit.end - whole - reader.load(hit, own[core.full.index][: hit.end - whole], whole)
        lost = lacking * core.block_size
        if lacking and (core.bounded or found.loaded <= lost):
            return None
        found = found._replace(resumable=found.resumable - lost, loaded=found.loaded - lost)
    return found
