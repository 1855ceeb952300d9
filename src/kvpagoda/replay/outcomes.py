"""What became of each request of a simulation: columns, one row for each request of the trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.replay.batching import Running
from kvpagoda.replay.costs import PER_SECOND
from kvpagoda.replay.trace import Floats, Ints

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Outcomes:
    """Columns with a row for each request, in the order of the trace.

    int64 ``[requests]``: ``worker``: which one served it, -1: none yet. ``prompt``, ``matched``, ``cached``, ``loaded``:
    tokens of its prompt, those in the tree, those that were not computed, those among them that came from tiers; 0 until
    it is admitted. ``arrived``, ``admitted``, ``first``, ``last``: picoseconds of its arrival, its admission, its first
    token and its end; -1: not yet, or never."""

    def __init__(self, arrivals: Floats) -> None:
        count = len(arrivals)
        self.arrived: Ints = np.round(arrivals * PER_SECOND).astype(np.int64)
        self.worker, self.admitted, self.first, self.last = (np.full(count, -1, np.int64) for _ in range(4))
        self.prompt, self.matched, self.cached, self.loaded = np.zeros((4, count), np.int64)

    def admit(self, worker: int, request: Running, now: int) -> None:
        """Note that ``worker`` admitted ``request``, and what it found."""
        number, sequence = request.number, request.sequence
        self.worker[number], self.admitted[number] = worker, now
        self.prompt[number], self.matched[number] = request.num_prompt, sequence.match.num_tokens
        self.cached[number] = sequence.cached_tokens

    def since_arrival(self, column: Ints) -> Floats:
        """Return the seconds from the arrival to ``column``, one of the times, float64 ``[requests]``; NaN where it is -1."""
        return np.where(column < 0, np.nan, (column - self.arrived) / PER_SECOND)


def summary(seconds: Floats) -> dict[str, Any]:
    """Return mean, quantiles and maximum of ``seconds``, NaN left out; None each if there are none."""
    known = seconds[~np.isnan(seconds)]
    if not len(known):
        return dict.fromkeys(("mean", *QUANTILES, "max"))
    quantiles = np.quantile(known, [*QUANTILES.values()]).tolist()
    return {"mean": float(known.mean()), **dict(zip(QUANTILES, quantiles)), "max": float(known.max())}
