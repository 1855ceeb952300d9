"""Which share of its prompts does a hybrid model reuse here, with vLLM's manager of several groups, and in TokenSpeed?

All have the same memory. The first 3,000 requests of the conversation trace are served in the steps of
``kvpagoda.replay.serve``. See ``peers/vllm_hybrid.py`` for the part of vLLM. vLLM's time is that of its manager's calls
and of its hashes. TokenSpeed's scheduler decides itself what a step is (``peers/tokenspeed_hybrid.py``); its time is that
of all its calls. Ours includes everything, also the making of the texts.
"""

from __future__ import annotations

from typing import Any

from benchmarks import hits
from benchmarks.one_budget import QWEN3_NEXT_80B
from benchmarks.peers import Absent, Process
from benchmarks.timing import Options, Row, tell
from kvpagoda.units import parse_bytes

QUESTION = "How much of its prompts does a hybrid model reuse, here and under other managers of several groups?"
PEERS = {"vllm": "vllm_hybrid", "tokenspeed": "tokenspeed_hybrid"}
MODELS: dict[str, dict[str, Any]] = {
    name: config for name, config in hits.MODELS.items() if config is not hits.FULL_ONLY
}  # fmt: skip
ASKED = {
    "Qwen3-Next-80B, its states in bfloat16": {**QWEN3_NEXT_80B, "mamba_ssm_dtype": "bfloat16"},
    **{f"{name}, all kept": {**config, "prefix_cache_retention_interval": None} for name, config in MODELS.items()},
}
"""vLLM with other settings. Its default for the states of Qwen3-Next is bfloat16. Ours are float32, as in transformers,
and in ``MODELS`` vLLM is set to float32 too. By default it keeps blocks of windows for reuse only where another text is
likely to continue; in the cases "all kept" it keeps all."""


def measure(options: Options) -> list[Row]:
    ours = hits.measure(options, MODELS) if "ours" in options.peers else []
    rows = [
        {"case": f"{row['model']}, {row['budget']}", "who": "ours", **row} for row in ours if row["step_tokens"] == 2048
    ]
    large = [*hits.BUDGETS][2:]
    cases = [(name, config, budget) for name, config in MODELS.items() for budget in hits.BUDGETS]
    more = {"vllm": [(name, config, budget) for name, config in ASKED.items() for budget in large]}
    for who, peer in PEERS.items():
        if who not in options.peers:
            continue
        try:
            process = Process(peer)
        except Absent as reason:
            rows.append({"who": who, "absent": str(reason)})
            continue
        with process:
            for name, config, budget in cases + more.get(who, []):
                if options.only in f"{name} {budget}":
                    rows.append(_asked(process, who, name, config, budget, 40 if options.quick else 3000))
    return rows


def _asked(process: Process, who: str, name: str, config: dict[str, Any], budget: str, limit: int) -> Row:
    """Serve the first ``limit`` requests in a peer and return the row."""
    figures = process.ask("serve", config=config, budget=parse_bytes(budget), limit=limit)
    return {
        "case": f"{name}, {budget}", "who": who, "version": process.version, "model": name, "budget": budget,
        "us": 1e6 * figures["seconds"] / figures["requests"],
        **{key: figures[key] for key in ("hit_percent", "mean_running", "steps", "preempted", "never_fit")},
    }  # fmt: skip


if __name__ == "__main__":
    tell("hybrid_peers", QUESTION, measure)
