"""How many checkpoints does it take to find what could be found, and how many does our choice of places take?

The first 3,000 requests of the public conversation trace are served one after another with the layers of Qwen3-Next-80B, and
memory for every block, so that only the number of checkpoints limits what is found. Beside ours stand, for as many
checkpoints, the best places known offline:

- ``fixed``: so many checkpoints in all, each of which stays (``offline/placement.py``): the best choice that was found, and
  ``fixed_most``, which no such choice exceeds.
- ``moving_most``: so many at any one time, which no cache exceeds that may drop one and make another (``offline/prices.py``).

``made``: the checkpoints that ours has made by the end. Needs the traces, as ``hits`` does; without them a synthetic mix is
served.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.bound import trace_for
from benchmarks.offline.demand import Needs, Texts, demand_of
from benchmarks.offline.placement import Leaves
from benchmarks.offline.prices import ROUNDS, bound
from benchmarks.offline.schedule import one_at_a_time, served_here
from benchmarks.one_budget import QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, tell
from kvpagoda.kv_cache import KVCache

QUESTION = "How many checkpoints does our choice of places take, and how many does the best one?"
NUMBERS = (100, 300, 1000, 3000, None)
"""The most checkpoints that are kept; None: no limit."""
BUDGET = "8TiB"


def measure(options: Options) -> list[Row]:
    trace, per_id = trace_for(options)
    schema, texts, rows = schema_of(QWEN3_NEXT_80B), Texts(trace, per_id), list[Row]()
    schedule = one_at_a_time(trace, np.ones(len(trace), bool))
    demand = demand_of(texts, schedule, Needs(0.0, (), 1.0))
    leaves, percent = Leaves.of(texts, demand), 100 / texts.prompts.sum()
    rounds = 100 if options.quick else ROUNDS
    for number in (5, None) if options.quick else NUMBERS:
        case = f"{number:,} checkpoints" if number else "no limit"
        if options.only not in case:
            continue
        told: dict[str, Any] = {}
        ours = served_here(
            trace, schema, BUDGET, tokens_per_id=per_id, at_once=1, checkpoints=number, on_end=partial(_tell, told)
        )
        most = number or len(leaves.parent)
        limit, chosen = leaves.best(most)
        rows.append(
            {
                "case": case, "hit_percent": percent * float(ours.found.sum()), **told,
                "gib": most * schema.state_layout.nbytes / 2**30, "fixed": percent * leaves.found(chosen),
                "fixed_number": len(chosen), "fixed_most": percent * limit,
                "moving_most": percent * bound(demand, np.full(schedule.num_steps, float(most)), rounds).tokens,
            }
        )  # fmt: skip
    return rows


def _tell(told: dict[str, Any], cache: KVCache) -> None:
    stats = cache.stats()
    told["made"] = stats.evicted_checkpoints + stats.checkpoints


if __name__ == "__main__":
    tell("placement", QUESTION, measure)
