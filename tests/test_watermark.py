"""``Limits(watermark=)``: the share of the memory that requests leave to cached texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache, Limits
from kvpagoda.core.scheduling import Job, RunQueue, Youngest
from kvpagoda.errors import BadInput, RetryLater
from kvpagoda.replay import serve, synthetic
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema
from kvpagoda.tiers import host_tier
from raises import raises

FULL = Attention(2, 4, 4, "float32")
WINDOW = Attention(1, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("recurrent", (2, 4, 4), "float32"),))
KINDS: dict[str, tuple[LayerKind, ...]] = {"full": (FULL,), "windows": (FULL, WINDOW), "all": (FULL, WINDOW, STATE)}


def schema_of(kinds: tuple[LayerKind, ...]) -> Schema:
    return Schema(tuple(Layer(i, "layer", (kind,)) for i, kind in enumerate(kinds)))


def cache_of(watermark: float, *kinds: LayerKind, budget: int | None = None, **options: Any) -> KVCache:
    options = {"max_requests": 8, "block_size": 4, "device": "none", **options}
    options |= {"num_blocks": 20} if budget is None else {}
    limits = Limits(64, 16, watermark=watermark)
    return KVCache(schema_of(kinds or (FULL,)), budget, limits=limits, **options)


def used(cache: KVCache, begin: int, length: int) -> None:
    """Compute a text and end it: what it had is cached then."""
    with cache.open(range(begin, begin + length), reserve=length) as sequence:
        sequence.commit(range(begin, begin + length))


def test_a_request_beside_others_leaves_the_share() -> None:
    cache = cache_of(0.3)
    first = cache.open(range(4), reserve=40)  # 10 of 20 blocks
    second = cache.open(range(100, 104), reserve=16)  # 14: 6 are left
    with raises(RetryLater, needed=[1], available=[6]):
        cache.open(range(200, 204), reserve=4)
    assert cache.stats().running == 2
    second.close()
    with raises(RetryLater, needed=[5], available=[10]):
        cache.open(range(200, 204), reserve=20)
    cache.open(range(200, 204), reserve=16).close()
    first.close()
    cache.check()


def test_alone_it_takes_all_and_running_ones_grow_into_the_share() -> None:
    cache = cache_of(0.5)
    cache.open(range(4), reserve=64).close()  # 16 of 20 blocks
    first, second = cache.open(range(4), reserve=4), cache.open(range(100, 104), reserve=4)
    first.commit(range(4))
    first.extend(60)
    with raises(RetryLater, needed=[1], available=[3]):
        cache.open(range(200, 204), reserve=4)
    second.close()
    first.close()


def test_what_nothing_uses_counts_as_left_and_what_is_shared_does_not_count_twice() -> None:
    cache = cache_of(0.3)
    used(cache, 0, 40)
    other = cache.open(range(100, 104), reserve=4)  # 19 are free or could be
    shared = cache.open(range(44), reserve=52)  # 10 of the cached ones, and 3
    assert shared.cached_tokens == 40
    with raises(RetryLater, needed=[1], available=[6]):
        cache.open(range(44), reserve=44)  # the same 10, and 1: 5 would be left
    other.close()
    cache.open(range(44), reserve=44).close()
    shared.close()
    cache.check()


def test_pins_stay_where_the_share_alone_is_lacking() -> None:
    cache = cache_of(0.5)
    used(cache, 0, 12)
    pin = cache.pin(range(12))
    first = cache.open(range(100, 104), reserve=24)
    with raises(RetryLater, needed=[2], available=[11]):
        cache.open(range(200, 204), reserve=8)
    assert cache.lookup(range(16)).cached == 12
    cache.unpin(pin)
    first.close()


def test_what_was_dropped_is_closed_before_a_request_has_to_wait() -> None:
    cache = cache_of(0.5)
    cache.open(range(4), reserve=40)
    assert cache.stats().running == 1
    cache.open(range(100, 104), reserve=40).close()
    assert cache.stats().dropped == 1


def test_tiers_are_not_read_for_a_request_that_has_to_wait() -> None:
    tier = host_tier("1MiB")
    cache = cache_of(0.5, tiers=[tier], device="cpu")
    used(cache, 0, 40)
    for begin in (100, 200, 300):
        used(cache, begin, 40)
    first = cache.open(range(500, 504), reserve=24)
    before = reads(cache)
    for _ in range(3):
        with pytest.raises(RetryLater):
            cache.open(range(44), reserve=44)
    assert reads(cache) == before
    first.close()
    with cache.open(range(44), reserve=44) as sequence:
        assert sequence.cached_tokens == 40
    cache.close()


def reads(cache: KVCache) -> dict[str, dict[str, int]]:
    """Return the outcomes of calls that ask a tier for records."""
    return {calls.call: calls.outcomes for calls in cache.stats().tiers[0].calls if calls.call in ("lookup", "load")}


@pytest.mark.parametrize("budget", [None, 40_000])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("watermark", [0.2, 0.6])
def test_random_requests_leave_the_share_and_all_of_them_run(kinds: str, watermark: float, budget: int | None) -> None:
    cache = cache_of(watermark, *KINDS[kinds], budget=budget)
    random, running, waited, total = np.random.default_rng(7), list[Any](), 0, 0
    while total < 60:
        text = np.concatenate([np.full(random.integers(0, 5) * 4, random.integers(0, 4)), random.integers(9, 99, 5)])
        try:
            sequence = cache.open(text, reserve=int(random.integers(len(text), 64)))
        except RetryLater:
            waited += 1
            assert running, "a request alone has to start"
            running.pop(0).close()
            continue
        total += 1
        running.append(sequence)
        nothing = [0] * len(cache.core.groups)
        assert len(running) == 1 or cache.core.capacity.keeps_watermark(nothing)
        sequence.commit(text[sequence.length :])
        cache.check()
    assert waited


@pytest.mark.parametrize("policy", [None, Youngest()])
@pytest.mark.parametrize("watermark", [0.0, 0.4, 0.9])
def test_a_queue_serves_all_with_fewer_at_once(watermark: float, policy: Any) -> None:
    cache = cache_of(watermark, max_requests=6)
    queue: RunQueue[Job] = RunQueue(cache, policy)
    jobs = [Job(np.arange(i * 50, i * 50 + 9, dtype=np.int32), 20) for i in range(7)]
    queue.enter(*jobs[:1])
    for job in jobs[1:]:
        queue.enter(job)
    most, ended = 0, list[Job]()
    while len(ended) < len(jobs):
        queue.admit()
        most = max(most, len(queue.running))
        for job in [*queue.running]:
            if job not in queue.running or not queue.make_room(job, len(job.text) - job.sequence.length):  # type: ignore[union-attr]
                continue
            job.sequence.commit(job.text[job.sequence.length :])  # type: ignore[union-attr]
            if len(job.text) == job.total:
                queue.remove(job)
                ended.append(job)
            else:
                job.extend([7])
    assert [job.number for job in ended] == sorted(job.number for job in ended)
    assert (
        most
        == {(0.0, True): 4, (0.4, True): 2, (0.9, True): 1, (0.0, False): 5, (0.4, False): 3, (0.9, False): 1}[
            watermark, policy is None
        ]
    )


def test_a_trace_is_served_with_fewer_at_once_and_more_is_found() -> None:
    steps = {"tokens_per_id": 64, "batch_tokens": 512}
    plain, spared = (
        serve(synthetic(12), schema_of(KINDS["all"]), "4MiB", watermark=share, **steps) for share in (0.0, 0.5)
    )
    assert spared.mean_running < plain.mean_running and spared.hit_rate > plain.hit_rate
    assert plain.never_fit == spared.never_fit == 0 and spared.prompt_tokens == plain.prompt_tokens


@pytest.mark.parametrize("share", [1, 1.5])
def test_a_share_below_one(share: float) -> None:
    with raises(BadInput, needed=share, available=1, field="watermark"):
        Limits(watermark=share)
    with raises(BadInput, needed=-0.1, available=0, field="watermark"):
        Limits(watermark=-0.1)
