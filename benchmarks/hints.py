"""What are hints worth, on the trace of coding agents? Hit rates in percent at shares of all distinct blocks.

``hints``: LRU with what an application knows when a request ends (``kvpagoda.replay.hinted``). ``opt``: the bound, which
knows the future. ``closed``: the share of the distance from LRU to the bound that hints close, in percent. Needs the
trace, in ``KVPAGODA_TRACES`` or beside the checkout in ``../shared/traces``.
"""

from __future__ import annotations

from time import perf_counter

from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.replay import Trace, hit_rate_curve
from kvpagoda.replay.hinted import replay_hints

QUESTION = "What are hints worth for coding agents, beside LRU, ARC and the bound?"
FILE = "weka_agentic_rle.jsonl.gz"
SHARES = (1, 5, 20)


def measure(options: Options) -> list[Row]:
    if not (TRACES / FILE).exists():
        return []
    trace = Trace.read(TRACES / FILE, 2000 if options.quick else None)
    shares = SHARES[1:] if options.quick else SHARES
    capacities = [trace.num_distinct * share // 100 for share in shares]
    found = {
        (one.capacity_blocks, one.policy): 100 * one.hit_rate
        for one in hit_rate_curve(trace, capacities, ("lru", "arc", "opt"))
    }
    rows: list[Row] = []
    for share, capacity in zip(shares, capacities):
        begun = perf_counter()
        hints = 100 * replay_hints(trace, capacity).hit_rate
        took = perf_counter() - begun
        lru, arc, opt = (found[capacity, policy] for policy in ("lru", "arc", "opt"))
        rows.append(
            {
                "share_percent": share,
                "capacity": capacity,
                "requests": len(trace),
                "lru": lru,
                "arc": arc,
                "hints": hints,
                "opt": opt,
                "closed": 100 * (hints - lru) / (opt - lru) if opt > lru else 0.0,
                "request_us": 1e6 * took / len(trace),
            }
        )
    return rows


if __name__ == "__main__":
    tell("hints", QUESTION, measure)
