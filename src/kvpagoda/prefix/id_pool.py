"""Dense numbers that are handed out and taken back, without an upper end, and arrays that are indexed by them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids

Scalar = TypeVar("Scalar", bound="np.generic[Any]")


class IdPool:
    """Whole numbers from ``first`` up; a number that was given back goes out again before a fresh one does.

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
        """What ``take`` would return, int32 ``[n]``; nothing is taken. O(n)."""
        again = min(n, self._num_free)
        used: Ids = self._free[self._num_free - again : self._num_free][::-1].copy()
        if again == n:
            return used
        fresh = np.arange(self._next, self._next + n - again, dtype=np.int32)
        return np.concatenate((used, fresh)) if again else fresh

    def advance(self, n: int) -> None:
        """The ``n`` numbers that ``peek`` showed are taken. O(1), and it cannot fail."""
        again = min(n, self._num_free)
        self._num_free -= again
        self._next += n - again

    def take(self, n: int) -> Ids:
        """``n`` distinct numbers, int32 ``[n]``. O(n)."""
        numbers = self.peek(n)
        self.advance(n)
        return numbers

    def give(self, numbers: Ids | list[int]) -> None:
        """Take back ``numbers``, each of them out and named once. Amortised O(n)."""
        end = self._num_free + len(numbers)
        self._free = grown(self._free, end)
        self._free[self._num_free : end] = numbers
        self._num_free = end


def grown(array: npt.NDArray[Scalar], length: int) -> npt.NDArray[Scalar]:
    """``array`` if its last axis has ``length`` places, else a copy with at least twice as many, the new ones zero."""
    if array.shape[-1] >= length:
        return array
    larger = np.zeros((*array.shape[:-1], max(length, 2 * array.shape[-1], 64)), array.dtype)
    larger[..., : array.shape[-1]] = array
    return larger
