"""How many checkpoints does it take to find what could be found, and how many does our choice of places take?

The first 3,000 requests of the public conversation trace are served one after another with the layers of Qwen3-Next-80B, and
memory for every block, so that only the number of checkpoints limits what is found. Beside ours stand, for as many
checkpoints, the best places known offline:

- ``fixed``: so many checkpoints in all, each of which stays (``best_places.py``): the best choice that was found, and
  ``fixed_most``, which no such choice exceeds.
- ``moving_most``: so many at any one time, which no cache exceeds that may drop one and make another
  (``kvpagoda.replay.offline.prices``).

``made``: the checkpoints that ours has made by the end. Needs the traces, as ``hits`` does; without them a synthetic mix is
served.
"""

from __future__ import annotations

import numpy as np

from benchmarks.best_places import Leaves
from benchmarks.bound import trace_for
from benchmarks.one_budget import QWEN3_NEXT_80B, schema_of
from benchmarks.timing import Options, Row, tell
from kvpagoda.replay.offline.demand import Needs, Texts, demand_of
from kvpagoda.replay.offline.lives import one_at_a_time, served_here
from kvpagoda.replay.offline.prices import ROUNDS, bound
from kvpagoda.replay.setup import Setup

QUESTION = "How many checkpoints does our choice of places take, and how many does the best one?"
NUMBERS = (100, 300, 1000, 3000, None)
"""The most checkpoints that are kept; None: no limit."""
BUDGET = "8TiB"


def measure(options: Options) -> list[Row]:
    trace, per_id = trace_for(options)
    schema, texts, rows = schema_of(QWEN3_NEXT_80B), Texts(trace, per_id), list[Row]()
    lives = one_at_a_time(trace, np.ones(len(trace), bool))
    demand = demand_of(texts, lives, Needs(0.0, (), 1.0))
    leaves, percent = Leaves.of(texts, demand), 100 / texts.prompts.sum()
    rounds = 100 if options.quick else ROUNDS
    for number in (5, None) if options.quick else NUMBERS:
        case = f"{number:,} checkpoints" if number else "no limit"
        if options.only not in case:
            continue
        setup = Setup(schema, BUDGET, per_id, max_requests=1, checkpoints=number)
        cache = setup.cache(trace)
        ours, stats = served_here(trace, setup, cache), cache.stats()
        cache.close()
        most = number or len(leaves.parent)
        limit, chosen = leaves.best(most)
        rows.append(
            {
                "case": case, "hit_percent": percent * float(ours.found.sum()),
                "made": stats.evicted_checkpoints + stats.checkpoints,
                "gib": most * schema.state_layout.nbytes / 2**30, "fixed": percent * leaves.found(chosen),
                "fixed_number": len(chosen), "fixed_most": percent * limit,
                "moving_most": percent * bound(demand, np.full(lives.num_steps, float(most)), rounds).tokens,
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    tell("placement", QUESTION, measure)
