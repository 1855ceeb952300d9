"""What ``kvpagoda replay`` does with its options: which of them go together, and what runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from kvpagoda import console
from kvpagoda.errors import BadInput
from kvpagoda.replay import engine_sheet, live, report, schema_sheet
from kvpagoda.replay.jobs import run_jobs
from kvpagoda.replay.report import Sheet, show
from kvpagoda.schema import Schema
from kvpagoda.text import numbers_of, words_of
from kvpagoda.units import whole_number

Options: TypeAlias = SimpleNamespace
"""The options of the command, under the names of the parameters of ``kvpagoda.cli.replay_trace``; but ``schema`` is the
Schema that --schema names, or None."""
_SHOWN = {"page": "--report", "timeline": "--trace", "trace": "TRACE"}


def _given(options: Options, *names: str) -> list[str]:
    """Return which of the options ``names`` are set, as the user writes them."""
    return [
        _SHOWN.get(name, f"--{name.replace('_', '-')}")
        for name in names
        if getattr(options, name) not in (None, False, 0, [])
    ]


_WHOLE_TRACES = (
    "trace", "plot", "requests", "timeline", "page", "warm_up", "hints", "jobs", "limit", "file_order", "skip_bad", "seed",
    "workers", "store", "engine",
)  # fmt: skip
_OF_SCHEMA = ("budget", "max_requests", "checkpoint_every")
_OF_BLOCKS = ("capacity", "plot", "requests", "warm_up", "hints")
_NOT_OF_ENGINES = (
    "schema", "policy", "plot", "requests", "timeline", "page", "warm_up", "hints", "workers", "store", *_OF_SCHEMA,
)  # fmt: skip
_OF_ONE_TRACE = ("plot", "requests", "timeline", "page")


def run(options: Options) -> bool:
    """Run ``kvpagoda replay``. Return whether it was interrupted, and printed what was done so far. Raises BadInput for
    options that do not go together, and what the replays raise."""
    if options.json_lines is not None:
        _answer(options, options.json_lines)
        return False
    if options.strict:
        raise BadInput("--strict is for --json-lines; a bad line of a trace is an error unless --skip-bad is given")
    if options.store is not None and options.workers is None:
        raise BadInput("--store is a store that several workers share: give --workers too")
    traces: Sequence[Path | None] = options.trace or (None,)
    how = (options.limit, options.file_order, options.seed, options.tokens_per_id, options.skip_bad)
    sources = [partial(report.read, trace, *how) for trace in traces]
    if len(traces) > 1 and (given := _given(options, *_OF_ONE_TRACE)):
        raise BadInput(f"{', '.join(given)} is a file about one trace; got {len(traces)}")
    if options.engine is not None:
        if (given := _given(options, *_NOT_OF_ENGINES)) or options.capacity is None:
            raise BadInput(f"--engine goes with --capacity, in blocks{'; leave out ' * bool(given)}{', '.join(given)}")
        numbers = numbers_of(options.capacity, "--capacity")
        work = [partial(engine_sheet.measured, source, numbers, options.engine) for source in sources]
        return _sheets(work, options.jobs, options.as_json)
    if options.schema is not None:
        return _serve(options, options.schema, sources)
    _need_schema(options, _OF_SCHEMA)
    if options.jobs is not None and options.workers is not None:
        raise BadInput("--workers without --schema is the same as --jobs; give one of them")
    sizes = None if options.capacity is None else numbers_of(options.capacity, "--capacity")
    policies = None if options.policy is None else words_of(options.policy)
    made = partial(
        report.measured, plot=options.plot, requests=options.requests, timeline=options.timeline, page=options.page,
        warm_up=options.warm_up, with_hints=options.hints,
    )  # fmt: skip
    work = [partial(made, source, sizes, policies) for source in sources]
    return _sheets(work, options.jobs if options.workers is None else options.workers, options.as_json)


def _sheets(work: Sequence[Callable[..., Sheet]], jobs: int | None, as_json: bool) -> bool:
    """Make and print the sheets of one trace or of several. ``jobs``: processes (None: one trace decides by its size,
    several take all cores). Return whether they are partial."""
    if len(work) == 1:
        return show([work[0](jobs)], as_json)
    processes = (os.cpu_count() or 1) if jobs is None else whole_number(jobs, "jobs", at_least=1)
    return _show_many([partial(make, quiet=True) for make in work], processes, as_json)


def _show_many(makes: Sequence[Callable[..., Sheet]], processes: int, as_json: bool) -> bool:
    """Make the sheet of each of several traces, in up to ``processes`` processes, and print them in their order; as JSON,
    {"traces": [..], "partial": ..}. ``makes``: called with the number of processes that each may start. Return whether an
    interrupt left some out, or ended one early; raise it if nothing was done."""
    found = dict[int, Sheet]()
    each, is_partial = max(1, processes // len(makes)), False
    try:
        with console.progress(len(makes), "traces") as moved:

            def done(number: int, sheet: Sheet) -> None:
                found[number] = sheet
                if moved is not None:
                    moved(len(found), sheet.lines[0].partition(":")[0])
                if sheet.is_partial:
                    raise KeyboardInterrupt

            run_jobs(makes, each, min(processes, len(makes)), done)
    except KeyboardInterrupt:
        if not found:
            raise
        is_partial = True
    sheets = [found[number] for number in sorted(found)]
    if as_json:
        print(json.dumps({"traces": [sheet.figures for sheet in sheets], "partial": is_partial}, indent=2))
        return is_partial
    show(sheets, as_json=False)
    if is_partial:
        console.say(f"\npartial: {len(sheets)} of {len(makes)} traces")
    return is_partial


def _serve(options: Options, schema: Schema, sources: Sequence[report.Source]) -> bool:
    """Run ``replay --schema``: all combinations of options, or one combination in workers that share a trace. Return
    whether the results are partial."""
    if given := _given(options, *_OF_BLOCKS):
        raise BadInput(f"{', '.join(given)} counts blocks of one kind; with --schema give --budget")
    budget, policy, every = options.budget or "40GiB", options.policy, options.checkpoint_every or "0"
    numbers = numbers_of(every, "--checkpoint-every")
    named = {"max_requests": options.max_requests, "tokens_per_id": options.tokens_per_id}
    settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if options.workers is None:
        grid = [*product(words_of(budget), words_of(policy or "lru,s3fifo"), numbers)]
        made = partial(schema_sheet.measured, timeline=options.timeline, page=options.page)
        work = [partial(made, source, schema, grid, settings) for source in sources]
        return _sheets(work, options.jobs, options.as_json)
    if others := _given(options, "jobs", "timeline", "page"):
        raise BadInput(f"{', '.join(others)} is for one cache a replay: leave out --workers")
    if len(sources) > 1 or "," in budget + every + (policy or ""):
        raise BadInput("--workers takes one TRACE, --budget, --policy and --checkpoint-every")
    settings.update(policy=policy or "lru", checkpoint_every=numbers[0])
    schema_sheet.run_workers(sources[0], schema, budget, options.workers, options.store, settings, options.as_json)
    return False


def _answer(options: Options, source: Path) -> None:
    """Run ``replay --json-lines``: one cache, and requests one by one."""
    if others := _given(options, *_WHOLE_TRACES):
        raise BadInput(f"--json-lines takes requests one by one: leave out {', '.join(others)}")
    for name in ("capacity", "policy", "budget", "checkpoint_every"):
        if "," in (value := getattr(options, name) or ""):
            raise BadInput(f"--{name.replace('_', '-')} takes one value with --json-lines, got {value!r}")
    policy = live.served_policy(options.policy or "lru")
    if options.schema is None:
        _need_schema(options, _OF_SCHEMA)
        if options.capacity is None:
            raise BadInput("--json-lines needs --capacity, in blocks, or --schema")
        (capacity,) = numbers_of(options.capacity, "--capacity")
        live.run(live.TreeAnswers(capacity, policy, options.tokens_per_id), source, options.strict)
        return
    if options.capacity is not None:
        raise BadInput("--capacity counts blocks of one kind; with --schema give --budget")
    (every,) = numbers_of(options.checkpoint_every or "0", "--checkpoint-every")
    answers = live.SchemaAnswers(
        options.schema, options.budget or "40GiB", options.tokens_per_id, max_requests=options.max_requests or 1,
        policy=policy, checkpoint_every=every,
    )  # fmt: skip
    live.run(answers, source, options.strict)


def _need_schema(options: Options, names: tuple[str, ...]) -> None:
    """Raise BadInput if one of the options ``names`` is set: they need --schema, which is not set."""
    if given := _given(options, *names):
        raise BadInput(f"{', '.join(given)} needs a model's layers; give --schema too")
