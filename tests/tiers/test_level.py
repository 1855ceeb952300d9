"""A level says that its stores are done only when their staging rows are free again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from hashlib import sha256
from time import monotonic, sleep
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")

from kvpagoda.errors import CheckFailed
from kvpagoda.pages import pages
from kvpagoda.tiers import host_tier
from kvpagoda.tiers.level import Level, RecordIdentity

KEYS = [sha256(bytes([i])).digest() for i in range(4)]


@contextmanager
def level_of() -> Iterator[Level]:
    level = Level(host_tier("1MiB", staging="64KiB"), RecordIdentity("w", "schema", 4), 256, [], pages)
    try:
        yield level
    finally:
        assert level.tier.close(monotonic() + 5)


def test_a_settled_level_has_its_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    with level_of() as level:
        release = level.buffer.release

        def slow(rows: Sequence[int]) -> None:
            sleep(0.1)
            release(rows)

        monkeypatch.setattr(level.buffer, "release", slow)
        whole, room = level.buffer.num_free, level.num_writable
        level.store(KEYS, level.buffer.acquire(len(KEYS), owner=level), told=lambda: told.append(True))
        assert not level.settle(monotonic() + 0.02)
        assert level.settle(monotonic() + 5)
        assert (level.buffer.num_free, level.num_writable) == (whole, room)
        assert told == [True]
        level.check()


def test_a_level_is_settled_though_what_it_tells_is_not_heard() -> None:
    def deaf() -> None:
        raise ValueError("deaf")

    with level_of() as level:
        whole, began = level.buffer.num_free, monotonic()
        level.store(KEYS, level.buffer.acquire(len(KEYS), owner=level), told=deaf)
        assert level.settle(monotonic() + 5) and monotonic() - began < 4
        assert level.buffer.num_free == whole


def test_a_store_that_is_interrupted_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Future[Any]):
        def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
            raise KeyboardInterrupt

    with level_of() as level:
        monkeypatch.setattr(level.tier, "store", lambda *_: Interrupted())
        rows = level.buffer.acquire(len(KEYS), owner=level)
        with pytest.raises(KeyboardInterrupt):
            level.store(KEYS, rows)
        assert level.settle(monotonic())
        level.buffer.release(rows)  # as the caller does, who was interrupted
        level.check()


def test_a_store_that_cannot_begin_leaves_nothing_to_wait_for() -> None:
    def refuse(begin: Callable[[], None]) -> None:
        raise RuntimeError("no event on this device")

    with level_of() as level:
        rows = level.buffer.acquire(len(KEYS), owner=level)
        with pytest.raises(RuntimeError, match="no event"):
            level.store(KEYS, rows, when=refuse)
        assert level.settle(monotonic()) and not level.is_storing
        level.buffer.release(rows)  # as the caller does
        level.check()


def test_records_of_other_weights_stay_intact_when_weights_change_beside_a_call() -> None:
    """Keys and headers are of one identity: of that which the level had when the keys were made."""
    begins: list[Callable[[], None]] = []
    with level_of() as level:
        old, rows = level.tier.fingerprint, level.buffer.acquire(len(KEYS), owner=level)
        level.store(KEYS, rows, when=begins.append)
        level.set_identity(RecordIdentity("other", "schema", 4))
        begins[0]()
        assert level.settle(monotonic() + 5)
        rows = level.buffer.acquire(len(KEYS), owner=level)
        assert level.finish_load(level.start_load(KEYS, rows, monotonic() + 5, old)) == set()
        level.set_identity(RecordIdentity("w", "schema", 4))
        assert level.finish_load(level.start_load(KEYS, rows, monotonic() + 5)) == set()
        level.buffer.release(rows)
        stats = level.stats()
        assert (stats.num_records, stats.loaded, stats.failed) == (len(KEYS), 2 * len(KEYS), 0)


def test_loads_that_two_threads_finish_in_another_order_do_not_count_as_faster_than_nothing() -> None:
    with level_of() as level:
        rows = level.buffer.acquire(2, owner=level)
        level.store(KEYS[:1], rows[:1])
        assert level.settle(monotonic() + 5)
        level._measured_until = monotonic() + 5  # by a thread that read the clock later
        rows = level.buffer.acquire(1, owner=level)
        assert not level.finish_load(level.start_load(KEYS[:1], rows, monotonic() + 5))
        assert level.seconds_per_byte == 0.0 and level._measured_until > monotonic() + 4


def test_a_check_beside_a_thread_that_gives_rows_back_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        is_released = False

    with level_of() as level:
        owner, owners = Owner(), level.buffer.owners
        rows = level.buffer.acquire(2, owner=owner)

        def then_released() -> dict[int, object]:
            found = owners()
            level.buffer.release_all(owner)
            owner.is_released = True
            return found

        monkeypatch.setattr(level.buffer, "owners", then_released)
        level.check()
        monkeypatch.setattr(level.buffer, "owners", owners)
        level.check()
        rows = level.buffer.acquire(1, owner=owner)
        with pytest.raises(CheckFailed, match="without a live owner"):
            level.check()
        level.buffer.release(rows)
