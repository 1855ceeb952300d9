"""A shadow model of a cache, made of what an observer is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvpagoda.abc import BlockIds, CacheObserver, RequestView


class Mirror(CacheObserver):
    """Knows which blocks are cached, which have an owner, and who runs, from what it is told alone."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.cached: set[tuple[str, int]] = set()
        self.running: Counter[RequestView] = Counter()
        self.told = Counter[str]()
        self.texts: dict[tuple[str, int], bytes] = {}  # full block -> its tokens

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
        assert all(one.first >= 0 for one in blocks)
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


def cached_now(cache: Any) -> set[tuple[str, int]]:
    core, tree = cache.core, cache.core.prefix.tree
    named = {(group.plan.name, number) for group in core.groups for number in group.cached_ids().tolist()}
    numbers = (
        [node.ids[tree.num_groups - 1] for node in tree.nodes()] if core.prefix.is_numbered else []
    )  # of texts that no group keeps
    return named | {("", number) for ids in numbers for number in ids.tolist()}
