"""Tiers below the caches of a simulation, also of models with windows and states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_worker import FULL, SCHEMAS, STATE, WINDOW, OneByOne, requests

from kvpagoda import KVCache, Schema, simulate
from kvpagoda.core.cache.options import Identity, Limits, Retention
from kvpagoda.errors import BadInput
from kvpagoda.replay import Trace
from kvpagoda.replay.batching import cache_for
from kvpagoda.replay.fleet.costs import Costs, TierCosts, record_nbytes
from kvpagoda.replay.fleet.simulation import Simulation
from kvpagoda.replay.setup import Fleet, Setup
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows
from kvpagoda.tiers.slots import host_driver
from kvpagoda.tiers.spec import TierSpec
from raises import raises

BIG = Layer(1, "state", (Recurrent((Rows("r", (40, 35), "float32"),)),))  # 5,600 bytes: 11 blocks of full attention
WIDE = Layer(
    1, "window", (Attention(1, 20, 20, "float16", Growth(window=40)),)
)  # a block of it takes 2.5 of the others
MODELS = {**SCHEMAS, "big states": Schema((FULL, BIG), "big"), "wide windows": Schema((FULL, WIDE), "wide")}
MODELS |= {
    "windows alone": Schema((replace(WINDOW, index=0),), "alone"),
    "both": Schema((FULL, WIDE, replace(STATE, index=2)), "both"),
}
BUDGETS = {"full": "14KiB", "window": "32KiB", "states": "48KiB", "big states": "160KiB", "wide windows": "80KiB"}
BUDGETS |= {"windows alone": "16KiB", "both": "140KiB"}
FREE = Costs(tiers={"host": TierCosts()})


def apart(trace: Trace) -> Trace:
    return replace(trace, arrivals=np.arange(len(trace)) * 10.0)


@pytest.mark.parametrize("records", [150, 4000])
@pytest.mark.parametrize("name", MODELS)
def test_hits_are_those_of_a_cache_with_memory(name: str, records: int) -> None:
    """The same requests with rows in memory, and a tier of as many records that keeps all their bytes."""
    pytest.importorskip("torch")
    trace, schema, budget = apart(requests(5, 120)), MODELS[name], BUDGETS[name]
    size = record_nbytes(cache_for(trace, schema, budget, 64, max_requests=2, block_size=16).plan)
    settings: dict[str, Any] = {"tokens_per_id": 16, "step_tokens": 64, "max_requests": 2, "block_size": 16}
    found = simulate(trace, schema, budget, costs=FREE, tiers={"host": records * size}, **settings)

    def driver(buffer: Any) -> Any:
        return host_driver(buffer, records * buffer.record_nbytes)

    longest = int((trace.input_lengths + trace.output_lengths).max())
    cache = KVCache(
        schema, budget, max_requests=2, block_size=16, device="cpu", retention=Retention(checkpoint_every=0),
        identity=Identity(weights="none"), limits=Limits(longest, 64),
        tiers=[TierSpec("host", driver, "evict", timeout=60.0, workers=1)],
    )  # fmt: skip
    cache.core.tiers.took(1.0)
    plain = OneByOne(trace, cache, 64)
    assert {number: int(found.each.cached[number]) for number in plain.cached} == plain.cached
    assert found.loaded_tokens == cache.stats().loaded_tokens and cache.stats().tiers[0].dropped == 0
    without = simulate(trace, schema, budget, costs=FREE, **settings)
    if records == 4000:  # a small tier has little but texts that were never found
        assert found.loaded_tokens > 100 and found.cached_tokens > 1.05 * without.cached_tokens
    cache.close()


@pytest.mark.parametrize(
    ("name", "budget", "length", "extra"),
    [
        ("full", "96KiB", 2900, 0), ("window", "96KiB", 2300, 3), ("states", "96KiB", 2900, 1),
        ("big states", "192KiB", 5100, 11), ("wide windows", "192KiB", 4000, 9), ("both", "192KiB", 4000, 10),
    ],
)  # fmt: skip
def test_blocks_and_checkpoints_are_loaded_in_the_time_of_their_bytes(
    name: str, budget: str, length: int, extra: int
) -> None:
    """A long prompt evicts one of 640 tokens, which comes back: with its blocks ``extra`` records of a checkpoint, three
    blocks of a window or the pieces of a state. Together with the latency that is all the time it takes."""
    texts = (640, 0), (length, 1), (640, 0)
    records = [
        {"timestamp": 1000 * i, "input_length": tokens, "output_length": 1, "hash_ids": [text]}
        for i, (tokens, text) in enumerate(texts)
    ]
    costs = Costs(tiers={"host": TierCosts(0.25, 1e-5)})
    setup = Setup(MODELS[name], budget, 6400, max_requests=1, step_tokens=640, block_size=16)
    made = Simulation(Trace.read(records, block_size=6400), setup, Fleet(costs, tiers={"host": "10MiB"}))
    made.run()
    cache, found = made.workers[0].batching.cache, made.result()  # type: ignore[attr-defined]
    blocks, size = cache.core.tiers.levels[0].loaded_blocks, record_nbytes(cache.plan)
    made.close()
    assert found.each.loaded.tolist() == [0, 0, 624 if extra else 480] and 25 <= blocks <= 39 and size == 512
    assert found.first_token["max"] == pytest.approx(0.25 + (blocks + extra) * size * 1e-5)


def test_a_tier_too_small_for_a_block_is_refused() -> None:
    with raises(BadInput, needed=512, available=100):
        simulate(requests(1), MODELS["states"], "48KiB", costs=FREE, tiers={"host": 100}, tokens_per_id=16)
