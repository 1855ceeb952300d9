"""What ``kvpagoda replay`` prints: a table or JSON, and a picture; progress on a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.replay.multi_worker import serve_multi_worker
from kvpagoda.replay.plot import draw, new_figure
from kvpagoda.replay.reuse import WorkingSet, reuse_distances, reuse_histogram, working_set
from kvpagoda.replay.serve import ServeResult, serve
from kvpagoda.replay.simulate import BOUND, ReplayResult, known_policy, possible_capacity, replay
from kvpagoda.replay.trace import Ints, Trace
from kvpagoda.replay.workload import synthetic
from kvpagoda.schema import Schema

T = TypeVar("T")
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the different blocks
WINDOWS = 12


@dataclass(frozen=True)
class Source:
    """Which requests are replayed: those of the file ``path``, or, where that is None, of the synthetic workload ``seed``.

    ``limit``: the first so many only. ``by_arrival``: in the order of their arrivals.
    """

    path: Path | None
    limit: int | None = None
    by_arrival: bool = False
    seed: int = 0

    def read(self, made_up: int) -> Trace:
        """The trace; ``made_up`` requests, if there is neither a file nor a limit. Raises BadInput, OSError."""
        if self.path is not None:
            trace = Trace.read(self.path, self.limit)
        else:
            trace = synthetic(made_up if self.limit is None else self.limit, self.seed)
        return trace.by_arrival() if self.by_arrival else trace

    @property
    def tokens_per_id(self) -> int:
        """How many tokens a block id stands for: 512 in the public traces."""
        return 64 if self.path is None else 512


def run(
    source: Source, capacities: Sequence[int] | None, policies: Sequence[str], plot: Path | None, as_json: bool
) -> None:
    """Replay at every capacity, in blocks (None: shares of the different ones), with every policy, and print."""
    chosen = [known_policy(name) for name in policies]
    sizes = [possible_capacity(size) for size in capacities or ()]
    figure = None if plot is None else new_figure(plot)
    trace = source.read(2_000)
    if not trace.num_refs:
        raise BadInput(f"{trace.name} names no blocks (lengths and arrivals only): there is nothing to look up")
    if not sizes:
        sizes = sorted({max(1, round(trace.num_distinct * share)) for share in DEFAULT_SHARES})
    began = time.perf_counter()
    results = _each(
        trace,
        [(size, policy) for size in sizes for policy in chosen],
        lambda job: f"{job[1]}, {job[0]:,} blocks",
        lambda job, done: replay(trace, capacity_blocks=job[0], policy=job[1], on_request=done),
    )
    seconds = time.perf_counter() - began
    distances = reuse_distances(trace)
    span = float(np.ptp(trace.arrivals))
    windows = working_set(trace, span / WINDOWS * (1 + 1e-9) if span > 0 else 1.0)
    if figure is not None and plot is not None:
        draw(figure, plot, trace, distances, results)
    if as_json:
        print(json.dumps(_figures(trace, distances, windows, results, seconds), indent=2))
    else:
        _print(trace, distances, windows, results, seconds)


def run_schema(
    source: Source, schema: Schema, grid: Iterable[tuple[str, str, int]], settings: dict[str, Any], as_json: bool
) -> None:
    """Serve a trace with the layers of ``schema`` for every (budget, policy, checkpoint interval) of ``grid``, and print.

    ``settings``: what else ``serve`` takes. The bound is no policy to serve with: it is left out.
    """
    jobs = [job for job in grid if known_policy(job[1]) != BOUND]
    trace = source.read(500)
    results = _each(
        trace,
        jobs,
        lambda job: f"{job[0]}, {job[1]}",
        lambda job, done: serve(
            trace, schema, job[0], policy=job[1], checkpoint_every=job[2], on_request=done, **settings
        ),
    )
    if as_json:
        rows = [{"budget": b, "checkpoint_every": every, **r.to_dict()} for (b, _, every), r in zip(jobs, results)]
        print(json.dumps({"trace": trace.name, "schema": schema.name, "results": rows}, indent=2))
        return
    cells = [
        (
            budget, policy, str(every or "-"), f"{r.hit_rate:.1%}", f"{r.matched_tokens / max(1, r.prompt_tokens):.1%}",
            f"{r.mean_running:.1f}", f"{r.evicted_blocks:,}", f"{r.unusable_percent:.2f}%",
        )
        for (budget, policy, every), r in zip(jobs, results)
    ]  # fmt: skip
    out = console.output()
    out.print(_title(trace, schema))
    if results and results[0].never_fit:
        out.print(f"{results[0].never_fit:,} requests are larger than the smallest cache")
    names = ("budget", "policy", "every", "hits", "found", "runs", "evicted", "unused")
    out.print(console.table(names, cells, left=names[:2]))


def run_workers(
    source: Source,
    schema: Schema,
    budget: str,
    workers: int,
    store: str | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Serve a trace by several workers that share a store, and print what each hit, and all together.

    ``settings``: what else ``serve`` takes.
    """
    known_policy(settings["policy"])
    trace = source.read(500)
    (results,) = _each(
        trace,
        [workers],
        lambda job: f"{job} workers",
        lambda job, done: serve_multi_worker(
            trace, schema, budget, workers=job, store=store, on_request=done, **settings
        ),
    )
    if as_json:
        hits, loaded = _shares(results)
        figures = {"trace": trace.name, "schema": schema.name, "budget": budget, "workers": workers}
        rows = [result.to_dict() for result in results]
        print(json.dumps({**figures, "hit_rate": hits, "from_store": loaded, "results": rows}, indent=2))
        return
    parts = {**{str(number): [result] for number, result in enumerate(results)}, "together": results}
    cells = [
        (
            name, f"{sum(r.requests for r in part):,}", *(f"{share:.1%}" for share in _shares(part)),
            f"{sum(r.evicted_blocks for r in part):,}",
        )
        for name, part in parts.items()
    ]  # fmt: skip
    out = console.output()
    out.print(f"{_title(trace, schema)}, {budget} a worker")
    out.print(console.table(("worker", "requests", "hits", "from store", "evicted"), cells, left=["worker"]))


def _title(trace: Trace, schema: Schema) -> str:
    return f"{Path(trace.name).name}: {len(trace):,} requests with the layers of {schema.name}"


def _shares(results: Sequence[ServeResult]) -> tuple[float, float]:
    """Of all prompt tokens, the share that was cached, and the share that came from the store."""
    prompt = max(1, sum(r.prompt_tokens for r in results))
    return sum(r.cached_tokens for r in results) / prompt, sum(r.loaded_tokens for r in results) / prompt


J = TypeVar("J")


def _each(
    trace: Trace, jobs: Sequence[J], note: Callable[[J], str], work: Callable[[J, Callable[[int], None]], T]
) -> list[T]:
    """``work(job, done)`` for each job; ``done(count)`` says how many requests of the trace are done."""
    results = []
    with console.progress(len(trace) * len(jobs), "requests") as moved:
        for number, job in enumerate(jobs):
            begin, text = number * len(trace), note(job)

            def done(count: int, begin: int = begin, text: str = text) -> None:
                if moved is not None:
                    moved(begin + count, text)

            results.append(work(job, done))
    return results


def _print(trace: Trace, distances: Ints, windows: WorkingSet, results: list[ReplayResult], seconds: float) -> None:
    out = console.output()
    reuses = np.sort(distances[distances >= 0])
    out.print(f"{Path(trace.name).name}: {len(trace):,} requests, {trace.num_refs:,} block references")
    out.print(f"different blocks  {trace.num_distinct:,}, so at most {len(reuses) / trace.num_refs:.2%} can hit")
    if len(reuses):
        half, most = (int(reuses[int(len(reuses) * share)]) for share in (0.5, 0.9))
        out.print(f"reuse distance    half below {half + 1:,} blocks, 90 % below {most + 1:,}")
    window = windows.window
    out.print(
        f"working set       {windows.blocks.mean():,.0f} blocks in "
        f"{f'{window:,.1f} s' if window < 600 else f'{window / 60:,.1f} min'} on average, at most {windows.blocks.max():,}"
    )
    cells = [
        (
            r.policy, f"{r.capacity_blocks:,}", f"{r.capacity_blocks / trace.num_distinct:.1%}", f"{r.hit_rate:.2%}",
            f"{r.block_hits:,}", f"{r.evictions:,}",
        )
        for r in results
    ]  # fmt: skip
    out.print()
    names = ("policy", "capacity", "of all", "hit rate", "hits", "evictions")
    out.print(console.table(names, cells, left=["policy"]))
    out.print(f"\n{len(results)} replays in {seconds:.1f} s")


def _figures(
    trace: Trace, distances: Ints, windows: WorkingSet, results: list[ReplayResult], seconds: float
) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "requests": len(trace),
        "block_refs": trace.num_refs,
        "distinct_blocks": trace.num_distinct,
        "results": [result.to_dict() for result in results],
        "reuse_distance": [
            {"from": low, "below": high, "references": count} for low, high, count in reuse_histogram(distances)
        ],
        "working_set": {
            "window_seconds": windows.window,
            "requests": windows.requests.tolist(),
            "blocks": windows.blocks.tolist(),
            "fresh_blocks": windows.fresh.tolist(),
        },
        "seconds": round(seconds, 3),
    }
