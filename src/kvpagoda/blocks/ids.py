"""Ownership flags of ids: which ids of a range are allocated, and the proof that a caller holds the ids it names."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.units import whole_number

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
