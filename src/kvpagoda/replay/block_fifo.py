"""First in, first out over single blocks, leaf or not: the policy of a cache without a prefix tree."""

from __future__ import annotations

import numpy as np

from kvpagoda.replay.trace import Ints, Trace


def block_fifo(trace: Trace, capacity: int) -> tuple[Ints, Ints]:
    """Return (hits, insertions), int64 ``[requests]`` each, of a cache of ``capacity`` blocks that evicts the oldest
    insertion.

    A request hits the blocks before its first missing block. Then it inserts the missing blocks, from the root on. Each
    replaces the oldest block, which may be one of the request's own. Blocks after a missing block stay cached, and hit
    again once that block is inserted.

    The cache always holds the last ``capacity`` insertions, so the number of a block's last insertion tells whether it
    is cached. O(refs) array work; a request is repeated while its insertions evict blocks that it would use later
    itself.
    """
    number = np.full(int(trace.blocks.max(initial=-1)) + 1, -capacity - 1, np.int64)  # of the last insertion of a block
    hits, inserted = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)
    total = 0
    for i in range(len(trace)):
        chain = trace.blocks[trace.starts[i] : trace.starts[i + 1]]
        own = number[chain]
        is_missing = own < total - capacity
        if not is_missing.any():
            hits[i] = len(chain)
            continue
        hits[i] = is_missing.argmax()
        while True:
            before: Ints = np.cumsum(is_missing) - is_missing  # insertions of this request before each of its blocks
            is_evicted = own < total - capacity + before
            if np.array_equal(is_evicted, is_missing):
                break
            is_missing = is_evicted
        number[chain[is_missing]] = total + before[is_missing]
        inserted[i] = np.count_nonzero(is_missing)
        total += int(inserted[i])
    return hits, inserted
