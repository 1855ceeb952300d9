"""Belady's bound: the hits of a cache that knows the future."""

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
