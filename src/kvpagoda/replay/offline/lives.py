"""When the requests of a trace run, and how many tokens of each are in memory in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpagoda import KVCache
from kvpagoda.replay.batching import Batching
from kvpagoda.replay.serving import Steps, TraceClock
from kvpagoda.replay.setup import Setup
from kvpagoda.replay.trace import Ints, Trace


@dataclass(frozen=True, eq=False)
class Lives:
    """In each step requests are admitted first, and then all that run compute a piece. Arrays int64.

    ``admitted``, ``ended`` ``[requests]``: the step in which a request is admitted, and that in which it computes its last
    piece and leaves; -1 if it is not served. ``step``, ``number``, ``length`` ``[n]``, in the order of the steps: in step
    ``step`` request ``number``, which was admitted before, has at least ``length`` tokens in memory when all requests of
    the step are admitted. ``found`` ``[requests]``: the tokens that were found cached (0 where nothing served)."""

    num_steps: int
    admitted: Ints
    ended: Ints
    step: Ints
    number: Ints
    length: Ints
    found: Ints

    def is_served(self) -> npt.NDArray[np.bool_]:
        """Return which requests run, bool ``[requests]``."""
        served: npt.NDArray[np.bool_] = self.admitted >= 0
        return served


def one_at_a_time(trace: Trace, served: npt.NDArray[np.bool_]) -> Lives:
    """Return the lives of requests in every cache that ends a request before it admits the next: those of ``served``, bool
    ``[requests]``, in the order of ``trace``. In one step a request is admitted, and in the next it has all its tokens but
    the last in memory and leaves."""
    numbers = np.flatnonzero(served)
    at, none = 2 * np.arange(len(numbers)), np.full(len(trace), -1, np.int64)
    admitted, ended = none.copy(), none.copy()
    admitted[numbers], ended[numbers] = at, at + 1
    lengths = np.maximum(trace.input_lengths, 1) + trace.output_lengths - 1
    return Lives(2 * len(numbers), admitted, ended, at + 1, numbers, lengths[numbers], np.zeros(len(trace), np.int64))


def served_here(
    trace: Trace,
    setup: Setup,
    cache: KVCache,
    on_request: Callable[[int], None] | None = None,
    batch_tokens: int | None = None,
) -> Lives:
    """Serve ``trace`` with ``cache``, an empty cache of ``setup``, as ``serve`` does, and return the lives of the requests.
    ``on_request`` is called with the number of those that ended."""
    batching = Batching(cache, trace, setup.tokens_per_id, range(len(trace)))
    steps = Steps(batching, setup.step_tokens, TraceClock(), batch_tokens)
    admitted, ended = np.full((2, len(trace)), -1, np.int64)
    rows: list[tuple[int, int, int]] = []
    before: dict[int, int] = {}
    is_left = True
    while is_left:
        now = steps.steps
        first, is_left = len(steps.each), steps.step()
        fresh = [i for i in range(first, len(steps.each)) if steps.each[i][0]]
        admitted[fresh] = now
        rows += [(now, number, length) for number, length in before.items()]
        after = {request.number: request.sequence.length for request in steps.running}
        ended[[number for number in (*before, *fresh) if number not in after]] = now
        before = after
        if on_request is not None:
            on_request(steps.probe.num_closed)
    step, number, length = np.array(rows, np.int64).reshape(-1, 3).T
    found = np.array([cached for _, _, cached in steps.each], np.int64)
    return Lives(steps.steps, admitted, ended, step, number, length, found)
