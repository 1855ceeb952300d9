"""The states of running requests, and copies of them for checkpoints.

A request has ``places`` blocks for its states: one, which every step overwrites; or one more than the tokens that a rewind
may remove. The state after n tokens is in place n % places:

    places 4       place  0   1   2   3         a step of 3 tokens after 9 reads place 1, and writes 2, 3 and 0;
    12 tokens written    12   9  10  11         if 2 of them are accepted, the next step reads place 3

So accepting tokens, and taking them back, copies nothing. A place holds the state that was written to it last; which
places a request may still use is known from its lengths (``Settler``, ``Lifecycle.rewind``).
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.blocks.places import BlockNames, BlockPlaces
from kvpagoda.core.cache.capacity import Capacity
from kvpagoda.core.memory.no_memory import NoMemory

_NONE = BlockNames(np.empty(0, np.int32))


class NoStates:
    """The states of a model that keeps none: nothing to copy, and nothing to make room for."""

    group: BlockGroup | None = None
    """The group of the states; None: there are none."""
    scratch: int | None = None
    """The index of the group in which a request needs a block while it loads a checkpoint; None: it needs none. Set where
    checkpoints are in another encoding than the states of requests."""
    places = 1
    """The number of places of a request."""
    _zeros: Ids = np.empty(0, np.int32)

    def reset(self, own: Many[Ids]) -> None:
        """Make the states in ``own``, free blocks by group, those of empty texts: for each text the blocks of its places,
        one after another."""

    def begin_at(self, length: int, own: Many[BlockPlaces]) -> Many[BlockPlaces]:
        """Return ``own``, free blocks by group for one request, with that for the state after ``length`` tokens as the
        first of its states."""
        return own

    def restore(self, copy: BlockNames, length: int, own: Many[Ids]) -> None:
        """Copy the states in block ``copy``, those of ``length`` tokens, to their place in ``own``, free blocks by group
        for one request."""

    def fork(self, slot: int, length: int, own: Many[Ids]) -> None:
        """Copy the states of ``slot`` after ``length`` tokens, and no older ones, to their place in ``own``, free blocks
        by group for one request."""

    def make_room(self, capacity: Capacity) -> bool:
        """Return whether there is room for one more copy, after evictions if necessary."""
        return True

    def copied(self, slot: int, length: int) -> BlockNames:
        """Copy the states of ``slot`` after ``length`` tokens to the block that ``take`` allocates; return its name:
        ``[1]``, ``[0]`` without states. The caller has made room for it."""
        return _NONE

    def take(self) -> None:
        """Allocate the block that ``copied`` filled. Cannot fail."""

    def copied_from(self, left: BlockNames) -> BlockNames:
        """Copy the states that a step left in block ``left`` to the block that ``take`` allocates; return its name."""
        return _NONE

    def loaded(self, length: int, own: Many[Ids]) -> None:
        """Put the states of ``length`` tokens that were loaded into the block of ``scratch`` in ``own`` in their place."""

    def round(self, slot: int, length: int) -> None:
        """Round the states of ``slot`` after ``length`` tokens to those that a checkpoint of them gives back."""

    def rows(self, slots: Ids, lengths: Ids) -> Ids:
        """Return the block with the state of each of ``slots`` after ``lengths`` tokens, int32 ``[len(slots)]``. 0, the
        padding block, for slot -1 and for models without states: then the same array while there are as many slots."""
        if len(self._zeros) != len(slots):
            self._zeros = np.zeros(len(slots), np.int32)
        return self._zeros

    def written(self, slots: Ids, before: Ids, after: Ids) -> Ids:
        """Return the blocks for the states after the last new tokens of each of ``slots``, int32 ``[len(slots), places]``,
        if a step computes tokens ``before .. after - 1`` of each: in column j that after token ``max(before, after -
        places) + j``."""
        return np.zeros((len(slots), 1), np.int32)


class States(NoStates):
    """The states of requests in ``group``, whose bytes ``memory`` moves."""

    def __init__(self, group: BlockGroup, copies: BlockGroup, num_groups: int, memory: NoMemory) -> None:
        """``copies``: the group of the copies in checkpoints: ``group`` itself, or one with another encoding."""
        self.group, self._copies = group, copies
        self.scratch = None if copies is group else copies.index
        self._group, self._memory, self.places = group, memory, group.places
        self._columns = np.arange(group.places)
        self._needs = [int(number == copies.index) for number in range(num_groups)]

    def reset(self, own: Many[Ids]) -> None:
        places = own[self._group.index]
        if len(places):
            self._memory.reset(self._group.index, BlockPlaces(places[:: self.places]))

    def begin_at(self, length: int, own: Many[BlockPlaces]) -> Many[BlockPlaces]:
        if not (column := length % self.places):
            return own
        number = self._group.index
        return [BlockPlaces(ids[column:]) if index == number else ids for index, ids in enumerate(own)]

    def restore(self, copy: BlockNames, length: int, own: Many[Ids]) -> None:
        copies = self._copies
        self._memory.convert(copies.index, copies.places_of(copy), self._group.index, self._place_in(own, length))

    def loaded(self, length: int, own: Many[Ids]) -> None:
        if (number := self.scratch) is not None:
            self._memory.convert(number, own[number], self._group.index, self._place_in(own, length))

    def round(self, slot: int, length: int) -> None:
        if self.scratch is not None:
            self._memory.round(self._group.index, self._place_of(slot, length), self.scratch)

    def fork(self, slot: int, length: int, own: Many[Ids]) -> None:
        if len(own[self._group.index]):
            self._memory.copy(self._group.index, self._place_of(slot, length), self._place_in(own, length))

    def _place_in(self, own: Many[Ids], length: int) -> BlockPlaces:
        """Return the place, ``[1]``, of the state after ``length`` tokens in ``own``, blocks by group for one request."""
        column = length % self.places
        return BlockPlaces(own[self._group.index][column : column + 1])

    def _place_of(self, slot: int, length: int) -> BlockPlaces:
        """Return the place, ``[1]``, of the state of ``slot`` after ``length`` tokens."""
        column = length % self.places
        return self._group.places_between(slot, column, column + 1)

    def make_room(self, capacity: Capacity) -> bool:
        return capacity.make_room(self._needs, self._needs)

    def copied(self, slot: int, length: int) -> BlockNames:
        return self._copy(self._place_of(slot, length))

    def copied_from(self, left: BlockNames) -> BlockNames:
        return self._copy(self._group.places_of(left))

    def _copy(self, source: BlockPlaces) -> BlockNames:
        copies, copy = self._copies, self._copies.next_names(1)
        self._memory.convert(self._group.index, source, copies.index, copies.places_of(copy))
        return copy

    def take(self) -> None:
        self._copies.take(1)

    def rows(self, slots: Ids, lengths: Ids) -> Ids:
        rows: Ids = self._group.table.cells[slots, lengths % self.places if self.places > 1 else 0]
        return rows

    def written(self, slots: Ids, before: Ids, after: Ids) -> Ids:
        first = np.maximum(before, after - self.places) + 1
        rows: Ids = self._group.table.cells[slots[:, None], (first[:, None] + self._columns) % self.places]
        return rows
