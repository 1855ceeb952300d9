"""What a request can start from: blocks that it shares with others, and what is copied into blocks of its own.

    Cached     whole blocks of the prefix tree; copies of the block after them and of the states of a checkpoint
    Loaded     whole blocks of the prefix tree; what tiers have after them
    Swapped    what it left in the prefix tree when it was suspended; the rest from host memory
    Forked     whole blocks of a running request; copies of its last block and its states

Each keeps what it shares and copies from eviction (``hold``), and fills the request's own blocks (``fill``) before anybody
owns them, so nothing that others see changes until ``Admission`` commits the start.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvpagoda.blocks.places import BlockNames, BlockPlaces
from kvpagoda.cache.below import Hit
from kvpagoda.cache.core import Core
from kvpagoda.cache.prefix_cache import PrefixMatch
from kvpagoda.cache.request import Request
from kvpagoda.cache.swap import Suspended
from kvpagoda.prefix import Match
from kvpagoda.prefix.hybrid import Holding

_NONE = BlockNames(np.empty(0, np.int32))


class Source(Protocol):
    """What a request can start from."""

    found: PrefixMatch
    """How much of the text that is."""
    shared: list[range]
    """For each group: the columns of the text that are shared. The row of the group begins where its range begins, also
    if the range is empty."""

    scratch: int | None
    """The index of the group of which ``fill`` needs one free block more, in ``own``, while it runs; None: of no group."""

    def hold(self) -> tuple[Holding, list[BlockNames]]:
        """Keep from eviction what is shared and copied; return the hold, and the names of the shared blocks of each group."""

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
        if core.prefix.index.optional:
            self.found = found._replace(lacking_from=core.prefix.lacking_from(self.shared, found.resumable))

    def _columns(self, num_tokens: int) -> list[range]:
        """Return for each group the columns that are shared to go on after ``num_tokens`` tokens."""
        core = self._core
        if core.prefix.index.optional:
            return core.prefix.index.columns(self._match, num_tokens)
        return [part.span(num_tokens // core.block_size) for part in core.prefix.cached]

    def hold(self) -> tuple[Holding, list[BlockNames]]:
        core, match, index = self._core, self._match, self._core.prefix.index
        whole, rest = divmod(self.found.resumable, core.block_size)
        whole = min(whole, match.num_blocks)
        windows = index.names_in(match.ids, self.shared)
        holding = core.guard.change(index.hold, match, whole, windows, self.found.checkpoint, has_partial=rest > 0)
        names = [_NONE] * len(core.groups)
        if core.full is not None:
            names[core.full.index] = BlockNames(match.ids[0, :whole])
        for (group, _), read in zip(core.prefix.windows, windows):
            names[group.index] = read
        return holding, names

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, partial, checkpoint = self._core, holding.partial, self.found.checkpoint
        if partial is not None and core.full is not None:
            source = core.full.places_of(BlockNames(core.prefix.tree.last_ids(partial)[:1]))
            rows = self.found.resumable % core.block_size
            core.memory.copy(core.full.index, source, own[core.full.index][:1], rows)
        if checkpoint is None:
            core.states.reset(own)
        else:
            core.states.restore(core.prefix.kept[checkpoint].states, self.found.resumable, own)
        return self.found


class Loaded(Cached):
    """What was ``found``, and what tiers have beyond it: the ``hit``, which ends further on."""

    def __init__(self, core: Core, match: Match, found: PrefixMatch, hit: Hit) -> None:
        end = hit.end * core.block_size
        groups = {name: max(tokens, end) for name, tokens in found.groups.items()}
        known = max(found.num_tokens, end)
        limited_by = "nothing" if known == end else found.limited_by
        super().__init__(core, match, PrefixMatch(known, end, limited_by, groups, None, end - found.resumable))
        self._hit, self.scratch = hit, core.states.scratch

    def _columns(self, num_tokens: int) -> list[range]:
        core, num_blocks = self._core, num_tokens // self._core.block_size
        whole = min(num_blocks, self._match.num_blocks)
        columns = [part.span(num_blocks) for part in core.prefix.cached]
        return [range(whole) if group is core.full else span[:0] for group, span in zip(core.groups, columns)]

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        core, found, hit = self._core, self.found, self._hit
        whole, grid = 0 if core.full is None else self.shared[core.full.index].stop, core.prefix.points.grid
        targets = own if self.scratch is not None else core.states.begin_at(found.resumable, own)
        end = whole + core.tiers.load(hit, targets, whole)
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
        targets = core.states.begin_at(suspended.length, own)
        core.swap.copy_in(suspended, [places[:count] for places, count in zip(targets, counts)])
        if core.states.group is not None and not counts[core.states.group.index]:
            core.states.reset(own)
        return self.found


class Forked:
    """What the running request ``parent`` holds."""

    scratch: int | None = None

    def __init__(self, core: Core, parent: Request) -> None:
        self._core, self._parent, slot = core, parent, parent.slot
        lacking = parent.lacking_from
        self.found = PrefixMatch(parent.length, parent.length, "nothing", lacking_from=lacking)
        self.shared = [range(group.first[slot], max(group.first[slot], group.shared[slot])) for group in core.groups]

    def hold(self) -> tuple[Holding, list[BlockNames]]:
        core, parent = self._core, self._parent
        names = [group.shared_names(parent.slot) for group in core.groups]
        windows = [names[group.index] for group, _ in core.prefix.windows]
        index = core.prefix.index
        return core.guard.change(index.hold, parent.lease, parent.lease.num_blocks, windows), names

    def fill(self, holding: Holding, own: list[BlockPlaces]) -> PrefixMatch | None:
        states, slot = self._core.states, self._parent.slot
        for group, span, places in zip(self._core.groups, self.shared, own):
            if len(places) and group is not states.group:
                last = group.places_between(slot, span.stop, span.stop + len(places))
                rows = self.found.resumable - span.stop * group.block_size
                self._core.memory.copy(group.index, last, places, min(rows, len(places) * group.block_size))
        states.fork(slot, self.found.resumable, own)
        return self.found
