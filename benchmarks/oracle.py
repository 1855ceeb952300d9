"""Do the engines of ``kvpagoda.replay`` find, request by request, what the engines' own managers find?

Each case serves the same requests twice with the same order of admission and the same chunks: with a profile of ours, and
with the installed engine's manager in a process of its own. A row counts the requests with equal hits and the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers import Absent, Process
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.replay import Trace, synthetic
from kvpagoda.replay.driver import Schedule
from kvpagoda.replay.engines import replay_engine

QUESTION = "Does each request find what it finds in the engine's own manager?"
FILES = {name: f"mooncake_{name}.jsonl.gz" for name in ("conversation", "synthetic")} | {
    "agentic": "weka_agentic_rle.jsonl.gz"
}
LIMIT, MIXES, MIX = 500, 20, 200
"""Requests of a cell, random mixes, and their requests."""
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
    "dynamo-1.6.1-trtllm": Judge("dynamo_oracle", {"backend": "trtllm"}, ("one at a time",)),
}
WHOLE = {"conversation": None, "synthetic": None, "agentic": 2_000}


def trace_of(name: str, limit: int | None, seed: int | None = None) -> Trace:
    """Return the first ``limit`` requests of a public trace, or those of a random mix."""
    return synthetic(limit or MIX, seed) if seed is not None else Trace.read(TRACES / FILES[name], limit)


def capacities(trace: Trace, block_size: int, at_once: int) -> list[int]:
    """Return the capacities of a cell, in blocks: from what the longest request needs, twice if several run at once, to what
    all distinct texts fill, each larger than the one before by the same factor."""
    tokens = trace.num_distinct * trace.block_size + int(trace.output_lengths.sum())
    least = -(-int((trace.input_lengths + trace.output_lengths).max()) // block_size) * (1 + (at_once > 1))
    return [round(blocks) for blocks in np.geomspace(least, max(2 * least, tokens / block_size), CAPACITIES).tolist()]


def cases(options: Options, engine: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (name, arguments of ``trace_of``, other arguments of the task ``oracle``)."""
    modes = JUDGES[engine].modes
    named = {name: {"name": name, "limit": 40 if options.quick else LIMIT} for name in FILES}
    mixes = {
        f"mix {seed}": {"name": "mix", "limit": 40 if options.quick else MIX, "seed": seed} for seed in range(MIXES)
    }
    for title, source in {**named, **mixes}.items():
        if "seed" not in source and not (TRACES / FILES[source["name"]]).exists():
            continue
        trace = None
        for size in BLOCKS:
            for mode in modes:
                name, schedule = f"{engine}: {title}, blocks of {size}, {mode}", SCHEDULES[mode]
                if options.only not in name:
                    continue
                trace = trace or trace_of(**source)
                for blocks in capacities(trace, size, schedule.at_once):
                    yield f"{name}, {blocks} blocks", source, _asked(size, blocks, schedule)
    if not options.quick:
        yield from whole(options, engine)


def whole(options: Options, engine: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield a case of each whole trace, and of vLLM one whose blocks it hashes itself, from their tokens."""
    hashed = [(f"{name} hashed from tokens", name, LIMIT, {"hashed": True}) for name in FILES if name != "agentic"]
    hashed = hashed if engine.startswith("vllm") else []
    for title, name, limit, more in [(f"{name} whole", name, limit, {}) for name, limit in WHOLE.items()] + hashed:
        for mode in JUDGES[engine].modes:
            case, source = f"{engine}: {title}, blocks of 64, {mode}", {"name": name, "limit": limit}
            schedule = SCHEDULES[mode]
            if options.only in case and (TRACES / FILES[name]).exists():
                blocks = capacities(trace_of(**source), 64, schedule.at_once)[2]
                yield f"{case}, {blocks} blocks", source, _asked(64, blocks, schedule) | more


def _asked(size: int, blocks: int, schedule: Schedule) -> dict[str, Any]:
    return {
        "block_size": size,
        "num_blocks": blocks,
        "at_once": schedule.at_once,
        "step_tokens": schedule.step_tokens,
        "shared": schedule.shared,
    }


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    for engine, judge in JUDGES.items():
        try:
            process = Process(judge.module)
        except Absent as reason:
            rows.append({"who": engine, "absent": str(reason)})
            continue
        with process:
            rows += [agreement(process, engine, *case) for case in cases(options, engine)]
    return rows


def agreement(process: Process, engine: str, case: str, source: dict[str, Any], asked: dict[str, Any]) -> Row:
    """Serve one case with both managers and return its row."""
    theirs = process.ask("oracle", trace=source, **asked, **JUDGES[engine].settings)
    schedule = Schedule(asked["at_once"], asked["step_tokens"], asked.get("shared", False))
    ours = replay_engine(
        trace_of(**source), engine, asked["num_blocks"], block_size=asked["block_size"], schedule=schedule
    )
    unequal = np.flatnonzero(ours.per_request != np.array(theirs["hits"]))
    return {
        "case": case, "who": engine, "version": process.version, "capacity_blocks": asked["num_blocks"],
        "requests": ours.requests, "equal": ours.requests - len(unequal), "unequal": len(unequal),
        "first_unequal": int(unequal[0]) if len(unequal) else None, "hit_percent": 100 * ours.hit_rate,
        "preempted": ours.preempted, "never_fit": ours.never_fit,
    }  # fmt: skip


if __name__ == "__main__":
    tell("oracle", QUESTION, measure)
