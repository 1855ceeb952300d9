"""Host memory is page-locked from its start on, ahead of its use, within a budget, and unlocked with it."""

import gc
import logging
import os
from threading import Thread

import numpy as np
import pytest

from kvpagoda.core.memory import page_locks
from kvpagoda.core.memory.page_locks import PageLocks, machine_nbytes
from kvpagoda.pages import pages
from streams import FakePages

PIECE = 1 << 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locks, "PIECE", PIECE)


def made(most: int = 1 << 40, refuse_above: int = 1 << 60, nbytes: int = 10 * PIECE):
    runtime = FakePages(refuse_above)
    locks, memory = PageLocks(runtime, most), pages(nbytes)
    locks.watch(memory)
    locks.settle()
    return runtime, locks, memory


def test_the_first_piece_is_locked_before_use_and_further_ones_ahead_of_it() -> None:
    runtime, locks, memory = made()
    assert locks.nbytes == runtime.nbytes == PIECE and runtime.calls == [("register", PIECE)]
    table = memory.reshape(-1, 4096)
    per_piece = PIECE // 4096
    assert locks.num_rows(table, 3) == per_piece
    locks.settle()
    assert locks.nbytes == PIECE, "what is locked is enough"
    locks.num_rows(
        table, 2 * per_piece
    )  # a row of the third piece: two pieces and a row are used, as much again is wanted
    locks.settle()
    assert locks.nbytes == 6 * PIECE
    assert all(nbytes == PIECE for _, nbytes in runtime.calls)
    locks.num_rows(table, len(table) - 1)
    locks.settle()
    assert locks.num_rows(table, 0) == len(table) and runtime.nbytes == memory.nbytes == locks.nbytes


@pytest.mark.parametrize(
    "offset, width, step", [(0, 4096, 4096), (100, 4000, 4096), (128, 50, 8192), (4096, PIECE, PIECE)]
)
def test_rows_count_as_locked_when_their_last_byte_is(offset: int, width: int, step: int) -> None:
    _, locks, memory = made()
    table = np.lib.stride_tricks.as_strided(memory[offset:], ((10 * PIECE - offset - width) // step, width), (step, 1))
    expected = sum(offset + row * step + width <= PIECE for row in range(len(table)))
    assert locks.num_rows(table, 0) == expected


def test_memory_that_nobody_watches_is_not_locked() -> None:
    _, locks, _ = made()
    assert locks.num_rows(pages(8192).reshape(2, 4096), 1) == 0


def test_a_budget_ends_the_locking_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runtime, locks, memory = made(most=2 * PIECE)
        table = memory.reshape(-1, PIECE)
        for row in (3, 5, 9):
            locks.num_rows(table, row)
            locks.settle()
    assert locks.num_rows(table, 9) == 2 and runtime.nbytes == 2 * PIECE
    assert len(caplog.records) == 1 and "Limits.page_locked" in caplog.text


def test_a_refusal_ends_the_locking_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        runtime, locks, memory = made(refuse_above=3 * PIECE)
        other = pages(PIECE)
        locks.num_rows(memory.reshape(-1, PIECE), 9)
        locks.settle()
        locks.watch(other)
        locks.settle()
    assert locks.nbytes == runtime.nbytes == 3 * PIECE and locks.num_rows(other.reshape(1, -1), 0) == 0
    assert len(caplog.records) == 1 and "out of memory" in caplog.text


def test_memory_is_unlocked_when_it_is_collected_and_another_may_be_locked_then() -> None:
    runtime, locks, memory = made(most=PIECE)
    other = pages(PIECE)
    locks.watch(other)
    locks.settle()
    assert not locks.num_rows(other.reshape(1, -1), 0)
    del memory
    gc.collect()
    assert runtime.nbytes == locks.nbytes == 0
    locks.num_rows(other.reshape(1, -1), 0)
    locks.settle()
    assert locks.num_rows(other.reshape(1, -1), 0) == 1


def test_a_view_is_locked_with_its_memory_and_twice_is_once() -> None:
    runtime, locks, memory = made(nbytes=PIECE)
    locks.watch(memory[4096:8192])
    locks.watch(memory.reshape(-1, 4096)[2:])
    locks.settle()
    assert [*runtime.locked.items()] == [(memory.ctypes.data, PIECE)]


def test_closing_unlocks_everything_and_what_is_used_afterwards_is_locked_again() -> None:
    runtime, locks, memory = made()
    locks.close()
    assert runtime.nbytes == locks.nbytes == 0 and runtime.calls[-1] == ("unregister", PIECE)
    assert locks.num_rows(memory.reshape(-1, PIECE), 0) == 0
    locks.settle()
    assert locks.num_rows(memory.reshape(-1, PIECE), 0) == 1


def test_a_forked_child_has_nothing_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, locks, memory = made()
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    assert locks.num_rows(memory.reshape(-1, PIECE), 0) == 0
    del memory
    gc.collect()
    assert runtime.nbytes == PIECE, "a child unlocks nothing"


def test_the_machine_says_how_much_memory_it_has() -> None:
    assert machine_nbytes() > 1 << 28


@pytest.mark.parametrize("row", [0, 9])
def test_what_is_locked_beside_close_is_unlocked(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """``row`` 0: the first piece is being locked when everything is unlocked; 9: a later one."""
    runtime = FakePages()
    locks, memory = PageLocks(runtime, 1 << 40), pages(10 * PIECE)
    register, unlock = runtime.register, locks._unlock

    def closing(address: int, nbytes: int) -> None:
        register(address, nbytes)
        if (address - memory.ctypes.data) // PIECE == row:
            for one in locks._ranges.values():  # as close() does, which then waits for this thread
                with locks._lock:
                    one.wanted = one.begin
                    unlock(one)

    monkeypatch.setattr(runtime, "register", closing)
    locks.watch(memory)
    locks.num_rows(memory.reshape(-1, PIECE), 9)
    locks.settle()
    assert runtime.nbytes == locks.nbytes == 0 and not any(one.pieces for one in locks._ranges.values())
    monkeypatch.setattr(runtime, "register", register)
    table = memory.reshape(-1, PIECE)
    locks.num_rows(table, 9)
    locks.settle()
    assert locks.num_rows(table, 9) == 10 and runtime.nbytes == locks.nbytes == memory.nbytes
    locks.close()
    assert runtime.nbytes == locks.nbytes == 0


def test_any_error_of_locking_ends_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakePages()
    locks, memory = PageLocks(runtime, 1 << 40), pages(PIECE)

    def register(address: int, nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(runtime, "register", register)
    locks.watch(memory)
    locks.settle()
    locks.close()
    assert locks.nbytes == 0 and "MemoryError()" in caplog.text


def test_where_no_thread_can_be_started_the_next_use_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    runtime = FakePages()
    locks, memory = PageLocks(runtime, 1 << 40), pages(PIECE)
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", start)
        locks.watch(memory)
        locks.settle()
    assert locks.num_rows(memory.reshape(1, -1), 0) == 0
    locks.settle()
    assert locks.num_rows(memory.reshape(1, -1), 0) == 1 and runtime.calls == [("register", PIECE)]
