"""A policy object that a user writes works in a tree, in a cache and in a replay."""

import random
from unittest.mock import ANY

import numpy as np
import pytest
from plain_lru import LRU

from kvpagoda import EvictionPolicy, Schema
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.core.prefix import POLICY_NAMES, PrefixTree, as_policy
from kvpagoda.errors import BadInput
from kvpagoda.replay import hit_rate_curve, replay
from kvpagoda.schema import Attention, Layer
from raises import raises


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
    with raises(BadInput, needed="policy"):
        PrefixTree(1, policy=policy)
    del tree
    with raises(BadInput, needed="policy"):  # it still knows the blocks of the deleted tree
        PrefixTree(1, policy=policy)
    for _ in range(100):  # a deleted policy does not refuse a new one at the same address
        PrefixTree(1, policy=LRU())


def test_anything_but_a_policy_is_refused_with_the_names_that_exist() -> None:
    with raises(BadInput, needed="mru", available=ANY) as error:
        PrefixTree(1, policy="mru")
    assert all(name in str(error.value) for name in POLICY_NAMES)
    for wrong in (RandomLeaf, object(), None, 3):
        with raises(BadInput, needed=("add", "touch", "set_leaf", "choose", "remove", "check")):
            as_policy(wrong, 10)
    with raises(BadInput, needed=("set_leaf", "choose", "remove", "check")):
        as_policy(type("Half", (), {"add": print, "touch": print})(), 10)


def chosen(answer):
    """A policy whose ``choose`` returns ``answer(chain, the oldest leaf)``."""
    return {"choose": lambda self, chain: answer(chain, next(iter(self.leaves)))}


def forgetting(answer):
    """A policy whose ``remove`` returns ``answer(keys)``."""
    return {"remove": lambda self, keys, *, evicted: answer(keys)}


def raising(method: str, error: type[BaseException] = KeyError):
    """A policy whose ``method`` raises ``error``."""

    def fail(self, *_, **__):
        raise error("a mistake in the policy")

    return {method: fail}


def written(self, keys, *_, **__):
    keys[:] = 0


WRONG = {
    "an unknown leaf": chosen(lambda chain, leaf: np.array([10**6], np.int32)),
    "a negative key": chosen(lambda chain, leaf: np.array([-1], np.int32)),
    "no block": chosen(lambda chain, leaf: chain(leaf)[:0]),
    "nothing": chosen(lambda chain, leaf: None),
    "text": chosen(lambda chain, leaf: "ab"),
    "more than the chain": chosen(lambda chain, leaf: np.repeat(chain(leaf), 9)),
    "inner blocks first": chosen(lambda chain, leaf: chain(leaf)[::-1]),
    "the chain of an unknown leaf": chosen(lambda chain, leaf: chain(10**6)),
    "the end of an iterator": raising("choose", StopIteration),
    "forgets nothing that can be counted": forgetting(lambda keys: None),
    "forgets what is cached": forgetting(lambda keys: np.array([0], np.int32)),
    "forgets all there could be": forgetting(lambda keys: np.arange(1000, dtype=np.int32)),
    "forgets twice": forgetting(lambda keys: [*keys.tolist(), *keys.tolist()]),
    "forgets lists": forgetting(lambda keys: [keys.tolist()]),
    **{f"raises in {name}": raising(name) for name in ("add", "touch", "set_leaf", "choose", "remove")},
    "has no memory for a leaf": raising("set_leaf", MemoryError),
    **{f"writes in {name}": {name: written} for name in ("add", "touch", "remove")},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_policy_costs_its_order_and_no_request(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """The policy goes wrong in the middle of a run of requests, which continue as if nothing were."""
    schema = Schema((Layer(0, "attention", (Attention(1, 4, 4, "float32"),)),), "test")
    cache = KVCache(schema, num_blocks=16, max_requests=3, device="none", policy=RandomLeaf(1), block_size=4)
    kept = cache.open([9] * 14)
    kept.commit([9] * 14)
    order = cache._core.prefix.tree._order

    def serve(name: int) -> None:
        text = [name % 3] * 4 + [name] * 12
        with cache.open(text) as sequence:
            sequence.commit(text[sequence.cached_tokens :])
        cache.check()

    for name in range(5):
        serve(name)
    order.policy.__class__ = type("Wrong", (RandomLeaf,), WRONG[wrong])
    for name in range(20, 40):
        serve(name)
    assert kept.tokens.tolist() == [9] * 14
    kept.close()
    cache.check()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the eviction policy Wrong failed; from now on the oldest leaf is evicted"
    ]
    assert caplog.records[-1].exc_info is not None
    cache.reset()
    serve(1)


@pytest.mark.parametrize("end", ["close", "suspend", "commit"])
def test_an_error_in_add_loses_no_request_that_ends(end: str) -> None:
    schema = Schema((Layer(0, "attention", (Attention(1, 4, 4, "float32"),)),), "test")
    cache = KVCache(
        schema, num_blocks=40, max_requests=4, device="none", policy=(policy := RandomLeaf(1)), block_size=16
    )
    first, second = cache.open([1] * 40), cache.open([2] * 40)
    first.commit([1] * 40)
    second.commit([2] * 40)
    policy.__class__ = type("Wrong", (RandomLeaf,), raising("add"))
    if end == "commit":
        first.extend(24)
        first.commit([1] * 24)
    else:
        getattr(first, end)()
    cache.check()
    assert (first.is_open, second.length) == (end != "close", 40)
    second.close()
    assert cache.lookup([2] * 40).cached == 39


def test_the_order_after_a_failure_is_by_age_of_the_leaves() -> None:
    tree = PrefixTree(1, policy=type("Wrong", (RandomLeaf,), raising("choose"))(1))
    for first in (10, 20, 30):
        text = np.arange(first, first + 3, dtype=np.int32)
        tree.insert(tree.match(text), text, text[None])
    tree.touch(tree.match(np.arange(10, 13, dtype=np.int32)))
    assert tree.evict(1).ids.tolist() == [[12]]  # the policy chose before it was touched
    tree.touch(tree.match(np.arange(20, 23, dtype=np.int32)))
    assert tree.evict(6).ids.tolist() == [[32, 31, 30, 11, 10, 22]]
    tree.check()


def test_ghosts_of_a_failed_policy_are_forgotten() -> None:
    """The policy remembers every block that is evicted. When it fails, their keys are free for others."""

    class Remembering(RandomLeaf):
        def remove(self, keys, *, evicted):
            return []

    tree = PrefixTree(1, policy=(policy := Remembering(1)))
    for first in range(0, 90, 9):
        tree.evict(tree.num_cached)
        text = np.arange(first, first + 9, dtype=np.int32)
        tree.insert(tree.match(text), text, text[None] + 1)
    order = tree._order
    assert len(order._ghosts) == 81
    policy.__class__ = type("Wrong", (RandomLeaf,), raising("remove"))
    tree.evict(5)
    assert tree.insert(tree.match(text), text[4:], text[None, 4:] + 1).num_added == 5
    tree.check()
    assert len(order._ghosts) == 0 and sorted(order._keys.take(90 - 9).tolist() + tree_keys(tree)) == list(range(90))


def tree_keys(tree: PrefixTree) -> list[int]:
    """Return the keys of all cached blocks."""
    return [key for node in tree.nodes() for key in node.ids[-1].tolist()]


def test_an_interrupt_in_a_policy_reaches_the_caller() -> None:
    tree = PrefixTree(1, policy=(policy := RandomLeaf(1)))
    text = np.arange(3, dtype=np.int32)
    tree.insert(tree.match(text), text, text[None] + 1)
    for method in ("touch", "choose", "remove"):
        policy.__class__ = type("Stopped", (RandomLeaf,), raising(method, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tree.touch(tree.match(text)) if method == "touch" else tree.evict(1)
        policy.__class__ = RandomLeaf
        tree.check()
    assert tree._order.policy is policy and tree.num_cached == 3
