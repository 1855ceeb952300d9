"""A cache that runs for ever meets ever new images and invalidates ever new namespaces: what it keeps of them is bounded by
what is cached or runs, and nothing that was forgotten is taken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda import Identity, KVCache, Namespace, Schema, namespace
from kvpagoda.hints import Hints
from kvpagoda.namespace import LEAST_MEDIA, LEAST_RENEWED, MOST_MEDIA, Media, Namespaces
from kvpagoda.schema import Attention, Layer
from kvpagoda.tiers import host_tier

SCHEMA = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "small")
TEXT = [*range(17)]
MANY = 10_000


def cache_of(**settings: Any) -> KVCache:
    given = {
        "num_blocks": 64,
        "device": "none",
        "block_size": 4,
        "max_requests": 4,
        "identity": Identity("w"),
        **settings,
    }
    return KVCache(SCHEMA, **given)


def image(number: int) -> bytes:
    return b"image" + number.to_bytes(16, "little")


def serve(cache: KVCache, namespace: Any = None, **settings: Any) -> int:
    """Compute the text as one request, and return how much of it was cached."""
    with cache.open(TEXT, namespace, **settings) as sequence:
        cached = sequence.cached_tokens
        sequence.commit(TEXT[cached:])
    return cached


@pytest.mark.parametrize("requests", [400, 1000])
def test_images_that_nobody_has_are_forgotten_and_the_others_are_told_apart(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images come back after they were forgotten: the cache, a follower of its events and a tier tell them apart."""
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    from kvpagoda.events import EventLog, EventStream, Follower, index
    from kvpagoda.events import stream as streams

    for module in (namespace, streams, index):
        monkeypatch.setattr(module, "LEAST_MEDIA", 128)

    log, rng, most, num_hits = EventLog(), np.random.default_rng(0), 0, 0
    cache = cache_of(events=log, tiers=[host_tier("64KiB", write="commit")], device="cpu")
    stream, follower = EventStream(log), Follower()
    follower.feed(*stream.replay(0)[0])
    for number in range(requests):
        media = {5: image(number if rng.random() < 0.6 else max(0, number - int(rng.geometric(0.02))))}
        found = cache.lookup(TEXT, media=media)
        if message := stream.drain():
            follower.feed(*message)
        assert follower.resumable(TEXT, media=media).cached == found.cached
        cached = serve(cache, media=media)
        assert cached >= found.resumable and cached in (0, 4, 5, 8, 12, 16)
        num_hits += found.cached == 16
        most = max(most, len(cache.core.media), len(stream._media), len(follower._index._media))
    assert most <= 128 + 2 * 64 + 4 and num_hits > requests // 33
    cache.check()


def test_what_is_pinned_runs_is_suspended_or_remembered_keeps_its_image() -> None:
    cache = cache_of(hints=Hints(), device="cpu")
    kept = {"pinned": image(1), "running": image(2), "suspended": image(3), "session": image(4)}
    hint = {"action_id": "a", "action_type": "kv.session", "action_version": "1.0"}
    begin = {"message_id": "m", "actions": [{**hint, "payload": {"session_id": "s", "event": "begin"}}]}
    for digest in kept.values():
        serve(cache, media={5: digest}, hints=begin if digest == kept["session"] else None)
    cache.pin(TEXT, media={5: kept["pinned"]})
    running, suspended = (cache.open(TEXT, media={5: kept[name]}) for name in ("running", "suspended"))
    suspended.commit(TEXT[suspended.length :])
    suspended.suspend()
    numbers = {name: cache.core.media.ids({5: digest}, 17)[5] for name, digest in kept.items()}
    most = 0
    for number in range(100, 100 + MANY):
        assert cache.lookup(TEXT, media={5: image(number)}).cached == 5
        if number % 20 == 0:
            assert serve(cache, media={5: image(number)}) == 5, "the beginning is shared, and the image is another"
        most = max(most, len(cache.core.media))
    assert most <= LEAST_MEDIA + 2 * 64 + 64
    assert numbers == {name: cache.core.media.ids({5: digest}, 17)[5] for name, digest in kept.items()}
    running.commit(TEXT[running.length :])
    suspended.resume()
    for sequence in (running, suspended):
        sequence.close()
    for name in ("pinned", "running", "suspended"):
        assert cache.lookup(TEXT, media={5: kept[name]}).cached == 16, name
        assert serve(cache, media={5: kept[name]}) == 16
    cache.check()


def test_no_number_of_an_image_in_use_is_given_again() -> None:
    """Also when all numbers were given once."""
    live: set[int] = set()
    media = Media(lambda: live)
    first = media.ids({0: image(1)}, 1)[0]
    live.add(first)
    media._next = MOST_MEDIA - 2
    seen = {media.ids({0: image(number)}, 1)[0] for number in range(2, 6)}
    assert seen == {-MOST_MEDIA + 1, -MOST_MEDIA, -2, -3} and media.ids({0: image(1)}, 1)[0] == first == -1
    for number in range(10, 10 + 2 * LEAST_MEDIA):
        assert media.ids({0: image(number)}, 1)[0] != first
    assert media.digest(first) == image(1) and len(media) <= LEAST_MEDIA + 2
    assert media.ids({0: image(2)}, 1)[0] not in seen, "forgotten, and a new one now"


def test_an_invalidated_namespace_is_never_found_again_however_many_follow() -> None:
    cache = cache_of(tiers=[host_tier("4MiB", write="commit")], device="cpu", num_blocks=32)
    names = cache.core.namespaces
    assert serve(cache, "kept") == 0 and serve(cache, Namespace(adapter="never cached again")) == 0
    pin = cache.pin(TEXT[:16], "kept")
    for number in range(3 * LEAST_RENEWED):
        if number < 40:
            assert serve(cache, f"tenant {number}") == 0
        cache.invalidate(f"tenant {number}")
        assert len(names._renewed) <= LEAST_RENEWED + 2 * 32
    assert len(names._renewed) < LEAST_RENEWED
    assert serve(cache, "kept") == 16, "what is cached is found as before"
    for number in range(40):
        assert serve(cache, f"tenant {number}") == 0, "neither here nor in the tier"
        assert serve(cache, f"tenant {number}") == 16, "and what is computed now is found"
    cache.unpin(pin)
    cache.check()


def test_keys_of_namespaces_in_use_stay_and_others_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "LEAST_RENEWED", 64)
    rng = np.random.default_rng(0)
    names, live, gone = Namespaces("layout", b"epoch"), dict[str, bytes](), dict[str, set[bytes]]()
    for number in range(4_000):
        if number % 1_000 == 999:
            names.renew_all(live.values())
            live.clear()
        tenant = f"tenant {number if rng.random() < 0.7 else rng.integers(0, number + 1)}"
        key = names.key(tenant)
        assert key not in gone.get(tenant, ()), "what was invalidated stays so"
        if rng.random() < 0.02:
            live[tenant] = key
        gone.setdefault(tenant, set()).add(key)
        live.pop(tenant, None)
        assert (key in names.renew([tenant], [*live.values(), key])) and not names.is_current(key)
        if number % 100 == 0:
            for tenant, key in [*live.items()]:
                assert names.key(tenant) == key and names.is_current(key)
            while len(live) > 100:
                live.popitem()
        for own in map(str, rng.integers(0, 100, 1)):
            live[own] = names.key(own)
    assert len(names._renewed) <= 2 * 200 + 64 + 1 and 100 < len(names._shares) <= 4096
