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

from kvpagoda.pages import pages
from kvpagoda.tiers import Status, host_tier
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
    told: list[Status] = []
    with level_of() as level:
        release = level.buffer.release

        def slow(rows: Sequence[int]) -> None:
            sleep(0.1)
            release(rows)

        monkeypatch.setattr(level.buffer, "release", slow)
        whole, room = level.buffer.num_free, level.num_writable
        level.store(KEYS, level.buffer.acquire(len(KEYS), owner=level), told=told.extend)
        assert not level.settle(monotonic() + 0.02)
        assert level.settle(monotonic() + 5)
        assert (level.buffer.num_free, level.num_writable) == (whole, room)
        assert told == [Status.OK] * len(KEYS)
        level.check()


def test_a_level_is_settled_though_what_it_tells_is_not_heard() -> None:
    def deaf(_: list[Status]) -> None:
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
