"""The bound: what a cache that knows the future would hit."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.trace import Ints, Trace


def furthest_next_use(trace: Trace, reuse: Reuse, capacity: int) -> Ints:
    """int64 ``[requests]``: the blocks of each request that Belady's MIN with bypass hits: the block used furthest in the
    future goes, the deepest first. ``reuse``: of this trace.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    The blocks of one chain are needed again the sooner the nearer they lie to its root. So what is held for request
    ``r`` and for none before it is always one stretch of its chain, and two numbers stand for all of it:

        chain of r   | held for requests before r | held for r | not held |
                     0                         low[r]       high[r]

    O((requests + stretches) log requests).
    """
    n = len(trace)
    low, high, hits = [0] * n, [0] * n, [0] * n
    idle = resident = 0  # idle: resident, never used again
    furthest: list[int] = []  # heap of -r for every r with something held, perhaps twice, perhaps past
    order = np.lexsort((reuse.begin, reuse.last))  # the stretches by who used them last: for whom each one keeps them
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
        gone = min(over, idle)
        idle, over = idle - gone, over - gone
        while over:
            r = -furthest[0]
            gone = min(over, high[r] - low[r])
            high[r] -= gone
            over -= gone
            if high[r] == low[r]:
                low[r] = high[r] = 0
                heappop(furthest)
    return np.array(hits, np.int64)
