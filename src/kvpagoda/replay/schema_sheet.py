"""What ``kvpagoda replay --schema`` prints: what a cache with a model's layers hits, with every policy in every budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.replay.jobs import run_jobs
from kvpagoda.replay.offline.bound import HitBound, hit_bound
from kvpagoda.replay.offline.demand import check_ids
from kvpagoda.replay.own_policy import policy_from_text
from kvpagoda.replay.page import ReportPage, Served, schema_sections
from kvpagoda.replay.report import Sheet, Source, order_of, partly, processes_for, show, title
from kvpagoda.replay.reuse import Reuse
from kvpagoda.replay.run import BLOCK_FIFO, BOUND, AnyPolicy, fresh, known_policy
from kvpagoda.replay.serving import ServeResult, serve, serve_multi_worker
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema

Job = tuple[str, str, int, AnyPolicy]
"""(budget, name of the policy, checkpoint interval, policy) of a replay."""
COLUMNS = (
    "budget", "policy", "checkpoint\nevery", "tokens\nhit", "tokens\nin tree", "requests\nat once", "blocks\nevicted",
    "memory\nunusable", "blocks\na run",
)  # fmt: skip
LEGEND = (
    "tokens: of all prompts, the share that was hit, so not computed, and that was in the tree, usable or not; "
    "requests at once, memory unusable, blocks a run (neighbours in memory): on average"
)
LEGEND_OF_BOUND = f"{BOUND}: no cache above in the steps of lru, even one that knows the whole trace"


def measured(
    source: Source,
    schema: Schema,
    grid: Sequence[tuple[str, str, int]],
    settings: dict[str, Any],
    jobs: int | None = None,
    *,
    timeline: Path | None = None,
    page: Path | None = None,
    quiet: bool = False,
) -> Sheet:
    """Serve a trace with the layers of ``schema`` for every (budget, policy, checkpoint interval) of ``grid``, in ``jobs``
    processes at once, and return the results. An interrupt ends it as it ends ``report.measured``.

    ``settings``: other arguments of ``serve`` and ``hit_bound``, which gives the results of ``opt``. An id stands for as many
    tokens as the trace says. ``block-fifo`` cannot serve requests, and is left out. ``timeline``: a file for trace events, if
    the grid is one. ``page``: a file for a report. ``quiet``: no progress. Raises BadInput, also if no policy is left, and
    MissingExtra.
    """
    asked = _checked_grid(grid, timeline is not None, page is not None)
    if timeline is not None:
        settings = {**settings, "record": timeline}
    report = None if page is None else ReportPage(page)
    trace = source(500)
    if any(policy == BOUND for *_, policy in asked):
        check_ids(trace)
    order, notes = order_of(trace)
    settings = {"tokens_per_id": trace.block_size, **settings}
    work = [partial(_served, schema, budget, policy, every, settings) for budget, _, every, policy in asked]
    at_once = jobs if jobs is not None else processes_for(trace.num_refs)
    at_once = at_once if all(isinstance(policy, str) for *_, policy in asked) else 1
    done = _served_all(trace, work, [f"{budget}, {name}" for budget, name, _, _ in asked], at_once, quiet)
    if is_partial := len(done) < len(asked):
        notes.append(partly(len(done), len(asked)))
    told = [job[:3] for number, job in enumerate(asked) if number in done]
    results = [done[number] for number in sorted(done)]
    rows = [{"budget": b, "checkpoint_every": every, **r.to_dict()} for (b, _, every), r in zip(told, results)]
    figures = {"trace": trace.name, "schema": schema.name, **order, "results": rows, "partial": is_partial}
    lines = [title(trace, schema), *notes]
    if results[0].never_fit:
        lines.append(f"{results[0].never_fit:,} requests are larger than the smallest cache")
    if report is not None:
        known = replace(trace, block_size=settings["tokens_per_id"])
        sections = schema_sections(known, Reuse.of(known), told, results)
        report.write(f"Replay of {Path(trace.name).name}", lines, sections)
    lines.append(LEGEND)
    if any(isinstance(result, HitBound) for result in results):
        lines.append(LEGEND_OF_BOUND)
    return Sheet(figures, lines, COLUMNS, [_cells_of(*row) for row in zip(told, results)], is_partial)


def _checked_grid(grid: Sequence[tuple[str, str, int]], with_timeline: bool, with_page: bool) -> list[Job]:
    """Return (budget, name of the policy, checkpoint interval, policy) of what ``grid`` asks for, but for ``block-fifo``.
    Raises BadInput if that is nothing, or if a file is asked for that cannot show it."""
    read = [(budget, policy_from_text(policy), every) for budget, policy, every in grid]
    named = [(budget, known_policy(policy), every, policy) for budget, policy, every in read]
    asked: list[Job] = [job for job in named if job[1] != BLOCK_FIFO]
    if not asked:
        raise BadInput(f"{BLOCK_FIFO} has no prefix tree and cannot serve requests: give another policy")
    is_bound = [policy == BOUND for *_, policy in asked]
    if with_timeline and len(asked) > 1:
        raise BadInput("--trace shows one replay: give it one --budget, --policy and --checkpoint-every")
    if with_timeline and is_bound[0]:
        raise BadInput(
            f"--trace shows how requests are served, and {BOUND} is a bound that serves none: give another policy"
        )
    if with_page and all(is_bound):
        raise BadInput(f"--report shows how requests are served, and {BOUND} is a bound that serves none: add a policy")
    return asked


def _cells_of(job: tuple[str, str, int], result: Served) -> tuple[str, ...]:
    """Return a row of the table of replays with a model's layers. ``job``: budget, policy, checkpoint interval."""
    budget, policy, every = job
    first = (budget, policy, f"{every} blocks" if every else "-", f"{result.hit_rate:.1%}")
    if isinstance(result, HitBound):
        return (*first, "-", "-", "-", "-", "-")
    found = result.matched_tokens / max(1, result.prompt_tokens)
    return (
        *first, f"{found:.1%}", f"{result.mean_running:.1f}", f"{result.evicted_blocks:,}", f"{result.unusable_percent:.2f}%",
        f"{result.blocks_per_run:.1f}",
    )  # fmt: skip


def _served_all(
    trace: Trace, work: Sequence[Callable[..., Served]], names: Sequence[str], at_once: int, quiet: bool
) -> dict[int, Served]:
    """Run ``work`` over ``trace`` and return number -> result; after an interrupt those that are done. The interrupt is
    raised if there are none."""
    done: dict[int, Served] = {}
    try:
        with console.progress(len(trace) * len(work), "requests", quiet) as moved:

            def tell(number: int, requests: int) -> None:
                if moved is not None:
                    moved(len(done) * len(trace) + requests, names[number])

            run_jobs(work, trace, at_once, done.__setitem__, tell)
    except KeyboardInterrupt:
        if not done:
            raise
    return done


def _served(
    schema: Schema,
    budget: str,
    policy: AnyPolicy,
    every: int,
    settings: dict[str, Any],
    trace: Trace,
    on_request: Callable[[int], None] | None = None,
) -> Served:
    if policy == BOUND:
        return hit_bound(trace, schema, budget, checkpoint_every=every, on_request=on_request, **settings)
    return serve(trace, schema, budget, policy=fresh(policy), checkpoint_every=every, on_request=on_request, **settings)


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
    with console.progress(len(trace), "requests") as moved:

        def done(count: int) -> None:
            if moved is not None:
                moved(count, f"{workers} workers")

        results = work(on_request=done)
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
    lines = [f"{title(trace, schema)}, {budget} a worker", *notes]
    show(
        [Sheet(figures, lines, ("worker", "requests", "tokens\nhit", "tokens\nfrom store", "blocks\nevicted"), cells)],
        as_json,
    )


def _shares(results: Sequence[ServeResult]) -> tuple[float, float]:
    """Return the share of the prompt tokens that was cached, and the share that came from the store."""
    prompt = max(1, sum(r.prompt_tokens for r in results))
    return sum(r.cached_tokens for r in results) / prompt, sum(r.loaded_tokens for r in results) / prompt
