"""The one free list: bare for owners who keep books of their own, and with proof that who frees an id holds it."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import AnyIds, Ids, IdSet
from kvpagoda.errors import BadInput, CheckFailed, OutOfBlocks
from kvpagoda.units import whole_number

_NONE: Ids = np.empty(0, np.int32)


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
    """A free list that proves every return: who gives an id back holds it. Not for use from several threads at once."""

    def __init__(self, num_ids: SupportsIndex, first: int = 0, what: str = "ids") -> None:
        super().__init__(num_ids, first, what)
        self._held = IdSet(self.num_ids, first, what)

    def acquire(self, n: SupportsIndex) -> Ids:
        """Take ``n`` distinct ids, the last freed first. Raises OutOfBlocks (taking nothing) and BadInput. O(n)."""
        ids = super().acquire(whole_number(n, f"the number of {self.what} to take"))
        self._held.flags[ids] = True
        return ids

    def reclaim(self, ids: AnyIds) -> Ids:
        """Held ids (integers ``[n]``), each named once, as int32: nobody holds them any more, and they are free once they are
        given (``give``). Raises NotOwned, naming the first bad id, and changes nothing. O(n)."""
        given = self._held.prove(ids)
        self._held.flags[given] = False
        return given

    def release(self, ids: AnyIds) -> None:
        """Give back held ids (integers ``[n]``), each named once. O(n).

        Raises NotOwned, naming the first bad id, and changes nothing.
        """
        self.give(self.reclaim(ids))

    def release_id(self, i: SupportsIndex) -> None:
        """Give back the held id ``i``. Raises NotOwned, changing nothing. O(1)."""
        self.release(np.array([self._held.in_range(i)]))

    def clear(self) -> None:
        """Make every id free, the lowest on top. O(num_ids)."""
        super().clear()
        self._held.flags[:] = False

    def is_held(self, i: SupportsIndex) -> bool:
        """Whether ``i`` is handed out. Raises NotOwned if out of range."""
        return bool(self._held.flags[self._held.in_range(i)])

    def are_held(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of ``ids`` ``[n]``, all of the range, are handed out: bool ``[n]``. O(n)."""
        return self._held.flags[ids]

    def held_ids(self) -> Ids:
        """All ids that are handed out, ascending. O(num_ids)."""
        return self._held.ids()

    def check(self, waiting: Ids = _NONE) -> None:
        """Prove that every id is free, held, or one of ``waiting``, which were reclaimed and not given yet. Raises CheckFailed
        naming those that are not."""
        super().check()
        wrong = np.setxor1d(super().held_ids(), np.concatenate((self.held_ids(), waiting)))
        if len(wrong) or len(np.unique(waiting)) < len(waiting):
            raise CheckFailed(f"{self.what}: not exactly one of free, waiting and held: {wrong[:16].tolist()}")
