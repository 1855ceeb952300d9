"""How near are the hits of hybrid models to what a cache could find that knew the future?

The first 3,000 requests of the public conversation trace are served without memory, with the layers of four models that have
windows or states beside full attention. Beside our hits stands the bound of ``kvpagoda.replay.hit_bound``
(``kvpagoda.replay.offline.prices`` proves it, ``.demand`` says what is counted).

- "one at a time": of every cache that ends a request before it admits the next.
- "64 at once": of every cache that admits and ends the requests in the same steps as ours, where after each step a request
  has as many tokens as in ours, or as many as it found. What the running requests hold is not room for others.

``packed_percent`` is the best choice of reuses that was seen to fit: the bound cannot fall below it. The hits of vLLM (with
the best of its settings) and of TokenSpeed are those that ``hybrid_peers`` saved. Their steps are others than
ours: strictly, neither bound is one for them. The whole takes some minutes. Needs the traces, as ``hits`` does; without
them a synthetic mix is served.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.one_budget import GEMMA3_27B, GPT_OSS_120B, NEMOTRON_H_8B, QWEN3_NEXT_80B, schema_of
from benchmarks.timing import RESULTS, Options, Row, tell
from benchmarks.workload import SOURCES, TRACES
from kvpagoda.replay import Trace, hit_bound, synthetic
from kvpagoda.replay.offline.prices import ROUNDS

QUESTION = "How near are the hits of hybrid models to what a cache could find that knew the future?"
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": GPT_OSS_120B, "Qwen3-Next-80B": QWEN3_NEXT_80B, "Gemma-3-27B": GEMMA3_27B,
    "Nemotron-H-8B": NEMOTRON_H_8B,
}  # fmt: skip
BUDGETS = ("20GiB", "100GiB", "400GiB")
AT_ONCE = 64


def measure(options: Options) -> list[Row]:
    trace, per_id = trace_for(options)
    rows = list[Row]()
    for name, config in MODELS.items():
        schema = schema_of(config)
        for budget in ("6GiB",) if options.quick else BUDGETS:
            for at_once in (4 if options.quick else AT_ONCE, 1):
                said = f"{at_once} at once" if at_once > 1 else "one at a time"
                if options.only not in f"{name}, {budget}, {said}":
                    continue
                rounds = 100 if options.quick else ROUNDS
                found = hit_bound(trace, schema, budget, tokens_per_id=per_id, max_requests=at_once, rounds=rounds)
                percent = 100 / found.prompt_tokens
                rows.append(
                    {
                        "case": f"{name}, {budget}, {said}", "model": name, "budget": budget,
                        "hit_percent": percent * found.served_tokens, "bound_percent": percent * found.bound_tokens,
                        "packed_percent": percent * found.packed_tokens,
                        "open_percent": percent * (found.bound_tokens - found.packed_tokens),
                        "unlimited_percent": percent * found.unlimited_tokens,
                        **(peers(name, budget) if at_once > 1 and not options.quick else {}),
                    }
                )  # fmt: skip
    return rows


def trace_for(options: Options) -> tuple[Trace, int]:
    """Return the trace that is served, and how many tokens each of its ids stands for."""
    source = SOURCES["conversation"]
    if options.quick or not (TRACES / source.file).exists():
        return synthetic(40), 64
    return Trace.read(TRACES / source.file, 3000), source.per_id


def peers(model: str, budget: str) -> dict[str, float | None]:
    """Return the most hits of vLLM and of TokenSpeed in percent, of the last saved ``hybrid_peers``; None where there are
    none."""
    path = RESULTS / "hybrid_peers.json"
    saved = json.loads(path.read_text())["rows"] if path.exists() else []
    mine = [row for row in saved if (row.get("model"), row.get("budget")) == (model, budget)]
    return {
        f"{who}_percent": max((row["hit_percent"] for row in mine if row["who"] == who), default=None)
        for who in ("vllm", "tokenspeed")
    }


if __name__ == "__main__":
    tell("bound", QUESTION, measure)
