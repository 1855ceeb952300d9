"""The best places for checkpoints, against every choice of places."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.best_places import Leaves, best_places

from kvpagoda.replay import synthetic
from kvpagoda.replay.offline.demand import Needs, Texts, demand_of
from kvpagoda.replay.offline.lives import one_at_a_time
from kvpagoda.replay.offline.prices import bound


def resumed(places: tuple[int, ...], depths: np.ndarray, counts: np.ndarray) -> int:
    """Return the tokens after which the requests of one text resume with checkpoints at ``places``."""
    return sum(max((p for p in places if p <= depth), default=0) * count for depth, count in zip(depths, counts))


def test_no_choice_of_places_in_a_text_is_better() -> None:
    rng = np.random.default_rng(3)
    for _ in range(80):
        depths = np.sort(rng.choice(np.arange(1, 12), rng.integers(1, 7), replace=False)).astype(np.int64)
        counts = rng.integers(1, 5, len(depths))
        for most in range(len(depths) + 2):
            found, places = best_places(depths, counts, most)
            tried = max(resumed(p, depths, counts) for p in combinations(range(12), min(most, 12)))
            assert found == tried == resumed(tuple(places), depths, counts)
            assert len(places) <= most and (np.diff(places) > 0).all()


def leaves_at_random(rng: np.random.Generator, num: int, *, is_path: bool = False) -> Leaves:
    parent = np.array([-1, *(v - 1 if is_path else int(rng.integers(-1, v)) for v in range(1, num))])
    depth = np.zeros(num, np.int64)
    for v in range(num):
        depth[v] = (depth[parent[v]] if parent[v] >= 0 else 0) + rng.integers(1, 6)
    return Leaves(parent, depth, rng.integers(1, 5, num))


def test_no_choice_of_places_in_a_tree_is_better() -> None:
    rng, exact = np.random.default_rng(5), 0
    for number in range(48):
        leaves = leaves_at_random(rng, int(rng.integers(1, 9)), is_path=number % 4 == 0)
        n = len(leaves.parent)
        tried = [
            max(leaves.found(np.array(c, np.int64)) for c in combinations(range(n), most)) for most in range(n + 1)
        ]
        for price in (0.0, 2.0, 7.5, 30.0):
            worth, chosen = leaves.choose(price)
            assert worth == max(found - price * most for most, found in enumerate(tried))
            assert leaves.found(chosen) - price * len(chosen) == worth
        for most, found in enumerate(tried):
            limit, chosen = leaves.best(most)
            assert leaves.found(chosen) <= found <= limit + 1e-6 and len(chosen) <= most
            exact += leaves.found(chosen) == found
            if number % 4 == 0:
                assert best_places(leaves.depth, leaves.count, most)[0] == found
    assert exact > 150


def test_places_of_a_trace() -> None:
    """A checkpoint at each place finds everything; as many that lie all the time find no more than the bound for as many that
    come and go."""
    trace = synthetic(80)
    texts, lives = Texts(trace, 64), one_at_a_time(trace, np.ones(80, bool))
    demand = demand_of(texts, lives, Needs(0.0, (), 1.0))
    leaves = Leaves.of(texts, demand)
    everything = bound(demand, np.ones(lives.num_steps), rounds=0).tokens
    limit, chosen = leaves.best(len(leaves.parent))
    assert (
        leaves.found(chosen) == everything == pytest.approx(limit)
        and (leaves.parent < np.arange(len(leaves.parent))).all()
    )
    for most in (3, 10, 25):
        limit, chosen = leaves.best(most)
        slots = bound(demand, np.full(lives.num_steps, float(most)), rounds=300)
        assert 0 < leaves.found(chosen) <= limit + 1e-6 < everything
        assert leaves.found(chosen) <= slots.tokens + 1e-6
