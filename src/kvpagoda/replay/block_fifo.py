"""First in, first out over blocks, leaf or not: what a cache does that does not know which block hangs below which."""

from __future__ import annotations

import numpy as np

from kvpagoda.replay.trace import Ints, Trace


def block_fifo(trace: Trace, capacity: int) -> tuple[Ints, Ints]:
    """(hits, insertions), int64 ``[requests]`` each, of a cache of ``capacity`` blocks that evicts the oldest insertion.

    A request hits the blocks before its first missing one. Then it inserts those that are missing, from the root on, each in
    the place of the oldest one, which may be one of its own. Blocks behind a hole stay, and count again once it is filled.

    The cache always holds the last ``capacity`` insertions, so that the number of its last insertion tells whether a block is
    there. O(refs) array work, for each time over that insertions of a request evict blocks which it still comes to.
    """
    number = np.full(int(trace.blocks.max(initial=-1)) + 1, -capacity - 1, np.int64)  # of a block's last insertion
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
            before: Ints = np.cumsum(is_missing) - is_missing  # insertions of this request when it comes to a block
            is_gone = own < total - capacity + before
            if np.array_equal(is_gone, is_missing):
                break
            is_missing = is_gone
        number[chain[is_missing]] = total + before[is_missing]
        inserted[i] = np.count_nonzero(is_missing)
        total += int(inserted[i])
    return hits, inserted
