"""Which share of its prompts does a hybrid model reuse here, with vLLM's manager of several groups, and in TokenSpeed?

All have the same memory. The first 3,000 requests of the conversation trace are served in the steps of
``kvpagoda.replay.serve``. See ``peers/vllm_hybrid.py`` for the part of vLLM. vLLM's time is that of its manager's calls
and of its hashes. TokenSpeed's scheduler decides itself what a step is (``peers/tokenspeed_hybrid.py``); its time is that
of all its calls. Ours includes everything, also the making of the texts. vLLM admits requests without room for their
outputs, and preempts some: ``again_percent`` is what it computes again for that, in percent of the prompt tokens.
"""

from __future__ import annotations

from itertools import product
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
INTERVALS = {"all kept": None, **{f"every {n}": n for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)}}
"""vLLM's ``prefix_cache_retention_interval``. By default (0) it keeps blocks of windows and states for reuse only where
another text is likely to continue; "every 1024" keeps those after every 1,024 tokens too (with states after every block, of
some 1,000 tokens), and "all kept" all."""
UNITS = {
    "unit 16": {"prefix_match_unit": 16},
    "every 8192, unit 16": {"prefix_match_unit": 16, "prefix_cache_retention_interval": 8192},
}
"""vLLM's ``prefix_match_unit``, which only models with states can use: the end of a prompt is found within a block too."""
BFLOAT16 = {"Qwen3-Next-80B, its states in bfloat16": {**QWEN3_NEXT_80B, "mamba_ssm_dtype": "bfloat16"}}
"""vLLM's default. Ours are float32, as in transformers, and in ``MODELS`` vLLM is set to float32 too."""
Case = tuple[str, str, dict[str, Any]]
"""The model, vLLM's setting ("" for its defaults), and both as the peers take them."""


def cases(who: str) -> list[Case]:
    """Return what is asked of a peer, at each budget."""
    models: list[Case] = [(name, "", config) for name, config in MODELS.items()]
    if who != "vllm":
        return models
    others = [
        (name, setting, {**config, "prefix_cache_retention_interval": interval})
        for name, config in MODELS.items()
        for setting, interval in INTERVALS.items()
    ]
    others += [
        (name, setting, {**MODELS[name], **more})
        for name in ("Qwen3-Next-80B", "Nemotron-H-8B")
        for setting, more in UNITS.items()
    ]
    return [*models, *((name, "", config) for name, config in BFLOAT16.items()), *others]


def measure(options: Options) -> list[Row]:
    ours = hits.measure(options, MODELS) if "ours" in options.peers else []
    rows = [
        {"case": f"{row['model']}, {row['budget']}", "who": "ours", **row} for row in ours if row["step_tokens"] == 2048
    ]
    for who, peer in PEERS.items():
        if who not in options.peers:
            continue
        try:
            process = Process(peer)
        except Absent as reason:
            rows.append({"who": who, "absent": str(reason)})
            continue
        with process:
            for (name, setting, config), budget in product(cases(who), hits.BUDGETS):
                title = f"{name}, {setting}" if setting else name
                if options.only in f"{title} {budget}":
                    figures = _served(process, config, budget, 40 if options.quick else 3000)
                    rows.append({"case": f"{title}, {budget}", "who": who, "model": name, "budget": budget, **figures})
    return rows


def _served(process: Process, config: dict[str, Any], budget: str, limit: int) -> Row:
    """Serve the first ``limit`` requests in a peer and return its figures."""
    figures = process.ask("serve", config=config, budget=parse_bytes(budget), limit=limit)
    kept = ("hit_percent", "again_percent", "mean_running", "steps", "preempted", "never_fit")
    per_request = 1e6 * figures["seconds"] / figures["requests"]
    return {"version": process.version, "us": per_request, **{key: figures[key] for key in kept if key in figures}}


if __name__ == "__main__":
    tell("hybrid_peers", QUESTION, measure)
