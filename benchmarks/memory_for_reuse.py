"""How much memory does the agentic trace need to find 90, 95 and 99 % of what unlimited memory finds?

Requests run one after another in order of arrival, so the memory holds cached texts and one running request. A 20th of
the conversations is served in a 20th of the memory: no id of this trace is in two conversations. How far that differs
from the whole trace is measured with full attention, for which one pass over the whole trace gives every capacity.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log
from typing import Any

import numpy as np

from benchmarks.hits import FULL_ONLY
from benchmarks.one_budget import GEMMA3_27B, GPT_OSS_120B, QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import SOURCES, TRACES
from kvpagoda.replay import Trace, hit_rate_curve, serve, synthetic

QUESTION = "How much memory does the agentic trace need for 90, 95 and 99 % of its reuse?"
MODELS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "Llama-3-8B": (FULL_ONLY, 1280),
    "Gemma-3-27B": (GEMMA3_27B, 640),
    "gpt-oss-120b": (GPT_OSS_120B, 320),
    "Qwen3-Next-80B": (QWEN3_NEXT_80B, 160),
    "DeepSeek-V4 Flash": (None, 40),
}
"""Model -> its layers, and the least memory that is tried, in GiB of the whole trace."""
EVERY, MOST = 20, 12
"""Which conversations are served: each 20th; the most budgets that are tried, each twice the one before."""
TARGETS = (90, 95, 99)
WHOLE = "the whole trace"


def measure(options: Options) -> list[Row]:
    path = TRACES / SOURCES["agent"].file
    if options.quick or not path.exists():
        trace, per_id, every = synthetic(60), 64, 1
    else:
        whole, per_id, every = Trace.read(path), SOURCES["agent"].per_id, EVERY
        assert whole.sessions is not None
        trace = whole.take(np.flatnonzero(whole.sessions % every == 7))
    unlimited = 100 * hit_rate_curve(trace, [trace.num_refs], ["lru"])[0].token_hit_rate
    rows: list[Row] = []
    if every > 1:
        rows += _needed("Llama-3-8B", WHOLE, _curve(whole, per_id))
    for name, (config, least) in MODELS.items():
        if options.only not in name:
            continue
        schema, found = schema_of(config), list[tuple[float, float]]()
        for number in range(1 if options.quick else MOST):
            gib = least * 2**number / every
            served = serve(trace, schema, f"{gib:.3f}GiB", tokens_per_id=per_id, max_requests=1)
            share = 100 * 100 * served.hit_rate / unlimited
            found.append((gib * every, share))
            rows.append(
                {
                    "case": f"{name}, {gib * every:,.0f} GiB", "model": name, "gib": gib * every,
                    "hit_percent": 100 * served.hit_rate, "share_percent": share, "never_fit": served.never_fit,
                    "requests": served.requests, "prompt_tokens": served.prompt_tokens,
                }
            )  # fmt: skip
            if share > 99.5 or (number > 2 and share - found[-3][1] < 0.02):
                break
        rows += _needed(name, f"a {every}th", found)
    return rows


def _curve(trace: Trace, per_id: int) -> list[tuple[float, float]]:
    """Return (GiB, percent of the reuse) of full attention for the whole trace, at many capacities."""
    block = schema_of(FULL_ONLY).bytes_per_token * per_id / 2**30
    gib = [MODELS["Llama-3-8B"][1] * 2 ** (number / 4) for number in range(24)]
    capacities = [int(one / block) for one in gib]
    *some, everything = hit_rate_curve(trace, [*capacities, trace.num_refs], ["lru"])
    return [
        (capacity * block, 100 * one.token_hit_rate / everything.token_hit_rate)
        for capacity, one in zip(capacities, some)
    ]


def _needed(name: str, part: str, found: list[tuple[float, float]]) -> list[Row]:
    """Return a row for each target: the memory at which the share of the reuse is reached, between the two measured budgets
    around it (as the logarithm of the memory grows). None: not reached."""
    rows: list[Row] = []
    for target in TARGETS:
        gib = None
        for (low, below), (high, above) in pairwise(found):
            if below < target <= above:
                gib = exp(log(low) + (log(high) - log(low)) * (target - below) / (above - below))
                break
        rows.append(
            {"case": f"{name}, {target} %, {part}", "model": name, "part": part, "target": target, "needs_gib": gib}
        )
    return rows


if __name__ == "__main__":
    tell("memory_for_reuse", QUESTION, measure)
