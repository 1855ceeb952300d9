"""Quotas of cached bytes: each namespace is within its own, or all that it has cached is in use, and others lose nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvpagoda import KVCache, Namespace, OutOfBlocks, Retention, RetryLater
from kvpagoda.abc import CacheObserver
from kvpagoda.core.cache.prefix_cache import PrefixCache
from kvpagoda.errors import BadInput
from kvpagoda.prefix import PrefixTree
from kvpagoda.tiers import host_tier
from quotas import cached_nbytes, prove_within
from raises import raises
from random_driver.schemas import schema_named

KINDS = ("full", "sliding", "gemma", "mixed", "qwen3_next", "mamba", "drafted", "wide", "deepseek_v4")

BUDGETS = {"gemma": "48KiB", "mixed": "96KiB", "qwen3_next": "256KiB", "deepseek_v4": "256KiB", "wide": "96KiB"}
"""Bytes for about six requests of 40 tokens; 24 KiB for the other kinds."""


def cache_of(kind: str = "full", quota: Any = None, **arguments: Any) -> KVCache:
    retention = Retention(quota=quota, **arguments.pop("retention", {}))
    usual = {"budget": BUDGETS.get(kind, "24KiB"), "max_requests": 6, "block_size": 8, "device": "none"}
    return KVCache(schema_named(kind), retention=retention, **{**usual, **arguments})


def answered(cache: KVCache, text: list[int], namespace: Any = None) -> int:
    """Compute ``text`` and close it. Return how many tokens were cached."""
    with cache.open(text, namespace, capacity=0, reserve=len(text)) as sequence:
        while sequence.length < len(text):
            n = min(len(text) - sequence.length, cache.step_limit(sequence), 8)
            sequence.extend(n)
            sequence.commit(text[sequence.length : sequence.length + n])
        return sequence.cached_tokens


def row_nbytes(cache: KVCache) -> int:
    return cache.plan.groups[0].row_nbytes


# -- what it is for --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_tenant_keeps_its_hits_while_another_floods(kind: str, policy: str) -> None:
    text = [7 + i % 20 for i in range(40)]
    found = {}
    for share in (None, 0.3):
        cache = cache_of(kind, None if share is None else int(share * cache_of(kind).plan.nbytes), policy=policy)
        answered(cache, text, "small")
        first = cache.lookup([*text, 1], "small").resumable
        for i in range(60):
            answered(cache, [50 + i, 60 + i] * 16, "flood")
        found[share] = first, cache.lookup([*text, 1], "small").resumable
        cache.check()
    assert found[0.3][0] == found[0.3][1] >= 32
    assert found[None][1] < found[None][0]  # without quotas all of it, or some, is lost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_after_every_call_each_namespace_is_within_its_quota_or_all_of_it_is_in_use(kind: str, seed: int) -> None:
    random = np.random.default_rng([seed, KINDS.index(kind)])
    nbytes = cache_of(kind).plan.nbytes
    quota: Any = int(nbytes * random.choice([0.02, 0.1, 0.3]))
    if seed == 1:
        quota = {"a": quota, Namespace("b", "x"): 0, None: f"{nbytes // 4} B"}
    policy = str(random.choice(["lru", "lfu", "arc"]))
    cache = cache_of(kind, quota, policy=policy, tiers=[host_tier("64KiB")] if seed == 2 else [])
    tenants = ["a", Namespace("b", "x"), None, Namespace("c")]
    systems = [random.integers(0, 50, 20).tolist() for _ in tenants]
    running: list[Any] = []
    pins: list[Any] = []
    for step in range(80):
        tenant = int(random.integers(len(tenants)))
        text = (
            systems[tenant][: int(random.integers(1, 21))]
            + random.integers(0, 50, int(random.integers(1, 20))).tolist()
        )
        action = random.random()
        try:
            if action < 0.4:
                running.append(cache.open(text, tenants[tenant], capacity=0, reserve=len(text) + 8))
            elif action < 0.45 and running:
                running.append(running[int(random.integers(len(running)))].fork())
            elif action < 0.5:
                pins.append(cache.pin(text, tenants[tenant]))
            elif action < 0.55 and pins:
                cache.unpin(pins.pop(0))
            elif action < 0.6 and running:
                sequence = running[int(random.integers(len(running)))]
                sequence.suspend()
                prove_within(cache)
                sequence.resume()
            elif action < 0.65 and running:
                running.pop(int(random.integers(len(running)))).close()
            elif action < 0.66:
                cache.invalidate(*([tenants[tenant]] if random.random() < 0.7 else []))
        except (OutOfBlocks, RetryLater):
            while running and random.random() < 0.7:
                running.pop(0).close()
        prove_within(cache)
        for sequence in running[-3:]:
            while sequence.length < sequence.prompt_length and random.random() < 0.9:
                n = min(sequence.prompt_length - sequence.length, cache.step_limit(sequence), 8)
                sequence.extend(n)
                sequence.commit(prompt_of(sequence, n))
                prove_within(cache)
        if step % 10 == 0:
            cache.check()
    for sequence in running:
        sequence.close()
        prove_within(cache)
    cache.check()
    cache.close()


def prompt_of(sequence: Any, n: int) -> list[int]:
    """Return the next ``n`` tokens of the prompt of ``sequence``."""
    request = sequence._request
    return request.tokens[sequence.length : sequence.length + n].tolist()


# -- what counts, and what follows ------------------------------------------------------------------------------------------


class Told(CacheObserver):
    """What an observer is told of evictions: (reason, group, ids)."""

    def __init__(self) -> None:
        self.evicted: list[tuple[str, str, list[int]]] = []

    def on_evicted(self, blocks: Any, reason: str, namespaces: frozenset[bytes]) -> None:
        self.evicted += [(reason, group, ids.tolist()) for group, ids, _ in blocks]


def text_of(number: int, n: int = 16) -> list[int]:
    return [number] * n


def test_the_least_recently_used_text_of_the_namespace_goes_first_from_its_end() -> None:
    cache = cache_of(block_size=4)
    quota = 10 * row_nbytes(cache)
    told = Told()
    cache = cache_of(quota=quota, block_size=4, observers=[told])
    for number in (1, 2):
        answered(cache, text_of(number), "a")
    assert answered(cache, [*text_of(1), 9], "a") == 16  # used again
    answered(cache, text_of(5, 100), "b")
    assert cache.lookup([*text_of(5, 100), 0], "b").cached < 100  # 25 blocks
    assert [reason for reason, _, _ in told.evicted] == ["evicted"] * len(told.evicted) and told.evicted
    before = [cache.lookup([*text_of(number), 0], "a").cached for number in (1, 2)]
    assert before == [16, 16]
    answered(cache, text_of(3), "a")  # 13 blocks, and the last one of text 1, which is not whole
    assert [cache.lookup([*text_of(number), 0], "a").cached for number in (1, 2, 3)] == [16, 4, 16]
    assert cached_nbytes(cache.core).most_common()[0][1] <= quota
    prove_within(cache)


def test_what_requests_and_pins_use_counts_and_stays() -> None:
    cache = cache_of(quota=0, block_size=4)
    sequence = cache.open(text_of(1), "a")
    sequence.commit(text_of(1))
    pin = cache.pin(text_of(1), "a")
    (stats,) = cache.stats().namespaces
    assert stats.cached_nbytes == 4 * row_nbytes(cache)
    sequence.close()
    assert cache.lookup([*text_of(1), 2], "a").cached == 16
    cache.unpin(pin)
    assert cache.lookup([*text_of(1), 2], "a").cached == 0 == cache.stats().namespaces[0].cached_nbytes
    assert cache.stats().groups[0].held == 0


def test_namespaces_of_a_mapping_and_their_epochs() -> None:
    cache = cache_of(block_size=4)
    quota = {"a": 3 * row_nbytes(cache), Namespace("b", "adapter"): "1GiB", None: 0}
    cache = cache_of(quota=quota, block_size=4)
    for name in ("a", Namespace("b", "adapter"), None, Namespace("b")):
        answered(cache, text_of(1), name)
    found = [
        cache.lookup([*text_of(1), 2], name).cached for name in ("a", Namespace("b", "adapter"), None, Namespace("b"))
    ]
    assert found == [12, 16, 0, 16]
    staying = cache.open(text_of(7), Namespace("a", epoch=0))
    cache.invalidate()
    staying.commit(text_of(7))  # of the old epoch, in use: all that the namespace may have
    answered(cache, text_of(8), "a")
    assert cache.lookup([*text_of(8), 2], "a").cached == 0
    prove_within(cache)


def test_tiers_get_what_a_quota_evicts_and_it_does_not_count_there() -> None:
    cache = cache_of(quota=0, block_size=4, tiers=[host_tier("64KiB", write="evict")])
    answered(cache, text_of(1, 40), "a")
    assert cache.flush() and cache.lookup([*text_of(1, 40), 2], "a").cached == 0
    with cache.open([*text_of(1, 40), 2], "a") as sequence:
        assert sequence.match.loaded == 40 == sequence.cached_tokens
        prove_within(cache)
    assert cache.stats().namespaces[0].cached_nbytes == 0
    cache.close()


def test_sleep_and_reset() -> None:
    cache = cache_of("mixed", 0)
    sequence = cache.open(text_of(1, 30), "a")
    sequence.commit(text_of(1, 30))
    cache.sleep("tree")
    sequence.close()
    cache.wake()
    assert cache.stats().namespaces[0].cached_nbytes == 0
    prove_within(cache)
    answered(cache, text_of(2, 30), "a")
    cache.reset()
    cache.check()


def test_without_quotas_or_with_large_ones_the_same_blocks_are_evicted() -> None:
    told = []
    for quota in (None, "1TiB", {"x": 1}):
        observer, random = Told(), np.random.default_rng(4)
        cache = cache_of("mixed", quota, observers=[observer])
        for _ in range(60):
            answered(
                cache, random.integers(0, 3, int(random.integers(8, 40))).tolist(), ["a", "b", None][random.integers(3)]
            )
        told.append(observer.evicted)
    assert told[0] == told[1] == told[2] and len(told[0]) > 20


def test_a_namespace_of_which_all_is_in_use_is_not_walked_again_in_each_call() -> None:
    cache = cache_of(quota=0, block_size=4)
    sequence = cache.open(text_of(1), "a", reserve=40)
    with patch.object(PrefixCache, "evict_of", autospec=True, side_effect=PrefixCache.evict_of) as evict_of:
        sequence.commit(text_of(1))
        cache.lookup(text_of(1), "a")
        calls = evict_of.call_count
        for _ in range(20):
            cache.lookup(text_of(1), "a")
            cache.stats()
        assert evict_of.call_count == calls <= 3
        sequence.close()
        assert evict_of.call_count > calls
    prove_within(cache)


def test_an_eviction_that_fails_is_repeated_at_the_end_of_the_next_call() -> None:
    cache = cache_of(quota=0, block_size=4)
    sequence = cache.open(text_of(1), "a")
    sequence.commit(text_of(1))
    with patch.object(PrefixCache, "evict_of", side_effect=MemoryError):
        sequence.close()
    assert cache.core.prefix.quota is not None and cache.core.prefix.quota.over
    assert cache.stats().groups[0].held == 4  # the figures are those before the end of this call
    assert cache.stats().groups[0].held == 0
    prove_within(cache)


def test_what_is_no_quota() -> None:
    for quota in (-1, 1.5, "many", True, {"a": "x"}, {"a": -3}):
        with pytest.raises(BadInput):
            Retention(quota=quota)  # type: ignore[arg-type]
    with raises(BadInput, needed=3):
        Retention(quota={3: 5})  # type: ignore[dict-item]
    assert "secret" not in repr(Retention(quota={"secret": 5}))
    assert Retention(quota="2KiB").quota == 2048 and Retention(quota={"a": "2KiB"}).quota == {"a": 2048}


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_tree_evicts_in_some_namespaces_and_then_in_its_order(policy: str) -> None:
    random, next_id = np.random.default_rng(0), 1
    for _ in range(10):
        tree, leases, owner = PrefixTree(2, policy=policy, capacity=200), list[Any](), dict[int, bytes]()
        next_id = 1
        for _ in range(40):
            name = bytes([int(random.integers(3))])
            text = random.integers(0, 3, 2 * int(random.integers(1, 8))).astype(np.int32)
            match = tree.match(text, name)
            new = len(text) // 2 - match.num_blocks
            ids = np.arange(next_id, next_id + new, dtype=np.int32)[None]
            next_id += new
            tree.touch(match)
            lease = tree.insert(match, text[match.num_blocks * 2 :], ids, pin=True).lease
            owner.update(dict.fromkeys(ids[0].tolist(), name))
            leases.append(lease)
            while len(leases) > 3:
                tree.unpin(leases.pop(int(random.integers(len(leases)))))
            if random.random() < 0.2:
                names = [bytes([one]) for one in range(3) if random.random() < 0.5]
                evicted = tree.evict_in(names, int(random.integers(1, 6)))
                assert {owner[one] for one in evicted.ids[0].tolist()} <= {*names}
                for one in evicted.ids[0].tolist():
                    del owner[one]
            if random.random() < 0.2:
                for one in tree.evict(int(random.integers(1, 4))).ids[0].tolist():
                    del owner[one]
            tree.check()
        for lease in leases:
            tree.unpin(lease)
        gone = tree.evict_in([bytes([one]) for one in range(3)], 10_000)
        assert sorted(gone.ids[0].tolist()) == sorted(owner) and not tree.num_cached and not tree.namespaces()
        assert tree.evict(5).ids.shape == (1, 0)
        tree.check()


def test_what_a_hint_let_go_at_the_end_of_a_call_is_evicted_in_that_call() -> None:
    cache = cache_of()
    row = row_nbytes(cache)
    cache = cache_of("full", 4 * row)

    def hint(kind: str, **payload: Any) -> dict[str, Any]:
        action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
        return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}

    text = [*range(48)]
    sequence = cache.open(text, hints=hint("kv.session", session_id="s", event="begin"))
    sequence.commit(text)
    (kept,) = cache.apply(hint("kv.pin", session_id="s", token_ids=text))
    assert kept.tokens == 48 and cached_nbytes(cache.core).total() == 6 * row, "it is in use"
    sequence.close()  # ends the promises of its session before: an observer does so when the call is over
    prove_within(cache)
    assert cached_nbytes(cache.core).total() == 4 * row


def test_closing_the_cache_ends_what_runs_over_its_quota() -> None:
    cache = cache_of(quota=0, block_size=4, tiers=[host_tier("64KiB", write="evict")])
    sequence = cache.open(text_of(1), "a")
    sequence.commit(text_of(1))
    cache.close()
    assert not sequence.is_open and cache.stats().groups[0].held == 0
