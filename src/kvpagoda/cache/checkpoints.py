"""Checkpoints: block boundaries at which a cached text can be resumed, and what is kept for that."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.windows import Windows
from kvpagoda.prefix import Lease, PrefixTree
from kvpagoda.prefix.window_blocks import Handles

Copies = list[Ids]
"""The blocks that a text needs to be resumed at a checkpoint, int32 for each bounded group."""


class Tail(NamedTuple):
    """The last window blocks before a checkpoint."""

    handles: tuple[Handles, ...]
    """By window group: the handles of the last blocks, intp ``[n]``."""
    needed: tuple[int, ...]
    """How many of these are needed to resume at the checkpoint; the others serve texts that part a little earlier."""


class Kept(NamedTuple):
    """What one checkpoint keeps: ``tail`` by reference, and ``states``, a block that holds a copy of the states: int32
    ``[1]``, or ``[0]`` for a model without states."""

    tail: Tail
    states: Ids


class Evicted(NamedTuple):
    """What is no longer cached; the caller frees the blocks."""

    blocks: tuple[tuple[BlockGroup, Ids], ...] = ()
    """(group, block ids), int32. Blocks of the full group are ordered deepest in their texts first."""
    checkpoints: tuple[tuple[int, Kept], ...] = ()
    """(name, what the checkpoint kept)."""
    texts: Ids | None = None
    """The numbers of evicted blocks of texts, int32, where there is no full group and an event log needs numbers."""


class KeptCheckpoints(dict[int, Kept]):
    """Name -> what the checkpoint keeps. A name is the state id in the tree; it is never used twice."""

    def __init__(self, bounded: Iterable[BlockGroup], windows: Windows) -> None:
        self._bounded, self._windows, self._next_name = tuple(bounded), windows, 0
        self._states = next((group for group in self._bounded if group.growth.is_state), None)

    def tail(self, tree: PrefixTree, lease: Lease, slot: int, num_blocks: int, more: int) -> Tail | None:
        """Return the window blocks that a text needs to be resumed after ``num_blocks`` blocks of ``lease``, and up to
        ``more`` blocks before these as far as they are cached. ``slot`` has published them. None if a needed block is
        not cached any more."""
        found: list[Handles] = []
        needed: list[int] = []
        for window, span in zip(self._windows, self._windows.spans_before(num_blocks)):
            first, begin, group = max(0, span.start - more), 0, window.group
            needed.append(len(span))
            # the request itself still reads all of it
            if group.first[slot] <= first and num_blocks <= group.shared[slot]:
                found.append(window.blocks.handles(group.table.cells[slot, first:num_blocks]))
                continue
            cells = np.empty((2, num_blocks - first), np.int32)
            tree.read_ids(lease, first, window.row, cells)
            are_cached = window.blocks.are_there(cells)
            if not are_cached.all():
                begin = int(np.flatnonzero(~are_cached)[-1]) + 1
            if first + begin > span.start and span:
                return None
            found.append(cells[0, begin:].astype(np.intp))
        return Tail(tuple(found), tuple(needed))

    def keep(self, kept: Kept) -> int:
        """Add a checkpoint that keeps ``kept``, whose tail is cached. Return its name."""
        name = self._next_name
        self._next_name += 1
        self[name] = kept
        for window, handles in zip(self._windows, kept.tail.handles):
            window.blocks.keep(handles)
        return name

    def copies(self, kept: Kept) -> Copies:
        """Return the blocks that a text needs to be resumed at a checkpoint that keeps ``kept``."""
        parts = zip(self._windows, *kept.tail)
        windows = iter([window.blocks.ids(handles[len(handles) - n :]) for window, handles, n in parts])
        return [kept.states if group is self._states else next(windows) for group in self._bounded]

    def forget(self, names: Many[int]) -> Evicted:
        """Remove the checkpoints ``names``, which the tree has removed. Their window blocks lose a keeper; the blocks
        with copies of their states are returned to be freed."""
        removed, states = tuple((name, self.pop(name)) for name in names), self._states
        for _, kept in removed:
            for window, handles in zip(self._windows, kept.tail.handles):
                window.blocks.drop(handles)
        return Evicted(() if states is None else tuple((states, kept.states) for _, kept in removed), removed)

    def remap(self, new_ids: Ids) -> None:
        """Replace every block id of the states by ``new_ids[id]``. O(checkpoints)."""
        for name, kept in self.items():
            self[name] = kept._replace(states=new_ids[kept.states])
