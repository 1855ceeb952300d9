"""Doubles of a device that works later than the host asks it to: streams, events and page-locking, on a CPU.

What the streams were told is in ``log``. The current stream copies at once; the side stream drains when the test says so,
or when another stream waits for it, and then events are over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

import torch

from kvpagoda.core.memory.host_copy import HostCopies
from kvpagoda.core.memory.page_locks import PageLocks


class FakeEvent:
    """An event of ``stream``, number ``number`` of all; ``over`` is set by the test."""

    def __init__(self, stream: str, number: int, over: bool) -> None:
        self.stream, self.number, self._over, self.num_waits = stream, number, Event(), 0
        if over:
            self._over.set()

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        self.num_waits += 1
        assert self._over.wait(20), "an event that never is over"

    def end(self) -> None:
        self._over.set()


class FakeStreams:
    """``Streams`` with the names of streams for streams. ``is_late``: events are over when ``end`` is called."""

    side = "side"

    def __init__(self, is_late: bool = True) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.events: list[FakeEvent] = []
        self.is_late, self._current = is_late, "current"
        self._due, self._lock = list[Callable[[], None]](), Lock()

    def current(self) -> str:
        return self._current

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def event(self, stream: str) -> FakeEvent:
        self.events.append(FakeEvent(stream, len(self.events), over=not self.is_late))
        self.log.append(("record", stream, len(self.events) - 1))
        return self.events[-1]

    def wait(self, stream: str, event: FakeEvent) -> None:
        self.log.append(("wait", stream, event.number))
        if stream == "current":
            self.drain()

    def defer(self, call: Callable[[], None]) -> None:
        """Let the side stream do ``call`` later."""
        self._due.append(call)
        if not self.is_late:
            self.drain()

    def drain(self) -> None:
        """Do what was deferred."""
        with self._lock:
            due, self._due = self._due, []
            for call in due:
                call()

    def end(self) -> None:
        """Let the device finish all that it was given."""
        events = [*self.events]
        self.drain()
        for event in events:
            event.end()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Let the device finish again and again, a little later than it is asked to."""
        is_over = Event()

        def work() -> None:
            while not is_over.wait(0.002):
                self.end()
            self.end()

        thread = Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


class FakePages:
    """``LockRuntime`` that counts, and refuses what would lock more than ``most`` bytes."""

    def __init__(self, most: int = 1 << 60) -> None:
        self.most, self.locked, self.calls = most, dict[int, int](), list[tuple[str, int]]()

    @property
    def nbytes(self) -> int:
        return sum(self.locked.values())

    def register(self, address: int, nbytes: int) -> None:
        if self.nbytes + nbytes > self.most:
            raise RuntimeError("CUDA error: out of memory")
        assert address not in self.locked and not address % 4096
        self.locked[address] = nbytes
        self.calls.append(("register", nbytes))

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", self.locked.pop(address)))


class LoggedCopies(HostCopies):
    """``HostCopies`` that logs each copy with the stream that does it, beside what the streams were told."""

    def __init__(self, streams: FakeStreams, locks: PageLocks | None) -> None:
        super().__init__(torch.device("cpu"), locks, streams)
        self.log, self._named = streams.log, streams

    def _move(self, *given: Any, is_out: bool, **named: Any) -> None:
        self.log.append(("out" if is_out else "in", self._named.current()))
        if self._named.current() == "side":
            self._named.drain()  # a stream does things in their order
        super()._move(*given, is_out=is_out, **named)

    def _drain(self, *given: Any) -> None:
        self.log.append(("drain", self._named.current()))
        self._named.defer(lambda: HostCopies._drain(self, *given))

    def _through_processor(self, *given: Any, **named: Any) -> None:
        self.log.append(("processor", self._named.current()))
        super()._through_processor(*given, **named)


def device_of(cache: Any, is_late: bool = True, most: int = 1 << 60) -> tuple[FakeStreams, FakePages]:
    """Let the memory of ``cache``, on a CPU, copy as one on a GPU does, with the staging memory of its tiers page-locked; and
    return the doubles."""
    memory, streams, pages = cache.core.memory, FakeStreams(is_late), FakePages(most)
    memory.locks = PageLocks(pages, 1 << 60)
    memory.host = LoggedCopies(streams, memory.locks)
    memory.locks_pages = True
    for table in (*(level.buffer.records for level in cache.core.tiers.levels), cache.core.swap.table()):
        memory.locks.watch(table)
        memory.locks.num_rows(table, len(table) - 1)
    memory.locks.settle()
    return streams, pages
