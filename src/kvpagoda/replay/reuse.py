"""Reuse distances and working sets of a trace, which do not depend on a cache.

The blocks of a chain are used together, so the blocks that one earlier request used last are neighbours in it: a
*stretch*.

        chain of a request   | used last by r1 | by r2 < r1 | .. | never before |
                              0           begin[1]     begin[2]

A request has only a few stretches, so the functions here are array operations over stretches and not over references.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.replay.trace import Floats, Ints, Trace

FIRST_USE = -1  # the distance of a reference whose block was not used before


@dataclass(frozen=True, eq=False)
class Reuse:
    """The stretches of a trace, in the order of the requests; within a request from the root on.

    Stretch ``s`` is the blocks ``begin[s]`` to ``end[s]`` of the chain of request ``request[s]``, which request
    ``last[s]`` used last. Their stack distances are ``distance[s]``, ``distance[s] + 1``, ..: the number of different
    blocks that were used more recently than the block when the request begins. A request uses its blocks deepest first.
    A cache of C blocks that evicts the least recently used leaf hits exactly the references with ``0 <= distance < C``
    (Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970), so one pass gives
    the hits of every capacity.

    Args:
        num_requests: of the trace.
        request: int64 ``[stretches]``.
        last: int64 ``[stretches]``.
        begin: int64 ``[stretches]``.
        end: int64 ``[stretches]``.
        distance: int64 ``[stretches]``.
    """

    num_requests: int
    request: Ints
    last: Ints
    begin: Ints
    end: Ints
    distance: Ints

    @classmethod
    def of(cls, trace: Trace) -> Reuse:
        """Find the stretches of a trace.

        O(refs) array work, a few calls for each request, then O(stretches log^2 stretches).

        Args:
            trace: with blocks.
        """
        request, last, begin, end = _stretches(trace)
        # The distance counts every block that was used since ``last`` once. So it is the number of references of the
        # requests between, minus the references to blocks that another request between had named already: these are the
        # stretches of the requests between whose own ``last`` is later than that of this stretch.
        again = weight_of_larger_before(last, end - begin) - begin  # stretches of the same request do not count
        distance = trace.starts[request] - trace.starts[last + 1] - again
        return cls(len(trace), request, last, begin, end, distance)

    @cached_property
    def num_reuses(self) -> int:
        """The number of references that are not first uses."""
        return int((self.end - self.begin).sum())

    @cached_property
    def seen(self) -> Ints:
        """The blocks of each request that an earlier request used: int64 ``[requests]``. They are its first ones."""
        return np.bincount(self.request, self.end - self.begin, self.num_requests).astype(np.int64)

    def hits(self, capacity: int) -> Ints:
        """Return the blocks of each request that leaf LRU hits: int64 ``[requests]``. O(stretches + requests).

        Args:
            capacity: in blocks.
        """
        hits = self._below(capacity)
        return np.bincount(self.request, hits, self.num_requests).astype(np.int64)

    def num_below(self, distance: int) -> int:
        """Return the number of references with a small distance, without first uses. O(stretches).

        Args:
            distance: those below it count.
        """
        return int(self._below(distance).sum())

    def quantile(self, share: float) -> int:
        """Return the smallest distance that more than a share of the reuses do not exceed. O(stretches log distances).

        Args:
            share: 0 to 1.
        """
        low, high = -1, int((self.distance + self.end - self.begin).max(initial=1)) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.num_below(middle + 1) > share * self.num_reuses else (middle, high)
        return high

    def _below(self, distance: int) -> Ints:
        return np.clip(distance - self.distance, 0, self.end - self.begin)


def _stretches(trace: Trace) -> Ints:
    """Return request, last, begin and end of all stretches: int64 ``[4, stretches]``."""
    blocks, starts = trace.blocks, trace.starts.tolist()
    last_use = np.full(int(blocks.max(initial=-1)) + 1, FIRST_USE, np.int32)
    found: list[tuple[int, int, int, int]] = []
    for request, (start, stop) in enumerate(pairwise(starts)):
        chain = blocks[start:stop]
        before = last_use[chain]
        last_use[chain] = request
        begin = 0
        for cut in [*(np.flatnonzero(before[1:] != before[:-1]) + 1).tolist(), stop - start]:
            if begin == cut or before[begin] == FIRST_USE:
                break
            found.append((request, int(before[begin]), begin, cut))
            begin = cut
    columns: Ints = np.array(found, np.int64).reshape(-1, 4).T
    return columns


def reuse_distances(trace: Trace) -> Ints:
    """Return the stack distance of each reference, int64 ``[refs]``: see ``Reuse``; FIRST_USE for the first use of a
    block.

    Args:
        trace: with blocks.
    """
    reuse = Reuse.of(trace)
    distances = np.full(trace.num_refs, FIRST_USE, np.int64)
    sizes = reuse.end - reuse.begin
    within = np.arange(reuse.num_reuses) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    distances[np.repeat(trace.starts[reuse.request] + reuse.begin, sizes) + within] = (
        np.repeat(reuse.distance, sizes) + within
    )
    return distances


def weight_of_larger_before(values: Ints, weights: Ints) -> Ints:
    """Return, for each value, the sum of the weights of the earlier values that are larger: int64 ``[n]``. Values are
    at least 0. O(n log^2 n).

    As in a merge sort, the values are cut into pairs of runs of 1, 2, 4, .. values. In each pair every value on the
    right is compared with all values on the left.
    """
    sums, index = np.zeros(len(values), np.int64), np.arange(len(values))
    span, width = int(values.max(initial=0)) + 1, 1
    while width < len(values):
        pair, is_right = index // (2 * width), index // width % 2 == 1
        keys = pair * span + values  # the keys of a pair are above those of all pairs before it
        left, right = np.flatnonzero(~is_right), np.flatnonzero(is_right)
        left = left[np.argsort(keys[left], kind="stable")]
        upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(weights[left])])
        in_pair = upto[np.searchsorted(keys[left], (pair[right] + 1) * span)]
        sums[right] += in_pair - upto[np.searchsorted(keys[left], keys[right], side="right")]
        width *= 2
    return sums


def lru_hits(reuse: Reuse, capacities: Iterable[int]) -> list[int]:
    """Return the number of blocks that leaf LRU hits at each capacity. O(stretches) each.

    Args:
        reuse: of the trace.
        capacities: in blocks.
    """
    return [reuse.num_below(capacity) for capacity in capacities]


def reuse_histogram(reuse: Reuse) -> list[tuple[int, int, int]]:
    """Return (low, high, count) for the distances in [low, high): first 0, then ranges that double. First uses are not
    counted.

    Args:
        reuse: of the trace.
    """
    largest = int((reuse.distance + reuse.end - reuse.begin).max(initial=0)) - 1
    edges = [0, *(2**k for k in range((largest + 1).bit_length() + 1))]
    below = lru_hits(reuse, edges)
    return [(low, high, n - m) for low, high, m, n in zip(edges, edges[1:], below, below[1:]) if low <= largest]


@dataclass(frozen=True, eq=False)
class WorkingSet:
    """Counts for each window of time, one after another from the first arrival on: arrays ``[windows]``.

    ``window``: seconds. ``begins`` float64, seconds; ``requests`` int64; ``blocks`` int64, the different blocks named
    in the window; ``fresh`` int64, those of them that were never named before the window.
    """

    window: float
    begins: Floats
    requests: Ints
    blocks: Ints
    fresh: Ints

    def to_dict(self) -> dict[str, Any]:
        """Return the counts of each window, for JSON."""
        return {
            "window_seconds": self.window,
            "requests": self.requests.tolist(),
            "blocks": self.blocks.tolist(),
            "fresh_blocks": self.fresh.tolist(),
        }


def working_set(trace: Trace, window: float) -> WorkingSet:
    """Count the different blocks that are used in each window of time, by arrival. O(refs).

    Denning, "The working set model for program behavior", CACM 11(5), 1968.

    Args:
        trace: with blocks.
        window: seconds.

    Raises:
        BadInput: ``window`` is not above 0, or so short that the trace has more than 10 million of them.
    """
    if not (window > 0 and math.isfinite(window)):
        raise BadInput(f"window must be a time in seconds above 0, got {window!r}", needed=window)
    if not len(trace):
        return WorkingSet(window, np.empty(0, np.float64), *(np.empty(0, np.int64) for _ in range(3)))
    origin = float(trace.arrivals.min())
    if (trace.arrivals.max() - origin) / window > 10_000_000:
        text = f"{trace.arrivals.max() - origin:.0f} s have more than 10 million windows of {window} s"
        raise BadInput(text, needed=window, available=float(trace.arrivals.max() - origin))
    index = ((trace.arrivals - origin) // window).astype(np.int64)
    num = int(index.max()) + 1
    last_window = np.full(int(trace.blocks.max(initial=-1)) + 1, FIRST_USE, np.int64)
    blocks, fresh = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for request in np.argsort(index, kind="stable").tolist():  # windows ascend, so only a block's last window matters
        chain, now = trace.blocks[trace.starts[request] : trace.starts[request + 1]], index[request]
        before = last_window[chain]
        blocks[now] += np.count_nonzero(before != now)
        fresh[now] += np.count_nonzero(before == FIRST_USE)
        last_window[chain] = now
    begins = np.asarray(origin + window * np.arange(num), np.float64)
    return WorkingSet(window, begins, np.bincount(index, minlength=num), blocks, fresh)
