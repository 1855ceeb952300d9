"""States: what a layer keeps of all tokens together, overwritten by every step; checkpoints have copies of them.

A request has ``places`` blocks for its states: one, which every step overwrites; or one more than the tokens that a rewind
may remove. The state after n tokens is in place n % places:

    places 4       place  0   1   2   3         a step of 3 tokens after 9 reads place 1, and writes 2, 3 and 0;
    12 tokens written    12   9  10  11         if 2 of them are accepted, the next step reads place 3

So accepting tokens, and taking them back, copies nothing. A place holds the state that was written to it last; which
places a request may still use is known from its lengths.

A step may also leave states at block boundaries that it passes, in blocks of their own, until they are checkpoints:

    batch     names a free block for each position inside the step at which a checkpoint is due
    commit    the engine says which of them it wrote
    settle    these become checkpoints; the others of the committed tokens are free again

What a step named and nobody committed is free again with the next batch of its request, unless that names the same
position, or with its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockNames, BlockPlaces
from kvpagoda.core.groups.base import CachedPart, CacheGroup
from kvpagoda.core.memory.no_memory import NoMemory
from kvpagoda.core.prefix.tree import PrefixTree
from kvpagoda.schema.plan import GroupPlan

_NONE = BlockNames(np.empty(0, np.int32))
_NO_PLACES = BlockPlaces(np.empty(0, np.int32))
Named = tuple[int, int, BlockNames, bool]
"""(row of the step, number of blocks before a position, id of the block, ``[1]``, in which the step leaves the state
there, whether no earlier step named it)."""


class Stepping(Protocol):
    """What is read of a request whose steps leave states."""

    own_length: int
    publishes: bool

    @property
    def length(self) -> int: ...


class CopyGroup(CacheGroup):
    """Copies of states, one for each checkpoint; requests hold none. ``kept``: the checkpoints, by name."""

    def __init__(self, plan: GroupPlan, num_slots: int, num_columns: int, index: int, *, may_move: bool) -> None:
        super().__init__(plan, num_slots, num_columns, index, may_move=may_move)
        self._kept: Mapping[int, CachedPart] = {}  # stays empty where another group has the copies

    def begin_with_copies(self, tree: PrefixTree, kept: Mapping[int, CachedPart]) -> None:
        """Begin with nothing cached: the copies of the checkpoints ``kept``, which are in ``tree``, are in this group."""
        self.begin_empty(tree, 0)
        self._kept = kept

    @property
    def num_cached(self) -> int:
        return len(self._kept)

    @property
    def num_evictable(self) -> int:
        return len(self._kept) - self.tree.checkpoints.num_held if self._kept else 0

    def oldest(self) -> int | None:
        return self.tree.checkpoints.oldest() if self._kept else None

    def cached_ids(self) -> BlockNames:
        return BlockNames(np.concatenate([_NONE, *(kept.states for kept in self._kept.values())]))


class StateGroup(CopyGroup):
    """The states of requests, whose bytes ``memory`` moves, and the blocks in which steps leave states.

    ``copies``: the group of the copies in checkpoints: itself, or one with another encoding (at rest). ``scratch``: then the
    index of ``copies``, of which a request needs a block while it loads a checkpoint; else None.

    ``named``: request -> the number of blocks before a position -> the id of the block, ``[1]``; requests without any are
    absent. ``wrote``: request -> those that its engine wrote, of committed tokens."""

    def __init__(self, plan: GroupPlan, num_slots: int, num_columns: int, index: int, *, may_move: bool) -> None:
        super().__init__(plan, num_slots, num_columns, index, may_move=may_move)
        self.copies: CopyGroup = self
        self.scratch: int | None = None
        self._memory = NoMemory()
        self._columns = np.arange(plan.places)
        self.named: dict[Stepping, dict[int, BlockNames]] = {}
        self.wrote: dict[Stepping, set[int]] = {}

    def begin_with_memory(self, memory: NoMemory, copies: CopyGroup) -> None:
        """Move bytes by ``memory``, and keep copies in ``copies``."""
        self._memory, self.copies = memory, copies
        self.scratch = None if copies is self else copies.index

    # -- states of requests ------------------------------------------------------------------------------------------

    def reset(self, own: Ids) -> None:
        """Make the states in ``own``, free blocks, those of empty texts: for each text the blocks of its places, one after
        another."""
        if len(own):
            self._memory.reset(self.index, BlockPlaces(own[:: self.places]))

    def begin_at(self, length: int, own: Many[BlockPlaces]) -> Many[BlockPlaces]:
        """Return ``own``, free blocks by group for one request, with that for the state after ``length`` tokens as the
        first of its states."""
        if not (column := length % self.places):
            return own
        return [BlockPlaces(ids[column:]) if number == self.index else ids for number, ids in enumerate(own)]

    def restore(self, copy: BlockNames, length: int, own: Many[Ids]) -> None:
        """Copy the states in block ``copy``, those of ``length`` tokens, to their place in ``own``, free blocks by group
        for one request."""
        copies = self.copies
        self._memory.convert(copies.index, copies.places_of(copy), self.index, self._place_in(own, length))

    def loaded(self, length: int, own: Many[Ids]) -> None:
        """Put the states of ``length`` tokens that were loaded into the block of ``scratch`` in ``own`` in their place."""
        if (number := self.scratch) is not None:
            self._memory.convert(number, own[number], self.index, self._place_in(own, length))

    def round(self, slot: int, length: int) -> None:
        """Round the states of ``slot`` after ``length`` tokens to those that a checkpoint of them gives back."""
        if self.scratch is not None:
            self._memory.round(self.index, self._place_of(slot, length), self.scratch)

    def fork(self, slot: int, length: int, own: Many[Ids]) -> None:
        """Copy the states of ``slot`` after ``length`` tokens, and no older ones, to their place in ``own``, free blocks
        by group for one request."""
        if len(own[self.index]):
            self._memory.copy(self.index, self._place_of(slot, length), self._place_in(own, length))

    def rows(self, slots: Ids, lengths: Ids) -> Ids:
        """Return the block with the state of each of ``slots`` after ``lengths`` tokens, int32 ``[len(slots)]``. 0, the
        padding block, for slot -1."""
        rows: Ids = self.table.cells[slots, lengths % self.places if self.places > 1 else 0]
        return rows

    def written(self, slots: Ids, before: Ids, after: Ids) -> Ids:
        """Return the blocks for the states after the last new tokens of each of ``slots``, int32 ``[len(slots), places]``,
        if a step computes tokens ``before .. after - 1`` of each: in column j that after token ``max(before, after -
        places) + j``."""
        first = np.maximum(before, after - self.places) + 1
        rows: Ids = self.table.cells[slots[:, None], (first[:, None] + self._columns) % self.places]
        return rows

    def _place_in(self, own: Many[Ids], length: int) -> BlockPlaces:
        """Return the place, ``[1]``, of the state after ``length`` tokens in ``own``, blocks by group for one request."""
        column = length % self.places
        return BlockPlaces(own[self.index][column : column + 1])

    def _place_of(self, slot: int, length: int) -> BlockPlaces:
        """Return the place, ``[1]``, of the state of ``slot`` after ``length`` tokens."""
        column = length % self.places
        return self.places_between(slot, column, column + 1)

    # -- copies in checkpoints ---------------------------------------------------------------------------------------

    def copied(self, slot: int, length: int) -> BlockNames:
        """Copy the states of ``slot`` after ``length`` tokens to the block that ``copies.take(1)`` allocates; return its id,
        ``[1]``. The caller has made room for it."""
        return self._copy(self._place_of(slot, length))

    def copied_from(self, left: BlockNames) -> BlockNames:
        """Copy the states that a step left in block ``left`` to the block that ``copies.take(1)`` allocates; return its id."""
        return self._copy(self.places_of(left))

    def _copy(self, source: BlockPlaces) -> BlockNames:
        copies, copy = self.copies, self.copies.next_names(1)
        self._memory.convert(self.index, source, copies.index, copies.places_of(copy))
        return copy

    # -- states inside a step: changes cannot fail -------------------------------------------------------------------

    def positions(self, request: Stepping) -> tuple[int, ...]:
        """Return after how many blocks, ascending, the newest step of ``request`` leaves states, of those that are not
        committed yet."""
        return tuple(sorted(self.named.get(request, ())))

    def is_written(self, request: Stepping, depth: int) -> bool:
        """Return whether the state of ``request`` after ``depth`` blocks, which are committed, was left in a block."""
        return depth in self.wrote.get(request, ())

    def places_of_steps(self, request: Stepping | None = None) -> BlockPlaces:
        """Return the places of all blocks that steps named, or of those of ``request``: int32."""
        owners = self.named.values() if request is None else [self.named.get(request, {})]
        ids = [block for blocks in owners for block in blocks.values()]
        return self.places_of(BlockNames(np.concatenate(ids))) if ids else _NO_PLACES

    def leave_in(self, request: Stepping, depth: int, block: BlockNames) -> None:
        """Own ``block``, which was allocated for the state of ``request`` after ``depth`` blocks."""
        self.named.setdefault(request, {})[depth] = block

    def commit(self, request: Stepping, depths: set[int], end: int) -> None:
        """Commit ``request`` up to ``end`` tokens, and record that its engine wrote the states after ``depths``, which are
        named."""
        request.own_length, self.wrote[request] = end, depths | self.wrote.get(request, set())

    def pop(self, request: Stepping, depth: int) -> BlockNames:
        """Give up the block for the state of ``request`` after ``depth`` blocks, and return it."""
        blocks, wrote = self.named[request], self.wrote.get(request, set())
        block = blocks.pop(depth)
        wrote.discard(depth)
        if not blocks:
            del self.named[request]
        if not wrote:
            self.wrote.pop(request, None)
        return block

    def useless(self, request: Stepping, num_blocks: int, due: list[int]) -> Collection[int]:
        """Return the depths, up to the ``num_blocks`` that are committed, at which no checkpoint comes of the blocks of
        ``request`` any more. ``due``: at which checkpoints are still to be kept."""
        wrote = self.wrote.get(request, ()) if request.publishes else ()
        return [at for at in self.named.get(request, ()) if at <= num_blocks and not (at in wrote and at in due)]

    def clear(self) -> None:
        super().clear()
        self.named.clear()
        self.wrote.clear()
