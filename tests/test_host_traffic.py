"""A cache whose device works later than it is asked to: blocks are given away at once, and nobody is told too early.

``streams`` has the doubles; the rows of every request are compared as in ``test_below``."""

from __future__ import annotations

from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch

from raises import raises

pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")

from kvpagoda import Limits
from kvpagoda.core.memory import host_copy
from kvpagoda.core.memory.page_locks import PageLocks
from kvpagoda.core.offload.offloader import Offloader
from kvpagoda.errors import BadInput
from kvpagoda.tiers import disk_tier, host_tier
from streams import device_of
from test_below import TINY, cache_of, forget, levels_of, run
from test_manager import FakeEngine, traffic

TEXTS = [np.arange(start, start + 40, dtype=np.int32) % 37 for start in (0, 11, 23)]


def fill(cache: Any, texts: Any = TEXTS) -> None:
    engine = FakeEngine(cache)
    for text in texts:
        run(cache, text, engine)


def test_evicted_blocks_are_used_again_before_the_host_has_them_and_the_tier_is_told_afterwards() -> None:
    cache = cache_of("full", host_tier("1MiB", **TINY), num_blocks=16, poison=False)
    streams, _ = device_of(cache)
    (level,) = levels_of(cache)
    fill(cache)  # evicts the first text
    log = [entry[0] for entry in streams.log]
    assert "out" in log and "drain" in log and log.index("out") < log.index("drain")
    assert level.is_storing and not level.tier.driver.stats().num_records, "not there yet"
    assert not any(event.num_waits for event in streams.events if event.stream == "current")
    streams.end()
    assert cache.flush() and level.tier.driver.stats().num_records >= 8 and not level.dropped
    assert run(cache, TEXTS[0]) >= 36, "all of it, with the rows that the blocks had"
    streams.end()
    cache.check()
    cache.close()


def test_a_full_staging_memory_drops_stores_by_the_rule_of_the_tier_and_counts_them() -> None:
    cache = cache_of("full", host_tier("1MiB", staging="32KiB"), num_blocks=16, poison=False)
    streams, _ = device_of(cache)
    (level,) = levels_of(cache)
    writable = level.num_writable
    fill(cache)
    evicted = sum(group.evicted for group in cache.stats().groups)
    assert evicted > writable and not level.num_writable
    assert level.dropped == evicted - writable
    streams.end()
    assert cache.flush() and level.num_writable == writable and cache.stats().tiers[0].stored == writable
    cache.close()


@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_rows_stay_right_whenever_the_device_is_done(name: str, tmp_path: Any) -> None:
    cache = cache_of(name, host_tier("1MiB", **TINY), disk_tier(tmp_path, "4MiB", write="commit", **TINY))
    streams, _ = device_of(cache)
    with streams.ending():
        traffic(cache, 300, seed=3, engine=FakeEngine(cache))
        assert cache.flush(30)
        cache.check()
        assert sum(one.loaded for one in cache.stats().tiers)
        for level in levels_of(cache):
            assert level.buffer.num_free == level.buffer.num_records
        cache.close()


def test_layers_arrive_and_their_staging_memory_is_free_when_the_device_is_done() -> None:
    cache = cache_of("full", host_tier("1MiB", write="commit", **TINY))
    streams, _ = device_of(cache)
    (level,) = levels_of(cache)
    with streams.ending():
        fill(cache)
        assert cache.flush()
    cache.reset()
    whole, num_events = level.buffer.num_free, len(streams.events)
    sequence = cache.open(TEXTS[0], "tenant 0", layerwise=True)
    assert level.buffer.num_free < whole
    cache.core.memory.finish_copies()
    assert level.buffer.num_free < whole and not any(event.num_waits for event in streams.events[num_events:])
    with streams.ending():
        until = monotonic() + 10
        while level.buffer.num_free < whole and monotonic() < until:
            cache.check()
        assert level.buffer.num_free == whole
        sequence.close()
        cache.close()


@pytest.mark.parametrize("name", ["full", "state"])
def test_staging_memory_is_free_when_the_device_has_read_it_and_open_does_not_wait_for_that(name: str) -> None:
    cache = cache_of(name, host_tier("1MiB", write="commit", **TINY))
    streams, _ = device_of(cache)
    (level,) = levels_of(cache)
    with streams.ending():
        fill(cache)
        assert cache.flush()
    cache.reset()
    whole, num_events = level.buffer.num_free, len(streams.events)
    sequence = cache.open(TEXTS[0], "tenant 0")
    assert sequence.cached_tokens
    assert level.buffer.num_free < whole
    cache.check()
    assert not any(event.num_waits for event in streams.events[num_events + 1 :])
    with streams.ending():
        assert level.settle(monotonic() + 10) and level.buffer.num_free == whole
        sequence.close()
        cache.close()


def test_suspending_and_resuming_wait_for_nothing() -> None:
    cache = cache_of("full", poison=False)
    streams, _ = device_of(cache)
    engine = FakeEngine(cache)
    sequence = cache.open(TEXTS[0], "tenant 0", capacity=0)
    engine.spaces[id(sequence)] = 0
    sequence.extend(9)
    engine.step([sequence], [TEXTS[0][:9]])
    sequence.commit(TEXTS[0][:9])
    rate = cache.core.swap.rate.seconds
    sequence.suspend()
    sequence.resume()
    assert [entry[0] for entry in streams.log if entry[0] in ("out", "drain", "in")] == ["out", "drain", "in"]
    assert cache.core.swap.rate.seconds == rate, "not measured yet"
    with streams.ending():
        sequence.extend(9)
        engine.step([sequence], [TEXTS[0][9:18]])  # compares all rows
        sequence.commit(TEXTS[0][9:18])
        sequence.close()
        cache.close()
    assert cache.core.swap.rate.seconds != rate


def test_a_sleeping_cache_has_waited_and_a_closed_one_has_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of("full", poison=False)
    streams, pages = device_of(cache)
    locks: PageLocks = cache.core.memory.locks  # type: ignore[attr-defined]
    watch = locks.watch
    monkeypatch.setattr(locks, "watch", lambda memory: (watch(memory), locks.settle()))  # before it is used
    sequence = cache.open(TEXTS[0], "tenant 0")
    sequence.commit(TEXTS[0])
    with streams.ending():
        cache.sleep()
        assert streams.events[-1].num_waits
        cache.wake()
        assert streams.events[-1].num_waits, "the copies in host memory are freed"
        assert cache.stats().page_locked_nbytes == pages.nbytes > 0
        sequence.close()
        cache.close()
    assert pages.nbytes == cache.stats().page_locked_nbytes == 0


def test_on_a_cpu_a_block_is_copied_once_on_its_way_to_host_memory_and_once_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied, copy, copyto = [0], host_copy.copy_rows, np.copyto

    def counting(source: Any, target: Any, pairs: Any) -> None:
        copied[0] += len(pairs) * source.shape[1]
        copy(source, target, pairs)

    def counting_too(target: Any, source: Any) -> None:
        copied[0] += target.nbytes
        copyto(target, source)

    cache = cache_of("full", host_tier("1MiB", **TINY), num_blocks=16, poison=False)
    fill(cache)
    assert cache.flush()
    monkeypatch.setattr(host_copy, "copy_rows", counting)
    monkeypatch.setattr(np, "copyto", counting_too)
    nbytes = cache.core.memory.record_nbytes(0)
    before = cache.stats()
    assert run(cache, TEXTS[0]) == 36
    assert cache.flush()
    stats = cache.stats()
    num_moved = stats.tiers[0].stored - before.tiers[0].stored + stats.tiers[0].loaded - before.tiers[0].loaded
    assert num_moved >= 9 and copied[0] == num_moved * nbytes
    cache.close()


@pytest.mark.parametrize("nbytes", [-1, "much", 1.5])
def test_a_limit_of_page_locked_memory_is_one_of_bytes(nbytes: Any) -> None:
    told = {} if nbytes == "much" else {"field": "page_locked", "available": 0}
    with raises(BadInput, needed=nbytes, **told):
        Limits(page_locked=nbytes)
    assert Limits(page_locked="2MiB").page_locked == 2 << 20 and Limits().page_locked is None
    assert cache_of("full", page_locked="1MiB").stats().page_locked_nbytes == 0, "a CPU locks nothing"


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the system start no thread whose name begins with ``name``."""
    start = Thread.start

    def refused(thread: Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", refused)


def test_where_no_thread_can_be_started_the_caller_waits_and_nothing_runs_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What was queued would run beside a later call, with rows that other records are in by then."""
    cache = cache_of("full", disk_tier(tmp_path, "4MiB", write="commit", **TINY), num_blocks=60, poison=False)
    streams, _ = device_of(cache)
    (level,), engine = levels_of(cache), FakeEngine(cache)
    with streams.ending():
        with monkeypatch.context() as patch:
            refuse_threads(patch, "kvpagoda-copies")
            run(cache, TEXTS[0], engine)
            assert cache.flush(10) and level.tier.driver.stats().num_records == 10 and not level.dropped
        run(cache, TEXTS[1], engine)
        assert cache.flush(10) and not level.is_storing
        forget(cache)
        for text in TEXTS[:2]:
            assert run(cache, text, engine) >= 36
        assert cache.stats().tiers[0].failed == 0
        cache.check()
        cache.close()


def test_a_prefetch_that_gets_no_thread_takes_no_rows_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    cache = cache_of("full", disk_tier(tmp_path, "4MiB", write="commit", **TINY), num_blocks=60)
    (level,) = levels_of(cache)
    run(cache, TEXTS[0])
    assert cache.flush(10)
    forget(cache)
    with monkeypatch.context() as patch:
        refuse_threads(patch, "kvpagoda-prefetch")
        for _ in range(3):
            with pytest.raises(RuntimeError, match="new thread"):
                cache.prefetch(TEXTS[0], "tenant 0")
    prefetch = cache.prefetch(TEXTS[0], "tenant 0")
    until = monotonic() + 10
    while not prefetch.is_done and monotonic() < until:
        sleep(0.001)
    assert level.buffer.num_free < level.buffer.num_records
    prefetch.close()
    assert level.buffer.num_free == level.buffer.num_records
    cache.check()
    cache.close()


def test_staging_rows_of_a_store_that_fails_halfway_are_free_when_the_device_has_written_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A load that got them before would read the disk into them, and then the device would write over that."""
    cache = cache_of("mixed", disk_tier(tmp_path, "4MiB", write="commit", **TINY), num_blocks=60, poison=False)
    streams, _ = device_of(cache)
    (level,), memory = levels_of(cache), cache.core.memory
    true_store, true_out = Offloader.store, memory.to_host
    written: list[int] | None = None  # rows of the store that is under way, if it has several parts
    failed: list[int] = []
    taken: set[int] | None = None  # rows that were not free right after the failure

    def store(self: Offloader, level: Any, keys: Any, parts: Any, *given: Any, **named: Any) -> None:
        nonlocal written, taken
        written = [] if len(parts) > 1 else None
        true_store(self, level, keys, parts, *given, **named)
        if failed and taken is None:
            taken = {*level.buffer.places_of([*level.buffer.owners()])}

    def to_host(group: int, ids: Any, table: Any, rows: Any, *given: Any) -> None:
        if written and not failed:
            failed.extend(written)
            raise torch.cuda.OutOfMemoryError("no room to pack the second group")
        true_out(group, ids, table, rows, *given)
        if written is not None:
            written.extend(rows)

    monkeypatch.setattr(Offloader, "store", store)
    monkeypatch.setattr(memory, "to_host", to_host)
    run(cache, TEXTS[0])
    assert failed and level.dropped and taken is not None and {*failed} <= taken
    with streams.ending():
        assert cache.flush(10) and level.buffer.num_free == level.buffer.num_records
        cache.check()
        cache.close()


def test_what_follows_a_load_of_layers_that_fails_comes_after_its_copies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The side stream may still copy the first layer when the blocks get another owner, who writes them by the current one."""
    cache = cache_of("mixed", disk_tier(tmp_path, "4MiB", write="commit", **TINY), num_blocks=60, poison=False)
    streams, _ = device_of(cache)
    with streams.ending():
        run(cache, TEXTS[0])
        assert cache.flush(10)
    forget(cache)
    host, moves = cache.core.memory.host, 0
    move = host._move

    def fail_at_the_second(*given: Any, is_out: bool, **named: Any) -> None:
        nonlocal moves
        moves += streams.current() == "side" and not is_out
        if moves == 2:
            raise torch.cuda.OutOfMemoryError("no room for the regions of layer 1")
        move(*given, is_out=is_out, **named)

    monkeypatch.setattr(host, "_move", fail_at_the_second)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        cache.open(TEXTS[0], "tenant 0", capacity=0, layerwise=True)
    assert moves == 2
    (copied,) = [at for at, entry in enumerate(streams.log) if entry == ("in", "side")][-1:]
    recorded = [entry[2] for entry in streams.log[copied:] if entry[:2] == ("record", "side")]
    assert recorded and ("wait", "current", recorded[-1]) in streams.log[copied:]
    with streams.ending():
        monkeypatch.setattr(host, "_move", move)
        assert run(cache, TEXTS[0]) >= 32
        cache.check()
        cache.close()
