"""Why may two replays of one trace give other hit rates? One replay, counted by different rules.

The rules: what is counted (blocks, tokens, requests), what may hit (whole blocks, blocks that are computed for some time,
all but the first), which requests are counted, how many nodes have a cache of their own, and the policy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.timing import Options, Row, tell
from benchmarks.workload import SOURCES, TRACES
from kvpagoda.replay import Trace, hit_rate_curve, synthetic

QUESTION = "How much of the hit rate of a public trace is the rule by which hits are counted (percent)?"
NAMES = ("conversation", "synthetic")
CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
UNLIMITED = "unlimited"
Ints = npt.NDArray[np.int64]


def shares(trace: Trace, hits: Ints) -> dict[str, float]:
    """Return the hit rate by each rule that needs one replay alone, 0 to 1. ``hits``: blocks that each request hit."""
    sizes, lengths = np.diff(trace.starts), trace.input_lengths
    tokens = np.minimum(hits * trace.block_size, lengths)
    whole = np.minimum(hits, lengths // trace.block_size)
    second = np.arange(len(trace)) >= len(trace) // 2
    return {
        "blocks": hits.sum() / sizes.sum(),
        "tokens": tokens.sum() / lengths.sum(),
        "tokens, and the last is computed": np.minimum(tokens, lengths - 1).sum() / lengths.sum(),
        "whole blocks alone": whole.sum() / (lengths // trace.block_size).sum(),
        "tokens of prompts and answers": tokens.sum() / (lengths + trace.output_lengths).sum(),
        "mean of the requests": float((hits / sizes).mean()),
        "the first block never hits": np.maximum(hits - 1, 0).sum() / sizes.sum(),
        "the second half of the requests": hits[second].sum() / sizes[second].sum(),
    }


def computed_for(trace: Trace, hits: Ints, seconds: float) -> float:
    """Return the share of the blocks that hit if a block can hit only ``seconds`` after the arrival of the request that
    inserted it. What is evicted is as in the replay without that rule, which gave ``hits``. O(references)."""
    since = np.full(int(trace.ids.max()) + 1, -np.inf)
    found = 0
    for i, now in enumerate(trace.arrivals):
        chain = trace.chain(i)
        early = since[chain[: hits[i]]] + seconds > now
        found += int(early.argmax()) if early.any() else int(hits[i])
        since[chain[hits[i] :]] = now
    return found / trace.num_refs


def lru(trace: Trace, policy: str = "lru") -> list[Ints]:
    """Return the blocks that each request hits, at each of ``CAPACITIES`` and without a limit."""
    return [result.hits for result in hit_rate_curve(trace, [*CAPACITIES, max(trace.num_refs, 1)], [policy])]


def nodes(trace: Trace, number: int) -> list[float]:
    """Return the shares of the blocks that hit if the requests go to ``number`` nodes in turn, each with a cache of its own
    of the capacity."""
    parts = [lru(trace.take(np.arange(node, len(trace), number))) for node in range(number)]
    return [sum(int(hits.sum()) for hits in at) / trace.num_refs for at in zip(*parts)]


def measure(options: Options) -> list[Row]:
    names = [name for name in NAMES if (TRACES / SOURCES[name].file).exists() and not options.quick]
    traces = {name: Trace.read(TRACES / SOURCES[name].file) for name in names} or {"generated": synthetic(60)}
    rows: list[Row] = []
    for name, trace in traces.items():
        each = lru(trace)
        found = {rule: [shares(trace, hits)[rule] for hits in each] for rule in shares(trace, each[0])}
        for seconds in (3, 10, 30):
            rule = f"a block hits {seconds} s after its request came"
            found[rule] = [computed_for(trace, hits, seconds + 0.001) for hits in each]
        for number in (2, 4):
            found[f"{number} nodes, each with a cache of its own"] = nodes(trace, number)
        for policy in ("block-fifo", "opt"):
            found[f"policy {policy}"] = [hits.sum() / trace.num_refs for hits in lru(trace, policy)]
        columns = [f"at_{capacity}" for capacity in CAPACITIES] + [UNLIMITED]
        for rule, rates in found.items():
            if options.only in f"{name}, {rule}":
                rows.append(
                    {
                        "case": f"{name}, {rule}", "trace": name, "rule": rule, "hit_percent": 100 * float(rates[-1]),
                        **{column: 100 * float(rate) for column, rate in zip(columns, rates)},
                    }
                )  # fmt: skip
    return rows


if __name__ == "__main__":
    tell("count_hits", QUESTION, measure)
