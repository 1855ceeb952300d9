"""A policy object that a user writes works in a tree, in a cache and in a replay."""

import random

import numpy as np
import pytest
from plain_lru import LRU

from kvpagoda import EvictionPolicy, Schema
from kvpagoda.errors import BadInput
from kvpagoda.kv_cache import KVCache
from kvpagoda.prefix import POLICY_NAMES, PrefixTree, as_policy
from kvpagoda.replay import hit_rate_curve, replay
from kvpagoda.schema import Attention, Layer


class RandomLeaf:
    """Evicts a random leaf."""

    def __init__(self, seed: int) -> None:
        self.rng, self.leaves = random.Random(seed), {}

    def add(self, keys, priority): ...

    def touch(self, keys, priority): ...

    def set_leaf(self, key, is_leaf):
        self.leaves.update({key: None}) if is_leaf else self.leaves.pop(key)

    def choose(self, chain):
        return chain(self.rng.choice(list(self.leaves)))[:1]

    def remove(self, keys, *, evicted):
        return keys

    def check(self, keys, leaves):
        assert self.leaves.keys() == leaves


def used_by(tree: PrefixTree, seed: int) -> list[int]:
    """Insert, touch and evict random texts in ``tree``. Returns the evicted ids in order."""
    rng, evicted, next_id = np.random.default_rng(seed), [], 1
    for _ in range(300):
        text = rng.integers(0, 3, rng.integers(1, 9)).astype(np.int32)
        match = tree.match(text)
        new = np.arange(next_id, next_id + len(text) - match.num_blocks, dtype=np.int32)
        next_id += len(new)
        tree.insert(match, text[match.num_blocks :], new[None])
        tree.touch(match)
        evicted += tree.evict(max(0, tree.num_cached - 40)).ids[0].tolist()
        tree.check()
    return evicted


def test_in_a_tree() -> None:
    policy: EvictionPolicy = RandomLeaf(1)
    gone = used_by(PrefixTree(1, policy=policy), 2)
    assert len(gone) > 100 and len(set(gone)) == len(gone)
    assert gone != used_by(PrefixTree(1), 2) != used_by(PrefixTree(1, policy=RandomLeaf(3)), 2)


def test_in_a_cache() -> None:
    schema = Schema((Layer(0, "attention", (Attention(1, 4, 4, "float32"),)),), "test")
    cache = KVCache(schema, num_blocks=12, max_requests=2, device="cpu", policy=RandomLeaf(1), block_size=4)
    for start in range(40):
        with cache.open(range(start % 7, start % 7 + 20)) as sequence:
            length = 20 - sequence.cached_tokens
            sequence.commit(range(start % 7 + 20 - length, start % 7 + 20))
        cache.check()
    assert cache.stats().evicted_blocks > 20


def test_in_a_replay() -> None:
    requests = [
        {"hash_ids": [i % 5, 10 + i % 7, 100 + i % 3], "input_length": 3, "output_length": 1, "timestamp": i}
        for i in range(200)
    ]
    found = replay(requests, capacity_blocks=20, policy=RandomLeaf(1))
    assert found.policy == "RandomLeaf" and 0 < found.block_hits < found.block_refs
    assert found.block_hits == replay(requests, capacity_blocks=20, policy=RandomLeaf(1)).block_hits
    both = hit_rate_curve(requests, [20], ["lru", RandomLeaf(1)])
    assert [one.policy for one in both] == ["lru", "RandomLeaf"] and both[1].block_hits == found.block_hits


def test_an_object_serves_one_tree() -> None:
    policy = RandomLeaf(1)
    tree = PrefixTree(1, policy=policy)
    with pytest.raises(BadInput, match="already"):
        PrefixTree(1, policy=policy)
    del tree
    with pytest.raises(BadInput, match="already"):  # it still knows the blocks of the deleted tree
        PrefixTree(1, policy=policy)
    for _ in range(100):  # a deleted policy does not refuse a new one at the same address
        PrefixTree(1, policy=LRU())


def test_anything_but_a_policy_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(BadInput, match="mru") as error:
        PrefixTree(1, policy="mru")
    assert all(name in str(error.value) for name in POLICY_NAMES)
    for wrong in (RandomLeaf, object(), None, 3):
        with pytest.raises(BadInput, match="EvictionPolicy"):
            as_policy(wrong, 10)
    with pytest.raises(BadInput, match="choose"):
        as_policy(type("Half", (), {"add": print, "touch": print})(), 10)


def test_an_impossible_choice_is_refused() -> None:
    class Wrong(RandomLeaf):
        answer = np.array([7], np.int32)

        def choose(self, chain):
            return self.answer

    tree = PrefixTree(1, policy=(policy := Wrong(1)))
    text = np.arange(3, dtype=np.int32)
    tree.insert(tree.match(text), text, text[None] + 1)
    for policy.answer in (np.array([7], np.int32), np.empty(0, np.int32), np.arange(3, dtype=np.int32)[::-1]):
        with pytest.raises(BadInput, match="chose"):
            tree.evict(2)
        tree.check()
        assert tree.num_cached == 3
