"""The log: bounded, of one cache, and whole again after memory lacked for a record."""

from __future__ import annotations

from typing import Any

import pytest

from kvpagoda import KVCache, Limits, Namespace
from kvpagoda.errors import BadInput
from kvpagoda.events.event_log import Gone, Renewed, Restart, SharedEvents
from kvpagoda.schema import Attention, Growth, Layer, Schema

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from kvpagoda.events import EventLog, EventStream, Follower
from raises import raises

SCHEMA = Schema(
    tuple(
        Layer(i, "attention", (Attention(1, 4, 4, "float32", growth),))
        for i, growth in enumerate((Growth(), Growth(8)))
    ),
    "test",
)


def cache_of(log: EventLog, **settings: Any) -> KVCache:
    return KVCache(SCHEMA, "16KiB", device="none", block_size=4, events=log, limits=Limits(64, 8), **settings)


def leave(cache: KVCache, tokens: Any, namespace: Any = None) -> None:
    with cache.open(tokens, namespace, capacity=0) as sequence:
        for at in range(0, len(tokens), 8):
            part = tokens[at : at + 8]
            sequence.extend(len(part))
            sequence.commit(part)


def test_a_log_says_what_the_cache_did() -> None:
    log = EventLog()
    cache = cache_of(log)
    leave(cache, range(16))
    first, second = log.take()
    assert isinstance(first, SharedEvents) and isinstance(second, SharedEvents) and log.take() == []
    assert first.first == 0 and first.keys.tolist() == [*range(8)] and len(first.texts) == 2
    assert second.keys.tolist()[-8:] == [*range(8, 16)]
    cache.invalidate("a")
    cache.invalidate()
    assert isinstance(log.take()[0], Restart)
    leave(cache, range(16), "a")
    cache.invalidate("a", "b")
    renewed = log.take()
    assert Renewed in {type(record) for record in renewed}
    for first_token in range(100, 150):
        leave(cache, [first_token] * 20)
    assert {SharedEvents, Gone} <= {type(record) for record in log.take()} <= {SharedEvents, Gone}
    leave(cache, range(16))
    log.take()
    cache.reset()
    (gone,) = log.take()
    assert isinstance(gone, Gone) and {group for group, _ in gone.blocks} == {0, 1}


def test_a_full_log_begins_anew_and_says_all() -> None:
    log = EventLog(capacity=3)
    cache = cache_of(log)
    for first in range(5):
        leave(cache, [first] * 8)
    records = log.take()
    assert log.num_restarts == 1 and isinstance(records[0], Restart) and len(records[0].shared) == 4
    assert [type(record) for record in records[1:]] == [SharedEvents]


def test_what_memory_lacked_for_is_said_later(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog()
    cache = cache_of(log)
    stream, follower = EventStream(log), Follower()
    with monkeypatch.context() as patch:
        patch.setattr(log, "_raw", lambda *_: (_ for _ in ()).throw(MemoryError))
        leave(cache, range(20))
        assert cache.lookup(range(21)).cached == 20 and stream.drain() is None
    leave(cache, range(50, 60))
    for message in stream.replay(0), [stream.drain()]:
        follower.feed(*message[0])  # type: ignore[misc]
    assert [follower.resumable(range(21)), follower.resumable(range(50, 61))] == [(20, 20), (8, 8)]
    cache.check()


def test_bad_input_is_told() -> None:
    for capacity in (0, True, 1.5):
        with raises(BadInput, needed=capacity, available=1):
            EventLog(capacity)  # type: ignore[arg-type]
    log = EventLog()
    with raises(BadInput, needed="cache"):
        _ = log.followed
    cache_of(log)
    with raises(BadInput, needed="log"):
        cache_of(log)
    with raises(BadInput, field="keep, a number of batches,", needed=0, available=1):
        EventStream(log, keep=0)
    with raises(BadInput, needed=0):
        Follower().resumable(range(3), Namespace(epoch=0))
    with raises(BadInput, needed=3):
        Follower().feed(0, b"abc")
    with raises(BadInput, needed="publisher"):
        Follower().feed(0, b"\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x90")
