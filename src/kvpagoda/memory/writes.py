"""Writes to arrays that kernels read, collected on the host, so that all of them travel in one copy."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_RUN, _ADDRESS, _WORD = 32, 8, 4  # bytes


class Write(NamedTuple):
    """Runs of words to be written to ``target``, a contiguous int32 or int64 array on a device.

    ``starts``, ``counts``: int64 ``[m]``: the first word of each run in ``target``, counted row by row, and how many words
    it has. ``words``: those of all runs, one after another, in one or more arrays of integers.
    """

    target: Any
    starts: Array
    counts: Array
    words: Many[Array]


def packed_nbytes(writes: Many[Write]) -> int:
    """Return how many bytes ``pack`` fills."""
    runs, words = (sum(map(size, writes)) for size in (_num_runs, _num_words))
    return _RUN * runs + _ADDRESS * len(writes) + _WORD * words


def _num_runs(write: Write) -> int:
    return len(write.counts)


def _num_words(write: Write) -> int:
    return sum(map(len, write.words))


def pack(writes: Many[Write], addresses: Many[int], staged: Array) -> Array:
    """Fill ``staged``, uint8 ``[packed_nbytes(writes) or more]``, as ``kernels.spread`` takes it, with the ``addresses`` of
    the targets. Return its runs, int64 ``[m, 4]``, a view of it."""
    counts = np.concatenate([write.counts for write in writes])
    many, ends = len(counts), np.cumsum(counts)
    begin = (_RUN * many + _ADDRESS * len(writes)) // _WORD
    runs: Array = staged[: _RUN * many].view(np.int64).reshape(many, 4)
    runs[:, 0] = np.repeat(np.arange(len(writes)), [len(write.counts) for write in writes])
    runs[:, 1] = np.concatenate([write.starts for write in writes])
    runs[:, 2] = ends - counts + begin
    runs[:, 3] = counts
    staged[_RUN * many : _WORD * begin].view(np.int64)[:] = addresses
    words = staged[_WORD * begin : _WORD * (begin + int(ends[-1]))].view(np.int32)
    np.concatenate([part for write in writes for part in write.words], out=words, casting="same_kind")
    return runs
