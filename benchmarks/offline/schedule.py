"""When the requests of a trace run, and how many tokens of each are in memory in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpagoda.kv_cache import KVCache
from kvpagoda.replay.batching import Batching, cache_for
from kvpagoda.replay.serving import Clock, Steps
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Schedule:
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


def one_at_a_time(trace: Trace, served: npt.NDArray[np.bool_]) -> Schedule:
    """Return the schedule of every cache that ends a request before it admits the next: those of ``served``, bool
    ``[requests]``, in the order of ``trace``. In one step a request is admitted, and in the next it has all its tokens but
    the last in memory and leaves."""
    numbers = np.flatnonzero(served)
    at, none = 2 * np.arange(len(numbers)), np.full(len(trace), -1, np.int64)
    admitted, ended = none.copy(), none.copy()
    admitted[numbers], ended[numbers] = at, at + 1
    lengths = np.maximum(trace.input_lengths, 1) + trace.output_lengths - 1
    return Schedule(
        2 * len(numbers), admitted, ended, at + 1, numbers, lengths[numbers], np.zeros(len(trace), np.int64)
    )


def served_here(
    trace: Trace, schema: Schema, budget: int | str, *, tokens_per_id: int, at_once: int, step_tokens: int = 2048,
    checkpoints: int | None = None, on_end: Callable[[KVCache], None] | None = None,
) -> Schedule:  # fmt: skip
    """Serve ``trace`` as ``kvpagoda.replay.serve`` does with up to ``at_once`` requests at once, and return the schedule.
    ``checkpoints``: the most that are kept (None: as many as fit). ``on_end`` is called with the cache. Raises
    BadInput, NeverFits."""
    cache = cache_for(trace, schema, budget, step_tokens, max_requests=at_once, checkpoints=checkpoints)
    steps = Steps(Batching(cache, trace, tokens_per_id, range(len(trace))), step_tokens, Clock())
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
    if on_end is not None:
        on_end(cache)
    cache.close()
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    found = np.array([cached for _, _, cached in steps.each], np.int64)
    return Schedule(steps.steps, admitted, ended, *columns, found)
