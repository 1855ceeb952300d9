"""Replays one trace at many capacities with many policies; one pass serves all capacities if the policy allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvpagoda.prefix import EvictionPolicy
from kvpagoda.replay.belady import furthest_next_use
from kvpagoda.replay.readers import Source
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.simulate import BOUND, ReplayResult, checked, counted, readable, replay
from kvpagoda.replay.trace import Trace
from kvpagoda.units import whole_number

Told = Callable[[float, str], None]
"""A callback: (number of finished replays, with fractions; the replay that runs)."""
_trace: Trace | None = None  # the trace, in a process of the pool


def hit_rate_curve(
    trace: Source | Trace,
    capacities: Sequence[int],
    policies: Sequence[str | EvictionPolicy],
    *,
    warm_up: float = 0.0,
    jobs: int = 1,
    reuse: Reuse | None = None,
    on_progress: Told | None = None,
) -> list[ReplayResult]:
    """Return the results of ``replay`` at every capacity, in blocks, for every policy; capacities are the outer loop.

    ``lru`` and ``opt`` are computed from the stretches of one pass; other policies run in ``jobs`` processes at once
    (with more than one, a script needs ``if __name__ == "__main__"``). ``warm_up``: see ``replay``. ``reuse``: the
    stretches of this trace, if they are known already. Raises BadInput before anything runs.
    """
    names, sizes = checked(policies, capacities, warm_up)
    asked = [(size, number) for size in sizes for number in range(len(names))]
    whole_number(jobs, "jobs", at_least=1)
    columns = readable(trace)
    if reuse is None and ("lru" in names or BOUND in names):
        reuse = Reuse.of(columns)
    found: dict[tuple[int, int], ReplayResult] = {}

    def tell(size: int, number: int, requests: int = 0) -> None:
        if on_progress is not None:
            on_progress(len(found) + requests / max(1, len(columns)), f"{names[number]}, {size:,} blocks")

    slow = []
    for size, number in asked:
        policy = policies[number]
        if reuse is None or policy not in ("lru", BOUND):
            slow.append((size, number))
            continue
        hits = reuse.hits(size) if policy == "lru" else furthest_next_use(columns, reuse, size)
        found[size, number] = counted(columns, names[number], size, warm_up, hits)
        tell(size, number)
    if jobs > 1 and len(slow) > 1 and all(isinstance(policy, str) for policy in policies):
        from concurrent.futures import ProcessPoolExecutor, as_completed  # slow to load
        from multiprocessing import get_context

        context, workers = get_context("spawn"), min(jobs, len(slow))
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(columns,)) as pool:
            futures = {pool.submit(_replay, size, names[number], warm_up): (size, number) for size, number in slow}
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                tell(*futures[future])
        return [found[key] for key in asked]
    for size, number in slow:
        found[size, number] = replay(
            columns, capacity_blocks=size, policy=policies[number], warm_up=warm_up,
            on_request=partial(tell, size, number),
        )  # fmt: skip
    return [found[key] for key in asked]


def _begin(trace: Trace) -> None:
    global _trace
    _trace = trace


def _replay(capacity: int, policy: str, warm_up: float) -> ReplayResult:
    assert _trace is not None, "the pool began with a trace"
    return replay(_trace, capacity_blocks=capacity, policy=policy, warm_up=warm_up)
