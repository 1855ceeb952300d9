"""What are checkpoints in fewer bytes worth in hits?

The first 3,000 requests of the public conversation trace are served without memory, at three budgets, with checkpoints as
running states (float32), in bfloat16 and in int8. Needs the traces, in ``KVPAGODA_TRACES`` or beside the checkout in
``../shared/traces``; without them a synthetic mix is served. ``rounded_states`` has what it costs.
"""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.one_budget import NEMOTRON_H_8B, QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.replay import serve, synthetic
from kvpagoda.replay.trace import Trace
from kvpagoda.schema.at_rest import FORMATS

QUESTION = "What are checkpoints in fewer bytes worth in hits?"
TRACE = "mooncake_conversation.jsonl.gz"
MODELS = {"Qwen3-Next-80B": QWEN3_NEXT_80B, "Nemotron-H-8B": NEMOTRON_H_8B}
BUDGETS = ("20GiB", "100GiB", "400GiB")


def measure(options: Options) -> list[Row]:
    is_there = (TRACES / TRACE).exists() and not options.quick
    trace = Trace.read(TRACES / TRACE, 3000) if is_there else synthetic(40)
    rows = list[Row]()
    for name, config in MODELS.items():
        for budget in BUDGETS[:: 2 if options.quick else 1]:
            for format in (None, *FORMATS):
                if options.only not in f"{name} {budget} {format}":
                    continue
                schema = replace(schema_of(config), max_positions=None)
                begun = time.process_time()
                served = serve(
                    trace,
                    schema,
                    budget,
                    tokens_per_id=512 if is_there else 64,
                    step_tokens=2048,
                    checkpoint_format=format,
                )
                plan = schema.plan(budget, checkpoint_format=format)
                rows.append(
                    {
                        "model": name,
                        "budget": budget,
                        "format": format or "as running",
                        "bytes": plan.groups[-1].layout.nbytes,
                        "hit_percent": 100 * served.hit_rate,
                        "found_percent": 100 * served.matched_tokens / served.prompt_tokens,
                        "us": 1e6 * (time.process_time() - begun) / served.requests,
                    }
                )
    return rows


if __name__ == "__main__":
    tell("checkpoints_at_rest", QUESTION, measure)
