"""What ``kvpagoda.simulate`` costs a request, and how that grows: with requests, workers, layers, tiers, routing.

The conversation trace is repeated until there are enough requests, each time with other texts, and arrives faster the more
workers there are. Seconds are those of the processor."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.timing import Options, Row, tell
from benchmarks.workload import GENERATED, workload
from kvpagoda import Schema
from kvpagoda.replay import Trace
from kvpagoda.replay.fleet.simulation import Simulation
from kvpagoda.replay.setup import Fleet, Setup
from kvpagoda.schema.presets import presets

QUESTION = "What does a simulated request cost, in microseconds of processor time, and does that stay flat?"
REQUESTS = (3_000, 10_000, 30_000, 100_000)


class Case(NamedTuple):
    """A model, workers, and how many requests; how the ``fleet`` goes otherwise."""

    name: str
    model: str
    workers: int
    requests: tuple[int, ...]
    fleet: Fleet = Fleet()
    block_size: int | None = None


AWARE, HOST = Fleet(routing="prefix-aware"), Fleet(tiers={"host": "200GiB"})
CASES = (
    Case("full attention, 8 workers", "llama-3.1-8b", 8, REQUESTS),
    Case("a million requests, 8 workers", "llama-3.1-8b", 8, (1_000_000,)),
    Case("full attention, 100 workers", "llama-3.1-8b", 100, (30_000,)),
    Case("100 workers, prefix-aware", "llama-3.1-8b", 100, (3_000, 30_000), AWARE),
    Case("windows, 8 workers", "gpt-oss-20b", 8, (1_000, 3_000)),
    Case("windows, 100,000 requests", "gpt-oss-20b", 8, (100_000,)),
    Case("states, 8 workers", "qwen3-next-80b-a3b", 8, (1_000, 3_000), Fleet("4xh100")),
    Case("states, a million requests", "qwen3-next-80b-a3b", 8, (1_000_000,), Fleet("4xh100")),
    Case("the cache of vLLM, 8 workers", "llama-3.1-8b", 8, (1_000, 3_000), Fleet(engine="vllm-0.33")),
    Case("the cache of SGLang, 8 workers", "llama-3.1-8b", 8, (1_000, 3_000), Fleet(engine="sglang-0.5.23")),
    Case("blocks of 512, 8 workers", "llama-3.1-8b", 8, (1_000, 3_000), block_size=512),
    Case("blocks of 512, prefix-aware", "llama-3.1-8b", 8, (1_000, 3_000), AWARE, 512),
    Case("blocks of 512, host tier", "llama-3.1-8b", 8, (1_000, 3_000), HOST, 512),
    Case("states, host tier", "qwen3-next-80b-a3b", 8, (1_000,), replace(HOST, costs="4xh100")),
)


def measure(options: Options) -> list[Row]:
    made = workload(GENERATED if options.quick else "conversation")
    rows: list[Row] = []
    for case in CASES:
        for count in (min(case.requests, default=0),) if options.quick else case.requests:
            if options.only in case.name:
                rows.append(
                    _row(case, repeated(made.trace, 60 if options.quick else count, case.workers / 8), made.per_id)
                )
    return rows


def repeated(trace: Trace, count: int, faster: float) -> Trace:
    """Return ``count`` requests: ``trace`` again and again, with other ids each time, arriving ``faster`` times as fast."""
    rounds = -(-count // len(trace))
    step, span = int(trace.ids.max()) + 1, float(trace.arrivals.max()) + 3.0
    ids = (trace.ids[None] + step * np.arange(rounds, dtype=np.int32)[:, None]).ravel()
    starts = (trace.starts[None, :-1] + len(trace.ids) * np.arange(rounds)[:, None]).ravel()
    arrivals = (trace.arrivals[None] + span * np.arange(rounds)[:, None]).ravel()[:count] / faster
    ends = np.append(starts, len(ids))[: count + 1]
    lengths = (np.tile(column, rounds)[:count] for column in (trace.input_lengths, trace.output_lengths))
    return replace(Trace(trace.name, ids[: ends[-1]], ends, arrivals, *lengths), block_size=trace.block_size)


def _row(case: Case, trace: Trace, per_id: int) -> Row:
    preset = presets()[case.model]["config"]
    schema = replace(Schema.from_hf_config(preset), name=case.model)
    began = time.process_time()
    told = [100_000]

    def say(count: int) -> None:
        """Say every 100,000 requests what they took so far."""
        if count >= told[0]:
            told[0] += 100_000
            taken = (time.process_time() - began) / count
            print(f"{case.name}: {count:,} requests, {taken * 1e6:,.0f} us each", file=sys.stderr, flush=True)

    setup = Setup(schema, "40GiB", per_id, step_tokens=8192, block_size=case.block_size)
    made = Simulation(trace, setup, replace(case.fleet, workers=case.workers))
    with suppress(KeyboardInterrupt):  # what is done so far is a row too
        made.run(say)
    seconds, result = time.process_time() - began, made.result()
    made.close()
    return {
        "case": case.name, "date": time.strftime("%Y-%m-%d"), "seed": case.fleet.seed,
        "requests": result.finished, "of": len(trace), "seconds": seconds,
        "us_each": seconds / result.finished * 1e6,
        "hit_rate": result.hit_rate, "first_token_p50": result.first_token["p50"],
        "first_token_p99": result.first_token["p99"], "last_token_p50": result.last_token["p50"],
    }  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it in the background
    tell("simulate", QUESTION, measure)
