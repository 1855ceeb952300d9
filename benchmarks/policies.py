"""Which hit rate does each eviction policy reach on the public traces, and is ``auto`` ever worse than LRU?

Needs the traces, in ``KVPAGODA_TRACES`` or beside the checkout in ``../shared/traces``; missing traces are left out.
"""

from __future__ import annotations

from benchmarks.timing import Options, Row, tell
from benchmarks.workload import TRACES
from kvpagoda.replay import Trace, hit_rate_curve

QUESTION = "Hit rate in percent of each policy on the public traces"
POLICIES = ("lru", "s3fifo", "arc", "auto")
CASES = [
    ("mooncake_conversation.jsonl.gz", None, (1_827, 3_656, 9_139, 18_279, 36_558)),
    ("mooncake_synthetic.jsonl.gz", None, (439, 878, 2_196, 4_392, 8_785, 21_962)),
    ("lmcache_agent_lcp.jsonl.gz", None, (251, 502, 1_254, 2_508)),
    ("weka_agentic_rle.jsonl.gz", 3_000, (10_000, 30_000)),
]


def measure(options: Options) -> list[Row]:
    rows: list[Row] = []
    for file, limit, capacities in CASES[:1] if options.quick else CASES:
        if options.quick:
            limit, capacities = 500, capacities[:1]
        if not (TRACES / file).exists():
            continue
        trace = Trace.read(TRACES / file, limit)
        found = {(r.capacity_blocks, r.policy): 100 * r.hit_rate for r in hit_rate_curve(trace, capacities, POLICIES)}
        for capacity in capacities:
            rates = {policy: found[capacity, policy] for policy in POLICIES}
            rows.append({"trace": file, "capacity": capacity, **rates, "auto_minus_lru": rates["auto"] - rates["lru"]})
    return rows


if __name__ == "__main__":
    tell("policies", QUESTION, measure)
