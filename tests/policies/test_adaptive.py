"""The ``auto`` policy: exact in either mode, right about which mode is better, and able to switch with the workload."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import model_replay, tree_replay
from test_policies import chains, named

from kvpagoda.core.prefix import PrefixTree
from kvpagoda.errors import CheckFailed
from kvpagoda.policies import adaptive
from kvpagoda.policies.adaptive import Auto, ShadowARC, ShadowLRU

NEVER = 2**60


@pytest.mark.parametrize("mode", ["lru", "arc"])
@settings(max_examples=120, deadline=None, derandomize=True)
@given(requests=chains, capacity=st.integers(1, 14))
def test_victims_are_those_of_the_leader(mode: str, requests: list[list[int]], capacity: int) -> None:
    def held(size: int) -> Auto:
        policy = Auto(size)
        policy._window, policy._is_lru = NEVER, mode == "lru"
        return policy

    hits, evicted = model_replay(requests, capacity, mode)
    got, ids, tree = tree_replay([np.array(one, np.int32) for one in requests], capacity, held(capacity))
    tree.check()
    assert got == hits
    assert named(requests, capacity, ids) == evicted


@pytest.mark.parametrize(("mode", "shadow"), [("lru", ShadowLRU), ("arc", ShadowARC)])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(uses=st.lists(st.integers(0, 9), max_size=120), capacity=st.integers(1, 7))
def test_a_shadow_is_the_policy_where_every_block_is_a_leaf(mode, shadow, uses: list[int], capacity: int) -> None:
    watched, remembered = shadow(capacity), set()
    for cell in uses:
        remembered.add(cell)
        remembered -= set(watched.use(cell))
        assert all((one in watched) == (one in remembered) for one in range(10))
    assert watched.hits == model_replay([[one] for one in uses], capacity, mode)[0]


def looping(rng: np.random.Generator, rounds: int) -> list[np.ndarray]:
    """Return requests for texts that repeat, among many that do not: ARC keeps those that repeat, LRU loses them."""
    requests = []
    for i in range(rounds):
        requests += [np.array([7, j, j], np.int32) for j in range(20)] * 2 if i % 4 == 0 else []
        requests += [rng.integers(1000, 2**31 - 1, 6).astype(np.int32) for _ in range(12)]
    return requests


def growing(rng: np.random.Generator, rounds: int) -> list[np.ndarray]:
    """Return requests of chats that grow and end, two at a time: ARC keeps blocks of old chats for too long."""
    requests = []
    for first in range(10**6, 10**6 + 10**4 * rounds, 10**4):
        lengths = {first: 12, first + 5000: 20}
        for _ in range(24):
            chat = first + 5000 * int(rng.integers(2))
            lengths[chat] += int(rng.integers(1, 5))
            requests.append(np.arange(chat, chat + lengths[chat], dtype=np.int32))
    return requests


def test_it_follows_the_workload_there_and_back() -> None:
    policy, rng = Auto(150), np.random.default_rng(1)
    tree = PrefixTree(1, 1, policy)
    for workload, size, gain in ((looping, 60, 1.3), (growing, 40, 0.999), (looping, 60, 1.3)):
        requests = workload(rng, size)
        hits = tree_replay(requests, 150, tree)[0]
        assert policy._is_lru == (workload is growing)
        assert hits > gain * tree_replay(requests, 150, "lru")[0]
        tree.check()
        tree.clear()


def test_two_runs_are_the_same() -> None:
    requests = looping(np.random.default_rng(2), 40)
    assert tree_replay(requests, 100, "auto")[:2] == tree_replay(requests, 100, "auto")[:2]


def test_a_sample_of_a_large_cache_is_every_kth_new_block() -> None:
    policy = Auto(1000 * adaptive._SHADOW)
    cells = np.arange(50_000, dtype=np.int32)
    for part in np.array_split(cells, 77):
        policy.add(part, 0)
    assert np.flatnonzero(policy._known & adaptive._SAMPLED).tolist() == list(range(0, 50_000, 1000))
    policy.touch(cells, 0)
    assert policy._shadow_lru.hits == policy._shadow_arc.hits == 50


def test_check_notices_a_lost_memory() -> None:
    requests = looping(np.random.default_rng(3), 4)
    tree = tree_replay(requests, 50, "auto")[2]
    tree.check()
    tree._order.policy._known[:] = 0
    with pytest.raises(CheckFailed):
        tree.check()
