"""Checkpoints: block boundaries at which a cached text can be resumed, and what is kept for that."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.cached_blocks import CachedBlocks, Evicted, Kept, Tail
from kvpagoda.cache.windows import Windows
from kvpagoda.prefix import Lease, PrefixTree
from kvpagoda.prefix.window_blocks import Handles

Copies = list[Ids]
"""The blocks that a text needs to be resumed at a checkpoint, int32 for each bounded group."""


class KeptCheckpoints(CachedBlocks, dict[int, Kept]):
    """Name -> what the checkpoint keeps. A name is the state id in ``tree``; it is never used twice. For the group of
    the states these are the cached blocks, one each; see ``CachedBlocks``."""

    def __init__(self, tree: PrefixTree, bounded: Iterable[BlockGroup], windows: Windows) -> None:
        self._tree, self._bounded, self._windows, self._next_name = tree, tuple(bounded), windows, 0
        self._states = next((group for group in self._bounded if group.growth.is_state), None)

    def tail(self, lease: Lease, slot: int, num_blocks: int, more: int) -> Tail | None:
        """Return the window blocks that a text needs to be resumed after ``num_blocks`` blocks of ``lease``, and up to
        ``more`` blocks before these as far as they are cached. ``slot`` has published them. None if a needed block is
        not cached any more."""
        found: list[Handles] = []
        needed: list[int] = []
        for window in self._windows:
            span, begin, group = window.span(num_blocks), 0, window.group
            first = max(0, span.start - more)
            needed.append(len(span))
            # the request itself still reads all of it
            if group.first[slot] <= first and num_blocks <= group.shared[slot]:
                found.append(window.blocks.handles(group.table.cells[slot, first:num_blocks]))
                continue
            cells = np.empty((2, num_blocks - first), np.int32)
            self._tree.read_ids(lease, first, window.row, cells)
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

    # -- the copies of states ----------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        return len(self)

    @property
    def num_evictable(self) -> int:
        return len(self) - self._tree.checkpoints.num_held

    def remap(self, new_ids: Ids) -> None:
        for name, kept in self.items():
            self[name] = kept._replace(states=new_ids[kept.states])

    def owned_ids(self) -> Ids:
        return np.concatenate([np.empty(0, np.int32), *(kept.states for kept in self.values())])
