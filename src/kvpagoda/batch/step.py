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
    arrays: arrays that are the same object as in the step before are not put again.
    """

    def __init__(self, slots: Array, counts: Array, num_sequences: int) -> None:
        self.slots, self.counts, self.num_sequences = slots, counts, num_sequences
        self.indptr = np.concatenate(([0], np.cumsum(counts)))
        self.row_of = np.repeat(np.arange(len(slots)), counts)
        self.offsets = np.arange(len(self.row_of)) - self.indptr[self.row_of]
        self.slot_of = slots[self.row_of]
        self.last = self.indptr[1:] - 1
        self.one_each = len(self.row_of) == len(slots)
        self.zeros = np.zeros(len(slots), np.int64)


@dataclass(frozen=True)
class Step:
    """Which tokens a step computes: int32 ``[n]`` each, on the cache's device. Shared by all layers of the step.

    ``request_slots``: the row of each token's request in block tables, below 0 for padded rows. ``state_rows``: the record of
    each token's request in the state pool.
    """

    request_slots: Any
    positions: Any
    request_ids: Any
    state_rows: Any
