"""What a request starts from, prepared in blocks that nobody holds yet: room, what is shared, and what is copied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.capacity import Capacity
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import Holding
from kvpagoda.cache.prefix_match import PrefixMatch
from kvpagoda.cache.request import Request
from kvpagoda.cache.swap import Suspended
from kvpagoda.cache.tier_hit import TierHit
from kvpagoda.errors import OutOfBlocks
from kvpagoda.prefix import Lease, Match

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


def shared_columns(core: Core, wish: AdmissionRequest, whole: int) -> list[range]:
    """Which blocks of its text the request shares with the prefix cache, for each group: the first ``whole`` ones of the full
    group; of windows those that the text still needs there, unless they are copied or loaded. The row of a group begins where
    its range does."""
    spans = iter(core.prefix.windows.spans_before(wish.found.resumable // core.block_size))
    shared: list[range] = []
    for group in core.groups:
        if group.growth.is_state:
            shared.append(range(0))
        elif wish.suspended is not None:
            left = wish.suspended.left_behind[group.index]
            shared.append(range(whole) if group is core.full else left)
        elif group is core.full:
            shared.append(range(whole))
        else:
            span = next(spans)
            shared.append(range(span.start, span.start) if wish.hit is not None else span)
    return shared


def allot(core: Core, wish: AdmissionRequest, shared: list[range], holding: Holding) -> list[Allotment] | None:
    """What each group gives the request, whose ``shared`` blocks are held; None if there is no room for it."""
    capacity = wish.capacity
    if wish.suspended is None and wish.found.resumable > capacity:
        capacity = wish.found.resumable
    needs: list[int] = []
    more: list[int] = []
    for group, span, reserved in zip(core.groups, shared, wish.reserved):
        need, lacking = -(-capacity // group.block_size) - span.stop, reserved - len(span)
        needs.append(need if need > 0 else 0)
        more.append(lacking if lacking > needs[-1] else needs[-1])
    moves = core.capacity.num_moves
    if not make_room(core.capacity, needs, more):
        return None
    is_moved, lease, end = moves != core.capacity.num_moves, holding.lease, holding.lease.num_blocks
    rows = core.prefix.tree.ids_between(lease, 0, end) if is_moved else wish.match.ids
    windows = iter([window.blocks.ids(handles) for window, handles in zip(core.prefix.windows, holding.handles)])
    allotments: list[Allotment] = []
    for group, span, need, reserved in zip(core.groups, shared, needs, wish.reserved):
        ids = rows[0, :end] if group is core.full else _NONE if group is core.states else next(windows)
        allotments.append(Allotment(span.start, ids, group.free.peek(need), reserved))
    return allotments


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
    core: Core, wish: AdmissionRequest, shared: list[range], allotments: list[Allotment], beyond: Lease | None
) -> PrefixMatch | None:
    """Copy to each group's own blocks, which nobody holds yet, what the request starts from beyond the ``shared`` ones.
    Returns what it can start from then, or None if tiers had no more than is cached."""
    memory, found, own, states = core.memory, wish.found, [one.own for one in allotments], core.states
    is_new = states is not None
    if wish.suspended is not None:
        counts = [max(0, part.end - some.stop) for part, some in zip(wish.suspended.parts, shared)]
        core.swap.copy_in(wish.suspended, [ids[:count] for ids, count in zip(own, counts)])
        is_new = states is not None and not counts[states.index]
    elif wish.hit is not None:
        return _load(core, wish, shared, own)
    else:
        if beyond is not None and core.full is not None:
            memory.copy(core.full.index, core.prefix.tree.last_ids(beyond), own[core.full.index][:1])
        if states is not None and found.checkpoint is not None:
            memory.copy(states.index, core.prefix.kept[found.checkpoint].states, own[states.index][:1])
            is_new = False
    if is_new and states is not None and len(own[states.index]):
        memory.reset(states.index, own[states.index])
    return found


def _load(core: Core, wish: AdmissionRequest, shared: list[range], own: list[Ids]) -> PrefixMatch | None:
    """Load what tiers have beyond the ``shared`` blocks; what can be started from then, or None if that is no more than
    before."""
    found, hit, whole = wish.found, wish.hit, 0 if core.full is None else shared[core.full.index].stop
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
