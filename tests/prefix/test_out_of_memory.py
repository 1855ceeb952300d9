"""If memory runs out at any call into numpy, the tree is unchanged: for every method, and with every policy."""

import numpy as np
import pytest
from out_of_memory import OutOfMemory
from plain_lru import LRU
from test_tree_oracle import Pair, finish
from tests.policies.replay_model import tree_replay

from kvpagoda.core.prefix import POLICY_NAMES, PrefixTree


@pytest.mark.parametrize("policy", ["lru", LRU])
@pytest.mark.parametrize(
    ("block_size", "num_groups", "steps"),
    [(1, 1, 250), (2, 2, 250), pytest.param(2, 2, 8000, marks=pytest.mark.slow)],
)
def test_every_call_fails_everywhere_first(block_size: int, num_groups: int, steps: int, policy) -> None:
    """Compared with the oracle, which makes only the calls that succeed."""
    pair = Pair(block_size, 2, num_groups, seed=steps, room=60, policy="lru" if policy == "lru" else policy())
    swept = pair.tree = OutOfMemory(pair.tree)
    for _ in range(steps):
        pair.step()
    finish(pair)
    failures = swept.num_failures
    assert all(failures[name] for name in ("match", "insert", "evict")), failures
    assert sum(failures.values()) > 2 * steps


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_policy_continues_as_if_nothing_had_failed(policy: str) -> None:
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 3, 40).astype(np.int32) for _ in range(4)]
    requests = [texts[rng.integers(4)][: rng.integers(1, 40)] for _ in range(25)]
    requests += [rng.integers(0, 3, rng.integers(1, 12)).astype(np.int32) for _ in range(25)]
    hits, evicted, _ = tree_replay(requests, 50, policy)
    swept = OutOfMemory(PrefixTree(1, 1, policy, capacity=50))
    assert tree_replay(requests, 50, swept)[:2] == (hits, evicted)
    assert len(evicted) > 100 and swept.num_failures["evict"] and (swept.num_parts or policy == "lru")
    swept.clear()
    assert swept.num_failures["clear"]
    swept.check()
