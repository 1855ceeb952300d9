"""Several workers: where requests go, what is counted, what is refused."""

from __future__ import annotations

import doctest
import importlib
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from followed import watch
from test_worker import SCHEMAS, requests

import kvpagoda
from kvpagoda import Schema
from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.replay import Trace, synthetic
from kvpagoda.replay.fleet.costs import Costs, TierCosts
from kvpagoda.replay.fleet.routing import RULES, PrefixAware
from kvpagoda.replay.fleet.simulation import Simulation, simulate
from kvpagoda.replay.setup import Fleet, Setup
from kvpagoda.replay.texts import text_of
from kvpagoda.schema import Attention, Layer
from raises import raises

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
FULL = Schema((Layer(0, "full", (Attention(1, 8, 8, "float16"),)),), "full")  # 32 bytes a token
COSTS = Costs(step=0.001, prefill_token=1e-5, decode_token=1e-5, read_byte=1e-10)


def run(routing: str, workers: int, budget: str = "3MiB", trace: Trace | None = None, **settings: Any) -> Any:
    given = synthetic(300) if trace is None else trace
    return simulate(given, FULL, budget, costs=COSTS, workers=workers, routing=routing, tokens_per_id=64, **settings)


def test_the_examples_of_the_module() -> None:
    assert doctest.testmod(importlib.import_module("kvpagoda.replay.fleet.simulation")).failed == 0
    assert kvpagoda.simulate is simulate


def test_round_robin_takes_turns() -> None:
    result = run("round-robin", 7)
    assert np.array_equal(result.each.worker, np.arange(300) % 7)
    assert [one.requests for one in result.workers] == [43] * 6 + [42]


def test_random_depends_on_the_seed_alone() -> None:
    once, again, other = (run("random", 4, seed=seed).each.worker for seed in (1, 1, 2))
    assert np.array_equal(once, again) and not np.array_equal(once, other)
    assert min(Counter(once.tolist()).values()) > 300 / 4 * 0.6


def test_prefix_aware_goes_where_the_least_is_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every arrival the rule is applied to what the caches themselves would answer."""
    trace, choose, checked = synthetic(150), PrefixAware.choose, list[bool]()

    def compared(rule: Any, number: int) -> tuple[int, int]:
        text, num_prompt = text_of(trace, number, 64)
        ranks = []
        for worker, sent in zip(rule._workers, rule._sent):
            found = worker.batching.cache.lookup(text[:num_prompt]).resumable
            ranks.append((worker.backlog + num_prompt - found, worker.num_requests, sent, worker.index, found))
        chosen: tuple[int, int] = choose(rule, number)
        assert chosen == (min(ranks)[3], num_prompt - min(ranks)[4])
        checked.append(min(ranks)[4] > 0)
        return chosen

    monkeypatch.setattr(PrefixAware, "choose", compared)
    result = run("prefix-aware", 3, "1MiB", trace)
    assert len(checked) == 150 and sum(checked) > 50
    assert min(one.requests for one in result.workers) > 20 and sum(one.evicted_blocks for one in result.workers) > 1000


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_router_that_follows_events_chooses_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every arrival a ``Follower`` of each worker knows what the caches have; and making events changes nothing."""
    pytest.importorskip("msgspec")
    trace, settings = requests(6, 200), {"costs": COSTS, "tokens_per_id": 16, "step_tokens": 64, "max_requests": 6}
    budget = {"full": "14KiB", "window": "32KiB", "states": "48KiB"}[name]

    def result() -> Any:
        return simulate(trace, SCHEMAS[name], budget, workers=4, routing="prefix-aware", block_size=16, **settings)

    plain, told = result(), list[bool]()

    def same(own: list[int], followed: list[int]) -> None:
        assert own == followed
        told.append(max(own) > min(own))

    watch(monkeypatch, same)
    assert result().to_dict() == plain.to_dict() and len(told) == 200 and sum(told) > 50
    assert all(one.evicted_blocks > 20 for one in plain.workers)


def test_prefix_aware_finds_more_than_the_others() -> None:
    aware, other, turns = (run(rule, 4, trace=synthetic(200)) for rule in ("prefix-aware", "random", "round-robin"))
    assert aware.hit_rate > 1.2 * max(other.hit_rate, turns.hit_rate) > 0.1
    assert aware.first_token["mean"] < other.first_token["mean"]


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs the public traces in ../shared/traces")
def test_prefix_aware_finds_more_on_the_conversation_trace() -> None:
    trace = Trace.read(TRACES / "mooncake_conversation.jsonl.gz", limit=600)
    schema = Schema.from_hf_config(kvpagoda.schema.presets.presets()["llama-3.1-8b"]["config"])
    settings: dict[str, Any] = {"costs": "h100:llama-3.1-8b", "workers": 4, "block_size": 512}
    aware, other = (simulate(trace, schema, "100GiB", routing=rule, **settings) for rule in ("prefix-aware", "random"))
    assert aware.finished == other.finished == 600
    assert aware.hit_rate > 1.1 * other.hit_rate and aware.first_token["p50"] < other.first_token["p50"]


@pytest.mark.parametrize("routing", RULES)
def test_what_is_counted_adds_up(routing: str) -> None:
    count = list[int]()
    result = run(routing, 5, trace=synthetic(120), on_request=count.append)
    each = result.each
    assert count[-1] == 120 and count == sorted(count)
    assert result.finished == 120 == sum(one.requests for one in result.workers) and not result.never_fit
    for name in ("prompt_tokens", "cached_tokens"):
        assert getattr(result, name) == sum(getattr(one, name) for one in result.workers)
    assert result.hit_rate == each.cached.sum() / each.prompt.sum()
    assert result.seconds == (each.last.max() - each.arrived.min()) / 1e12
    assert result.first_token["mean"] == pytest.approx((each.first - each.arrived).mean() / 1e12)
    assert all(0 < one.busy <= 1 and one.steps > 0 for one in result.workers)


def test_an_interrupted_simulation_tells_what_is_done() -> None:
    made = Simulation(synthetic(100), Setup(FULL, "3MiB", 64), Fleet(COSTS, workers=2))

    def stop(count: int) -> None:
        if count >= 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(stop)
    part = made.result()
    assert 40 <= part.finished < 100 and part.requests == 100 and part.hit_rate > 0 and part.first_token["p50"] > 0


def test_what_cannot_be_simulated_is_refused() -> None:
    with raises(BadInput, needed="prefixaware", available=("round-robin", "random", "prefix-aware")):
        run("prefixaware", 2)
    with raises(BadInput, needed=64, available=32):
        run("random", 2, step_tokens=32)
    with raises(BadInput, field="workers", needed=0, available=1):
        run("random", 0)
    with raises(BadInput, needed="full", available=ANY):
        simulate(synthetic(3), FULL, "1MiB")
    with pytest.raises(NeverFits):
        run("random", 1, "100B")
    large = [{"timestamp": 0, "input_length": 10**6, "output_length": 1, "hash_ids": [1]}] * 2
    result = run("round-robin", 2, "64KiB", Trace.read(large))
    assert (result.never_fit, result.finished, result.hit_rate) == (2, 0, 0.0)
    assert result.first_token["mean"] is None and result.seconds == 0


def test_what_a_tier_has_is_loaded_in_its_time() -> None:
    """A prompt that the cache evicted comes back from a tier: its bytes and the latency are all the time it takes."""
    before = {*threading.enumerate()}
    records = [{"timestamp": 1000 * i, "input_length": 640, "output_length": 1, "hash_ids": [i % 3]} for i in range(6)]
    trace, tiers = Trace.read(records, block_size=640), {"host": TierCosts(0.25, 1e-5)}
    settings: dict[str, Any] = {"tokens_per_id": 640, "block_size": 64, "max_requests": 2}
    result = simulate(trace, FULL, "45KiB", costs=Costs(tiers=tiers), tiers={"host": "1MiB"}, **settings)
    again = simulate(trace, FULL, "45KiB", costs=Costs(tiers=tiers), tiers={"host": "1MiB"}, **settings)
    loaded = result.each.loaded.tolist()
    assert result.each.cached.tolist() == [0, 0, 0, 576, 576, 576] and loaded[:3] == [0, 0, 0] and min(loaded[3:]) > 300
    waits = [0.25 + tokens * 32 * 1e-5 if tokens else 0 for tokens in loaded]
    assert ((result.each.first - result.each.arrived) / 1e12).tolist() == pytest.approx(waits)
    assert result.loaded_tokens == sum(loaded) and result.to_dict() == again.to_dict()
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
        assert not thread.is_alive()
    small = simulate(trace, FULL, "45KiB", costs=Costs(tiers=tiers), tiers={"host": "4KiB"}, **settings)
    assert small.loaded_tokens < result.loaded_tokens  # two blocks of 2 KiB alone
    with raises(BadInput, needed="disk", available=("host",)):
        simulate(trace, FULL, "45KiB", costs=Costs(tiers=tiers), tiers={"disk": "1MiB"}, **settings)
