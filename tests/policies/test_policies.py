"""Every policy agrees with the replay model: each victim on random traces, hits and evictions on public ones."""

import csv
from unittest.mock import ANY

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_model import MODELS, TRACES, load_trace, model_replay, tree_replay

from kvpagoda.core.prefix import POLICY_NAMES, PrefixTree, as_policy
from kvpagoda.core.prefix.node import nodes_below
from kvpagoda.errors import BadInput
from raises import raises

QUICK = 18279
"""The capacity, in blocks, of the default run. ``replay/test_replay.py`` runs every policy with 1,827 blocks."""


def expected() -> list[tuple[str, str, int, int, int]]:
    """Return (trace, policy, capacity in blocks, block hits, evictions) for each result on a public trace."""
    if not TRACES.exists():
        return []
    with open(TRACES / "expected_hits.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] != "opt"]
    return [
        (row["trace"], row["policy"], int(row["capacity_blocks"]), int(row["block_hits"]), int(row["evictions"]))
        for row in rows
    ]


@pytest.fixture(scope="module")
def traces() -> dict[str, list[np.ndarray]]:
    """Traces that are loaded already, by name."""
    return {}


@pytest.mark.skipif(not TRACES.exists(), reason="needs the public traces in ../shared/traces")
@pytest.mark.parametrize(
    ("trace", "policy", "capacity", "hits", "evictions"),
    [pytest.param(*row, marks=() if row[2] == QUICK else pytest.mark.slow) for row in expected()],
)
def test_hits_and_evictions_on_a_public_trace(traces, trace, policy, capacity, hits, evictions) -> None:
    if trace not in traces:
        traces[trace] = load_trace(trace)
    got, evicted, tree = tree_replay(traces[trace], capacity, policy)
    assert (got, len(evicted)) == (hits, evictions)
    tree.check()


chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=40)


@pytest.mark.parametrize("policy", MODELS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(requests=chains, capacity=st.integers(1, 14))
def test_victims_are_those_of_the_model(policy: str, requests: list[list[int]], capacity: int) -> None:
    hits, evicted = model_replay(requests, capacity, policy)
    got, ids, tree = tree_replay([np.array(one, np.int32) for one in requests], capacity, policy)
    tree.check()
    assert got == hits
    assert named(requests, capacity, ids) == evicted


@pytest.mark.parametrize("policy", MODELS)
def test_victims_are_those_of_the_model_on_long_chains(policy: str) -> None:
    """The chains have hundreds of blocks, so that runs of victims inside one node are long."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 3, 150) for _ in range(4)]
    requests = []
    for _ in range(60):
        text = texts[rng.integers(4)][: rng.integers(1, 150)]
        requests.append([*text.tolist(), *rng.integers(3, 9, rng.integers(0, 20)).tolist()])
    hits, evicted = model_replay(requests, 260, policy)
    got, ids, tree = tree_replay([np.array(one, np.int32) for one in requests], 260, policy)
    tree.check()
    assert len(evicted) > 1000
    assert (got, named(requests, 260, ids)) == (hits, evicted)


def named(requests: list[list[int]], capacity: int, ids: list[int]) -> list[tuple]:
    """Return the chains of the evicted ``ids``. Ids count up whenever a block is inserted, also a second time."""
    names: dict[int, tuple] = {}
    cached: dict[tuple, int] = {}
    evicted, next_id = iter(ids), 1
    for request in requests:
        for i in range(min(len(request), capacity)):
            chain = tuple(request[: i + 1])
            if chain not in cached:
                cached[chain], names[next_id] = next_id, chain
                next_id += 1
        while len(cached) > capacity:
            del cached[names[next(evicted)]]
    return [names[one] for one in ids]


def insert(tree: PrefixTree, tokens: list[int], first_id: int, priority: int = 0, size: int = 1) -> None:
    """Insert and touch ``tokens``; new blocks get ids from ``first_id`` on. ``size``: tokens in a block."""
    array = np.array(tokens, np.int32)
    match = tree.match(array)
    ids = np.arange(first_id, first_id + len(tokens) // size - match.num_blocks, dtype=np.int32)
    tree.insert(match, array[match.num_blocks * size :], ids[None], priority=priority)
    tree.touch(match, priority=priority)


def test_blocks_of_low_priority_are_evicted_first() -> None:
    tree = PrefixTree(1, 1, "priority", capacity=9)
    insert(tree, [1, 2], 1, priority=5)
    insert(tree, [3, 4], 3, priority=1)
    insert(tree, [5, 6], 5, priority=3)
    assert tree.evict(4).ids.tolist() == [[4, 3, 6, 5]]
    insert(tree, [7], 7, priority=4)
    tree.touch(tree.match(np.array([7], np.int32)), priority=9)
    assert tree.evict(3).ids.tolist() == [[2, 1, 7]]


def test_time_to_live_evicts_what_expires_first() -> None:
    tree = PrefixTree(1, 1, "ttl", capacity=9)
    for i, deadline in enumerate((300, 100, 200)):
        insert(tree, [i], i + 1, priority=deadline)
    assert tree.evict(3).ids.tolist() == [[2, 3, 1]]


def test_priorities_outlive_splits_and_merges() -> None:
    """Compared with a dictionary chain -> (highest priority, last use), in traffic that splits and merges nodes."""
    rng, tree = np.random.default_rng(8), PrefixTree(1, 1, "priority", capacity=60)
    keys: dict[tuple, tuple[int, int]] = {}
    names: dict[int, tuple] = {}
    clock = num_evicted = 0
    for next_id in range(1, 60_000, 20):
        text = rng.integers(0, 3, rng.integers(1, 12)).astype(np.int32)
        priority, used = int(rng.integers(-2, 4)), int(rng.integers(1, len(text) + 1))
        match = tree.match(text)
        ids = np.arange(next_id, next_id + len(text) - match.num_blocks, dtype=np.int32)
        tree.insert(match, text[match.num_blocks :], ids[None], priority=priority)
        own = tree.match(text)
        tree.touch(own, used, priority=priority - 1)
        names |= {int(one): tuple(text[: i + 1].tolist()) for i, one in enumerate(own.ids[0])}
        for chain, is_first in [(names[int(one)], True) for one in ids[::-1]] + [
            (names[int(one)], False) for one in own.ids[0, :used][::-1]
        ]:
            clock += 1
            best = priority if is_first else max(keys[chain][0], priority - 1)
            keys[chain] = best, clock
        while tree.num_cached > 60:
            parents = {chain[:-1] for chain in keys}
            victim = min((chain for chain in keys if chain not in parents), key=keys.__getitem__)
            assert names[int(tree.evict(1).ids[0, 0])] == victim
            del keys[victim]
            num_evicted += 1
    tree.check()
    assert num_evicted > 3000 and tree.num_cached == len(keys)


def test_no_block_is_older_than_the_blocks_below_it() -> None:
    rng, tree = np.random.default_rng(9), PrefixTree(2, 1, "lru", capacity=80)
    next_id = 1
    for _ in range(1500):
        text = rng.integers(0, 2, 2 * rng.integers(1, 10)).astype(np.int32)
        insert(tree, text.tolist(), next_id, size=2)
        next_id += len(text)
        tree.evict(max(0, tree.num_cached - 80))
        nodes = [node for root in tree._roots.values() for node in nodes_below(root) if not node.root]
        for node in nodes:
            times = [*(when for _, when in node.uses), node.used]
            assert times == sorted(times, reverse=True)
            assert node.parent.root or node.parent.used >= times[0]
    tree.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_survives_pins_clears_and_refills(policy: str) -> None:
    rng = np.random.default_rng(11)
    tree, free, leases = PrefixTree(2, 1, policy, capacity=60), list(range(1, 400)), []
    for step in range(1500):
        text = rng.integers(0, 3, 2 * rng.integers(1, 9)).astype(np.int32)
        match = tree.match(text)
        rest = text[match.num_blocks * 2 :]
        ids = np.array([[free.pop() for _ in range(len(rest) // 2)]], np.int32)
        lease = tree.insert(match, rest, ids, pin=True, priority=step % 4).lease
        if rng.random() < 0.8:
            tree.touch(lease, priority=step % 4)
            tree.unpin(lease)
        else:
            leases.append(lease)
        if len(leases) > 6:
            tree.unpin(leases.pop(int(rng.integers(len(leases)))))
        if tree.num_cached > 60:
            evicted = tree.evict(tree.num_cached - 60)
            free += evicted.ids[0].tolist()
            assert tree.num_cached == 60 + evicted.shortfall
        if step % 500 == 499:
            while leases:
                tree.unpin(leases.pop())
            free += tree.clear().ids[0].tolist()
        if step % 10 == 0:
            tree.check()
    assert sorted(free) == list(range(1, 400)) and tree.num_cached == 0
    assert policy == "lru" or tree._order._keys.take(1)[0] < 400, "keys leak"


def test_the_age_of_lfuda_never_falls() -> None:
    """A leaf that was held is evicted late, with a rank below those of earlier victims."""
    tree, names = PrefixTree(2, 1, "lfuda", capacity=8), iter(range(1, 9))

    def cached(text: list[int]) -> object:
        return tree.insert(
            tree.match(np.array(text, np.int32)),
            np.array(text, np.int32),
            np.array([[next(names)]], np.int32),
            pin=True,
        ).lease

    held, often = cached([1, 1]), cached([2, 2])
    for _ in range(9):
        tree.touch(often)
    tree.unpin(often)
    tree.evict(1)
    tree.unpin(cached([3, 3]))
    tree.unpin(held)
    tree.evict(1)  # of rank 1, where the age is 10
    tree.unpin(cached([4, 4]))
    assert tree.evict(1).ids.tolist() == [[3]], "of two texts that were used once the older one goes first"
    tree.check()


def test_names_and_sizes_of_policies() -> None:
    with raises(BadInput, needed="best", available=ANY):
        as_policy("best", 10)
    for name in ("s3fifo", "arc", "auto"):
        with raises(BadInput, field=name, needed=1, available=0):
            PrefixTree(1, policy=name)
