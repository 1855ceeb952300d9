"""A replay as a person sees it: progress on a terminal, a table, JSON, a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from kvpagoda.errors import BadInput
from kvpagoda.replay.multi_worker import serve_multi_worker
from kvpagoda.replay.plot import draw, new_figure
from kvpagoda.replay.reuse import WorkingSet, reuse_distances, reuse_histogram, working_set
from kvpagoda.replay.serve import serve
from kvpagoda.replay.simulate import BOUND, ReplayResult, known_policy, possible_capacity, replay
from kvpagoda.replay.trace import Ints, Trace
from kvpagoda.replay.workload import synthetic
from kvpagoda.schema import Schema

T = TypeVar("T")
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the different blocks
WINDOWS = 12


@dataclass(frozen=True)
class Source:
    """Which requests are replayed: those of a file, or made up."""

    path: Path | None
    limit: int | None = None
    by_arrival: bool = False
    seed: int = 0

    def read(self, made_up: int) -> Trace:
        """The trace; ``made_up`` requests, if neither file nor limit is given. Raises BadInput, OSError."""
        if self.path is not None:
            trace = Trace.read(self.path, self.limit)
        else:
            trace = synthetic(made_up if self.limit is None else self.limit, self.seed)
        return trace.by_arrival() if self.by_arrival else trace

    def tokens_per_id(self, asked: int | None) -> int:
        """How many tokens a block id stands for, if ``asked`` does not say."""
        return asked or (64 if self.path is None else 512)


def run(source: Source, capacities: str | None, policies: str, plot: Path | None, as_json: bool) -> None:
    """Replay and print. Progress goes to standard error, and only on a terminal."""
    chosen = [known_policy(name.strip()) for name in policies.split(",")]
    sizes = None if capacities is None else _sizes(capacities)
    figure = None if plot is None else new_figure(plot)
    trace = source.read(2_000)
    if not trace.num_refs:
        raise BadInput(f"{trace.name} names no blocks (lengths and arrivals only): there is nothing to look up")
    if sizes is None:
        sizes = sorted({max(1, round(trace.num_distinct * share)) for share in DEFAULT_SHARES})
    began = time.perf_counter()
    jobs = [(size, policy) for size in sizes for policy in chosen]
    results = _with_progress(
        len(trace),
        [f"{policy}, {size:,} blocks" for size, policy in jobs],
        lambda number, done: replay(trace, capacity_blocks=jobs[number][0], policy=jobs[number][1], on_request=done),
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
    source: Source,
    schema: Schema,
    budgets: list[str],
    policies: str,
    max_requests: int,
    intervals: tuple[int, ...],
    tokens_per_id: int | None,
    as_json: bool,
) -> None:
    """Serve a trace with the layers of ``schema`` at every budget, policy and checkpoint interval, and print."""
    chosen = [known_policy(name.strip()) for name in policies.split(",")]
    trace = source.read(500)
    jobs = [(b, p, every) for b in budgets for p in chosen if p != BOUND for every in intervals]
    results = _with_progress(
        len(trace),
        [f"{budget}, {policy}" for budget, policy, _ in jobs],
        lambda number, done: serve(
            trace, schema, jobs[number][0], policy=jobs[number][1], checkpoint_every=jobs[number][2],
            max_requests=max_requests, tokens_per_id=source.tokens_per_id(tokens_per_id), on_request=done,
        ),
    )  # fmt: skip
    if as_json:
        figures = [{"budget": b, "checkpoint_every": e, **r.to_dict()} for (b, _, e), r in zip(jobs, results)]
        print(json.dumps({"trace": trace.name, "schema": schema.name, "results": figures}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("budget", "policy"):
        table.add_column(name, no_wrap=True)
    for name in ("every", "hits", "found", "runs", "evicted", "unused"):
        table.add_column(name, justify="right", no_wrap=True)
    for (budget, policy, every), r in zip(jobs, results):
        table.add_row(
            budget, policy, str(every) if every else "-", f"{r.hit_rate:.1%}",
            f"{r.matched_tokens / max(1, r.prompt_tokens):.1%}", f"{r.mean_running:.1f}", f"{r.evicted_blocks:,}",
            f"{r.unusable_percent:.2f}%",
        )  # fmt: skip
    out = Console(highlight=False, markup=False)
    out.print(f"{Path(trace.name).name}: {len(trace):,} requests with the layers of {schema.name}")
    if results and results[0].never_fit:
        out.print(f"{results[0].never_fit:,} requests are larger than the smallest cache")
    out.print(table)


def run_together(
    source: Source,
    schema: Schema,
    budget: str,
    policy: str,
    workers: int,
    store: str | None,
    max_requests: int,
    interval: int,
    tokens_per_id: int | None,
    as_json: bool,
) -> None:
    """Serve a trace by several workers that share a store, and print what each hit, and all together."""
    known_policy(policy)
    trace = source.read(500)
    (results,) = _with_progress(
        len(trace),
        [f"{workers} workers"],
        lambda _, done: serve_multi_worker(
            trace, schema, budget, workers=workers, store=store, policy=policy, max_requests=max_requests,
            checkpoint_every=interval, tokens_per_id=source.tokens_per_id(tokens_per_id), on_request=done,
        ),
    )  # fmt: skip
    prompt, cached, loaded = (
        sum(getattr(r, name) for r in results) for name in ("prompt_tokens", "cached_tokens", "loaded_tokens")
    )
    if as_json:
        together = {"hit_rate": cached / max(1, prompt), "from_store": loaded / max(1, prompt)}
        figures = {"trace": trace.name, "schema": schema.name, "budget": budget, "workers": workers, **together}
        print(json.dumps({**figures, "results": [r.to_dict() for r in results]}, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("worker", no_wrap=True)
    for name in ("requests", "hits", "from store", "evicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, r in enumerate(results):
        share = r.loaded_tokens / max(1, r.prompt_tokens)
        table.add_row(str(number), f"{r.requests:,}", f"{r.hit_rate:.1%}", f"{share:.1%}", f"{r.evicted_blocks:,}")
    table.add_row(
        "together", f"{sum(r.requests for r in results):,}", f"{cached / max(1, prompt):.1%}",
        f"{loaded / max(1, prompt):.1%}", f"{sum(r.evicted_blocks for r in results):,}",
    )  # fmt: skip
    out = Console(highlight=False, markup=False)
    out.print(f"{Path(trace.name).name}: {len(trace):,} requests with the layers of {schema.name}, {budget} a worker")
    out.print(table)


def _sizes(text: str) -> list[int]:
    """'1000,5000' -> [1000, 5000]."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"--capacity takes whole numbers of blocks with commas between, got {text!r}") from None
    return [possible_capacity(size) for size in sizes]


def _with_progress(each: int, notes: list[str], work: Callable[[int, Callable[[int], None]], T]) -> list[T]:
    """``work(number, done)`` for each of ``notes``, of ``each`` requests; ``done(count)`` moves a bar on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return [work(number, lambda count: None) for number in range(len(notes))]
    columns = (
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} requests"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=each * len(notes), note="")

        def step(number: int) -> Callable[[int], None]:
            return lambda count: progress.update(task, completed=number * each + count, note=notes[number])

        return [work(number, step(number)) for number in range(len(notes))]


def _print(trace: Trace, distances: Ints, windows: WorkingSet, results: list[ReplayResult], seconds: float) -> None:
    console = Console(highlight=False, markup=False)
    reuses = np.sort(distances[distances >= 0])
    console.print(f"{Path(trace.name).name}: {len(trace):,} requests, {trace.num_refs:,} block references")
    console.print(f"different blocks  {trace.num_distinct:,}, so at most {len(reuses) / trace.num_refs:.2%} can hit")
    if len(reuses):
        half, most = (int(reuses[int(len(reuses) * share)]) for share in (0.5, 0.9))
        console.print(f"reuse distance    half below {half + 1:,} blocks, 90 % below {most + 1:,}")
    console.print(
        f"working set       {windows.blocks.mean():,.0f} blocks in {_duration(windows.window)} on average, "
        f"at most {windows.blocks.max():,}"
    )
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("capacity", "of all", "hit rate", "hits", "evictions"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(
            r.policy, f"{r.capacity_blocks:,}", f"{r.capacity_blocks / trace.num_distinct:.1%}", f"{r.hit_rate:.2%}",
            f"{r.block_hits:,}", f"{r.evictions:,}",
        )  # fmt: skip
    console.print(table)
    console.print()
    console.print(f"{len(results)} replays in {seconds:.1f} s")


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


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 600 else f"{seconds / 60:,.1f} min"
