"""What a trace asks of any cache: how far apart its reuses lie, and how many blocks it works with at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput
from kvpagoda.replay.trace import Floats, Ints, Trace

FIRST_USE = -1


def reuse_distances(trace: Trace) -> Ints:
    """int64 ``[refs]``: the stack distance of each reference; FIRST_USE where the block was not seen before.

    The distance is the number of different blocks used more recently than this one when its request begins, where a
    request uses its blocks deepest first. A cache of C blocks that evicts the least recently used leaf hits exactly the
    references with ``0 <= distance < C`` (Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems
    Journal 9(2), 1970), so one pass gives the hits of every capacity. O(refs log refs).
    """
    begin, end = trace.starts[:-1], trace.starts[1:]
    time = np.repeat(begin + end - 1, end - begin) - np.arange(trace.num_refs)  # deepest first
    order = np.argsort(trace.blocks, kind="stable")  # a block's references in the order of their requests
    same = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    last = np.full(trace.num_refs, -1, np.int64)
    last[order[1:][same]] = time[order[:-1][same]]
    again = np.flatnonzero(last >= 0)
    again = again[np.argsort(time[again])]
    distances = np.full(trace.num_refs, FIRST_USE, np.int64)
    # Between the last use p and now, a block counts once: at the use whose own last use was before p. Uses by this
    # request do not disturb: what it used so far lies deeper, and so was last used before p.
    between = trace.starts[trace.request_of[again]] - last[again] - 1
    distances[again] = between - larger_before(last[again])
    return distances


def larger_before(values: npt.NDArray[np.int64]) -> Ints:
    """int64 ``[n]``: how many earlier values are larger, for ``n`` values of at least 0. O(n log^2 n).

    As in a merge sort: in pairs of stretches of 1, 2, 4, .. values each one on the right is compared with all on the left.
    """
    counts, place = np.zeros(len(values), np.int64), np.arange(len(values))
    span, width = int(values.max(initial=0)) + 1, 1
    while width < len(values):
        pair, is_right = place // (2 * width), place // width % 2 == 1
        keys = pair * span + values  # a pair's are above those of all pairs before it
        not_larger = np.searchsorted(np.sort(keys[~is_right]), keys[is_right], side="right")
        counts[is_right] += (pair[is_right] + 1) * width - not_larger
        width *= 2
    return counts


def lru_hits(distances: Ints, capacities: Iterable[int]) -> list[int]:
    """Hits of leaf LRU at each capacity, from ``reuse_distances``. O(refs + largest distance)."""
    upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(distances[distances >= 0]))])
    return [int(upto[min(capacity, len(upto) - 1)]) for capacity in capacities]


def reuse_histogram(distances: Ints) -> list[tuple[int, int, int]]:
    """(low, high, count) of the distances in [low, high): 0, then ranges that double. First uses are left out."""
    seen = distances[distances >= 0]
    edges = [0] + [2**k for k in range(int(seen.max(initial=-1) + 1).bit_length() + 1)]
    counts = np.histogram(seen, edges)[0].tolist() if len(seen) else []
    return [row for row in zip(edges, edges[1:], counts) if row[0] <= int(seen.max(initial=-1))]


@dataclass(frozen=True, eq=False)
class WorkingSet:
    """Per window of time, one after another from the first arrival on: arrays ``[windows]``.

    ``begins`` float64 seconds; ``requests`` int64; ``blocks`` int64, the different blocks named; ``fresh`` int64, those
    never named before the window.
    """

    window: float
    begins: Floats
    requests: Ints
    blocks: Ints
    fresh: Ints

    def to_dict(self) -> dict[str, Any]:
        """The figures of each window, for JSON."""
        return {
            "window_seconds": self.window,
            "requests": self.requests.tolist(),
            "blocks": self.blocks.tolist(),
            "fresh_blocks": self.fresh.tolist(),
        }


def working_set(trace: Trace, window: float) -> WorkingSet:
    """Different blocks used in each ``window`` of seconds, by arrival. Raises BadInput. O(refs log refs).

    Denning, "The working set model for program behavior", CACM 11(5), 1968.
    """
    if not (window > 0 and math.isfinite(window)):
        raise BadInput(f"a window is a time in seconds above 0, got {window!r}")
    if not len(trace):
        return WorkingSet(window, np.empty(0, np.float64), *(np.empty(0, np.int64) for _ in range(3)))
    origin = float(trace.arrivals.min())
    if (trace.arrivals.max() - origin) / window > 10_000_000:
        raise BadInput(f"{trace.arrivals.max() - origin:.0f} s hold more than 10 million windows of {window} s")
    index = ((trace.arrivals - origin) // window).astype(np.int64)
    num = int(index.max()) + 1
    width = int(trace.blocks.max(initial=0)) + 1
    pairs = np.unique(index[trace.request_of] * width + trace.blocks)
    windows, blocks = pairs // width, pairs % width
    _, firsts = np.unique(blocks, return_index=True)  # windows ascend, so the first pair of a block is its oldest
    return WorkingSet(
        window, np.asarray(origin + window * np.arange(num), np.float64), np.bincount(index, minlength=num),
        np.bincount(windows, minlength=num), np.bincount(windows[firsts], minlength=num),
    )  # fmt: skip
