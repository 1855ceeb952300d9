"""Events of tiers: what host memory and disk keep is told with their medium, until they drop it; a follower is not misled."""

from __future__ import annotations

from collections import deque
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import numpy as np
import pytest

from kvpagoda import Identity, KVCache
from kvpagoda.core.offload.offloader import Offloader
from kvpagoda.events.event_log import CachedEvents, Restart, SharedEvents
from kvpagoda.events.tier_watch import TierWatch
from kvpagoda.tiers import disk_tier, host_tier
from kvpagoda.tiers.driver import _ALIVE, Status
from kvpagoda.tiers.slots import SlotDriver

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from test_event_log import SCHEMA

from kvpagoda.events import EventLog, EventStream, Follower


def serve(cache: KVCache, tokens: Any, namespace: Any = None) -> None:
    with cache.open(tokens, namespace, capacity=0) as sequence:
        while part := tokens[sequence.length : sequence.length + 8]:
            sequence.extend(len(part))
            sequence.commit(part)


class Reader:
    """What a router knows of each medium, from events alone: name -> (parent, tokens)."""

    def __init__(self) -> None:
        self.known: dict[str, dict[int, Any]] = {}
        self.num_dropped = 0  # names that left a tier

    def read(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
                continue
            known = self.known.setdefault(event["medium"], {})
            if event["group_idx"] != 0:  # the window's
                assert event["medium"] == "GPU"
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del known[name]
                    self.num_dropped += event["medium"] != "GPU"
            else:
                above, size = event["parent_block_hash"], event["block_size"]
                for at, name in enumerate(event["block_hashes"]):
                    known[name] = (above, event["token_ids"][at * size : (at + 1) * size])
                    above = name


def settled(cache: KVCache, stream: EventStream, reader: Reader, follower: Follower, medium: str) -> None:
    """Read what is told when no store is on its way any more: just that is what the driver has."""
    assert cache.flush(10) and isinstance(cache.core.tiers, Offloader)
    (level,), (watch,) = cache.core.tiers.levels, cache.core.tiers.watches.values()
    if (message := stream.drain()) is not None:
        reader.read(message[1])
        follower.feed(*message)
    keys = level.tier.driver._slots  # type: ignore[attr-defined]
    kept = {int.from_bytes(one[:8], "big") >> 1 for key, one in watch._hashes.items() if key in keys}
    assert {*reader.known.get(medium, {})} == kept


@pytest.mark.parametrize("write", ["evict", "commit", "reuse"])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_a_tier_keeps_is_told(kind: str, write: str, tmp_path: Path) -> None:
    if kind == "disk":
        pytest.importorskip("xxhash", reason="records on disk need xxhash")
        tier, medium = disk_tier(tmp_path, "160KiB", write=write, admit_all=True, timeout=10.0), "STORAGE"
    else:
        tier, medium = host_tier("128KiB", write=write, timeout=10.0), "CPU"
    log = EventLog()
    cache = KVCache(SCHEMA, "16KiB", device="cpu", block_size=4, events=log, tiers=[tier], identity=Identity("w"))
    stream, reader, follower = EventStream(log, keep=1), Reader(), Follower()
    reader.read(stream.replay(0)[0][1])
    follower.feed(*stream.replay(0)[0])
    random, most = np.random.default_rng(0), 0
    texts = [[100 + first, *random.integers(0, 3, 30).tolist()] for first in range(40)]
    for number in random.integers(0, len(texts), 150).tolist():
        serve(cache, texts[number], "tenant" if number % 3 == 0 else None)
        settled(cache, stream, reader, follower, medium)
        assert reader.known["GPU"].keys() == stream.index.blocks.keys()
        most = max(most, len(reader.known.get(medium, {})))
        text, namespace = texts[number], "tenant" if number % 3 == 0 else None
        found = cache.lookup(text, namespace)
        assert follower.resumable(text, namespace) == (found.cached, found.resumable)
    assert most > 10 and (reader.num_dropped > 10 or write == "reuse")
    for above, tokens in reader.known[medium].values():
        assert len(tokens) == 4 and (above is None) == (tokens[0] >= 100)
    late = Reader()
    late.read(stream.replay(0)[-1][1])  # a snapshot: of all batches only one is kept
    assert late.known[medium] == reader.known[medium] and late.known["GPU"].keys() == reader.known["GPU"].keys()
    cache.invalidate("tenant")
    message = stream.drain()
    assert message is not None
    reader.read(message[1])
    firsts = {tokens[0] for above, tokens in reader.known[medium].values() if above is None}
    assert firsts and not any((first - 100) % 3 == 0 for first in firsts)
    cache.close()


class Slots:
    """A medium of two slots that holds nothing."""

    num_slots, slot_nbytes = 2, 1

    def scan(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass

    def write(self, *_: int) -> bool:
        return True

    read = clear = write


def test_a_watch_tells_only_what_changes() -> None:
    log, driver = EventLog(), SlotDriver(Slots())
    watch = TierWatch("CPU", log, driver)
    one, two = b"1" * 32, b"2" * 32
    assert driver.store([b"k"], [0], inf) == [Status.OK]
    watch.stored({b"k": one + two, b"l": two})
    driver.discard([b"l", b"m"], inf)
    driver.discard([b"k"], inf)
    driver.discard([b"k"], inf)
    assert log.take() == [CachedEvents("CPU", (one, two), True), CachedEvents("CPU", (one, two), False)]


@pytest.mark.parametrize("is_kept_before", [False, True])
def test_what_was_dropped_since_it_was_stored_is_not_told_as_kept(is_kept_before: bool) -> None:
    """A tier has two threads: one stores "k", the other one evicts it before the first one tells that it is there."""
    log, driver = EventLog(), SlotDriver(Slots())
    watch = TierWatch("CPU", log, driver)
    one, two, three = b"1" * 32, b"2" * 32, b"3" * 32
    if is_kept_before:
        driver.store([b"k"], [0], inf)
        watch.stored({b"k": one})
    driver.store([b"k"], [0], inf)
    driver.store([b"l", b"m"], [1, 2], inf)
    watch.stored({b"l": two, b"m": three})
    watch.stored({b"k": one})
    kept = set[bytes]()
    for record in log.take():
        assert isinstance(record, CachedEvents)
        (kept.update if record.is_there else kept.difference_update)(record.hashes)
    assert kept == {two, three}


@pytest.mark.parametrize("is_late", [False, True])
def test_blocks_of_an_invalidated_namespace_that_were_on_their_way_to_a_tier_are_not_told(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """``is_late``: the tier stores them after the publisher told of the invalidation; else both are news of one batch."""
    log = EventLog()
    cache = KVCache(SCHEMA, "16KiB", device="cpu", block_size=4, events=log, tiers=[host_tier("64KiB", write="commit")])
    assert isinstance(cache.core.tiers, Offloader)
    ((level,), stream, reader, go) = cache.core.tiers.levels, EventStream(log), Reader(), Event()
    store = level.tier.driver.store
    monkeypatch.setattr(level.tier.driver, "store", lambda *given: go.wait(10) and store(*given))

    def read() -> None:
        if (message := stream.drain()) is not None:
            reader.read(message[1])

    reader.read(stream.replay(0)[0][1])
    serve(cache, range(8), "tenant")
    serve(cache, range(8), "other")
    if not is_late:
        go.set()
        assert cache.flush(10)
    cache.invalidate("tenant")
    if is_late:
        read()
        go.set()
        assert cache.flush(10)
    read()
    assert len(reader.known["CPU"]) == len(stream._kept["CPU"]) == 2, "those of the other namespace"
    assert not stream._gone
    assert cache.lookup(range(9), "tenant").resumable == 0 and cache.lookup(range(9), "other").resumable == 8
    serve(cache, range(8), "tenant")
    assert cache.flush(10)
    read()
    assert len(reader.known["CPU"]) == 4, "what is cached of it from now on"
    cache.close()


KEEPS, DROPS = CachedEvents("CPU", (b"1" * 32,), True), CachedEvents("CPU", (b"1" * 32,), False)


def test_a_full_log_starts_again_after_news_of_a_tier() -> None:
    log = EventLog(capacity=3)
    cache = KVCache(SCHEMA, "16KiB", device="cpu", block_size=4, events=log)
    for _ in range(3):
        log.told(KEEPS)
    assert log.take() == [KEEPS] * 3
    for _ in range(4):  # one more than fits
        log.told(KEEPS)
    serve(cache, range(4))
    assert log.num_restarts == 1 and [type(record) for record in log.take()] == [Restart]
    for _ in range(3):
        log.told(KEEPS)
    serve(cache, range(10, 14))  # news of tiers takes room, too
    assert log.num_restarts == 2 and [type(record) for record in log.take()] == [Restart]
    cache.close()


def test_a_log_restarts_while_a_tier_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier tells while everything is listed is all forgotten: not just that it drops a block again."""
    log = EventLog(capacity=1)
    cache = KVCache(SCHEMA, "16KiB", device="cpu", block_size=4, events=log)
    serve(cache, range(20))
    texts = log._view.texts

    def told_meanwhile() -> Any:
        found = texts()
        log.told(KEEPS)
        log.told(DROPS)
        return found

    monkeypatch.setattr(log._view, "texts", told_meanwhile)
    log.restart()
    assert [type(record) for record in log.take()] == [Restart]
    cache.close()


class EmptyOnce(deque[Any]):
    """Calls ``when_empty`` once, when nothing is left."""

    when_empty: Any = None

    def popleft(self) -> Any:
        if not self and self.when_empty:
            call, self.when_empty = self.when_empty, None
            call()
            raise IndexError
        return super().popleft()


@pytest.mark.parametrize("does_restart", [False, True])
def test_news_of_a_tier_never_comes_before_what_it_is_about(does_restart: bool) -> None:
    """A block is cached and stored in a tier when ``take`` has just seen the last record of the cache."""
    log = EventLog()
    cache = KVCache(SCHEMA, "16KiB", device="cpu", block_size=4, events=log)
    log.take()

    def meanwhile() -> None:
        serve(cache, range(4))
        if does_restart:
            log.restart()
        log.told(KEEPS)

    log._records = EmptyOnce()
    log._records.when_empty = meanwhile
    log.told(DROPS)
    first, then = log.take(), log.take()
    assert first == ([] if does_restart else [DROPS])
    assert type(then[0]) is (Restart if does_restart else SharedEvents) and then[1:] == [KEEPS]
    cache.close()


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    log, is_held, goes_on = EventLog(), Event(), Event()

    def hold() -> None:
        with log._telling:
            is_held.set()
            goes_on.wait(10)

    thread = Thread(target=hold)
    thread.start()
    assert is_held.wait(10) and log in _ALIVE
    log.after_fork()  # as every Forkable's is called in a child
    log.told(KEEPS)
    assert log.take() == [KEEPS]
    goes_on.set()
    thread.join()
