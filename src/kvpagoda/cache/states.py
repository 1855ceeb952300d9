"""The states of running requests: one block each, which every step overwrites, and copies of it for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.blocks.ids import Ids
from kvpagoda.blocks.places import BlockNames, BlockPlaces
from kvpagoda.cache.capacity import Capacity
from kvpagoda.memory.no_memory import NoMemory

_NONE = BlockNames(np.empty(0, np.int32))


class NoStates:
    """The states of a model that keeps none: nothing to copy, and nothing to make room for."""

    group: BlockGroup | None = None
    """The group of the states; None: there are none."""

    def reset(self, own: Many[Ids]) -> None:
        """Make the states in ``own``, free blocks by group, those of an empty text."""

    def restore(self, copy: BlockNames, own: Many[Ids]) -> None:
        """Copy the states in block ``copy`` to the first free block of ``own``, blocks by group."""

    def make_room(self, capacity: Capacity) -> bool:
        """Return whether there is room for one more copy, after evictions if necessary."""
        return True

    def copied(self, slot: int) -> BlockNames:
        """Copy the states of ``slot`` to the block that ``take`` allocates; return its name: ``[1]``, ``[0]`` without
        states. The caller has made room for it."""
        return _NONE

    def take(self) -> None:
        """Allocate the block that ``copied`` filled. Cannot fail."""

    def rows(self, slots: Ids) -> Ids:
        """Return the place of the state of each of ``slots``, int32 ``[len(slots)]``. 0, the padding block, for slot -1
        and for models without states."""
        return np.zeros(len(slots), np.int32)


class States(NoStates):
    """The states of requests in ``group``, whose bytes ``memory`` moves."""

    def __init__(self, group: BlockGroup, num_groups: int, memory: NoMemory) -> None:
        self.group = group
        self._group, self._memory = group, memory
        self._needs = [int(number == group.index) for number in range(num_groups)]

    def reset(self, own: Many[Ids]) -> None:
        places = own[self._group.index]
        if len(places):
            self._memory.reset(self._group.index, BlockPlaces(places))

    def restore(self, copy: BlockNames, own: Many[Ids]) -> None:
        index = self._group.index
        self._memory.copy(index, self._group.places_of(copy), BlockPlaces(own[index][:1]))

    def make_room(self, capacity: Capacity) -> bool:
        return capacity.make_room(self._needs, self._needs)

    def copied(self, slot: int) -> BlockNames:
        group, copy = self._group, self._group.next_names(1)
        self._memory.copy(group.index, group.held_places(slot), group.places_of(copy))
        return copy

    def take(self) -> None:
        self._group.take(1)

    def rows(self, slots: Ids) -> Ids:
        rows: Ids = self._group.table.cells[slots, 0]
        return rows
