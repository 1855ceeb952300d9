"""Prints what ``kvpagoda simulate`` finds: a table or JSON; progress on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvpagoda import console
from kvpagoda.replay.engine_sheet import settings_from_text
from kvpagoda.replay.fleet.costs import Costs
from kvpagoda.replay.fleet.simulation import SimulateResult, Simulation
from kvpagoda.replay.report import Sheet, Source, order_of, partly, show, title
from kvpagoda.replay.setup import Fleet, Setup
from kvpagoda.replay.trace import Trace

COLUMNS = (
    "budget", "policy", "engine", "workers", "routing", "tokens\nhit", "first token\np50", "first token\np99",
    "last token\np50", "last token\np99", "next token\np50", "requests\ndone",
)  # fmt: skip
LEGEND = (
    "tokens hit: share of the prompt tokens that are not computed; first token, last token: from a request's arrival; next "
    "token: from one token of an answer to the next; p50, p99: of half of the requests, of 99 %, it takes at most this"
)
Case = tuple[str, str, str, int, str]
"""A budget of each worker, a policy, an engine with its settings, a number of workers, a routing rule."""


def run(
    source: Source, setup: Setup, fleet: Fleet, cases: Sequence[Case], tokens_per_id: int | None, as_json: bool
) -> bool:
    """Simulate every one of ``cases``, otherwise as ``setup`` and ``fleet`` say, and print. ``tokens_per_id``: tokens of an id
    (None: as the trace says). Ctrl-C ends the case that runs;
    what is done so far is printed then. Return whether it came. Raises BadInput, NeverFits."""
    trace, results, is_partial = source(500), list[SimulateResult](), False
    setup = replace(setup, tokens_per_id=tokens_per_id or trace.block_size)
    for case in cases:  # what is wrong with one of them is said before any runs
        _simulation(trace.take([]), setup, fleet, case).close()
    with console.progress(len(trace) * len(cases), "requests") as moved:
        for case in cases:
            made = _simulation(trace, setup, fleet, case)
            budget, policy, engine, _, routing = case

            def done(count: int, note: str = f"{budget}, {policy}, {engine}, {routing}") -> None:
                if moved is not None:
                    moved(len(results) * len(trace) + count, note)

            try:
                made.run(done)
            except KeyboardInterrupt:
                is_partial = True
            results.append(made.result())
            made.close()
            if is_partial:
                break
    order, notes = order_of(trace)
    rows = [{"budget": case[0], **result.to_dict(), "engine": case[2]} for case, result in zip(cases, results)]
    costs = fleet.costs.to_dict() if isinstance(fleet.costs, Costs) else fleet.costs
    shared = {"trace": trace.name, "schema": setup.schema.name, **order, "costs": costs, "partial": is_partial}
    lines = [title(trace, setup.schema), *notes]
    if results[0].never_fit:
        lines.append(f"{results[0].never_fit:,} requests are larger than the smallest cache")
    if is_partial:
        lines.append(f"{partly(len(results), len(cases))}, in the middle of the last one")
    lines.append(LEGEND)
    cells = [_cells(case, result) for case, result in zip(cases, results)]
    return show([Sheet({**shared, "results": rows}, lines, COLUMNS, cells, is_partial)], as_json)


def _simulation(trace: Trace, setup: Setup, fleet: Fleet, case: Case) -> Simulation:
    """Return the simulation of ``case``, otherwise as ``setup`` and ``fleet`` say. Raises BadInput, NeverFits."""
    budget, policy, engine, workers, routing = case
    name, settings = settings_from_text(engine)
    fleet = replace(fleet, engine=name, settings=settings, workers=workers, routing=routing)
    return Simulation(trace, replace(setup, budget=budget, policy=policy), fleet)


def _cells(case: Case, result: SimulateResult) -> tuple[str, ...]:
    budget, policy, engine, workers, routing = case
    first, last, between = result.first_token, result.last_token, result.between_tokens
    times = [_shown(one) for one in (first["p50"], first["p99"], last["p50"], last["p99"], between["p50"])]
    return budget, policy, engine, str(workers), routing, f"{result.hit_rate:.1%}", *times, f"{result.finished:,}"


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.0f} s"
