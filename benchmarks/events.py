"""What do events for routers cost a request?

The first requests of the public conversation trace are served without memory, in turns: without events, and with an
event log that is cleared after each step. Afterwards the same records are made into messages, which a publisher does in
its own thread. Needs the traces, in ``KVPAGODA_TRACES`` or beside the checkout in ``../shared/traces``; without them a
synthetic mix is served.
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import Any

from benchmarks.hits import FULL_ONLY, TRACE
from benchmarks.one_budget import GEMMA3_27B, QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.events import EventLog, EventStream
from kvpagoda.events.event_log import Record, Restart
from kvpagoda.replay import serve, synthetic
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema

QUESTION = "What does it cost a request that routers are told of its blocks?"
REQUESTS = 1000
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B, full attention": FULL_ONLY, "Gemma-3-27B": GEMMA3_27B, "Qwen3-Next-80B": QWEN3_NEXT_80B,
}  # fmt: skip
BUDGET = "100GiB"


class Emptied(EventLog):
    """An event log that is cleared after each step, so that only the work in the cache's own thread is measured."""

    def step(self, _: int) -> None:
        """Clear the log after a step."""
        self._records.clear()


class Tape(EventLog):
    """An event log whose records are kept for each step, and published to a stream later."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Record]] = []

    def step(self, _: int) -> None:
        """Keep the records of a step."""
        if records := super().take():
            self.steps.append(records)

    def play(self) -> tuple[float, int, int]:
        """Publish all kept records. Return the CPU seconds, the number of blocks and the bytes of all messages."""
        steps, self.steps = self.steps, []
        stream, nbytes = EventStream(self, keep=1), 0
        self._records.clear()
        self._records.append(Restart(()))  # the stream starts anew
        stream.drain()
        start = time.process_time()
        for records in steps:
            self._records.extend(records)
            if (message := stream.drain()) is not None:
                nbytes += len(message[1])
        return time.process_time() - start, stream.num_events, nbytes


def measure(options: Options) -> list[Row]:
    is_there = (TRACES / TRACE).exists() and not options.quick
    trace = Trace.read(TRACES / TRACE, REQUESTS) if is_there else synthetic(40)
    tokens, rows = (512 if is_there else 64), list[Row]()
    for name, config in MODELS.items():
        if options.only not in name:
            continue
        schema, off, on = schema_of(config), list[float](), list[float]()
        for _ in range(options.runs):
            off.append(_microseconds(trace, schema, tokens, None))
            on.append(_microseconds(trace, schema, tokens, Emptied()))
        tape = Tape()
        _microseconds(trace, schema, tokens, tape)
        seconds, num_blocks, nbytes = tape.play()
        rows.append(
            {
                "model": name,
                "off_us": median(off),
                "us": median(on),
                "on_over_off": median(b / a for a, b in zip(off, on)),
                "blocks_a_request": num_blocks / len(trace),
                "publisher_us_a_block": 1e6 * seconds / max(1, num_blocks),
                "bytes_a_block": nbytes / max(1, num_blocks),
            }
        )
    return rows


def _microseconds(trace: Trace, schema: Schema, tokens: int, log: Emptied | Tape | None) -> float:
    """Serve ``trace`` and return the CPU time of a request, in microseconds."""
    gc.collect()
    start = time.process_time()
    serve(trace, schema, BUDGET, tokens_per_id=tokens, events=log, on_request=int if log is None else log.step)
    return 1e6 * (time.process_time() - start) / len(trace)


if __name__ == "__main__":
    tell("events", QUESTION, measure)
