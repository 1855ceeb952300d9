"""Observers are told what happened, in order, after it is done, as arrays; they cost nothing where they do not listen."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.abc import BlockIds, CacheObserver, RequestView
from kvpagoda.schema import Attention
from test_manager import SCHEMAS, SHARING, traffic

FULL = Attention(1, 1, 1, "float16")


class Mirror(CacheObserver):
    """Knows which blocks are cached, which have an owner, and who runs, from what it is told alone."""

    def __init__(self) -> None:
        self.cached: set[tuple[str, int]] = set()
        self.running: Counter[RequestView] = Counter()
        self.told = Counter[str]()
        self.texts: dict[tuple[str, int], bytes] = {}  # full block -> its tokens
        self.size = 0

    def on_start(self, request: RequestView) -> None:
        self.told["start"] += 1
        self.running[request] = 1

    def on_hit(self, request: RequestView, blocks: tuple[BlockIds, ...]) -> None:
        self.told["hit"] += 1
        assert self.running[request] and blocks and all(len(one.ids) for one in blocks)
        assert pairs(blocks) <= self.cached

    def on_cached(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> None:
        self.told["cached"] += 1
        assert len({one.group for one in blocks}) == len(blocks), "one array a group"
        assert all(one.first >= 0 for one in blocks) and request.is_findable
        self.cached |= pairs(blocks)
        for one in blocks:
            if one.group == "full":
                assert one.first <= first and len(request.token_ids) == request.length
                keys = request.keys(one.first * self.size, (one.first + len(one.ids)) * self.size)
                for number, text in zip(one.ids.tolist(), keys.reshape(-1, self.size)):
                    known = self.texts.setdefault((one.group, number), text.tobytes())
                    assert known == text.tobytes()

    def on_evicted(self, blocks: tuple[BlockIds, ...], reason: str, namespaces: frozenset[bytes]) -> None:
        self.told[reason] += 1
        assert reason in ("evicted", "dropped") if blocks else reason in ("invalidated", "reset")
        assert pairs(blocks) <= self.cached, "what was cached, once"
        self.cached -= pairs(blocks)
        for pair in pairs(blocks):
            self.texts.pop(pair, None)
        if reason == "reset":
            self.cached.clear()
            self.texts.clear()
            self.running.clear()

    def on_freed(self, blocks: tuple[BlockIds, ...]) -> None:
        self.told["freed"] += 1
        assert not pairs(blocks) & self.cached, "no longer cached when it is given away"

    def on_end(self, request: RequestView) -> None:
        self.told["end"] += 1
        del self.running[request]


def pairs(blocks: tuple[BlockIds, ...]) -> set[tuple[str, int]]:
    return {(one.group, number) for one in blocks for number in one.ids.tolist()}


def cached_now(cache: KVCache) -> set[tuple[str, int]]:
    core = cache.core
    return {
        (group.plan.name, number)
        for group, part in zip(core.groups, core.prefix.cached)
        for number in part.names().tolist()
    }


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("name", ["full", "window", "mixed", "state", "latent", "windows", "full and state"])
def test_a_mirror_knows_what_is_cached_over_random_traffic(name: str, order: str) -> None:
    mirror = Mirror()
    cache = KVCache(
        {**SCHEMAS, **SHARING}[name], num_blocks=40, max_requests=6, block_size=4, device="none", order=order,
        observers=[mirror], limits=Limits(step_tokens=9), retention=Retention(checkpoints=4, checkpoint_every=2),
    )  # fmt: skip
    mirror.size = 4
    check = cache.check

    def checked() -> None:
        check()
        assert mirror.cached == cached_now(cache)
        assert len(mirror.running) == len(cache.core.running) + len(cache.core.suspended)

    cache.check = checked  # type: ignore[method-assign]
    for seed in range(3):
        traffic(cache, 120, seed=seed, engine=None)
        if seed == 1:
            cache.invalidate()
            assert mirror.told["invalidated"] == 1
            assert mirror.cached == cached_now(cache)
    assert min(mirror.told[one] for one in ("start", "cached", "evicted", "dropped", "freed", "end")) > 1
    assert mirror.told["hit"] > 10 or name == "state"
    cache.core.guard.is_torn = True
    cache.reset()
    assert mirror.told["reset"] == 1 and not mirror.cached
    cache.close()
