"""The one free list: bare for owners who keep books of their own, and with proof that who frees an id holds it."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import AnyIds, Ids, IdSet
from kvpagoda.errors import BadInput, CheckFailed, NotOwned, OutOfBlocks
from kvpagoda.units import whole_number


class FreeStack:
    """Ids ``first .. first + num_ids - 1``, handed out from a stack: whoever takes one keeps account of it himself.

        stack  | free ids, the next one on top | places of those that are out |
               0                           num_free                        num_ids

    Taking or giving n ids is one copy of n, whatever the size. The stack starts with the lowest id on top.
    """

    def __init__(self, num_ids: SupportsIndex, first: int = 0, what: str = "ids") -> None:
        count = whole_number(num_ids, f"the number of {what}")
        if first < 0 or first + count >= 2**31:
            raise BadInput(f"a free list holds 0 to 2^31 - 1 {what}, got {count} from {first}")
        self.first, self.num_ids, self.what = first, count, what
        self.num_free = count
        self._stack: Ids = np.arange(first + count - 1, first - 1, -1, dtype=np.int32)

    def acquire(self, n: int) -> Ids:
        """Take ``n`` distinct ids, the last given back first: int32 ``[n]``. Raises OutOfBlocks (taking nothing). O(n)."""
        ids = self.require(n)
        self.num_free -= n
        return ids

    def require(self, n: int) -> Ids:
        """What ``peek`` says. Raises OutOfBlocks if there are fewer."""
        if n > self.num_free:
            text = f"OOM: need {n} {self.what}, {self.num_free} free of {self.num_ids}"
            raise OutOfBlocks.with_hint(text, "release some first", needed=n, available=self.num_free)
        return self.peek(n)

    def peek(self, n: int) -> Ids:
        """The ids that the next ``take(n)`` hands out: int32 ``[n]``, a copy; they stay free. ``n`` <= ``num_free``."""
        end = self.num_free
        ids: Ids = self._stack[end - n : end][::-1].copy()
        return ids

    def take(self, n: int) -> None:
        """Hand out what ``peek(n)`` said. Cannot fail. O(1)."""
        self.num_free -= n

    def keep_only(self, ids: Ids) -> None:
        """Let ``ids``, int32, be all that is free, the last one on top: for an owner who hands out or takes back the rest
        together. O(n)."""
        self._stack[: len(ids)] = ids
        self.num_free = len(ids)

    def clear(self) -> None:
        """Make every id free, the lowest on top. O(num_ids)."""
        self._stack[:] = np.arange(self.first + self.num_ids - 1, self.first - 1, -1, dtype=np.int32)
        self.num_free = self.num_ids

    def give(self, ids: Ids) -> None:
        """Give back ``ids``, int32, which the caller is known to hold and names once: nothing is proven here. O(n)."""
        end = self.num_free + len(ids)
        self._stack[self.num_free : end] = ids
        self.num_free = end

    def free_ids(self) -> Ids:
        """All ids that are free, ascending. O(n log n)."""
        return np.sort(self._stack[: self.num_free])

    def held_ids(self) -> Ids:
        """All ids that are out, ascending. O(num_ids)."""
        held = np.ones(self.num_ids, np.bool_)
        held[self._stack[: self.num_free] - self.first] = False
        return (np.flatnonzero(held) + self.first).astype(np.int32)

    def check(self) -> None:
        """Prove that the free ids are of the range, each once. Raises CheckFailed naming those that are not."""
        free, end = self._stack[: max(0, self.num_free)], self.first + self.num_ids
        outside = free[(free < self.first) | (free >= end)]
        if len(outside) or not 0 <= self.num_free <= self.num_ids:
            raise CheckFailed(
                f"{self.what}: {self.num_free} free of {self.num_ids}; out of range: {outside[:16].tolist()}"
            )
        twice = np.flatnonzero(np.bincount(free, minlength=end) > 1)
        if len(twice):
            raise CheckFailed(f"{self.what}: free more than once: {twice[:16].tolist()}")


class FreeList(FreeStack):
    """A free list that proves every return, and lets ids wait.

        stack  | free ids, the next one on top | (as many as are held) | waiting ids, the oldest last |
               0                           num_free        num_ids - num_waiting                   num_ids

    A *waiting* id has been given back but may not go out before ``merge``. ``generation[id]`` (int64) counts how often an
    id was handed out by ``acquire``, so that a stale reference is seen. Not for use from several threads at once.
    """

    def __init__(self, num_ids: SupportsIndex, first: int = 0, what: str = "ids") -> None:
        super().__init__(num_ids, first, what)
        count = self.num_ids
        self.num_waiting = 0
        self._held = IdSet(count, first, what)
        self._place: Ids = np.empty(first + count, np.int32)  # where a free or waiting id lies in the stack
        self._place[self._stack] = np.arange(count, dtype=np.int32)
        self.generation: npt.NDArray[np.int64] = np.zeros(first + count, np.int64)

    def acquire(self, n: SupportsIndex) -> Ids:
        """Take ``n`` distinct ids, the last freed first. Raises OutOfBlocks (taking nothing) and BadInput. O(n)."""
        count = whole_number(n, f"the number of {self.what} to take")
        if count > self.num_free:
            waiting = f" and {self.num_waiting} waiting" if self.num_waiting else ""
            text = f"OOM: need {count} {self.what}, {self.num_free} free{waiting} of {self.num_ids}"
            raise OutOfBlocks.with_hint(text, "release some first", needed=count, available=self.num_free)
        self.num_free -= count
        ids: Ids = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self._held.flags[ids] = True
        self.generation[ids] += 1
        return ids

    def acquire_id(self, i: SupportsIndex, *, fresh: bool = False) -> int:
        """Take the free id ``i`` by name and return it. O(1).

        Its generation stays, unless ``fresh`` says that this is a new owner. Raises NotOwned if it is held, waiting or
        out of range.
        """
        number = self._held.in_range(i)
        if self._held.flags[number]:
            raise NotOwned(f"id {number} of {self.what} is already held")
        hole = self._place[number]
        if hole >= self.num_free:
            raise NotOwned(f"id {number} of {self.what} is waiting to be merged")
        self.num_free -= 1
        top = self._stack[self.num_free]
        self._stack[hole], self._place[top] = top, hole
        self._held.flags[number] = True
        self.generation[number] += fresh
        return number

    def release(self, ids: AnyIds, *, later: bool = False) -> None:
        """Give back held ids (integers ``[n]``), each named once; ``later``: they wait for ``merge``. O(n).

        Raises NotOwned, naming the first bad id, and changes nothing.
        """
        given = self._held.prove(ids)
        n = len(given)
        self._held.flags[given] = False
        if later:
            self.num_waiting += n
            self._put(self.num_ids - self.num_waiting, given[::-1])
        else:
            self._put(self.num_free, given)
            self.num_free += n

    def give(self, ids: Ids) -> None:
        self.release(ids)

    def release_id(self, i: SupportsIndex) -> int:
        """Give back the held id ``i`` and return it. Raises NotOwned, changing nothing. O(1)."""
        number = self._held.in_range(i)
        if not self._held.flags[number]:
            raise NotOwned(f"id {number} of {self.what} is not held: freed twice, or never handed out")
        self._stack[self.num_free] = number
        self._place[number] = self.num_free
        self._held.flags[number] = False
        self.num_free += 1
        return number

    def merge(self, n: int | None = None) -> None:
        """Make the ``n`` ids that have waited longest (None: all) free. O(num_waiting)."""
        count = self.num_waiting if n is None else n
        if not 0 <= count <= self.num_waiting:
            raise BadInput(f"cannot merge {count} of {self.num_waiting} waiting {self.what}")
        start, end = self.num_ids - self.num_waiting, self.num_ids - count
        younger, merged = self._stack[start:end].copy(), self._stack[end:].copy()
        self._put(start + count, younger)
        self._put(self.num_free, merged)
        self.num_free += count
        self.num_waiting -= count

    def sort(self) -> None:
        """Order the free ids so that the lowest goes out first. O(f log f) for f free ids, at most O(num_ids)."""
        free = self._stack[: self.num_free]
        if self.num_free * 16 < self.num_ids:
            ordered = np.sort(free)
        else:  # one pass over all flags beats a sort
            present = np.zeros(self.num_ids, np.bool_)
            present[free - self.first] = True
            ordered = (np.flatnonzero(present) + self.first).astype(np.int32)
        self._put(0, ordered[::-1])

    def clear(self) -> None:
        """Make every id free, the lowest on top. Generations stay, so that references from before are stale. O(N)."""
        self.num_free, self.num_waiting = self.num_ids, 0
        self._held.flags[:] = False
        self._put(0, np.arange(self.first + self.num_ids - 1, self.first - 1, -1, dtype=np.int32))

    def is_held(self, i: SupportsIndex) -> bool:
        """Whether ``i`` is handed out. Raises NotOwned if out of range."""
        return bool(self._held.flags[self._held.in_range(i)])

    def are_held(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of ``ids`` ``[n]``, all of the range, are handed out: bool ``[n]``. O(n)."""
        return self._held.flags[ids]

    def held_ids(self) -> Ids:
        """All ids that are handed out, ascending. O(num_ids)."""
        return self._held.ids()

    def waiting_ids(self) -> Ids:
        """All ids that wait for ``merge``, ascending. O(n log n)."""
        return np.sort(self._stack[self.num_ids - self.num_waiting :])

    def check(self) -> None:
        """Prove that free, waiting and held ids partition the range. Raises CheckFailed naming those that do not."""
        if self.num_free < 0 or self.num_waiting < 0 or self.num_free + self.num_waiting > self.num_ids:
            raise CheckFailed(f"{self.what}: {self.num_free} free and {self.num_waiting} waiting of {self.num_ids}")
        places = np.r_[0 : self.num_free, self.num_ids - self.num_waiting : self.num_ids]
        back, end = self._stack[places], self.first + self.num_ids
        outside = back[(back < self.first) | (back >= end)]
        if len(outside):
            raise CheckFailed(f"{self.what}: ids out of range on the stack: {outside[:16].tolist()}")
        seen = np.bincount(back, minlength=end) + self._held.flags
        wrong = np.flatnonzero(seen[self.first :] != 1) + self.first
        if len(wrong):
            raise CheckFailed(f"{self.what}: not exactly one of free, waiting and held: {wrong[:16].tolist()}")
        if not np.array_equal(self._place[back], places):
            raise CheckFailed(f"{self.what}: the stack and its index disagree")

    def _put(self, start: int, ids: Ids) -> None:
        self._stack[start : start + len(ids)] = ids
        self._place[ids] = np.arange(start, start + len(ids), dtype=np.int32)
