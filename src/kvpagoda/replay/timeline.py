"""Writes one replay through the tree as trace events, in the form of ``kvpagoda.recording``.

A trace says when requests arrive, and not how long they run: here each token takes a microsecond, those that hit first. Where
all requests arrive together, each begins when the one before it ends."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from kvpagoda.recording import CACHE, EVICTIONS, TraceFile, Track, Tracks
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.run import ReplayResult
from kvpagoda.replay.trace import Ints, Trace


def lost_tokens(trace: Trace, reuse: Reuse, hits: Ints) -> tuple[Ints, Ints, Ints]:
    """Return, for each request, the tokens that hit, those that an earlier request used but that did not hit, and those
    that no earlier request used: int64 ``[requests]`` each. ``hits``: the blocks that each request hit."""
    hit, seen, asked = (trace.tokens_of(blocks) for blocks in (hits, reuse.seen, np.diff(trace.starts)))
    return hit, seen - hit, asked - seen


def write_timeline(file: TraceFile, trace: Trace, reuse: Reuse, result: ReplayResult) -> None:
    """Write the life of every request of ``result``, a replay of ``trace``, to ``file``, and close it. O(requests)."""
    parts = [tokens.tolist() for tokens in lost_tokens(trace, reuse, result.hits)]
    size, is_timed = result.capacity_blocks, float(np.ptp(trace.arrivals)) > 0
    cached = np.minimum(result.inserted, size).tolist()
    evicted = np.diff(np.maximum(result.inserted - size, 0), prepend=0).tolist()
    file.begin(requests=[], cache=["evictions"])
    tracks, running, now = Tracks(file), list[tuple[float, int, Track]](), 0.0
    for i, (hit, gone, fresh) in enumerate(zip(*parts)):
        now = max(now, 1e6 * float(trace.arrivals[i] - trace.arrivals[0])) if is_timed else running[0][0] if i else 0.0
        while running and running[0][0] <= now:
            end, _, track = heappop(running)
            tracks.leave(track, end)
        track = tracks.take(now, {"tokens": hit + gone + fresh, "evicted before": gone, "first seen": fresh})
        tracks.begin(track, "cached", now, {"tokens": hit})
        tracks.end(track, now + hit)
        tracks.begin(track, "computed", now + hit, {"tokens": gone + fresh})
        tracks.end(track, now + hit + gone + fresh)
        heappush(running, (track.at, i, track))
        if evicted[i]:
            file.put("i", "evict", CACHE, EVICTIONS, now, {"blocks": evicted[i]}, s="t")
        file.put("C", "blocks", CACHE, 0, now, {"free": size - cached[i], "cached": cached[i]})
    while running:
        end, _, track = heappop(running)
        tracks.leave(track, end)
    file.close()
