"""Copies between a device and the host that nobody waits for: their order, what the host is told, and when.

``streams`` has the doubles: bytes are copied at once, and events are over when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, get_ident
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda.core.memory import host_copy
from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.host_copy import HostCopies, LayerwiseCopy, pairs_of
from kvpagoda.core.memory.page_locks import PageLocks
from kvpagoda.pages import Bytes, pages
from kvpagoda.schema import Field, RowLayout
from kvpagoda.units import table_rows
from records import records_of
from streams import FakePages, FakeStreams, LoggedCopies


def arena(order: str = "block", seed: int = 0) -> Arena:
    fields = [Field("k", 3, (8,), "float16"), Field("v", 2, (8,), "uint8")]
    made = Arena(
        RowLayout.build((layer, field) for layer in range(3) for field in fields), 40, device="cpu", order=order
    )
    made.buffer[:] = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, made.nbytes, np.uint8))
    return made


def table_of(rows: int, width: int) -> Bytes:
    return pages(rows * width).reshape(rows, width)


class Bench:
    """``HostCopies`` over doubles, with a table whose first ``num_locked`` bytes are page-locked (None: all)."""

    def __init__(self, rows: int, width: int, num_locked: int | None = None, is_late: bool = True) -> None:
        self.streams, self.table = FakeStreams(is_late), table_of(rows, width)
        self.locks = PageLocks(FakePages(), 1 << 60 if num_locked is None else num_locked)
        self.locks.watch(self.table)
        self.locks.settle()
        self.copies = LoggedCopies(self.streams, self.locks)

    @property
    def log(self) -> list[tuple[Any, ...]]:
        return self.streams.log


@pytest.fixture
def source() -> Arena:
    return arena()


def test_blocks_are_gathered_in_stream_order_and_drained_aside(source: Arena) -> None:
    bench = Bench(10, source.layout.nbytes)
    bench.copies.out(source, np.array([3, 1]), bench.table, [7, 2])
    assert bench.log == [
        ("out", "current"), ("record", "current", 0), ("wait", "side", 0), ("drain", "side"), ("record", "side", 1),
    ]  # fmt: skip
    assert not bench.table.any(), "not there yet"
    bench.copies.out(source, np.array([4]), bench.table, [0])
    assert bench.log[5:] == [
        ("out", "current"), ("record", "current", 2), ("wait", "side", 2), ("wait", "side", 1), ("drain", "side"),
        ("record", "side", 3),
    ]  # fmt: skip
    assert not any(event.num_waits for event in bench.streams.events), "the host waits for nothing"
    before = records_of(source, [3, 1, 4])
    source.buffer.zero_()  # the blocks were given away
    bench.streams.end()
    assert torch.equal(torch.from_numpy(bench.table[[7, 2, 0]]), before)


def test_what_is_copied_back_waits_on_the_device_for_what_was_copied_out(source: Arena) -> None:
    bench, target = Bench(10, source.layout.nbytes), arena(seed=1)
    bench.copies.out(source, np.array([3, 1]), bench.table, [7, 2])
    del bench.log[:]
    bench.copies.into(target, np.array([8, 9]), bench.table, [2, 7])
    assert bench.log == [("wait", "current", 1), ("in", "current"), ("record", "current", 2)]
    assert torch.equal(records_of(target, [9, 8]), records_of(source, [3, 1]))
    bench.copies.out(source, np.array([5]), bench.table, [2])
    assert ("wait", "side", 2) in bench.log, "rows are written again after they were read"


def test_who_follows_a_copy_is_told_after_its_event_in_order_and_not_before(source: Arena) -> None:
    bench, told, here = Bench(10, source.layout.nbytes), list[int](), get_ident()
    done = Event()
    for number in range(2):
        bench.copies.out(source, np.array([3 + number]), bench.table, [number])
        bench.copies.then(lambda number=number: told.append(number))

    def last() -> None:
        told.append(get_ident() != here)
        done.set()

    bench.copies.then(last)
    sleep(0.05)
    assert told == []
    bench.streams.events[1].end()
    until = monotonic() + 10
    while told != [0] and monotonic() < until:
        sleep(0.001)
    assert told == [0] and not done.wait(0.05)
    bench.streams.end()
    assert done.wait(10) and told == [0, 1, True]
    bench.copies.close()


def test_who_follows_a_copy_that_is_over_is_called_now(source: Arena) -> None:
    for copies in (Bench(10, 100).copies, HostCopies(torch.device("cpu")), Bench(4, 400, is_late=False).copies):
        told = list[int]()
        copies.then(lambda told=told: told.append(get_ident()))
        assert told == [get_ident()]
    bench = Bench(10, source.layout.nbytes, is_late=False)
    bench.copies.out(source, np.array([3]), bench.table, [0])
    bench.copies.then(lambda: told.append(0))
    assert told[-1] == 0


def test_a_follower_that_fails_is_logged_and_others_go_on(source: Arena, caplog: pytest.LogCaptureFixture) -> None:
    bench, told = Bench(10, source.layout.nbytes), list[int]()

    def fail() -> None:
        raise ValueError("deaf")

    bench.copies.out(source, np.array([3]), bench.table, [0])
    bench.copies.then(fail)
    bench.copies.then(lambda: told.append(1))
    bench.streams.end()
    bench.copies.close()
    assert told == [1] and "deaf" in caplog.text


def test_a_full_stage_leaves_the_copy_to_the_current_stream(source: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    width = source.layout.nbytes
    monkeypatch.setattr(host_copy, "_STAGE_NBYTES", 3 * width)
    bench = Bench(10, width)
    bench.copies.out(source, np.array([3, 1]), bench.table, [7, 2])
    del bench.log[:]
    bench.copies.out(source, np.array([4, 5]), bench.table, [0, 1])
    assert bench.log == [("wait", "current", 1), ("out", "current"), ("record", "current", 2)]
    assert torch.equal(torch.from_numpy(bench.table[[0, 1]]), records_of(source, [4, 5]))
    bench.copies.out(source, np.array([4]), bench.table, [3])
    assert bench.log[-2] == ("drain", "side"), "one more fits"
    bench.streams.end()
    bench.copies.out(source, np.array([6, 7]), bench.table, [4, 5])
    assert bench.log[-2] == ("drain", "side"), "what is drained makes room"
    counts = bench.copies.num_staged, bench.copies.num_direct, bench.copies.num_pageable
    assert counts == (3, 1, 0)


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("width_of_record", [0.3, 1, 2.5])
def test_rows_that_are_not_locked_go_through_the_processor_and_bytes_are_the_same(
    order: str, width_of_record: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpagoda.core.memory.page_locks.PIECE", 4096)
    source, target = arena(order), arena(order, seed=1)
    width = int(source.layout.nbytes * width_of_record)
    bench = Bench(160, width, num_locked=4096, is_late=False)
    random, before = np.random.default_rng(2), records_of(target, range(40))
    num_locked = bench.locks.num_rows(bench.table, 0)
    assert 0 < num_locked < 160
    for n in (1, 2, 5, 18):
        out, into = (random.permutation(40)[:n].astype(np.int32) for _ in range(2))
        rows = random.permutation(2 * num_locked)[: table_rows(n, source.layout.nbytes, width)].tolist()
        bench.copies.out(source, out, bench.table, rows)
        bench.copies.into(target, into, bench.table, rows)
        before[into] = records_of(source, out)
        assert torch.equal(records_of(target, range(40)), before)
    assert bench.copies.num_pageable and bench.copies.num_staged


def test_nothing_is_page_locked_where_that_is_refused_and_bytes_are_the_same(source: Arena) -> None:
    bench, target = Bench(10, source.layout.nbytes, num_locked=0), arena(seed=1)
    bench.copies.out(source, np.array([3, 1]), bench.table, [7, 2])
    bench.copies.into(target, np.array([8, 9]), bench.table, [7, 2])
    assert torch.equal(records_of(target, [8, 9]), records_of(source, [3, 1]))
    assert bench.copies.num_pageable == 2 and not bench.copies.num_staged + bench.copies.num_direct


def test_layers_arrive_aside_and_a_reader_of_one_waits_for_its_event_alone() -> None:
    source, target, told = arena("layer"), arena("layer", seed=1), list[str]()
    bench = Bench(10, source.layout.nbytes)
    bench.copies.out(source, np.array([3, 1]), bench.table, [7, 2])
    del bench.log[:]
    copy = LayerwiseCopy(target, [(np.array([8, 9]), bench.table, [7, 2])], lambda: told.append("done"), bench.copies)
    assert [entry for entry in bench.log if entry[0] == "in"] == [("in", "side")] * 3
    ends = [entry[2] for entry in bench.log if entry[:2] == ("record", "side")]
    del bench.log[:]
    copy.wait(1)
    assert bench.log == [("wait", "current", ends[1])] and not copy.is_done
    copy.wait(0)
    copy.wait(2)
    assert copy.is_done and told == [], "its rows are read until the last event"
    bench.streams.end()
    bench.copies.close()
    assert told == ["done"] and torch.equal(records_of(target, [8, 9]), records_of(source, [3, 1]))


def test_blocks_of_a_cancelled_copy_are_written_after_it() -> None:
    source, told = arena("layer"), list[str]()
    bench = Bench(10, source.layout.nbytes)
    copy = LayerwiseCopy(source, [(np.array([8, 9]), bench.table, [7, 2])], lambda: told.append("done"), bench.copies)
    last = bench.streams.events[-1].number
    copy.cancel()
    copy.cancel()
    assert bench.log[-1] == ("wait", "current", last) and told == []
    bench.streams.end()
    bench.copies.close()
    assert told == ["done"]


@pytest.mark.parametrize("width, table_width", [(8, 8), (8, 20), (20, 8), (8, 5)])
@pytest.mark.parametrize("is_out", [False, True])
def test_pairs_name_each_piece_once(width: int, table_width: int, is_out: bool) -> None:
    ids, rows = np.array([5, 3, 9]), np.arange(100, 100 + table_rows(3, width, table_width))
    pairs = pairs_of(width, table_width, ids, rows, is_out=is_out)
    found = [
        (number, *(pair if is_out else pair[::-1])) for number, many in enumerate(pairs.tolist()) for pair in many
        if pair != [-1, -1]
    ]  # fmt: skip
    expected: Sequence[tuple[int, int, int]]
    if width > table_width:
        many = -(-width // table_width)
        expected = [(piece, ids[i], rows[i * many + piece]) for piece in range(many) for i in range(3)]
    else:
        each = table_width // width
        expected = [(i % each, ids[i], rows[i // each]) for i in range(3)]
    assert sorted(found) == sorted(expected)
