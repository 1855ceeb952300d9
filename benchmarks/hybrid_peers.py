"""How much of its prompts does a hybrid model reuse here, and under vLLM's own manager of several groups, in the same bytes?

The first 3,000 requests of the conversation trace, in steps as ``kvpagoda.replay.serve`` makes them. See
``peers/vllm_hybrid.py`` for what is vLLM's. Host time is that of its manager's calls and its hashes; ours is that of
everything, the making of the texts too.
"""

from __future__ import annotations

from typing import Any

from benchmarks import hits
from benchmarks.one_budget import QWEN3_NEXT_80B
from benchmarks.peers import Absent, Process
from benchmarks.timing import Options, Row, tell
from kvpagoda.units import parse_bytes

QUESTION = "How much of its prompts does a hybrid model reuse, here and under vLLM's manager of several groups?"
PEER = "vllm_hybrid"
MODELS: dict[str, dict[str, Any]] = {
    name: config for name, config in hits.MODELS.items() if config is not hits.FULL_ONLY
}  # fmt: skip
ASKED = {
    "Qwen3-Next-80B, its states in bfloat16": {**QWEN3_NEXT_80B, "mamba_ssm_dtype": "bfloat16"},
    **{f"{name}, all kept": {**config, "prefix_cache_retention_interval": None} for name, config in MODELS.items()},
}
"""vLLM in other ways. Its states of Qwen3-Next are in bfloat16 unless it is told; ours are in float32, as those of
transformers, and vLLM is asked for that too. It keeps blocks of windows for reuse only where a text is likely to be taken up
again, unless it is told to keep all."""


def measure(options: Options) -> list[Row]:
    ours = hits.measure(options, MODELS) if "ours" in options.peers else []
    rows = [{"case": f"{row['model']}, {row['budget']}", "who": "ours", **row} for row in ours]
    if "vllm" not in options.peers:
        return rows
    try:
        process = Process(PEER)
    except Absent as reason:
        return [*rows, {"who": PEER, "absent": str(reason)}]
    with process:
        for name, config in (MODELS | ASKED).items():
            for budget in hits.BUDGETS if name in MODELS else hits.BUDGETS[2:]:
                if options.only in f"{name} {budget}":
                    rows.append(_asked(process, name, config, budget, 40 if options.quick else 3000))
    return rows


def _asked(process: Process, name: str, config: dict[str, Any], budget: str, limit: int) -> Row:
    told = process.ask("serve", config=config, budget=parse_bytes(budget), limit=limit)
    us = 1e6 * told.pop("seconds") / told["requests"]
    return {
        "case": f"{name}, {budget}", "who": "vllm", "version": process.version, "model": name, "budget": budget, "us": us,
        **told,
    }  # fmt: skip


if __name__ == "__main__":
    tell("hybrid_peers", QUESTION, measure)
