"""Ids: which are free, and who owns them.

``FreeStack`` trusts its owner, ``FreeList`` proves that every freed id was allocated, and ``IdPool`` has no upper bound.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import AnyIds, Ids, grown
from kvpagoda.errors import BadInput, CheckFailed, NotOwned, OutOfBlocks
from kvpagoda.units import whole_number

__all__ = ["FreeList", "FreeStack", "IdPool", "IdSet"]

_NONE: Ids = np.empty(0, np.int32)
_MORE = 1024  # at most so many ids more than are asked for are put in order
_FEW = 256  # fewer ids are sorted sooner than one sees that they are in order


class IdSet:
    """One flag for each of the ids ``first .. first + num_ids - 1``: set while the id is allocated.

    ``flags``: bool ``[first + num_ids]``, indexed by id, written by the owner of this object.

    Args:
        num_ids: how many ids there are.
        first: the lowest id.
        what: names the ids in messages.
    """

    def __init__(self, num_ids: int, first: int, what: str) -> None:
        self.num_ids, self.first, self.what = num_ids, first, what
        self.flags: npt.NDArray[np.bool_] = np.zeros(first + num_ids, np.bool_)
        self._mark: Ids = np.empty(first + num_ids, np.int32)  # scratch of ``prove``: id -> position in its argument

    def ids(self) -> Ids:
        """Return all allocated ids, ascending. O(num_ids)."""
        return np.flatnonzero(self.flags).astype(np.int32)

    def in_range(self, i: SupportsIndex) -> int:
        """Return an id as an int.

        Args:
            i: the id.

        Raises:
            NotOwned: it is out of range.
        """
        return whole_number(i, f"an id of the {self.what}", self.first, NotOwned, self.first + self.num_ids)

    def prove(self, ids: AnyIds) -> Ids:
        """Return ids as int32, if each is allocated and named once. O(n).

        Args:
            ids: integers ``[n]``, of any width.

        Raises:
            NotOwned: one is not; the first such id is named.
            BadInput: ``ids`` is not a vector of integers.
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


class FreeStack:
    """A free list of the ids ``first .. first + num_ids - 1``, kept as a stack. Its owner tracks the allocated ids.

        stack  | free ids, the next one on top | unused: as many as are allocated  |
               0                           num_free                                num_ids

    Freeing n ids copies n values, and allocating n sorts up to 2 n, whatever the size of the list. A new stack has the
    lowest id on top.

    Args:
        num_ids: how many ids there are.
        first: the lowest id.
        what: names the ids in messages.
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
        """Allocate the ids of ``peek``. O(n log n).

        Args:
            n: how many.

        Returns:
            int32 ``[n]``, distinct.

        Raises:
            OutOfBlocks: fewer are free; nothing is allocated.
        """
        ids = self.require(n)
        self.num_free -= n
        return ids

    def require(self, n: int) -> Ids:
        """Return the same as ``peek``.

        Args:
            n: how many.

        Raises:
            OutOfBlocks: fewer ids are free.
        """
        if n > self.num_free:
            text = f"OOM: need {n} {self.what}, {self.num_free} free of {self.num_ids}"
            raise OutOfBlocks.with_hint(text, "release some first", needed=n, available=self.num_free)
        return self.peek(n)

    def peek(self, n: int) -> Ids:
        """Return the ids that the next ``take(n)`` allocates. O(n log n).

        They are the lowest, ascending, of the ids freed last: twice as many, but at most 1,024 more. So neighbours come
        together, in whatever order they were freed. They stay free.

        Args:
            n: at most ``num_free``.

        Returns:
            int32 ``[n]``, a copy.
        """
        end = self.num_free
        if n > 1:
            latest = self._stack[max(0, end - n - min(n, _MORE)) : end]
            if n < _FEW or (latest[1:] > latest[:-1]).any():
                latest[::-1] = np.sort(latest)
        ids: Ids = self._stack[end - n : end][::-1].copy()
        return ids

    def take(self, n: int) -> None:
        """Allocate the ids that ``peek(n)`` returned. Cannot fail. O(1).

        Args:
            n: as given to ``peek``.
        """
        self.num_free -= n

    def keep_only(self, ids: Ids) -> None:
        """Make ``ids`` the only free ids. For an owner that allocates or frees all other ids together. O(n).

        Args:
            ids: int32; the last one is on top.
        """
        self._stack[: len(ids)] = ids
        self.num_free = len(ids)

    def clear(self) -> None:
        """Make every id free, the lowest on top. O(num_ids)."""
        self._stack[:] = np.arange(self.first + self.num_ids - 1, self.first - 1, -1, dtype=np.int32)
        self.num_free = self.num_ids

    def give(self, ids: Ids) -> None:
        """Free ids. The caller guarantees that it holds each of them; nothing is checked here. O(n).

        Args:
            ids: int32, each named once; the first one comes on top.
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
        """Prove that every free id is in the range and listed once.

        Raises:
            CheckFailed: it names the ids that are not.
        """
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
    """A free list that checks every free: only an allocated id can be freed. Not safe for concurrent use.

    Args:
        num_ids: how many ids there are.
        first: the lowest id.
        what: names the ids in messages.
    """

    def __init__(self, num_ids: SupportsIndex, first: int = 0, what: str = "ids") -> None:
        super().__init__(num_ids, first, what)
        self._held = IdSet(self.num_ids, first, what)

    def acquire(self, n: SupportsIndex) -> Ids:
        """Allocate the ids of ``peek``. O(n log n).

        Args:
            n: how many.

        Returns:
            int32 ``[n]``, distinct.

        Raises:
            OutOfBlocks: fewer are free; nothing is allocated.
            BadInput: ``n`` is no whole number; nothing is allocated.
        """
        ids = super().acquire(whole_number(n, f"the number of {self.what} to take"))
        self._held.flags[ids] = True
        return ids

    def reclaim(self, ids: AnyIds) -> Ids:
        """Mark allocated ids as no longer held. They become free when they are passed to ``give``. O(n).

        Args:
            ids: integers ``[n]``, each named once.

        Returns:
            The ids as int32.

        Raises:
            NotOwned: an id is not allocated or named twice: the first one is named, and nothing changed.
        """
        given = self._held.prove(ids)
        self._held.flags[given] = False
        return given

    def release(self, ids: AnyIds) -> None:
        """Free allocated ids. O(n).

        Args:
            ids: integers ``[n]``, each named once.

        Raises:
            NotOwned: an id is not allocated or named twice: the first one is named, and nothing changed.
        """
        self.give(self.reclaim(ids))

    def release_id(self, i: SupportsIndex) -> None:
        """Free an allocated id. O(1).

        Args:
            i: the id.

        Raises:
            NotOwned: it is not allocated; nothing changed.
        """
        self.release(np.array([self._held.in_range(i)]))

    def clear(self) -> None:
        """Make every id free, the lowest on top. O(num_ids)."""
        super().clear()
        self._held.flags[:] = False

    def is_held(self, i: SupportsIndex) -> bool:
        """Return whether an id is allocated.

        Args:
            i: the id.

        Raises:
            NotOwned: it is out of range.
        """
        return bool(self._held.flags[self._held.in_range(i)])

    def are_held(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of some ids are allocated: bool ``[n]``. O(n).

        Args:
            ids: int32 ``[n]``, all in range.
        """
        return self._held.flags[ids]

    def held_ids(self) -> Ids:
        """Return all allocated ids, ascending. O(num_ids)."""
        return self._held.ids()

    def check(self, waiting: Ids = _NONE) -> None:
        """Prove that every id is exactly one of free, allocated, and ``waiting``.

        Args:
            waiting: ids that were reclaimed and not yet given.

        Raises:
            CheckFailed: it names the others.
        """
        super().check()
        wrong = np.setxor1d(super().held_ids(), np.concatenate((self.held_ids(), waiting)))
        if len(wrong) or len(np.unique(waiting)) < len(waiting):
            text = f"{self.what}: not exactly one of free, waiting and held: {wrong[:16].tolist()}"
            raise CheckFailed(text, needed="one of free, waiting and held", available=wrong[:16].tolist())


class IdPool:
    """Whole numbers from ``first`` up. A number that was given back is handed out again before a fresh one.

    Args:
        first: the lowest number.

    Examples:
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
        """Return the numbers that ``take`` would return, without taking them. O(n).

        Args:
            n: how many.

        Returns:
            int32 ``[n]``.
        """
        num_reused = min(n, self._num_free)
        reused: Ids = self._free[self._num_free - num_reused : self._num_free][::-1].copy()
        if num_reused == n:
            return reused
        fresh = np.arange(self._next, self._next + n - num_reused, dtype=np.int32)
        return np.concatenate((reused, fresh)) if num_reused else fresh

    def advance(self, n: int) -> None:
        """Take the numbers that ``peek`` returned. O(1), and cannot fail.

        Args:
            n: as given to ``peek``.
        """
        num_reused = min(n, self._num_free)
        self._num_free -= num_reused
        self._next += n - num_reused

    def take(self, n: int) -> Ids:
        """Take distinct numbers. O(n).

        Args:
            n: how many.

        Returns:
            int32 ``[n]``.
        """
        numbers = self.peek(n)
        self.advance(n)
        return numbers

    def give(self, numbers: Ids | list[int]) -> None:
        """Give numbers back. Amortised O(n).

        Args:
            numbers: each is taken, and named once.
        """
        end = self._num_free + len(numbers)
        self._free = grown(self._free, end)
        self._free[self._num_free : end] = numbers
        self._num_free = end
