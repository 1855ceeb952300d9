"""What ``kvpagoda replay`` does with its options: which of them go together, and what runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kvpagoda.errors import BadInput
from kvpagoda.replay import live, report
from kvpagoda.schema import Schema
from kvpagoda.text import numbers_of, words_of


@dataclass(frozen=True)
class Options:
    """The options of the command, under their names; ``schema``: the layers that --schema names, ``page``: --report,
    ``timeline``: --trace."""

    trace: Path | None
    capacity: str | None
    policy: str | None
    plot: Path | None
    requests: Path | None
    timeline: Path | None
    page: Path | None
    warm_up: float
    hints: bool
    jobs: int | None
    limit: int | None
    file_order: bool
    skip_bad: bool
    seed: int
    schema: Schema | None
    budget: str | None
    max_requests: int | None
    checkpoint_every: str | None
    tokens_per_id: int | None
    workers: int | None
    store: str | None
    json_lines: Path | None
    strict: bool
    as_json: bool

    def given(self, *names: str) -> list[str]:
        """Return which of the options ``names`` are set, as the user writes them."""
        shown = {"page": "--report", "timeline": "--trace", "trace": "TRACE"}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return [
            shown.get(name, f"--{name.replace('_', '-')}") for name in names if values[name] not in (None, False, 0)
        ]


_WHOLE_TRACES = (
    "trace", "plot", "requests", "timeline", "page", "warm_up", "hints", "jobs", "limit", "file_order", "skip_bad", "seed",
    "workers", "store",
)  # fmt: skip
_OF_SCHEMA = ("budget", "max_requests", "checkpoint_every", "workers")
_OF_BLOCKS = ("capacity", "plot", "requests", "warm_up", "jobs", "hints")


def run(options: Options) -> None:
    """Run ``kvpagoda replay``. Raises BadInput for options that do not go together, and what the replays raise."""
    if options.json_lines is not None:
        _answer(options, options.json_lines)
        return
    if options.strict:
        raise BadInput("--strict is for --json-lines; a bad line of a trace is an error unless --skip-bad is given")
    if options.store is not None and options.workers is None:
        raise BadInput("--store is a store that several workers share: give --workers too")
    source = partial(
        report.read,
        options.trace,
        options.limit,
        options.file_order,
        options.seed,
        options.tokens_per_id,
        options.skip_bad,
    )
    if options.schema is not None:
        _serve(options, options.schema, source)
        return
    _need_schema(options, _OF_SCHEMA)
    report.run(
        source,
        None if options.capacity is None else numbers_of(options.capacity, "--capacity"),
        None if options.policy is None else words_of(options.policy),
        options.as_json,
        plot=options.plot, requests=options.requests, timeline=options.timeline, page=options.page, warm_up=options.warm_up,
        jobs=options.jobs, with_hints=options.hints,
    )  # fmt: skip


def _serve(options: Options, schema: Schema, source: report.Source) -> None:
    """Run ``replay --schema``: all combinations of options in this process, or one combination in several processes."""
    if options.given(*_OF_BLOCKS):
        raise BadInput(
            "--capacity, --plot, --requests, --warm-up, --jobs and --hints count blocks of one kind; with --schema give "
            "--budget"
        )
    budget, policy, every = options.budget or "40GiB", options.policy, options.checkpoint_every or "0"
    numbers = numbers_of(every, "--checkpoint-every")
    named = {"max_requests": options.max_requests, "tokens_per_id": options.tokens_per_id}
    settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if options.workers is None:
        grid = product(words_of(budget), words_of(policy or "lru,s3fifo"), numbers)
        report.run_schema(source, schema, grid, settings, options.as_json, timeline=options.timeline, page=options.page)
        return
    if options.timeline is not None or options.page is not None:
        raise BadInput("--trace and --report are for one process: leave out --workers")
    if "," in budget + every + (policy or ""):
        raise BadInput("--workers takes one --budget, --policy and --checkpoint-every")
    settings.update(policy=policy or "lru", checkpoint_every=numbers[0])
    report.run_workers(source, schema, budget, options.workers, options.store, settings, options.as_json)


def _answer(options: Options, source: Path) -> None:
    """Run ``replay --json-lines``: one cache, and requests one by one."""
    if others := options.given(*_WHOLE_TRACES):
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
    if given := options.given(*names):
        raise BadInput(f"{', '.join(given)} needs a model's layers; give --schema too")
