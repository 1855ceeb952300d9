"""Which share of its prompts does a hybrid model reuse, and what does a request cost the host?

Full attention is measured too, for comparison.

The first 3,000 requests of the public conversation trace are served without memory. Needs the traces, in
``KVPAGODA_TRACES`` or beside the checkout in ``../shared/traces``; without them a synthetic mix is served.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.one_budget import GEMMA3_27B, GPT_OSS_120B, NEMOTRON_H_8B, QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.replay import serve, synthetic
from kvpagoda.replay.trace import Trace

QUESTION = "How much of its prompts does a hybrid model reuse?"
TRACE = "mooncake_conversation.jsonl.gz"
WINDOWS_ONLY = {
    "model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
FULL_ONLY = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Gemma-3-27B": GEMMA3_27B, "gpt-oss-120b": GPT_OSS_120B, "Mistral-7B, windows only": WINDOWS_ONLY,
    "Qwen3-Next-80B": QWEN3_NEXT_80B, "Nemotron-H-8B": NEMOTRON_H_8B, "Llama-3-8B, full attention": FULL_ONLY,
}  # fmt: skip
BUDGETS = {"20GiB": (2048,), "50GiB": (2048,), "100GiB": (2048, 8192), "400GiB": (2048,)}
"""Budget -> most tokens of a request that are computed in one step."""


def measure(options: Options, models: dict[str, dict[str, Any]] = MODELS) -> list[Row]:
    is_there = (TRACES / TRACE).exists() and not options.quick
    trace = Trace.read(TRACES / TRACE, 3000) if is_there else synthetic(40)
    tokens, rows = (512 if is_there else 64), list[Row]()
    cases = [(name, *case) for name in models for case in BUDGETS.items()][:: 3 if options.quick else 1]
    for name, budget, step_tokens in ((name, budget, n) for name, budget, steps in cases for n in steps):
        if options.only not in f"{name} {budget}":
            continue
        start = time.process_time()
        served = serve(trace, schema_of(models[name]), budget, tokens_per_id=tokens, step_tokens=step_tokens)
        taken = time.process_time() - start
        rows.append(
            {
                "model": name,
                "budget": budget,
                "step_tokens": step_tokens,
                "hit_percent": 100 * served.hit_rate,
                "found_percent": 100 * served.matched_tokens / served.prompt_tokens,
                "us": 1e6 * taken / served.requests,
                "mean_running": served.mean_running,
                "steps": served.steps,
            }
        )
    return rows


if __name__ == "__main__":
    tell("hits", QUESTION, measure)
