"""Do the engines of ``kvpagoda.replay`` find, request by request, what the engines' own managers find?

Each run serves the same requests twice with the same order of admission and the same chunks: with a profile of ours, and
with the installed engine's manager in a process of its own. A row counts the requests of some runs, those with equal hits and
the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers import Absent, Process
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.replay import EngineSettings, Group, Schedule, Trace, replay_engine, synthetic
from kvpagoda.replay.engines.run import EngineResult

QUESTION = "Does each request find what it finds in the engine's own manager?"
FILES = {name: f"mooncake_{name}.jsonl.gz" for name in ("conversation", "synthetic")} | {
    "agentic": "weka_agentic_rle.jsonl.gz"
}
LIMIT, MIXES, MIX, FEW = 500, 20, 200, 5
"""Requests of a run, random mixes and branches, their requests, and how many of them models with groups are run on."""
BLOCKS = (16, 64, 512)
SCHEDULES = {
    "one at a time": Schedule(),
    "16 at once": Schedule(16, 2048),
    "16 share a budget": Schedule(16, 2048, shared=True),
}
CAPACITIES = 5


class Judge(NamedTuple):
    """An installed engine: the module of ``benchmarks.peers`` that drives it, its settings, and the schedules to compare."""

    module: str
    settings: Mapping[str, Any] = {}
    modes: tuple[str, ...] = ("one at a time", "16 at once")


OWN = ("one at a time", "16 share a budget")  # what a scheduler of its own, as that of Dynamo's mocker, does
JUDGES = {
    "vllm-0.33": Judge("vllm_oracle"),
    "sglang-0.5.23": Judge("sglang_oracle"),
    "dynamo-1.6.1": Judge("dynamo_oracle", {"backend": "vllm"}, OWN),
    "dynamo-1.6.1-trtllm": Judge("dynamo_oracle", {"backend": "trtllm"}, OWN),
}
WHOLE = {"conversation": None, "synthetic": None, "agentic": 2_000}
MODELS = {
    "gpt-oss-like": "full+window:128", "gemma-3-like": "full+5*window:1024", "Llama-4-like": "full+3*chunk:8192",
    "Qwen3-Next-like": "full+3*state",
}  # fmt: skip
RETENTIONS = {"retention 0": 0, "retention of 16 blocks": 16, "all retained": None}
"""vLLM's ``prefix_cache_retention_interval``, in blocks."""
STATES: dict[str, dict[str, dict[str, Any]]] = {"dynamo-1.6.1": {"": {}, "one state, ": {"groups": "full+state"}}}
"""Engine -> what is said before the title of a case -> its settings: Dynamo's ``state_cache`` of one block."""
ONE_MEMORY = {"sglang-0.5.23": {"unified_memory": True}}
"""Engine -> settings with which models with windows or states are judged once more."""
Run = tuple[dict[str, Any], dict[str, Any]]
"""(arguments of ``trace_of``, other arguments of the task ``oracle``)."""


@lru_cache(4)
def trace_of(name: str, limit: int | None, seed: int | None = None) -> Trace:
    """Return the first ``limit`` requests of a public trace, or those of a random mix or of random branches."""
    if name.endswith("branches"):
        return branches(limit or MIX, seed or 0, 64 if name == "long branches" else 16, name == "whole branches")
    return synthetic(limit or MIX, seed) if seed is not None else Trace.read(TRACES / FILES[name], limit)


def branches(limit: int, seed: int, tokens: int = 16, is_whole: bool = False) -> Trace:
    """Return random texts of a few blocks of ``tokens`` tokens, most of which part somewhere from one another: what they find
    depends on what is evicted first. ``is_whole``: the last block is whole too, so that a state of a prompt's end is found."""
    rng = np.random.default_rng(seed)
    records: list[dict[str, Any]] = []
    for _ in range(limit):
        steps = (rng.geometric(0.6, rng.integers(2, 24)) - 1).clip(0, 3)
        ids = [hash((*steps[: i + 1].tolist(),)) % 2**40 for i in range(len(steps))]
        length = tokens * len(ids) - int(rng.integers(0, tokens)) * (not is_whole)
        output = int(rng.choice([1, 5, 40, 200 * tokens // 16], p=[0.5, 0.2, 0.2, 0.1]))
        records.append({"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": ids})
    return Trace.read(records, block_size=tokens)


def capacities(trace: Trace, block_size: int, at_once: int, groups: int = 1) -> list[int]:
    """Return the capacities of a cell, in blocks: from what the longest request needs, twice if several run at once, to what
    all distinct texts fill, each larger than the one before by the same factor."""
    tokens = groups * (trace.num_distinct * trace.block_size + int(trace.output_lengths.sum()))
    least = -(-int((trace.input_lengths + trace.output_lengths).max()) // block_size) * (1 + (at_once > 1)) * groups
    return [round(blocks) for blocks in np.geomspace(least, max(2 * least, tokens / block_size), CAPACITIES).tolist()]


def sources(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Return title -> arguments of ``trace_of``: the public traces that are there, the random mixes and branches."""
    there = [name for name in FILES if (TRACES / FILES[name]).exists()]
    found = {name: [{"name": name, "limit": 40 if quick else LIMIT}] for name in there}
    seeds = range(2 if quick else MIXES)
    for title, name in (("mixes", "mix"), ("branches", "long branches")):
        found[f"{len(seeds)} {title}"] = [{"name": name, "limit": 40 if quick else MIX, "seed": seed} for seed in seeds]
    return found


@dataclass(frozen=True)
class Case:
    """Some traces at one block size with one schedule. ``settings``: other arguments of the judge. ``at``: which of the
    capacities."""

    title: str
    given: list[dict[str, Any]]
    size: int
    mode: str
    settings: dict[str, Any] = field(default_factory=dict)
    at: tuple[int, ...] = tuple(range(CAPACITIES))

    @property
    def name(self) -> str:
        return f"{self.title}, blocks of {self.size}, {self.mode}"

    def runs(self) -> Iterator[Run]:
        schedule, groups = SCHEDULES[self.mode], len(Group.from_text(self.settings.get("groups", "full")))
        for source in self.given:
            sizes = capacities(trace_of(**source), self.size, schedule.at_once, groups)
            for blocks in [sizes[i] for i in self.at]:
                yield source, asked(self.size, blocks, schedule) | self.settings


def cases(engine: str, quick: bool) -> Iterator[Case]:
    """Yield full attention on all traces, whole traces, of vLLM also those that it hashes, then models with groups."""
    named, modes = sources(quick), JUDGES[engine].modes
    for head, settings in STATES.get(engine, {"": {}}).items():
        for title, given in named.items():
            yield from (Case(head + title, given, size, mode, settings) for size in BLOCKS for mode in modes)
        for name, limit in WHOLE.items() if not quick else ():
            if name in named:
                given = [{"name": name, "limit": limit}]
                yield from (Case(f"{head}{name} whole", given, 64, mode, settings, (2,)) for mode in modes)
        if settings:
            given = [{"name": "whole branches", "limit": MIX, "seed": seed} for seed in range(2 if quick else MIXES)]
            title = f"{head}{len(given)} whole branches"
            yield from (Case(title, given, size, mode, settings) for size in (16, 64) for mode in modes)
    if quick:
        return
    if engine.startswith("vllm"):
        for name in ("conversation", "synthetic"):
            if name in named:
                title = f"{name} hashed from tokens"
                yield from (Case(title, named[name], 64, mode, {"hashed": True}, (2,)) for mode in modes)
    yield from models(engine, named)
    if engine in ONE_MEMORY:
        yield from models(engine, named, "one memory", ONE_MEMORY[engine])


def models(
    engine: str, named: dict[str, list[dict[str, Any]]], setting: str = "", more: Mapping[str, Any] | None = None
) -> Iterator[Case]:
    """Yield the models with groups that the profile has: of vLLM all, with its retentions, of SGLang all but chunks, in one
    memory too, of Dynamo states."""
    retentions = RETENTIONS if engine.startswith("vllm") else {"": None}
    for (model, groups), (said, blocks) in product(MODELS.items(), retentions.items()):
        if blocks and "chunk" in groups:
            continue  # vLLM refuses it
        is_unknown = engine.startswith("dynamo") and not (engine in STATES and "state" in groups)
        if is_unknown or (not said and "chunk" in groups):
            continue
        for (title, given), size in product(named.items(), (16, 64)):
            if title == "agentic":
                continue
            if len(given) > 1:
                title, given = f"{FEW} {title.split()[1]}", given[:FEW]
            settings = {"groups": groups} | ({"retention": blocks and blocks * size} if said else {})
            settings |= more or {}
            head = ", ".join(filter(None, (model, setting, said, title)))
            modes = JUDGES[engine].modes
            yield from (Case(head, given, size, mode, settings, (0, 2, 4)) for mode in modes)


def asked(size: int, blocks: int, schedule: Schedule) -> dict[str, Any]:
    """Return the arguments of the task ``oracle`` for one run."""
    return {
        "block_size": size, "num_blocks": blocks, "at_once": schedule.at_once, "step_tokens": schedule.step_tokens,
        "shared": schedule.shared,
    }  # fmt: skip


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    for engine, judge in JUDGES.items():
        chosen = [case for case in cases(engine, options.quick) if options.only in f"{engine}: {case.name}"]
        if not chosen:
            continue
        try:
            process = Process(judge.module)
        except Absent as reason:
            rows.append({"who": engine, "absent": str(reason)})
            continue
        with process:
            rows += [agreements(process, engine, f"{engine}: {case.name}", case.runs()) for case in chosen]
    return rows


def ours(engine: str, source: dict[str, Any], wanted: dict[str, Any]) -> EngineResult:
    """Serve one run with our profile of ``engine``."""
    names = ("block_size", "at_once", "step_tokens", "shared", *(one.name for one in fields(EngineSettings)))
    settings = {name: wanted[name] for name in names if name in wanted}
    groups = Group.from_text(wanted.get("groups", "full"))
    return replay_engine(trace_of(**source), engine, wanted["num_blocks"], groups=groups, **settings)


def agreement(process: Process, engine: str, case: str, source: dict[str, Any], wanted: dict[str, Any]) -> Row:
    """Serve one run with both managers and return its row."""
    return agreements(process, engine, case, [(source, wanted)])


def agreements(process: Process, engine: str, case: str, runs: Iterable[Run]) -> Row:
    """Serve the runs of a case with both managers and return its row."""
    more = dict(JUDGES[engine].settings)
    requests = unequal = preempted = never_fit = 0
    first: str | None = None
    rates, sizes, seeds = [], [], set()
    for source, wanted in runs:
        if engine.startswith("vllm"):
            more["in_flight"] = wanted["step_tokens"]
        theirs, mine = process.ask("oracle", trace=source, **wanted, **more), ours(engine, source, wanted)
        differ = np.flatnonzero(mine.per_request != np.array(theirs["hits"]))
        if len(differ) and first is None:
            first = f"request {differ[0]} of {source} in {wanted['num_blocks']} blocks"
        requests, unequal = requests + mine.requests, unequal + len(differ)
        preempted, never_fit = preempted + mine.preempted, never_fit + mine.never_fit
        rates.append(100 * mine.hit_rate)
        sizes.append(wanted["num_blocks"])
        seeds |= {source["seed"]} if "seed" in source else set()
    return {
        "case": case, "who": engine, "version": process.version, "runs": len(rates), "requests": requests,
        "equal": requests - unequal, "unequal": unequal, "first_unequal": first, "least_blocks": min(sizes),
        "most_blocks": max(sizes), "hit_percent": sum(rates) / len(rates), "preempted": preempted,
        "never_fit": never_fit, "seeds": sorted(seeds),
    }  # fmt: skip


if __name__ == "__main__":
    tell("oracle", QUESTION, measure)
