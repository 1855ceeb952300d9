"""The new tokens of one step, as the kernels of all layers see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvpagoda.core.batch.step_buffers import StepArray
from kvpagoda.core.memory.writes import Array


class StepRows:
    """The ``B`` rows of a step, and for each of its ``T`` new tokens the row that it belongs to.

    ``slots`` int64 ``[B]``: -1 for padded rows, which come last. ``counts`` int64 ``[B]``: new tokens of each row. The
    arrays must not be changed: an array that is the same object as in the step before is not copied to its buffer
    again. ``num_sequences``: rows that are not padded. ``is_fixed``: whether index arrays always have their greatest
    width. ``goes_back``: whether some tokens of the step may be committed already.
    """

    def __init__(
        self, slots: Array, counts: Array, num_sequences: int, is_fixed: bool = False, goes_back: bool = False
    ) -> None:
        self.slots, self.counts, self.num_sequences, self.is_fixed = slots, counts, num_sequences, is_fixed
        self.goes_back = goes_back
        self.indptr = np.concatenate(([0], np.cumsum(counts)))
        self.row_of = np.repeat(np.arange(len(slots)), counts)
        self.offsets = np.arange(len(self.row_of)) - self.indptr[self.row_of]
        self.offsets[self.indptr[num_sequences] :] = 0  # all padded tokens are written to one place
        self.slot_of = slots[self.row_of]
        self.last = self.indptr[1:] - 1
        self.one_each = len(self.row_of) == len(slots)
        self.zeros = np.zeros(len(slots), np.int64)


@dataclass(frozen=True)
class Step:
    """The ``n`` tokens that a step computes; all layers share it.

    The arrays are tensors on the cache's device, or numpy arrays if the cache has no memory. The tokens of one request
    are adjacent, in ascending order of ``positions``.

    Args:
        request_slots: int32 ``[n]``, the slot of each token's request; negative for a padded row.
        positions: int32 ``[n]``, of each token in its request.
        request_ids: int32 ``[n]``, the row of each token's request in the step.
        state_rows: int32 ``[n]``, the record of each token's request in the state pools.
        dummy: the record of the state pools that padded rows write and no kernel reads: the first (0) or the last (-1).
        is_by_id: whether a batch of a ``KVCache`` made this step: block tables then have a row for each of
            ``request_ids``; otherwise they have one for each slot, and one more.
    """

    request_slots: StepArray
    positions: StepArray
    request_ids: StepArray
    state_rows: StepArray
    dummy: int = 0
    is_by_id: bool = False

    @cached_property
    def slots(self) -> StepArray:
        """int64 ``[n]``: ``request_slots``, with -1, the last row of a table, for all negative ones."""
        return self.request_slots.long().clamp(min=-1)

    @cached_property
    def table_rows(self) -> StepArray:
        """int64 ``[n]``: the row of each token's request in the block tables."""
        return self.request_ids.long() if self.is_by_id else self.slots

    @cached_property
    def rows(self) -> StepArray:
        """int64 ``[n]``: ``state_rows``, with -1 for all negative ones."""
        return self.state_rows.long().clamp(min=-1)

    @cached_property
    def starts(self) -> StepArray:
        """int64 ``[n]``: for each token, the first position that this step computes of its request."""
        same = self.slots == self.slots
        order, head = same.cumsum(0) - 1, same
        head[1:] = self.slots[1:] != self.slots[:-1]
        return self.positions.long()[(order * head).cummax(0).values]

    def writers(self, ring: int, tokens: StepArray | None = None) -> StepArray:
        """Return the state record in which each token writes its row of a ring.

        Args:
            ring: rows of the ring; the token at position ``p`` writes row ``p % ring``, so that adjacent tokens write
                adjacent rows.
            tokens: the indices of the tokens that write; None: all.

        Returns:
            int64 ``[n]``: the record of the token's request, or ``dummy`` if a later token of the same request writes
            the same ring row. So every ring row has one writer.
        """
        rows = self.rows if tokens is None else self.rows[tokens]
        if len(rows) <= ring:
            return rows
        later = rows != rows
        later[:-ring] = rows[ring:] == rows[:-ring]
        return rows.masked_fill(later, self.dummy)
