"""The bound: what a cache that knows the future would hit."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvpagoda.replay.trace import Trace


def next_requests(trace: Trace) -> npt.NDArray[np.int32]:
    """int32 ``[refs]``: the next request that names the block of each reference; ``len(trace)`` where none does.

    O(refs log refs).
    """
    order = np.argsort(trace.blocks, kind="stable")
    later = np.full(trace.num_refs, len(trace), np.int32)
    same = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    later[order[:-1][same]] = trace.request_of[order[1:][same]]
    return later


def furthest_next_use(trace: Trace, capacity: int) -> tuple[int, int]:
    """(hits, evictions) of Belady's MIN with bypass: the block used furthest in the future goes, the deepest first.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    The blocks of one chain are needed again the sooner the nearer they lie to its root. So what is held for request
    ``r`` and for none before it is always one stretch of its chain, and two numbers stand for all of it:

        chain of r   | held for requests before r | held for r | not held |
                     0                         low[r]       high[r]

    O((requests + stretches) log requests) after ``next_requests``.
    """
    n = len(trace)
    low, high = [0] * n, [0] * n
    idle = resident = hits = evictions = 0  # idle: resident, never used again
    furthest: list[int] = []  # heap of -r for every r with something held, perhaps twice, perhaps past
    later = next_requests(trace)
    for i, (start, end) in enumerate(zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist())):
        hits += high[i]
        kept = min(end - start, capacity)
        resident += kept - high[i]
        low[i] = high[i] = 0
        uses = later[start : start + kept]
        cuts = [0, *(np.flatnonzero(uses[1:] != uses[:-1]) + 1).tolist(), kept] if kept else []
        for top, bottom in pairwise(cuts):
            r = int(uses[top])
            if r == n:
                idle += bottom - top
                continue
            assert high[r] == low[r] or low[r] == bottom
            high[r] = max(bottom, high[r])
            low[r] = top
            heappush(furthest, -r)
        over = resident - capacity
        if over <= 0:
            continue
        evictions += over
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
    return hits, evictions
