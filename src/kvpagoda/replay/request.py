"""One request of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one request asks of a cache.

    ``arrival``: seconds since the trace began. ``input_length``, ``output_length``: tokens (bytes in the lcp form).
    ``block_ids``: int64 ``[n]``, the chain of blocks of its prompt; equal ids behind equal chains are equal blocks;
    empty where the trace holds lengths only. The array is the holder's to keep.
    """

    arrival: float
    input_length: int
    output_length: int
    block_ids: npt.NDArray[np.int64]
