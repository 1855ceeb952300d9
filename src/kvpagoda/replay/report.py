"""Prints the results of ``kvpagoda replay``: a table or JSON, and a plot; progress on a terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.recording import TraceFile
from kvpagoda.replay.hinted import replay_hints
from kvpagoda.replay.own_policy import policy_from_text
from kvpagoda.replay.page import ReportPage, draw, new_figure, tree_sections
from kvpagoda.replay.reuse import Reuse, WorkingSet, reuse_histogram, working_set
from kvpagoda.replay.run import (
    BOUND,
    WITHOUT_TREE,
    AnyPolicy,
    ReplayResult,
    checked,
    hit_rate_curve,
    known_policy,
)  # fmt: skip
from kvpagoda.replay.timeline import write_timeline
from kvpagoda.replay.trace import Trace
from kvpagoda.replay.workload import synthetic
from kvpagoda.schema import Schema
from kvpagoda.text import table

Source = Callable[[int], Trace]
"""Returns the trace. The argument is the number of requests of a synthetic workload if no limit was set."""
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # default capacities, as shares of the distinct blocks
DEFAULT_POLICIES = ("lru", "s3fifo", BOUND)
MANY_REFS = 20_000_000
"""With more references than this, policies that need a tree are replayed only if the user names them. On the public
agent trace (94 million references) a tree takes some 25 s for each capacity, all other policies together one or two
seconds."""
WINDOWS = 12  # windows of time of a working set
COLUMNS = (
    "policy", "capacity\nin blocks", "of different\nblocks", "hit rate\nof blocks", "hit rate\nof tokens", "blocks\nhit",
    "blocks\nevicted",
)  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """The results of one trace: ``figures`` for JSON; ``lines`` and a table of ``columns`` and ``cells`` for people.
    ``is_partial``: it was interrupted, and holds what was done by then."""

    figures: dict[str, Any]
    lines: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    is_partial: bool = False


def partly(done: int, asked: int) -> str:
    """Return a line that says that only ``done`` of ``asked`` results are there."""
    return f"partial: interrupted after {done} of {asked} replays"


def show(sheets: Sequence[Sheet], as_json: bool) -> bool:
    """Print ``sheets``, as JSON or as lines and a table each. Columns of words are aligned left, numbers right. Return
    whether one of them is partial."""
    is_partial = any(sheet.is_partial for sheet in sheets)
    if as_json:
        figures = [sheet.figures for sheet in sheets]
        print(json.dumps(figures[0] if len(figures) == 1 else figures, indent=2))
        return is_partial
    out = console.output()
    for number, sheet in enumerate(sheets):
        if number:
            out.print("")
        for line in sheet.lines:
            console.say(line)
        if sheet.lines[-1]:
            out.print("")
        out.print(
            "\n".join(table(sheet.columns, sheet.cells, ("policy", "budget", "worker", "routing"), out.width)),
            soft_wrap=True,
        )
    return is_partial


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
    the source is not in order of arrival; and lines about the times of agents, and about bad lines that were left out."""
    late = trace.out_of_order
    is_kept = bool((np.diff(trace.arrivals) < 0).any())
    told = f"{late:,} of {len(trace):,} requests were not in order of arrival; "
    told += "left in the order of the file" if is_kept else "ordered (--file-order keeps the order of the file)"
    bad = trace.skipped
    lines = [f"{bad.lines:,} bad lines left out; the first {len(bad.first)}:", *bad.first] if bad.lines else []
    figures = {"order": "file" if is_kept else "arrival", "out_of_order": late, "skipped": asdict(bad)}
    if trace.agent_times is not None:
        begin = "the agent's own entry" if trace.agent_times == "agent" else "the beginning of the conversation"
        lines.insert(0, f"the times of the requests of agents count from {begin}")
    return figures, [told, *lines] if late else lines


def measured(
    source: Source, capacities: Sequence[int] | None, policies: Sequence[str] | None, jobs: int | None = None, *,
    plot: Path | None = None, requests: Path | None = None, timeline: Path | None = None, page: Path | None = None,
    warm_up: float = 0.0, with_hints: bool = False, quiet: bool = False,
) -> Sheet:  # fmt: skip
    """Replay at every capacity, in blocks (None: shares of the distinct blocks), with every policy (None: the default
    policies; "FILE.py:CLASS": one of the user's own), and return the results. ``plot``, ``requests``, ``timeline``, ``page``:
    files for a plot, for the hits of every request, for trace events of one replay, and for a report. ``jobs``: processes.
    ``with_hints``: also LRU that is told what the application knew (``kvpagoda.replay.hinted``). ``quiet``: no progress.
    An interrupt ends it with the replays that were done by then, or is raised if there were none. Raises BadInput,
    MissingExtra, OSError.
    """
    chosen: list[AnyPolicy] = [policy_from_text(text) for text in policies or DEFAULT_POLICIES]
    _, sizes = checked(chosen, capacities or (), warm_up)
    figure = None if plot is None else new_figure(plot)
    if requests is not None:
        requests.touch()  # raises before the work if it cannot be written
    if timeline is not None and len(chosen) * len(sizes) != 1:
        raise BadInput("--trace shows one replay: give it one --capacity and one --policy")
    events, report = None if timeline is None else TraceFile(timeline), None if page is None else ReportPage(page)
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
    at_once = processes_for(trace.num_refs) if jobs is None else jobs
    results = _replayed(trace, sizes, chosen, hinted, quiet, warm_up=warm_up, jobs=at_once, reuse=reuse)
    num_asked = len(sizes) * len(chosen) + len(hinted)
    if is_partial := len(results) < num_asked:
        notes.append(partly(len(results), num_asked))
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
        "working_set": windows.to_dict(), "seconds": round(seconds, 3), "partial": is_partial,
    }  # fmt: skip
    lines = [*_asked(trace, reuse, windows), *notes, f"{len(results)} replays in {seconds:.1f} s", ""]
    if report is not None:
        report.write(f"Replay of {Path(trace.name).name}", lines[:-2], tree_sections(trace, reuse, results))
    return Sheet(figures, lines, COLUMNS, [_cells(result, trace) for result in results], is_partial)


def _replayed(
    trace: Trace, sizes: list[int], policies: list[AnyPolicy], hinted: Sequence[int], quiet: bool, **options: Any
) -> list[ReplayResult]:
    """Return the results of ``hit_rate_curve`` with ``options``, and of LRU with hints at the capacities ``hinted``; after an
    interrupt those that are done. The interrupt is raised if there are none."""
    results: list[ReplayResult] = []
    try:
        with console.progress(len(sizes) * len(policies) + len(hinted), "replays", quiet) as moved:
            results = hit_rate_curve(trace, sizes, policies, on_progress=moved, on_result=results.append, **options)
            for size in hinted:
                if moved is not None:
                    moved(len(results), "LRU with hints")
                results.append(replay_hints(trace, size))
    except KeyboardInterrupt:
        if not results:
            raise
        names = [known_policy(policy) for policy in policies]
        results.sort(
            key=lambda result: (sizes.index(result.capacity_blocks), [*names, result.policy].index(result.policy))
        )
    return results


def _cells(result: ReplayResult, trace: Trace) -> tuple[str, ...]:
    """Return a row of the table of replays."""
    size = result.capacity_blocks
    return (
        result.policy, f"{size:,}", f"{size / trace.num_distinct:.1%}", f"{result.hit_rate:.2%}",
        f"{result.token_hit_rate:.2%}", f"{result.block_hits:,}", f"{result.evictions:,}",
    )  # fmt: skip


def processes_for(num_refs: int) -> int:
    """Return how many replays run at once: one per core for a trace of middle size. A small trace is not worth a process,
    and several copies of a large one would fill the memory."""
    return (os.cpu_count() or 1) if 200_000 < num_refs <= MANY_REFS else 1


def _write_requests(path: Path, trace: Trace, results: Sequence[ReplayResult]) -> None:
    """Write a JSON line for each request: its size, and for every result the blocks and tokens that it hit."""
    tokens = [trace.tokens_of(result.hits) for result in results]
    sizes = np.diff(trace.starts)
    with path.open("w") as file:
        for i in range(len(trace)):
            hits = [
                {"policy": r.policy, "capacity_blocks": r.capacity_blocks, "blocks": int(r.hits[i]), "tokens": int(t[i])}
                for r, t in zip(results, tokens)
            ]  # fmt: skip
            record = {
                "request": i, "arrival": float(trace.arrivals[i]), "input_length": int(trace.input_lengths[i]),
                "blocks": int(sizes[i]), "counted": i >= results[0].warm_up_requests, "hits": hits,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def title(trace: Trace, schema: Schema) -> str:
    return f"{Path(trace.name).name}: {len(trace):,} requests with the layers of {schema.name}"


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
