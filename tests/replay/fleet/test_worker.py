"""A worker of a simulation against one that computes step after step, token after token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache, Schema
from kvpagoda.errors import RetryLater
from kvpagoda.replay import Trace, serve
from kvpagoda.replay.batching import AdmittedRequest, Batching, cache_for
from kvpagoda.replay.fleet.costs import Costs, Ticks
from kvpagoda.replay.fleet.simulation import simulate
from kvpagoda.schema import Attention, Growth, Layer, Recurrent, Rows

FULL = Layer(0, "full", (Attention(1, 8, 8, "float16"),))
WINDOW = Layer(1, "window", (Attention(1, 8, 8, "float16", Growth(window=40)),))
STATE = Layer(1, "state", (Recurrent((Rows("r", (4, 8), "float32"),)),))
SCHEMAS = {
    "full": Schema((FULL,), "full"),
    "window": Schema((FULL, WINDOW), "window"),
    "states": Schema((FULL, STATE), "states"),
}
COSTS = Costs(step=0.003, prefill_token=0.0001, decode_token=0.0002, read_byte=1e-7)


def requests(seed: int, count: int = 60) -> Trace:
    """Random requests that share prefixes of up to six blocks of 16 tokens, and arrive in bursts."""
    rng = np.random.default_rng(seed)
    records, now = [], 0.0
    for number in range(count):
        now += rng.exponential(0.08) if rng.random() < 0.6 else 0.0
        shared = [int(rng.integers(4)) * 100 + depth for depth in range(int(rng.integers(7)))]
        ids = [*shared, *range(1000 + 20 * number, 1000 + 20 * number + int(rng.integers(1, 6)))]
        length = 16 * len(ids) - int(rng.integers(0, 16))
        records.append(
            {
                "timestamp": now * 1000,
                "input_length": length,
                "output_length": int(rng.integers(0, 90)),
                "hash_ids": ids,
            }
        )
    return Trace.read(records, block_size=16)


class OneByOne:
    """What one worker does, in the plain way: every step by itself, a call of the cache for every token of an output.
    ``times``: request -> [admission, first token, end] in picoseconds; ``cached``: request -> tokens."""

    def __init__(self, trace: Trace, cache: KVCache, step_tokens: int) -> None:
        self.cache = cache
        self.batching, self.step_tokens = Batching(self.cache, trace, 16), step_tokens
        self.ticks = Ticks(COSTS, self.cache.plan)
        self.times: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.prefilling: list[AdmittedRequest] = []
        self.decoding: list[AdmittedRequest] = []
        self.is_blocked = False
        coming = [(round(at * 1e12), number) for number, at in enumerate(trace.arrivals.tolist())]
        now = 0
        while coming or self.prefilling or self.decoding or self.batching.waiting:
            while coming and coming[0][0] <= now:
                self.batching.waiting.append(coming.pop(0)[1])
            has_work = bool(self.prefilling or self.decoding or self.batching.waiting)
            now = self.step(now) if has_work else coming[0][0]

    def step(self, now: int) -> int:
        """Compute one step that begins ``now``; return when it ends."""
        decoding, context = [*self.decoding], sum(one.sequence.length for one in self.decoding)
        budget, pieces = self.step_tokens - len(decoding), list[tuple[AdmittedRequest, int]]()
        for request in decoding:
            request.extend(request.sequence.length + 1)
        for request in self.prefilling:
            budget -= self.piece(request, budget, pieces)
        most = self.cache.plan.max_requests
        while self.batching.waiting and not self.is_blocked:
            if len(decoding) + len(self.prefilling) == most or self.batching.next_waits(pieces) or budget <= 0:
                break
            self.cache.flush(60.0)
            try:
                number, request = self.batching.open_next()
            except RetryLater:
                self.is_blocked = True
                break
            if request is not None:
                self.times[number], self.cached[number] = [now], request.sequence.cached_tokens
                self.prefilling.append(request)
                budget -= self.piece(request, budget, pieces)
        computed = sum(end - one.sequence.length for one, end in pieces)
        if not computed and not decoding:
            return now
        now += self.ticks.of(1, computed, len(decoding), context)
        for request in decoding:
            request.commit(request.sequence.length + 1)
        ended = [one for one in decoding if one.sequence.length >= len(one.text) - 1]
        for request, end in pieces:
            request.commit(end)
            if end == request.num_prompt:
                self.times[request.number].append(now)
                self.prefilling.remove(request)
                (ended if len(request.text) - end <= 1 else self.decoding).append(request)
        for request in ended:
            if request.sequence.length < len(request.text):
                request.extend(len(request.text))
                request.commit(len(request.text))
        for request in ended:
            request.sequence.close()
            self.times[request.number].append(now)
        self.decoding = [one for one in self.decoding if one not in ended]
        self.is_blocked = self.is_blocked and not ended
        return now

    def piece(self, request: AdmittedRequest, budget: int, pieces: list[tuple[AdmittedRequest, int]]) -> int:
        if budget <= 0:
            return 0
        length = request.sequence.length
        end = request.extend(self.batching.piece(request, budget))
        pieces.append((request, end))
        return end - length


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_times_and_hits_are_those_of_single_steps(name: str, policy: str, seed: int) -> None:
    trace, budget = requests(seed), {"full": "14KiB", "window": "32KiB", "states": "48KiB"}[name]
    settings: dict[str, Any] = {"max_requests": 6, "policy": policy, "block_size": 16}
    plain = OneByOne(trace, cache_for(trace, SCHEMAS[name], budget, step_tokens=64, **settings), 64)
    fast = simulate(trace, SCHEMAS[name], budget, costs=COSTS, tokens_per_id=16, step_tokens=64, **settings)
    each = fast.each
    assert fast.finished + fast.never_fit == len(trace) and fast.finished > 50
    assert {
        number: [int(c[number]) for c in (each.admitted, each.first, each.last)] for number in plain.times
    } == plain.times
    assert {number: int(each.cached[number]) for number in plain.cached} == plain.cached
    assert fast.workers[0].evicted_blocks > 50 and fast.waited["max"] > 0.1  # under pressure
    assert fast.workers[0].evicted_blocks == sum(plain.cache.core.prefix.num_evicted)


def test_every_request_ends_once_and_in_order() -> None:
    each = simulate(requests(9), SCHEMAS["full"], "14KiB", costs=COSTS, tokens_per_id=16, max_requests=5).each
    served = each.last >= 0
    assert served.sum() > 50
    for earlier, later in zip((each.arrived, each.admitted, each.first), (each.admitted, each.first, each.last)):
        assert (earlier[served] <= later[served]).all()
    outputs = requests(9).output_lengths
    assert (each.last[served] == each.first[served])[outputs[served] <= 1].all()
    assert (each.last[served] > each.first[served])[outputs[served] > 1].all()


@pytest.mark.parametrize("name", SCHEMAS)
def test_turns_that_arrive_closely_find_one_another(name: str) -> None:
    """Six turns of one conversation, each 64 tokens longer than the one before, arrive within a step: each waits until the
    one before has computed its prompt, and finds that. Another text waits behind them, and no longer."""
    chains = [[*range(1, 5 + 4 * turn)] for turn in range(6)] + [[*range(90, 98)]]
    records = [
        {"timestamp": number * 1e-3, "input_length": 16 * len(chain) + 1, "output_length": 20, "hash_ids": chain}
        for number, chain in enumerate(chains)
    ]
    settings: dict[str, Any] = {"costs": COSTS, "tokens_per_id": 16, "step_tokens": 512, "block_size": 16}
    found = simulate(records, SCHEMAS[name], "1MiB", **settings)
    assert found.each.cached.tolist() == [0, *(64 * turn for turn in range(1, 6)), 0]
    steps = 6 if name != "states" else 12  # with states each turn also has a step of its last token
    assert found.each.admitted[-1] < (steps + 1) * (0.003 + 0.0001 * 65) * 1e12


@pytest.mark.parametrize("budget", ["14KiB", "40KiB", "1MiB"])
def test_without_costs_one_worker_hits_what_serve_hits(budget: str) -> None:
    trace = requests(3, 120)
    apart = replace(trace, arrivals=np.arange(len(trace)) / 10)  # each request ends before the next one arrives
    fast = simulate(apart, SCHEMAS["full"], budget, costs="none", tokens_per_id=16, step_tokens=64)
    served = serve(apart, SCHEMAS["full"], budget, tokens_per_id=16, step_tokens=64, max_requests=1)
    assert np.array_equal(np.stack((fast.each.prompt, fast.each.matched, fast.each.cached), 1), served.each)
    assert fast.never_fit == served.never_fit and fast.hit_rate == served.hit_rate > 0.1
    assert fast.first_token["max"] == fast.last_token["max"] == 0
    assert fast.workers[0].evicted_blocks == served.evicted_blocks
