"""Observers are told what happened, in order, after it is done, as arrays; they cost nothing where they do not listen."""

from __future__ import annotations

import logging
import sys
from threading import Thread
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvpagoda import BadInput, ConcurrentUse, KVCache, Limits, Retention
from kvpagoda.abc import BlockIds, CacheObserver, RequestView
from kvpagoda.core.cache import observers as module
from mirror import Mirror, cached_now
from raises import raises
from test_manager import SCHEMAS, SHARING, traffic


def cache_of(*observers: Any, name: str = "full", num_blocks: int = 12, **settings: Any) -> KVCache:
    settings = {"max_requests": 2, "device": "none", **settings}
    return KVCache(SCHEMAS[name], num_blocks=num_blocks, block_size=4, observers=observers, **settings)


def serve(cache: KVCache, text: Any, namespace: str | None = None) -> int:
    with cache.open(text, namespace) as sequence:
        sequence.commit(text[sequence.length :])
        return sequence.cached_tokens


class Diary(CacheObserver):
    """Writes down each event as (name, its arguments)."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_start(self, request: RequestView) -> None:
        self.told.append(("start", request))

    def on_hit(self, request: RequestView, blocks: tuple[BlockIds, ...]) -> None:
        self.told.append(("hit", request, blocks))

    def on_cached(self, request: RequestView, blocks: tuple[BlockIds, ...], first: int) -> None:
        self.told.append(("cached", request, blocks, first))

    def on_evicted(self, blocks: tuple[BlockIds, ...], reason: str, namespaces: frozenset[bytes]) -> None:
        self.told.append(("evicted", blocks, reason, namespaces))

    def on_freed(self, blocks: tuple[BlockIds, ...]) -> None:
        self.told.append(("freed", blocks))

    def on_end(self, request: RequestView) -> None:
        self.told.append(("end", request))

    def names(self) -> list[str]:
        names = [one[0] for one in self.told]
        self.told.clear()
        return names


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("name", ["full", "window", "mixed", "state", "latent", "windows", "full and state"])
def test_a_mirror_knows_what_is_cached_over_random_traffic(name: str, order: str) -> None:
    mirror = Mirror(4)
    cache = KVCache(
        {**SCHEMAS, **SHARING}[name], num_blocks=40, max_requests=6, block_size=4, device="none", order=order,
        observers=[mirror], limits=Limits(step_tokens=9), retention=Retention(checkpoints=4, checkpoint_every=2),
    )  # fmt: skip
    check = cache.check

    def checked() -> None:
        check()
        assert mirror.cached == cached_now(cache)
        assert len(mirror.running) == len(cache.core.running) + len(cache.core.suspended)

    cache.check = checked  # type: ignore[method-assign]
    for seed in range(2):
        traffic(cache, 100, seed=seed, engine=None)
        if seed == 0:
            cache.invalidate()
            assert mirror.told["invalidated"] == 1
            assert mirror.cached == cached_now(cache)
    assert min(mirror.told[one] for one in ("start", "cached", "evicted", "dropped", "freed", "end")) > 0
    assert mirror.told["hit"] > 5 or name == "state"
    cache.core.guard.is_torn = True
    cache.reset()
    assert mirror.told["reset"] == 1 and not mirror.cached
    cache.close()


def test_one_request_is_told_in_the_order_of_its_life() -> None:
    diary = Diary()
    cache = cache_of(diary)
    text = np.arange(10, dtype=np.int32)
    assert serve(cache, text, "a") == 0
    (_, request), (_, cached_by, blocks, first), (_, ended) = diary.told
    assert diary.names() == ["start", "cached", "end"]
    assert request == cached_by == ended and len({request, cached_by, ended}) == 1
    assert (request.length, request.prompt_length, request.cached_tokens, request.slot >= 0) == (0, 10, 0, True)
    assert (ended.length, ended.slot) == (10, -1) and ended.token_ids.tolist() == [*range(10)]
    assert ended.keys(8, 12).tolist() == [8, 9, -(2**31), -(2**31)]
    with pytest.raises(ValueError):
        ended.token_ids[0] = 1
    assert first == 0 and [(one.group, one.first, len(one.ids)) for one in blocks] == [("full", 0, 3)]
    with cache.open([*range(10), 5], "a") as sequence:
        fork = sequence.fork()
        (_, request), (_, _, hit), (_, child), (_, _, shared) = diary.told
        assert diary.names() == ["start", "hit", "start", "hit"] and child != request
        assert (request.cached_tokens, child.cached_tokens) == (10, 10) and request.namespace == ended.namespace
        assert [one.ids.tolist() for one in hit] == [blocks[0].ids[:2].tolist()] == [one.ids.tolist() for one in shared]
        fork.close()
        names = diary.names()
        assert names[-1] == "end" and "cached" not in names
        sequence.suspend()
        assert "end" not in diary.names()
        sequence.resume()
        assert diary.names()[:2] == ["start", "hit"]
    assert diary.names()[-1] == "end"
    cache.invalidate("a")
    (_, none, reason, namespaces), (_, dropped, why, _), *_ = diary.told
    assert (none, reason, namespaces, why) == ((), "invalidated", {ended.namespace}, "dropped")
    assert dropped[0].ids.tolist() == blocks[0].ids.tolist()[::-1] and diary.names() == ["evicted", "evicted", "freed"]


def test_media_are_told_by_id_and_digest() -> None:
    diary = Diary()
    with cache_of(diary).open(range(8), media={2: b"1" * 16}) as sequence:
        sequence.commit(range(8))
    request = next(one[1] for one in diary.told if one[0] == "cached")
    keys = request.keys(0, 8).tolist()
    assert request.media == {keys[2]: b"1" * 16} and keys[2] < 0 and keys[3:] == [*range(3, 8)]
    assert request.token_ids.tolist() == [*range(8)]


def test_tiers_hear_of_an_eviction_before_blocks_are_given_away_and_observers_at_the_end_of_the_call() -> None:
    pytest.importorskip("torch")
    from kvpagoda.tiers import host_tier

    happened: list[str] = []

    class Late(CacheObserver):
        def on_evicted(self, *_: Any) -> None:
            happened.append("told")
            assert not cache.core.guard.is_torn and len(cache.core.running) == 1, "the request runs already"

        def on_freed(self, *_: Any) -> None:
            happened.append("freed told")

    cache = cache_of(Late(), device="cpu", tiers=[host_tier("1MiB")])
    serve(cache, range(40))
    (group,), tiers = cache.core.groups, cache.core.tiers
    stored, free = tiers.on_evicted, group.free_blocks

    def on_evicted(freed: Any, is_stored: bool) -> None:
        happened.append("tiers")
        assert is_stored and np.isin(freed.blocks[0][1], group.free.held_ids()).all(), "nobody has them yet"
        stored(freed, is_stored)

    def freed_blocks(ids: Any) -> Any:
        happened.append("released")
        return free(ids)

    tiers.on_evicted, group.free_blocks = on_evicted, freed_blocks  # type: ignore[method-assign]
    happened.clear()
    with cache.open(range(100, 140)):
        assert happened[:2] == ["tiers", "released"] and happened[-2:] == ["told", "freed told"]
        assert happened.count("tiers") == happened.count("told")
    cache.close()


def test_observers_are_told_in_the_order_of_the_list_and_event_by_event() -> None:
    heard: list[tuple[str, str]] = []

    class One(CacheObserver):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_start(self, request: RequestView) -> None:
            heard.append((self.name, "start"))

        def on_end(self, request: RequestView) -> None:
            heard.append((self.name, "end"))

    cache = cache_of(One("a"), One("b"))
    cache.open([1]).close()
    assert heard == [("a", "start"), ("b", "start"), ("a", "end"), ("b", "end")]


def test_one_that_fails_is_logged_and_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(CacheObserver):
        calls = 0

        def on_cached(self, *_: Any) -> None:
            self.calls += 1
            raise ValueError("a mistake")

    broken, mirror = Broken(), Mirror(4)
    cache, plain = cache_of(broken, mirror), cache_of()
    with caplog.at_level(logging.ERROR, "kvpagoda"):
        for one in (cache, plain):
            assert [serve(one, range(first, first + 30)) for first in (0, 0, 60, 90, 0)] == [0, 29, 0, 0, 0]
    (record,) = caplog.records
    assert broken.calls == 1 and "Broken.on_cached" in record.getMessage() and record.exc_info is not None
    assert mirror.cached == cached_now(cache) and cache.stats().groups == plain.stats().groups
    cache.check()


def test_an_interrupt_in_an_observer_is_raised_and_the_change_is_told_again() -> None:
    class Stopped(CacheObserver):
        def on_start(self, request: RequestView) -> None:
            stops, self.stops = self.stops, False
            if stops:
                raise KeyboardInterrupt

        stops = True

    diary = Diary()
    cache = cache_of(Stopped(), diary)
    with pytest.raises(KeyboardInterrupt):
        cache.open(range(8))
    assert diary.told == [] and not cache.core.guard.is_torn
    kept = [cache.open(range(first, first + 8)) for first in (0, 8)]
    assert diary.names() == ["start", "start", "freed", "end", "start"], (
        "the one that nobody can name is closed for its slot"
    )
    for sequence in kept:
        sequence.close()
    cache.check()


def test_an_observer_may_look_but_not_change() -> None:
    found: list[Any] = []

    class Calling(CacheObserver):
        def on_cached(self, *_: Any) -> None:
            found.append(cache.stats().running)
            found.append(cache.lookup(range(9)).cached)
            for call in (lambda: cache.open([1]), lambda: cache.pin(range(8))):
                try:
                    call()
                except BadInput as error:
                    found.append(error.needed)

    cache = cache_of(Calling())
    serve(cache, range(9))
    assert found == [1, 8, "KVCache.open", "KVCache.pin"] or found == [0, 8, "KVCache.open", "KVCache.pin"]
    cache.open([1]).close()
    cache.check()


def test_another_thread_is_no_observer() -> None:
    """Its call comes while the owner's is telling: it is refused as at any other moment of that call."""
    found: list[BaseException] = []

    class Slow(CacheObserver):
        def on_cached(self, *_: Any) -> None:
            def other() -> None:
                try:
                    cache.open([1])
                except BaseException as error:
                    found.append(error)

            thread = Thread(target=other)
            thread.start()
            thread.join()

    cache = cache_of(Slow())
    serve(cache, range(9))
    assert found and all(type(error) is ConcurrentUse for error in found)
    cache.open([1]).close()
    cache.check()


def test_where_nobody_listens_nothing_is_noted() -> None:
    class Ends(CacheObserver):
        def on_end(self, request: RequestView) -> None: ...

    def calls(cache: KVCache) -> int:
        for first in (0, 0, 60, 90, 0):
            serve(cache, range(first, first + 30))
        count = 0

        def counting(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename == module.__file__

        sys.setprofile(counting)
        try:
            for first in (0, 0, 60, 90, 0):
                serve(cache, range(first, first + 30))
        finally:
            sys.setprofile(None)
        return count

    assert calls(cache_of()) == calls(cache_of(CacheObserver())) == 0
    assert 0 < calls(cache_of(Ends())) <= 5 * 5  # note_end, a snapshot, tell, _tell, and the hash of a request


def test_what_memory_lacked_for_is_told_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()
    cache = cache_of(diary)
    with monkeypatch.context() as patch:
        patch.setattr(module, "RequestSnapshot", lambda *_: (_ for _ in ()).throw(MemoryError))
        assert serve(cache, range(8)) == 0
    cache.check()
    diary.told.clear()
    cache.open([1]).close()
    assert diary.told[0] == ("evicted", (), "lost", frozenset()) and diary.names() == [
        "evicted",
        "start",
        "freed",
        "end",
    ]


def test_what_is_no_observer_is_refused() -> None:
    for wrong in (3, "log", Mirror, None):
        with raises(BadInput, field="observers", needed=wrong):
            cache_of(wrong)
    with raises(BadInput, field="observers", needed=3):
        KVCache(SCHEMAS["full"], num_blocks=4, device="none", observers=3)  # type: ignore[arg-type]
    once = CacheObserver()
    with raises(BadInput, field="observers", needed=once):
        cache_of(once, once)
    cache_of(once)
    cache_of(once)  # of several caches, if it likes


def test_one_observer_is_removed_without_the_others() -> None:
    first, second = Diary(), Diary()
    cache = cache_of(first)
    end = cache.core.observers.add(second)
    cache.open([1]).close()
    end()
    end()
    cache.open([1]).close()
    assert (len(first.told), len(second.told)) == (6, 3)
