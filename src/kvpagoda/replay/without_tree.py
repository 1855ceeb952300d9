"""Hits that need no prefix tree: Belady's bound, and first in, first out over single blocks."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.trace import Ints, Trace


def furthest_next_use(trace: Trace, reuse: Reuse, capacity: int) -> Ints:
    """Return the blocks of each request that Belady's MIN with bypass hits: int64 ``[requests]``. It evicts the block
    whose next use is furthest in the future, the deepest first. ``reuse``: the stretches of this trace.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. The
    nearer a block is to the root of its chain, the sooner it is needed again. So the blocks that are cached for request
    ``r``, and for no request before it, are always one stretch of its chain, which two numbers describe:

        chain of r   | cached for requests before r | cached for r | not cached |
                     0                           low[r]         high[r]

    O((requests + stretches) log requests).
    """
    n = len(trace)
    low, high, hits = [0] * n, [0] * n, [0] * n
    idle = resident = 0  # idle: resident blocks that are never used again
    furthest: list[int] = []  # heap of -r for every r with cached blocks; r may be in it twice, or be finished
    # stretches by the earlier request, which keeps their blocks for the later one
    order = np.lexsort((reuse.begin, reuse.last))
    keeps_for, upto = reuse.request[order].tolist(), reuse.end[order].tolist()
    first = np.searchsorted(reuse.last[order], np.arange(n + 1)).tolist()
    for i, size in enumerate(np.diff(trace.starts).tolist()):
        hits[i] = high[i]
        kept = min(size, capacity)
        resident += kept - high[i]
        low[i] = high[i] = top = 0
        for stretch in range(first[i], first[i + 1]):
            if top == kept:
                break
            r, bottom = keeps_for[stretch], min(upto[stretch], kept)
            assert high[r] == low[r] or low[r] == bottom
            high[r] = max(bottom, high[r])
            low[r] = top
            heappush(furthest, -r)
            top = bottom
        idle += kept - top
        over = resident - capacity
        if over <= 0:
            continue
        resident = capacity
        evicted = min(over, idle)
        idle, over = idle - evicted, over - evicted
        while over:
            r = -furthest[0]
            evicted = min(over, high[r] - low[r])
            high[r] -= evicted
            over -= evicted
            if high[r] == low[r]:
                low[r] = high[r] = 0
                heappop(furthest)
    return np.array(hits, np.int64)


def block_fifo(trace: Trace, capacity: int) -> tuple[Ints, Ints]:
    """Return (hits, insertions), int64 ``[requests]`` each, of a cache of ``capacity`` blocks, without a prefix tree,
    that evicts the oldest insertion, leaf or not.

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
