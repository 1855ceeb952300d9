"""What ``kvpagoda replay`` prints: a table or JSON, and a picture; progress on a terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.replay.multi_worker import serve_multi_worker
from kvpagoda.replay.plot import draw, new_figure
from kvpagoda.replay.reuse import WorkingSet, reuse_distances, reuse_histogram, working_set
from kvpagoda.replay.serve import ServeResult, serve
from kvpagoda.replay.simulate import BOUND, known_policy, possible_capacity, replay
from kvpagoda.replay.trace import Ints, Trace
from kvpagoda.replay.workload import synthetic
from kvpagoda.schema import Schema

T = TypeVar("T")
Source = Callable[[int], Trace]
"""Gives the trace; the number is how many requests a synthetic workload has if no limit was set."""
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the different blocks
WINDOWS = 12


def read(path: Path | None, limit: int | None, by_arrival: bool, seed: int, made_up: int) -> Trace:
    """The requests that are replayed: those of the file ``path``, or, where that is None, of the synthetic workload ``seed``.

    ``limit``: the first so many only; without one, a workload has ``made_up``. ``by_arrival``: in the order of their
    arrivals. Raises BadInput, OSError.
    """
    num_requests = made_up if limit is None else limit
    trace = synthetic(num_requests, seed) if path is None else Trace.read(path, limit)
    return trace.by_arrival() if by_arrival else trace


def run(
    source: Source, capacities: Sequence[int] | None, policies: Sequence[str], plot: Path | None, as_json: bool
) -> None:
    """Replay at every capacity, in blocks (None: shares of the different ones), with every policy, and print."""
    chosen = [known_policy(name) for name in policies]
    sizes = [possible_capacity(size) for size in capacities or ()]
    figure = None if plot is None else new_figure(plot)
    trace = source(2_000)
    if not trace.num_refs:
        raise BadInput(f"{trace.name} names no blocks (lengths and arrivals only): there is nothing to look up")
    if not sizes:
        sizes = sorted({max(1, round(trace.num_distinct * share)) for share in DEFAULT_SHARES})
    began = time.perf_counter()
    results = _each(
        trace,
        [
            (f"{policy}, {size:,} blocks", partial(replay, trace, capacity_blocks=size, policy=policy))
            for size in sizes
            for policy in chosen
        ],
    )
    seconds = time.perf_counter() - began
    distances = reuse_distances(trace)
    span = float(np.ptp(trace.arrivals))
    windows = working_set(trace, span / WINDOWS * (1 + 1e-9) if span > 0 else 1.0)
    if figure is not None and plot is not None:
        draw(figure, plot, trace, distances, results)
    histogram = [{"from": low, "below": high, "references": n} for low, high, n in reuse_histogram(distances)]
    figures = {
        "trace": trace.name,
        "requests": len(trace),
        "block_refs": trace.num_refs,
        "distinct_blocks": trace.num_distinct,
        "results": [result.to_dict() for result in results],
        "reuse_distance": histogram,
        "working_set": windows.to_dict(),
        "seconds": round(seconds, 3),
    }
    lines = [*_asked(trace, distances, windows), f"{len(results)} replays in {seconds:.1f} s", ""]
    cells = [
        (
            r.policy, f"{r.capacity_blocks:,}", f"{r.capacity_blocks / trace.num_distinct:.1%}", f"{r.hit_rate:.2%}",
            f"{r.block_hits:,}", f"{r.evictions:,}",
        )
        for r in results
    ]  # fmt: skip
    _show(as_json, figures, lines, ("policy", "capacity", "of all", "hit rate", "hits", "evictions"), cells)


def run_schema(
    source: Source, schema: Schema, grid: Iterable[tuple[str, str, int]], settings: dict[str, Any], as_json: bool
) -> None:
    """Serve a trace with the layers of ``schema`` for every (budget, policy, checkpoint interval) of ``grid``, and print.

    ``settings``: what else ``serve`` takes. The bound is no policy to serve with: it is left out.
    """
    jobs = [job for job in grid if known_policy(job[1]) != BOUND]
    trace = source(500)
    results = _each(
        trace,
        [
            (f"{size}, {policy}", partial(serve, trace, schema, size, policy=policy, checkpoint_every=n, **settings))
            for size, policy, n in jobs
        ],
    )
    rows = [{"budget": b, "checkpoint_every": every, **r.to_dict()} for (b, _, every), r in zip(jobs, results)]
    figures = {"trace": trace.name, "schema": schema.name, "results": rows}
    lines = [_title(trace, schema)]
    if results and results[0].never_fit:
        lines.append(f"{results[0].never_fit:,} requests are larger than the smallest cache")
    cells = [
        (
            budget, policy, str(every or "-"), f"{r.hit_rate:.1%}", f"{r.matched_tokens / max(1, r.prompt_tokens):.1%}",
            f"{r.mean_running:.1f}", f"{r.evicted_blocks:,}", f"{r.unusable_percent:.2f}%",
        )
        for (budget, policy, every), r in zip(jobs, results)
    ]  # fmt: skip
    _show(as_json, figures, lines, ("budget", "policy", "every", "hits", "found", "runs", "evicted", "unused"), cells)


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
    trace = source(500)
    work = partial(serve_multi_worker, trace, schema, budget, workers=workers, store=store, **settings)
    (results,) = _each(trace, [(f"{workers} workers", work)])
    hits, loaded = _shares(results)
    figures = {
        "trace": trace.name, "schema": schema.name, "budget": budget, "workers": workers, "hit_rate": hits,
        "from_store": loaded, "results": [result.to_dict() for result in results],
    }  # fmt: skip
    parts = {**{str(number): [result] for number, result in enumerate(results)}, "together": results}
    cells = [
        (
            name, f"{sum(r.requests for r in part):,}", *(f"{share:.1%}" for share in _shares(part)),
            f"{sum(r.evicted_blocks for r in part):,}",
        )
        for name, part in parts.items()
    ]  # fmt: skip
    lines = [f"{_title(trace, schema)}, {budget} a worker"]
    _show(as_json, figures, lines, ("worker", "requests", "hits", "from store", "evicted"), cells)


def _title(trace: Trace, schema: Schema) -> str:
    return f"{Path(trace.name).name}: {len(trace):,} requests with the layers of {schema.name}"


def _shares(results: Sequence[ServeResult]) -> tuple[float, float]:
    """Of all prompt tokens, the share that was cached, and the share that came from the store."""
    prompt = max(1, sum(r.prompt_tokens for r in results))
    return sum(r.cached_tokens for r in results) / prompt, sum(r.loaded_tokens for r in results) / prompt


def _each(trace: Trace, jobs: Sequence[tuple[str, Callable[..., T]]]) -> list[T]:
    """Run the jobs over ``trace``, (note, function) each: a function is told whom to tell how many requests are done."""
    results: list[T] = []
    with console.progress(len(trace) * len(jobs), "requests") as moved:
        for note, work in jobs:

            def done(count: int, note: str = note) -> None:
                if moved is not None:
                    moved(len(results) * len(trace) + count, note)

            results.append(work(on_request=done))
    return results


def _show(
    as_json: bool, figures: dict[str, Any], lines: Sequence[str], names: Sequence[str], cells: Iterable[Sequence[str]]
) -> None:
    """Print the figures as JSON, or else the lines and a table below them; words are aligned left, numbers right."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for line in lines:
        console.say(line)
    console.print_figures(names, cells, left=("policy", "budget", "worker"))


def _asked(trace: Trace, distances: Ints, windows: WorkingSet) -> list[str]:
    """What the trace asks of any cache, in lines."""
    reuses = np.sort(distances[distances >= 0])
    lines = [
        f"{Path(trace.name).name}: {len(trace):,} requests, {trace.num_refs:,} block references",
        f"different blocks  {trace.num_distinct:,}, so at most {len(reuses) / trace.num_refs:.2%} can hit",
    ]
    if len(reuses):
        half, most = (int(reuses[int(len(reuses) * share)]) for share in (0.5, 0.9))
        lines.append(f"reuse distance    half below {half + 1:,} blocks, 90 % below {most + 1:,}")
    window = windows.window
    span = f"{window:,.1f} s" if window < 600 else f"{window / 60:,.1f} min"
    mean, most = windows.blocks.mean(), windows.blocks.max()
    return [*lines, f"working set       {mean:,.0f} blocks in {span} on average, at most {most:,}"]
