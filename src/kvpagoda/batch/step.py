"""The tokens of one step, as the kernels of all layers see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvpagoda.batch.table_snapshot import Array


class StepRows:
    """Which rows a step has, and which of them each new token belongs to.

    ``slots`` int64 ``[B]``, -1 for padded rows, which come last; ``counts`` int64 ``[B]``: new tokens. Nobody changes these
    arrays: arrays that are the same object as in the step before are not put again. ``is_fixed``: whether index arrays are
    as wide as they can get.
    """

    def __init__(self, slots: Array, counts: Array, num_sequences: int, is_fixed: bool = False) -> None:
        self.slots, self.counts, self.num_sequences, self.is_fixed = slots, counts, num_sequences, is_fixed
        self.indptr = np.concatenate(([0], np.cumsum(counts)))
        self.row_of = np.repeat(np.arange(len(slots)), counts)
        self.offsets = np.arange(len(self.row_of)) - self.indptr[self.row_of]
        self.offsets[self.indptr[num_sequences] :] = 0  # padded tokens all go to one place
        self.slot_of = slots[self.row_of]
        self.last = self.indptr[1:] - 1
        self.one_each = len(self.row_of) == len(slots)
        self.zeros = np.zeros(len(slots), np.int64)


@dataclass(frozen=True)
class Step:
    """Which tokens a step computes: int32 ``[n]`` each, tensors on the cache's device (numpy arrays where it
    has no memory). Shared by all layers of the step.

    The tokens of one request lie together, in ascending order of position. ``request_slots``: the slot of each token's
    request; below 0 for a padded row. ``state_rows``: its record in the state pools. ``dummy``: the record of the state pools
    that takes what padded rows write, and that nobody reads: the first, or the last (-1). ``is_by_id``: whether block tables
    have a row for each of ``request_ids``, or for each slot and one more.
    """

    request_slots: Any
    positions: Any
    request_ids: Any
    state_rows: Any
    dummy: int = 0
    is_by_id: bool = False

    @cached_property
    def slots(self) -> Any:
        """int64 ``[n]``: ``request_slots``, -1 for whatever is negative: the last row of a table."""
        return self.request_slots.long().clamp(min=-1)

    @cached_property
    def table_rows(self) -> Any:
        """int64 ``[n]``: the row of each token's request in the block tables."""
        return self.request_ids.long() if self.is_by_id else self.slots

    @cached_property
    def rows(self) -> Any:
        """int64 ``[n]``: ``state_rows``, -1 for whatever is negative."""
        return self.state_rows.long().clamp(min=-1)

    @cached_property
    def starts(self) -> Any:
        """int64 ``[n]``: the first position of this step of each token's request."""
        same = self.slots == self.slots
        order, head = same.cumsum(0) - 1, same
        head[1:] = self.slots[1:] != self.slots[:-1]
        return self.positions.long()[(order * head).cummax(0).values]

    def writers(self, ring: int, tokens: Any = None) -> Any:
        """int64 ``[n]``: the record that each token (of ``tokens``, if given) writes in a ring of ``ring`` rows, one behind
        another: its request's, or ``dummy`` if a later one of the same request takes the same ring row. So every ring row
        has one writer."""
        rows = self.rows if tokens is None else self.rows[tokens]
        if len(rows) <= ring:
            return rows
        later = rows != rows
        later[:-ring] = rows[ring:] == rows[:-ring]
        return rows.masked_fill(later, self.dummy)
