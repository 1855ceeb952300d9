"""A pool of dense whole numbers without an upper bound, and growth of the arrays that they index."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids

Scalar = TypeVar("Scalar", bound="np.generic[Any]")


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
