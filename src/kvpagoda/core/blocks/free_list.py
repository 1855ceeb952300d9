"""Ids of blocks: which are free, who owns them, and where they lie.

``FreeStack`` trusts its owner, ``FreeList`` proves that every freed id was allocated, and ``IdPool`` has no upper bound.
Blocks have names and places, as addresses in virtual memory:

    name     the id of a block; it stays the same while the block lives       prefix tree, checkpoints, tiers, events
    place    where the block's bytes lie: a record of the group's memory      block tables, free lists, copies, kernels

A name that is passed to a kernel reads the bytes of another block, so the two are two types.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NewType, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, CheckFailed, NotOwned, OutOfBlocks
from kvpagoda.units import whole_number

# -- ownership of ids ------------------------------------------------------------------------------------------------

Ids = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
AnyIds = npt.NDArray[np.integer[Any]]


def positive_numbers(**numbers: SupportsIndex) -> list[int]:
    """Return the arguments, in their order, as ints of at least 1. Raises BadInput naming the first that is not."""
    return [whole_number(n, what, at_least=1) for what, n in numbers.items()]


class IdSet:
    """One flag for each of the ids ``first .. first + num_ids - 1``: set while the id is allocated.

    ``flags``: bool ``[first + num_ids]``, indexed by id, written by the owner of this object. ``what`` names the ids in
    messages.
    """

    def __init__(self, num_ids: int, first: int, what: str) -> None:
        self.num_ids, self.first, self.what = num_ids, first, what
        self.flags: npt.NDArray[np.bool_] = np.zeros(first + num_ids, np.bool_)
        self._mark: Ids = np.empty(first + num_ids, np.int32)  # scratch of ``prove``: id -> position in its argument

    def ids(self) -> Ids:
        """Return all allocated ids, ascending. O(num_ids)."""
        return np.flatnonzero(self.flags).astype(np.int32)

    def in_range(self, i: SupportsIndex) -> int:
        """Return ``i`` as an int. Raises NotOwned if it is out of range."""
        return whole_number(i, f"an id of the {self.what}", self.first, NotOwned, self.first + self.num_ids)

    def prove(self, ids: AnyIds) -> Ids:
        """Return ``ids`` (integers ``[n]``, of any width) as int32, if each is allocated and named once. O(n).

        Raises NotOwned naming the first id that is not, and BadInput for an array that is not a vector of integers.
        """
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            text = f"ids of {self.what} must be a vector of integers, got {ids.dtype} {list(ids.shape)}"
            raise BadInput(text, needed=ids.dtype, available=list(ids.shape))
        n = len(ids)
        if n == 0:
            return ids.astype(np.int32)
        self.in_range(int(ids.min()))
        self.in_range(int(ids.max()))
        narrow = ids.astype(np.int32, copy=False)
        held = self.flags[narrow]
        if not held.all():
            text = f"id {narrow[np.argmin(held)]} of {self.what} is not held: freed twice, or never handed out"
            raise NotOwned(text, needed=int(narrow[np.argmin(held)]))
        positions = np.arange(n, dtype=np.int32)
        self._mark[narrow] = positions
        is_repeated = self._mark[narrow] != positions
        if is_repeated.any():
            text = f"id {narrow[np.argmax(is_repeated)]} of {self.what} is named twice in one call"
            raise NotOwned(text, needed=int(narrow[np.argmax(is_repeated)]), available="twice")
        return narrow


# -- names and places ------------------------------------------------------------------------------------------------

BlockNames = NewType("BlockNames", AnyIds)
"""Names of blocks: int32 in the prefix tree, intp where they index arrays."""
BlockPlaces = NewType("BlockPlaces", Ids)
"""Places of blocks: int32."""


class Move(NamedTuple):
    """Decision to exchange the places of blocks: ``names`` move to ``targets``, and the free blocks ``unused``, which
    lie there, to ``sources``."""

    sources: BlockPlaces
    targets: BlockPlaces
    names: npt.NDArray[np.intp]
    unused: npt.NDArray[np.intp]


class FixedPlaces:
    """The places of blocks that never move: name and place are the same number."""

    may_move = False

    def names_at(self, places: BlockPlaces) -> BlockNames:
        """Return the names of the blocks at ``places``: ``[n]``, a copy."""
        return BlockNames(places.copy())

    def places_of(self, names: BlockNames) -> BlockPlaces:
        """Return the places of the blocks ``names``: int32 ``[n]``."""
        same: Any = names  # the same numbers, where nothing moves
        return BlockPlaces(same if same.dtype == np.int32 else same.astype(np.int32))

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> Move:
        """Return the decision to move the blocks at ``sources`` to ``targets``, where free blocks lie. Not for blocks
        that never move."""
        raise NotImplementedError("blocks of a memory of their own never move")

    def commit(self, move: Move) -> None:
        """Apply ``move``. Cannot fail. O(blocks moved)."""

    def check(self) -> None:
        """Prove that every block has one place. Raises CheckFailed."""


class PlaceTable(FixedPlaces):
    """The places of ``num_rows`` blocks that may move: a permutation. Block 0, the padding block, stays at place 0.

    >>> table = PlaceTable(4)
    >>> table.commit(table.moving(np.array([1], np.int32), np.array([3], np.int32)))
    >>> table.places_of(np.array([1, 3])), table.names_at(np.array([3, 1], np.int32))
    (array([3, 1], dtype=int32), array([1, 3]))
    """

    may_move = True

    def __init__(self, num_rows: int) -> None:
        self._place_of: Ids = np.arange(num_rows, dtype=np.int32)  # by name
        self._name_at = np.arange(num_rows)  # by place; intp, since numpy takes several times as long to index by int32

    def names_at(self, places: BlockPlaces) -> BlockNames:
        return BlockNames(self._name_at[places])

    def places_of(self, names: BlockNames) -> BlockPlaces:
        return BlockPlaces(self._place_of[names])

    def moving(self, sources: BlockPlaces, targets: BlockPlaces) -> Move:
        return Move(sources, targets, self._name_at[sources], self._name_at[targets])

    def commit(self, move: Move) -> None:
        self._place_of[move.names] = move.targets
        self._place_of[move.unused] = move.sources
        self._name_at[move.targets] = move.names
        self._name_at[move.sources] = move.unused

    def shuffle(self, order: Ids) -> None:
        """Give block ``i`` the place ``order[i]``, before any block is in use: a permutation with ``order[0] == 0``."""
        self._place_of[:] = order
        self._name_at[order] = np.arange(len(order))

    def check(self) -> None:
        wrong = np.flatnonzero(self._name_at[self._place_of] != np.arange(len(self._place_of)))
        if len(wrong) or self._place_of[0]:
            text = f"blocks {wrong[:16].tolist()} have a place that names another block"
            raise CheckFailed(text, available=wrong[:16].tolist())


def places_for(num_rows: int, *, may_move: bool) -> FixedPlaces:
    """Return the places of ``num_rows`` blocks: a table if they may move."""
    return PlaceTable(num_rows) if may_move else FixedPlaces()


# -- free lists ------------------------------------------------------------------------------------------------------

Scalar = TypeVar("Scalar", bound="np.generic[Any]")
_NONE: Ids = np.empty(0, np.int32)
_MORE = 1024  # at most so many ids more than are asked for are put in order
_FEW = 256  # fewer ids are sorted sooner than one sees that they are in order


class FreeStack:
    """A free list of the ids ``first .. first + num_ids - 1``, kept as a stack. Its owner tracks the allocated ids.

        stack  | free ids, the next one on top | unused: as many as are allocated  |
               0                           num_free                                num_ids

    Freeing n ids copies n values, and allocating n sorts up to 2 n, whatever the size of the list. A new stack has the
    lowest id on top.
    ``what`` names the ids in messages.
    """

    def __init__(self, num_ids: SupportsIndex, first: int = 0, what: str = "ids") -> None:
        count = whole_number(num_ids, f"the number of {what}")
        if first < 0 or first + count >= 2**31:
            text = f"a free list holds 0 to 2^31 - 1 {what}, got {count} from {first}"
            raise BadInput(text, needed=count, available=first)
        self.first, self.num_ids, self.what = first, count, what
        self.num_free = count
        self._stack: Ids = np.arange(first + count - 1, first - 1, -1, dtype=np.int32)

    def acquire(self, n: int) -> Ids:
        """Allocate the ``n`` distinct ids of ``peek``: int32 ``[n]``. O(n log n).

        Raises OutOfBlocks, and allocates nothing then.
        """
        ids = self.require(n)
        self.num_free -= n
        return ids

    def require(self, n: int) -> Ids:
        """Return the same as ``peek``. Raises OutOfBlocks if fewer than ``n`` ids are free."""
        if n > self.num_free:
            text = f"OOM: need {n} {self.what}, {self.num_free} free of {self.num_ids}"
            raise OutOfBlocks.with_hint(text, "release some first", needed=n, available=self.num_free)
        return self.peek(n)

    def peek(self, n: int) -> Ids:
        """Return the ids that the next ``take(n)`` allocates: int32 ``[n]``, a copy.

        They are the lowest, ascending, of the ids freed last: twice as many, but at most 1,024 more. So neighbours come
        together, in whatever order they were freed. They stay free. ``n`` <= ``num_free``. O(n log n).
        """
        end = self.num_free
        if n > 1:
            latest = self._stack[max(0, end - n - min(n, _MORE)) : end]
            if n < _FEW or (latest[1:] > latest[:-1]).any():
                latest[::-1] = np.sort(latest)
        ids: Ids = self._stack[end - n : end][::-1].copy()
        return ids

    def take(self, n: int) -> None:
        """Allocate the ids that ``peek(n)`` returned. Cannot fail. O(1)."""
        self.num_free -= n

    def keep_only(self, ids: Ids) -> None:
        """Make ``ids``, int32, the only free ids, the last one on top. O(n).

        For an owner that allocates or frees all other ids together.
        """
        self._stack[: len(ids)] = ids
        self.num_free = len(ids)

    def clear(self) -> None:
        """Make every id free, the lowest on top. O(num_ids)."""
        self._stack[:] = np.arange(self.first + self.num_ids - 1, self.first - 1, -1, dtype=np.int32)
        self.num_free = self.num_ids

    def give(self, ids: Ids) -> None:
        """Free ``ids``, int32; the first one comes on top. O(n).

        The caller guarantees that it holds each of them and names each once; nothing is checked here.
        """
        end = self.num_free + len(ids)
        self._stack[self.num_free : end] = ids[::-1]
        self.num_free = end

    def free_ids(self) -> Ids:
        """Return all free ids, ascending. O(n log n)."""
        return np.sort(self._stack[: self.num_free])

    def held_ids(self) -> Ids:
        """Return all allocated ids, ascending. O(num_ids)."""
        held = np.ones(self.num_ids, np.bool_)
        held[self._stack[: self.num_free] - self.first] = False
        return (np.flatnonzero(held) + self.first).astype(np.int32)

    def check(self) -> None:
        """Prove that every free id is in the range and listed once. Raises CheckFailed naming the ids that are not."""
        free, end = self._stack[: max(0, self.num_free)], self.first + self.num_ids
        outside = free[(free < self.first) | (free >= end)]
        if len(outside) or not 0 <= self.num_free <= self.num_ids:
            text = f"{self.what}: {self.num_free} free of {self.num_ids}; out of range: {outside[:16].tolist()}"
            raise CheckFailed(text, needed=self.num_ids, available=outside[:16].tolist())
        twice = np.flatnonzero(np.bincount(free, minlength=end) > 1)
        if len(twice):
            text = f"{self.what}: free more than once: {twice[:16].tolist()}"
            raise CheckFailed(text, needed="once", available=twice[:16].tolist())


class FreeList(FreeStack):
    """A free list that checks every free: only an allocated id can be freed. Not safe for concurrent use."""

    def __init__(self, num_ids: SupportsIndex, first: int = 0, what: str = "ids") -> None:
        super().__init__(num_ids, first, what)
        self._held = IdSet(self.num_ids, first, what)

    def acquire(self, n: SupportsIndex) -> Ids:
        """Allocate the ``n`` distinct ids of ``peek``: int32 ``[n]``. O(n log n).

        Raises OutOfBlocks, and BadInput for an ``n`` that is no whole number; allocates nothing then.
        """
        ids = super().acquire(whole_number(n, f"the number of {self.what} to take"))
        self._held.flags[ids] = True
        return ids

    def reclaim(self, ids: AnyIds) -> Ids:
        """Mark allocated ids (integers ``[n]``), each named once, as no longer held, and return them as int32. O(n).

        They become free when they are passed to ``give``. Raises NotOwned, naming the first bad id, and changes
        nothing.
        """
        given = self._held.prove(ids)
        self._held.flags[given] = False
        return given

    def release(self, ids: AnyIds) -> None:
        """Free allocated ids (integers ``[n]``), each named once. O(n).

        Raises NotOwned, naming the first bad id, and changes nothing.
        """
        self.give(self.reclaim(ids))

    def release_id(self, i: SupportsIndex) -> None:
        """Free the allocated id ``i``. Raises NotOwned, changing nothing. O(1)."""
        self.release(np.array([self._held.in_range(i)]))

    def clear(self) -> None:
        """Make every id free, the lowest on top. O(num_ids)."""
        super().clear()
        self._held.flags[:] = False

    def is_held(self, i: SupportsIndex) -> bool:
        """Return whether ``i`` is allocated. Raises NotOwned if it is out of range."""
        return bool(self._held.flags[self._held.in_range(i)])

    def are_held(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of ``ids`` ``[n]``, all in range, are allocated: bool ``[n]``. O(n)."""
        return self._held.flags[ids]

    def held_ids(self) -> Ids:
        """Return all allocated ids, ascending. O(num_ids)."""
        return self._held.ids()

    def check(self, waiting: Ids = _NONE) -> None:
        """Prove that every id is exactly one of free, allocated, and ``waiting``. Raises CheckFailed naming the others.

        ``waiting``: ids that were reclaimed and not yet given.
        """
        super().check()
        wrong = np.setxor1d(super().held_ids(), np.concatenate((self.held_ids(), waiting)))
        if len(wrong) or len(np.unique(waiting)) < len(waiting):
            text = f"{self.what}: not exactly one of free, waiting and held: {wrong[:16].tolist()}"
            raise CheckFailed(text, needed="one of free, waiting and held", available=wrong[:16].tolist())


class IdPool:
    """Whole numbers from ``first`` up. A number that was given back is handed out again before a fresh one.

    >>> pool = IdPool()
    >>> pool.take(3).tolist()
    [0, 1, 2]
    >>> pool.give([1])
    >>> pool.take(2).tolist()
    [1, 3]
    """

    def __init__(self, first: int = 0) -> None:
        self._free: Ids = np.empty(0, np.int32)
        self._num_free = 0
        self._next = first

    def peek(self, n: int) -> Ids:
        """Return the numbers that ``take`` would return, int32 ``[n]``, without taking them. O(n)."""
        num_reused = min(n, self._num_free)
        reused: Ids = self._free[self._num_free - num_reused : self._num_free][::-1].copy()
        if num_reused == n:
            return reused
        fresh = np.arange(self._next, self._next + n - num_reused, dtype=np.int32)
        return np.concatenate((reused, fresh)) if num_reused else fresh

    def advance(self, n: int) -> None:
        """Take the ``n`` numbers that ``peek`` returned. O(1), and cannot fail."""
        num_reused = min(n, self._num_free)
        self._num_free -= num_reused
        self._next += n - num_reused

    def take(self, n: int) -> Ids:
        """Take ``n`` distinct numbers, int32 ``[n]``. O(n)."""
        numbers = self.peek(n)
        self.advance(n)
        return numbers

    def give(self, numbers: Ids | list[int]) -> None:
        """Give back ``numbers``, each of which is taken and named once. Amortised O(n)."""
        end = self._num_free + len(numbers)
        self._free = grown(self._free, end)
        self._free[self._num_free : end] = numbers
        self._num_free = end


def grown(array: npt.NDArray[Scalar], length: int) -> npt.NDArray[Scalar]:
    """Return ``array`` if its last axis has at least ``length`` elements, else a larger copy.

    The copy's last axis is at least twice as long; the new elements are zero.
    """
    if array.shape[-1] >= length:
        return array
    larger = np.zeros((*array.shape[:-1], max(length, 2 * array.shape[-1], 64)), array.dtype)
    larger[..., : array.shape[-1]] = array
    return larger
