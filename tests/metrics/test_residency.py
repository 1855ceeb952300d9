"""Lives of cached blocks: of every block with ``every=1``, of a sample else; nothing without a collector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpagoda import BadInput, KVCache, Schema
from kvpagoda.metrics import residency
from kvpagoda.metrics.residency import Residency
from kvpagoda.schema import Attention, Growth, Layer
from raises import raises

FULL = Attention(1, 1, 1, "float16")
WINDOW = Attention(1, 1, 1, "float16", Growth(window=8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(residency, "monotonic", lambda: now[0])
    yield now


def cache_of(*kinds: Attention, blocks: int = 9, every: int = 1) -> KVCache:
    schema = Schema(tuple(Layer(i, "full", (kind,)) for i, kind in enumerate(kinds)))
    cache = KVCache(schema, num_blocks=blocks, block_size=4, max_requests=2, device="none")
    following = Residency(every)
    cache.core.observers.add(following)
    cache.core.residency = following.stats
    return cache


def serve(cache: KVCache, text: list[int]) -> int:
    with cache.open(text) as sequence:
        sequence.commit(text[sequence.length :])
        return sequence.cached_tokens


def figures(cache: KVCache) -> list[tuple[int, float]]:
    found = cache.stats().residency
    assert found is not None
    return [(one.count, one.total) for one in found]


def test_lifetime_idle_and_gaps(clock: list[float]) -> None:
    cache = cache_of(FULL)
    text = [1] * 16
    clock[0] = 10.0
    serve(cache, text)  # publishes 4 blocks
    cache.lookup(text)
    clock[0] = 13.0
    assert serve(cache, [*text, 2]) == 16  # uses the 4 blocks
    assert figures(cache) == [(0, 0), (0, 0), (4, 12.0)]
    clock[0] = 15.0
    assert serve(cache, [*text[:8], 3, 3]) == 8  # uses two of them
    clock[0] = 20.0
    serve(cache, [7] * 36)  # needs all 9 blocks
    cache.lookup([0])
    lifetime, idle, gaps = figures(cache)
    assert gaps == (6, 12.0 + 2 * 2.0)
    # and a partial block of the second request, another of the third
    assert lifetime == (6, 4 * 10.0 + 7.0 + 5.0) and idle == (6, 2 * 7.0 + 2 * 5.0 + 7.0 + 5.0)


@pytest.mark.parametrize("kinds", [(FULL,), (WINDOW,), (FULL, WINDOW)], ids=["full", "window", "both"])
def test_every_eviction_is_counted_once_over_random_traffic(kinds: tuple[Attention, ...]) -> None:
    cache, random = cache_of(*kinds, blocks=24), np.random.default_rng(0)
    for number in range(300):
        text = [int(random.integers(0, 4))] * int(random.integers(1, 20)) + random.integers(0, 3, 8).tolist()
        serve(cache, text)
        if number == 150:
            cache.invalidate()
    cache.check()
    stats = cache.stats()
    assert stats.residency is not None and stats.evicted_blocks > 100
    lifetime, idle, _ = stats.residency
    assert lifetime.count == idle.count
    if len(kinds) == 1:
        assert lifetime.count == stats.evicted_blocks
    else:  # blocks of a window leave with the blocks of the text before them too
        assert lifetime.count >= stats.evicted_blocks
    assert stats.residency.reuse_gap.count > 50


def test_a_sample_is_about_its_share() -> None:
    one, eighth = (cache_of(FULL, blocks=200, every=every) for every in (1, 7))
    for cache in (one, eighth):
        for first in range(400):
            serve(cache, [first] * 40)
    counts = [figures(cache)[0][0] for cache in (one, eighth)]
    assert counts[0] > 3000 and 0.1 < counts[1] / counts[0] < 0.15


def test_a_lack_of_memory_loses_a_figure_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(FULL)

    class Short:
        def __rand__(self, names: object) -> object:
            raise MemoryError

    monkeypatch.setattr(cache.core.observers.find(Residency), "_mask", Short())
    for first in range(6):
        serve(cache, [first] * 20)
    assert serve(cache, [5] * 20) == 19 and figures(cache) == [(0, 0)] * 3
    cache.check()


def test_nothing_is_followed_without_a_collector() -> None:
    cache = KVCache(Schema((Layer(0, "full", (FULL,)),)), num_blocks=9, block_size=4, device="none")
    serve(cache, [1] * 20)
    assert cache.stats().residency is None and cache.core.residency is None
    with raises(BadInput, field="every how many blocks one is followed", needed=0, available=1):
        Residency(0)
