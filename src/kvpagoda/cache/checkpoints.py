"""Places in cached texts at which they can be taken up again, and what is kept there for it."""

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
"""The blocks from which a text goes on at a checkpoint, int32 for each bounded group."""


class Tail(NamedTuple):
    """The end of a text in the window groups."""

    handles: tuple[Handles, ...]
    """Of each group: the handles of the last blocks, intp ``[n]``."""
    needed: tuple[int, ...]
    """How many of these a text needs to go on; the others help those that part a little earlier."""


class Kept(NamedTuple):
    """What one checkpoint keeps: ``tail`` by reference; ``states``, int32 ``[1]``, is a block with a copy of the states, or
    ``[0]`` for a model without."""

    tail: Tail
    states: Ids


class Evicted(NamedTuple):
    """What is cached no more, to be freed by the caller."""

    blocks: tuple[tuple[BlockGroup, Ids], ...] = ()
    """Of each group that gives up any: int32; those of the full group deepest in their texts first."""
    checkpoints: tuple[tuple[int, Kept], ...] = ()
    """(name, what it kept)."""
    texts: Ids | None = None
    """Where no group keeps all tokens and texts are numbered: the numbers of the blocks of texts that go, int32."""


class KeptCheckpoints(dict[int, Kept]):
    """What each checkpoint keeps, by the name that the tree knows it by; no name is ever used again."""

    def __init__(self, bounded: Iterable[BlockGroup], windows: Windows) -> None:
        self._bounded, self._windows, self._next_name = tuple(bounded), windows, 0
        self._states = next((group for group in self._bounded if group.growth.is_state), None)

    def tail(self, tree: PrefixTree, lease: Lease, slot: int, num_blocks: int, more: int) -> Tail | None:
        """What a text needs to go on after ``num_blocks`` of ``lease``, which ``slot`` has published, and of up to ``more``
        blocks before that as much as is there. None if something that it needs is gone."""
        found: list[Handles] = []
        needed: list[int] = []
        for window, span in zip(self._windows, self._windows.spans_before(num_blocks)):
            first, begin, group = max(0, span.start - more), 0, window.group
            needed.append(len(span))
            if (
                group.first[slot] <= first and num_blocks <= group.shared[slot]
            ):  # the request itself still reads all of it
                found.append(window.blocks.handles(group.table.cells[slot, first:num_blocks]))
                continue
            cells = np.empty((2, num_blocks - first), np.int32)
            tree.read_ids(lease, first, window.row, cells)
            there = window.blocks.are_there(cells)
            if not there.all():
                begin = int(np.flatnonzero(~there)[-1]) + 1
            if first + begin > span.start and span:
                return None
            found.append(cells[0, begin:].astype(np.intp))
        return Tail(tuple(found), tuple(needed))

    def keep(self, kept: Kept) -> int:
        """Keep ``kept``, whose tail is there; the name of it."""
        name = self._next_name
        self._next_name += 1
        self[name] = kept
        for window, handles in zip(self._windows, kept.tail.handles):
            window.blocks.keep(handles)
        return name

    def copies(self, kept: Kept) -> Copies:
        """The blocks from which a text goes on at a checkpoint that keeps ``kept``."""
        parts = zip(self._windows, *kept.tail)
        windows = iter([window.blocks.ids(handles[len(handles) - n :]) for window, handles, n in parts])
        return [kept.states if group is self._states else next(windows) for group in self._bounded]

    def forget(self, names: Many[int]) -> Evicted:
        """``names`` are in the tree no more."""
        gone, states = tuple((name, self.pop(name)) for name in names), self._states
        for _, kept in gone:
            for window, handles in zip(self._windows, kept.tail.handles):
                window.blocks.drop(handles)
        return Evicted(() if states is None else tuple((states, kept.states) for _, kept in gone), gone)

    def remap(self, new_ids: Ids) -> None:
        """Block ``i`` of the states is now block ``new_ids[i]``. O(checkpoints)."""
        for name, kept in self.items():
            self[name] = kept._replace(states=new_ids[kept.states])
