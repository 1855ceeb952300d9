"""Prints the results of ``kvpagoda replay``: a table or JSON, and a plot; progress on a terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.recording import TraceFile
from kvpagoda.replay.hinted import replay_hints
from kvpagoda.replay.own_policy import policy_from_text
from kvpagoda.replay.page import Page, schema_sections, tree_sections
from kvpagoda.replay.reuse import Reuse, WorkingSet, lru_hits, reuse_histogram, working_set
from kvpagoda.replay.run import (
    BLOCK_FIFO,
    BOUND,
    WITHOUT_TREE,
    AnyPolicy,
    ReplayResult,
    checked,
    fresh,
    hit_rate_curve,
    known_policy,
)
from kvpagoda.replay.serving import ServeResult, serve, serve_multi_worker
from kvpagoda.replay.timeline import write_timeline
from kvpagoda.replay.trace import Trace
from kvpagoda.replay.workload import synthetic
from kvpagoda.schema import Schema
from kvpagoda.text import short_number, table

T = TypeVar("T")
Source = Callable[[int], Trace]
"""Returns the trace. The argument is the number of requests of a synthetic workload if no limit was set."""
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # default capacities, as shares of the distinct blocks
DEFAULT_POLICIES = ("lru", "s3fifo", BOUND)
MANY_REFS = 20_000_000
"""With more references than this, policies that need a tree are replayed only if the user names them. On the public
agent trace (94 million references) a tree takes some 25 s for each capacity, all other policies together one or two
seconds."""
LEAST_FOR_LINE = 5
"""With fewer capacities a plot has markers alone: a straight line between two that are far apart runs above any curve."""
WINDOWS = 12  # windows of time of a working set
COLUMNS = ("policy", "capacity", "of all", "hit rate", "of tokens", "hits", "evictions")


def read(
    path: Path | None,
    limit: int | None,
    keep_order: bool,
    seed: int,
    block_size: int | None,
    skip_bad: bool,
    made_up: int,
) -> Trace:
    """Return the requests to replay: those of the file ``path``, or of the synthetic workload ``seed`` if ``path`` is
    None.

    ``limit``: only the first requests of the file, this many; without it a workload has ``made_up`` requests.
    ``keep_order``: not sorted by arrival. ``block_size``: tokens per id if the file does not say. ``skip_bad``: leave out
    lines that cannot be read. Raises BadInput, OSError.
    """
    num_requests = made_up if limit is None else limit
    if path is None:
        return synthetic(num_requests, seed)
    return Trace.read(path, limit, block_size, keep_order=keep_order, skip_bad=skip_bad)


def order_of(trace: Trace) -> tuple[dict[str, Any], list[str]]:
    """Return which requests run, and in which order: figures for JSON; a line if that is not the order of the source, or if
    the source is not in order of arrival; and lines about bad lines that were left out."""
    late = trace.out_of_order
    is_kept = bool((np.diff(trace.arrivals) < 0).any())
    told = f"{late:,} of {len(trace):,} requests were not in order of arrival; "
    told += "left in the order of the file" if is_kept else "ordered (--file-order keeps the order of the file)"
    bad = trace.skipped
    lines = [f"{bad.lines:,} bad lines left out; the first {len(bad.first)}:", *bad.first] if bad.lines else []
    figures = {"order": "file" if is_kept else "arrival", "out_of_order": late, "skipped": asdict(bad)}
    return figures, [told, *lines] if late else lines


def run(
    source: Source,
    capacities: Sequence[int] | None,
    policies: Sequence[str] | None,
    as_json: bool,
    *,
    plot: Path | None = None,
    requests: Path | None = None,
    timeline: Path | None = None,
    page: Path | None = None,
    warm_up: float = 0.0,
    jobs: int | None = None,
    with_hints: bool = False,
) -> None:
    """Replay at every capacity, in blocks (None: shares of the distinct blocks), with every policy (None: the default
    policies; "FILE.py:CLASS": one of the user's own), and print the results. ``plot``, ``requests``, ``timeline``, ``page``:
    files for a plot, for the hits of every request, for trace events of one replay, and for a report. ``jobs``: processes.
    ``with_hints``: also LRU that is told what the application knew (``kvpagoda.replay.hinted``). Raises BadInput,
    MissingExtra, OSError.
    """
    chosen: list[AnyPolicy] = [policy_from_text(text) for text in policies or DEFAULT_POLICIES]
    _, sizes = checked(chosen, capacities or (), warm_up)
    figure = None if plot is None else new_figure(plot)
    if requests is not None:
        requests.touch()  # raises before the work if it cannot be written
    if timeline is not None and len(chosen) * len(sizes) != 1:
        raise BadInput("--trace shows one replay: give it one --capacity and one --policy")
    events, report = None if timeline is None else TraceFile(timeline), None if page is None else Page(page)
    trace = source(2_000)
    if not trace.num_refs:
        raise BadInput(f"{trace.name} names no blocks (lengths and arrivals only): there is nothing to look up")
    order, notes = order_of(trace)
    if policies is None and trace.num_refs > MANY_REFS:
        left_out = [name for name in DEFAULT_POLICIES if name not in WITHOUT_TREE]
        chosen = [name for name in DEFAULT_POLICIES if name in WITHOUT_TREE]
        notes.append(f"{', '.join(left_out)} left out: slow with so many references; name it with --policy to run it")
    if with_hints and (warm_up or trace.sessions is None):
        raise BadInput("--hints needs a trace that says which requests belong to one session, and no --warm-up")
    if not sizes:
        sizes = sorted({max(1, round(trace.num_distinct * share)) for share in DEFAULT_SHARES})
    began = time.perf_counter()
    reuse = Reuse.of(trace)
    hinted = sizes if with_hints else []
    with console.progress(len(sizes) * len(chosen) + len(hinted), "replays") as moved:
        at_once = _processes(trace) if jobs is None else jobs
        results = hit_rate_curve(trace, sizes, chosen, warm_up=warm_up, jobs=at_once, reuse=reuse, on_progress=moved)
        for size in hinted:
            if moved is not None:
                moved(len(results), "LRU with hints")
            results.append(replay_hints(trace, size))
    seconds = time.perf_counter() - began
    span = float(np.ptp(trace.arrivals))
    windows = working_set(trace, span / WINDOWS * (1 + 1e-9) if span > 0 else 1.0)
    if figure is not None and plot is not None:
        draw(figure, plot, trace, reuse, results)
    if requests is not None:
        _write_requests(requests, trace, results)
    if events is not None:
        write_timeline(events, trace, reuse, results[0])
    if results[0].warm_up_requests:
        notes.append(f"the first {results[0].warm_up_requests:,} requests are not counted")
    figures = {
        "trace": trace.name, "requests": len(trace), **order, "block_refs": trace.num_refs,
        "distinct_blocks": trace.num_distinct, "notes": notes,
        "results": [result.to_dict() for result in results],
        "reuse_distance": [{"from": low, "below": end, "references": n} for low, end, n in reuse_histogram(reuse)],
        "working_set": windows.to_dict(), "seconds": round(seconds, 3),
    }  # fmt: skip
    lines = [*_asked(trace, reuse, windows), *notes, f"{len(results)} replays in {seconds:.1f} s", ""]
    if report is not None:
        report.write(f"Replay of {Path(trace.name).name}", lines[:-2], tree_sections(trace, reuse, results))
    _show(as_json, figures, lines, COLUMNS, [_cells(result, trace) for result in results])


def _cells(result: ReplayResult, trace: Trace) -> tuple[str, ...]:
    """Return a row of the table of replays."""
    size = result.capacity_blocks
    return (
        result.policy, f"{size:,}", f"{size / trace.num_distinct:.1%}", f"{result.hit_rate:.2%}",
        f"{result.token_hit_rate:.2%}", f"{result.block_hits:,}", f"{result.evictions:,}",
    )  # fmt: skip


def _processes(trace: Trace) -> int:
    """Return how many replays run at once: one per core (at most 8) for a trace of middle size. A small trace is not
    worth a process, and several copies of a large one would fill the memory."""
    return min(os.cpu_count() or 1, 8) if 200_000 < trace.num_refs <= MANY_REFS else 1


def _write_requests(path: Path, trace: Trace, results: Sequence[ReplayResult]) -> None:
    """Write a JSON line for each request: its size, and for every result the blocks and tokens that it hit."""
    tokens = [trace.tokens_of(result.hits) for result in results]
    sizes = np.diff(trace.starts)
    with path.open("w") as file:
        for i in range(len(trace)):
            hits = [
                {
                    "policy": r.policy,
                    "capacity_blocks": r.capacity_blocks,
                    "blocks": int(r.hits[i]),
                    "tokens": int(t[i]),
                }
                for r, t in zip(results, tokens)
            ]
            record = {
                "request": i, "arrival": float(trace.arrivals[i]), "input_length": int(trace.input_lengths[i]),
                "blocks": int(sizes[i]), "counted": i >= results[0].warm_up_requests, "hits": hits,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def run_schema(
    source: Source,
    schema: Schema,
    grid: Iterable[tuple[str, str, int]],
    settings: dict[str, Any],
    as_json: bool,
    *,
    timeline: Path | None = None,
    page: Path | None = None,
) -> None:
    """Serve a trace with the layers of ``schema`` for every (budget, policy, checkpoint interval) of ``grid``, and
    print.

    ``settings``: other arguments of ``serve``. An id stands for as many tokens as the trace says. ``opt`` and
    ``block-fifo`` cannot serve requests, and are left out. ``timeline``: a file for trace events, if the grid is one.
    ``page``: a file for a report. Raises BadInput, also if no other policy is given, and MissingExtra.
    """
    read = [(size, policy_from_text(policy), every) for size, policy, every in grid]
    named = [(size, known_policy(policy), every, policy) for size, policy, every in read]
    jobs = [job for job in named if job[1] not in (BOUND, BLOCK_FIFO)]
    if not jobs:
        raise BadInput(f"{BOUND} and {BLOCK_FIFO} cannot serve requests: give another policy")
    if timeline is not None:
        if len(jobs) > 1:
            raise BadInput("--trace shows one replay: give it one --budget, --policy and --checkpoint-every")
        settings = {**settings, "record": timeline}
    report = None if page is None else Page(page)
    trace = source(500)
    order, notes = order_of(trace)
    settings = {"tokens_per_id": trace.block_size, **settings}
    work = partial(serve, trace, schema, **settings)
    runs = [
        (f"{size}, {name}", partial(work, size, policy=fresh(policy), checkpoint_every=every))
        for size, name, every, policy in jobs
    ]
    results = _each(trace, runs)
    rows = [{"budget": b, "checkpoint_every": every, **r.to_dict()} for (b, _, every, _), r in zip(jobs, results)]
    figures = {"trace": trace.name, "schema": schema.name, **order, "results": rows}
    lines = [_title(trace, schema), *notes]
    if results[0].never_fit:
        lines.append(f"{results[0].never_fit:,} requests are larger than the smallest cache")
    lines.append(
        "hits: prompt tokens not computed; found: in the tree; runs: mean requests at once; unused: memory of no use"
    )
    cells = [
        (
            budget, policy, str(every or "-"), f"{r.hit_rate:.1%}", f"{r.matched_tokens / max(1, r.prompt_tokens):.1%}",
            f"{r.mean_running:.1f}", f"{r.evicted_blocks:,}", f"{r.unusable_percent:.2f}%",
        )
        for (budget, policy, every, _), r in zip(jobs, results)
    ]  # fmt: skip
    if report is not None:
        known = replace(trace, block_size=settings["tokens_per_id"])
        asked = [job[:3] for job in jobs]
        sections = schema_sections(known, Reuse.of(known), asked, results)
        report.write(f"Replay of {Path(trace.name).name}", lines[:-1], sections)
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
    """Serve a trace with several workers that share a store, and print the hits of each worker, and of all together.

    ``settings``: other arguments of ``serve``. Raises BadInput.
    """
    if isinstance(policy_from_text(settings["policy"]), type):
        raise BadInput(f"{settings['policy']}: a policy of your own runs in one process; leave out --workers")
    if known_policy(settings["policy"]) in (BOUND, BLOCK_FIFO):
        raise BadInput(
            f"{settings['policy']} cannot serve requests: it needs the whole trace or has no tree; give another policy"
        )
    trace = source(500)
    settings = {"tokens_per_id": trace.block_size, **settings}
    work = partial(serve_multi_worker, trace, schema, budget, workers=workers, store=store, **settings)
    (results,) = _each(trace, [(f"{workers} workers", work)])
    order, notes = order_of(trace)
    hits, loaded = _shares(results)
    figures = {
        "trace": trace.name, "schema": schema.name, **order, "budget": budget, "workers": workers, "hit_rate": hits,
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
    lines = [f"{_title(trace, schema)}, {budget} a worker", *notes]
    _show(as_json, figures, lines, ("worker", "requests", "hits", "from store", "evicted"), cells)


def _title(trace: Trace, schema: Schema) -> str:
    return f"{Path(trace.name).name}: {len(trace):,} requests with the layers of {schema.name}"


def _shares(results: Sequence[ServeResult]) -> tuple[float, float]:
    """Return the share of the prompt tokens that was cached, and the share that came from the store."""
    prompt = max(1, sum(r.prompt_tokens for r in results))
    return sum(r.cached_tokens for r in results) / prompt, sum(r.loaded_tokens for r in results) / prompt


def _each(trace: Trace, jobs: Sequence[tuple[str, Callable[..., T]]]) -> list[T]:
    """Run ``jobs`` over ``trace`` and return their results. A job is (note, function): the function is called with
    ``on_request=``, a callback that takes the number of finished requests; the note is shown beside the progress."""
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
    """Print the figures as JSON, or the lines and a table below them. Columns of words are aligned left, numbers
    right."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for line in lines:
        console.say(line)
    out = console.output()
    out.print("\n".join(table(names, cells, ("policy", "budget", "worker"), out.width)), soft_wrap=True)


def _asked(trace: Trace, reuse: Reuse, windows: WorkingSet) -> list[str]:
    """Return lines about the trace itself: distinct blocks, reuse distances, working set."""
    lines = [
        f"{Path(trace.name).name}: {len(trace):,} requests, {trace.num_refs:,} block references",
        f"different blocks  {trace.num_distinct:,}, so at most {reuse.num_reuses / trace.num_refs:.2%} can hit",
    ]
    if reuse.num_reuses:
        half, most = reuse.quantile(0.5), reuse.quantile(0.9)
        lines.append(f"reuse distance    half below {half + 1:,} blocks, 90 % below {most + 1:,}")
    window = windows.window
    span = f"{window:,.1f} s" if window < 600 else f"{window / 60:,.1f} min"
    mean, most = windows.blocks.mean(), windows.blocks.max()
    return [*lines, f"working set       {mean:,.0f} blocks in {span} on average, at most {most:,}"]


def new_figure(path: Path) -> Any:
    """Return an empty figure that can be saved at ``path``. Raises BadInput if it could not be saved, before any work
    is done."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("a plot needs the plot extra: pip install 'kvpagoda[plot]'") from None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    known = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix.lower().lstrip(".") not in known:
        raise BadInput(f"cannot plot into {str(path)!r}: its suffix must be one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise BadInput(f"cannot plot into {str(path)!r}: there is no folder {str(path.parent)!r}")
    return figure


def draw(figure: Any, path: Path, trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> None:
    """Draw the results on a figure of ``new_figure`` and save it at ``path``. Raises OSError if it cannot be
    written."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(
        f"{Path(trace.name).name}: {len(trace):,} requests, {trace.num_refs:,} block references, "
        f"{trace.num_distinct:,} different blocks",
        fontsize=11,
    )
    _hit_rates(left, trace, reuse, results)
    _distances(right, trace, reuse)
    figure.savefig(path, dpi=150)


def _hit_rates(axes: Any, trace: Trace, reuse: Reuse, results: Sequence[ReplayResult]) -> None:
    capacities = [result.capacity_blocks for result in results]
    low, high = max(1, min(capacities) * 0.7), max(trace.num_distinct, *capacities)
    every = np.unique(np.geomspace(low, high, 300).astype(np.int64))
    rates = np.array(lru_hits(reuse, every.tolist())) * 100 / trace.num_refs
    axes.plot(every, rates, color="0.75", linewidth=5, label="lru, every capacity", zorder=1)
    for number, policy in enumerate(dict.fromkeys(result.policy for result in results)):
        mine = sorted((r.capacity_blocks, r.hit_rate * 100) for r in results if r.policy == policy)
        style = dict(color=f"C{number % 10}", marker="osD^vPX*"[number % 8], label=policy)
        if policy == BOUND:
            style |= dict(linestyle="--", color="black", label="opt (bound)")
        if policy == "lru" or len(mine) < LEAST_FOR_LINE:  # the line of lru is drawn already, at every capacity
            style |= dict(linestyle="none")
        axes.plot(*zip(*mine), markersize=6, markerfacecolor="none", linewidth=1.4, **style)
    axes.axhline(rates[-1], color="0.5", linewidth=0.8, linestyle=":")
    axes.annotate(f"all reuse {rates[-1]:.1f} %", (low, rates[-1]), (2, 3), textcoords="offset points", color="0.35")
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="hit rate, % of block references", xlim=(low, high * 1.1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if high < 10 * low else "")
    axes.set_ylim(0, max(rates[-1] * 1.12, 1))
    axes.set_title("Hit rate against capacity", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _distances(axes: Any, trace: Trace, reuse: Reuse) -> None:
    rows = reuse_histogram(reuse)
    share = 100 / max(1, trace.num_refs)
    bars = [count * share for _, _, count in rows]
    axes.bar(range(len(rows)), bars, width=0.9, color="C0", zorder=2)
    total = np.cumsum(bars)
    axes.plot(range(len(rows)), total, color="black", marker=".", linewidth=1, label="cumulative", zorder=3)
    step = 1 if len(rows) < 8 else 2
    axes.set_xticks(range(0, len(rows), step), [short_number(low) for low, _, _ in rows[::step]])
    axes.set(xlabel="different blocks used since, at least", ylabel="% of block references")
    first = 100 - (total[-1] if len(total) else 0)
    axes.set_title(f"Reuse distance ({first:.1f} % are first uses)", fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    if rows:
        axes.legend(frameon=False, fontsize=9, loc="upper left")
