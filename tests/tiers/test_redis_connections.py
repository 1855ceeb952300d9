"""Connections to Redis and Valkey: servers that are none and say anything at all, or nothing; and URLs."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import count, product
from socket import AI_NUMERICHOST, create_server, getaddrinfo, socket
from threading import Event, Thread
from time import monotonic, sleep

import numpy as np
import pytest
from servers import SLACK, Client, free_ports, key_of

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.tiers import RecordBuffer, Status
from kvpagoda.tiers.redis import redis_driver
from raises import raises

pytest.importorskip("redis", reason="needs kvpagoda[redis]")

TIMEOUT, UNAVAILABLE = Status.TIMEOUT, Status.UNAVAILABLE
KEYS = [key_of(i) for i in range(8)]


@contextmanager
def made_up(serve: Callable[[socket, int], None], *, is_polite: bool = True) -> Iterator[str]:
    """A server that does ``serve(connection, its number)``, if polite after it was told who asks; its url."""
    with create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def accept() -> None:
            for number in count():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                Thread(target=one, args=(connection, number), daemon=True).start()

        def one(connection: socket, number: int) -> None:
            with connection, suppress(OSError):
                for _ in range(2 * is_polite):
                    connection.recv(1 << 16)
                    connection.sendall(b"+OK\r\n")
                serve(connection, number)

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{port}"
        listening.shutdown(2)
        thread.join(5)


RECORD = RecordBuffer.nbytes_for(1, 4000)
REPLIES = [
    b"", b"\n", b"+OK", b"+OK\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n", b"$-1\r\n", b"$-2\r\n", b"$0\r\n\r\n", b"$5\r\nhello\r\n",
    b"$5\r\nhello-MOVED 1 x:1\r\n", b":-1\r\n", b":1\r\n", b"$%d\r\n" % RECORD + b"x" * RECORD + b"\r\n", b"*1\r\n" * 10000,
    b"$536870912\r\n" + b"y" * 70000, b"$99999999999999999999999999999999\r\n", b"$1_0\r\n" + b"z" * 12, b"x" * 10000,
    "$٣\r\nabc\r\n".encode(), b"\xff\xfe\r\n", b"-\r\n", b"-ERR\r\n", b"-MOVED\r\n", b"-MOVED 1 :99999999999999999999\r\n",
    b"-MOVED 1 " + b"a" * 3000 + b":1\r\n", b"-MOVED 1 \xff\xff:1\r\n", b"-MOVED 1 a\0b:1\r\n", b"-ASK 1 127.0.0.1:1\r\n",
    b"-MOVED 99999 127.0.0.1:1\r\n", b"-OOM\r\n", b"-LOADING \r\n", b"-NOAUTH\r\n", b"HTTP/1.1 400 Bad Request\r\n",
]  # fmt: skip


def talk_to(url: str, seconds: float = 0.2) -> set[Status]:
    """Ask everything once; each answer is in time, and takes little memory."""
    buffer, seen = RecordBuffer(2, 4000), set()
    driver = redis_driver(buffer, url)
    for call in (
        lambda deadline: driver.load(KEYS[:2], [0, 1], deadline),
        lambda deadline: driver.store(KEYS[:2], [0, 1], deadline),
        lambda deadline: driver.lookup(KEYS[:2], deadline, 0.0).statuses,
        lambda deadline: driver.discard(KEYS[:2], deadline),
    ):
        start = monotonic()
        told = call(start + seconds)
        assert len(told) == 2 and monotonic() <= start + 1.1 * seconds + SLACK
        seen.update(told)
    driver.stats()
    driver.close()
    return seen


@pytest.mark.parametrize("times", [300, pytest.param(30_000, marks=pytest.mark.slow)])
def test_many_replies_that_are_none(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of right and wrong replies in any order, cut anywhere: no exception, nothing late, no memory taken."""
    random = np.random.default_rng(times)

    def serve(connection: socket, number: int) -> None:
        mine = np.random.default_rng(number)
        connection.recv(1 << 16)
        said = b"".join(REPLIES[i] for i in mine.integers(len(REPLIES), size=mine.integers(1, 6)))
        flipped = bytearray(said[: mine.integers(len(said) + 1)])
        if flipped:
            flipped[mine.integers(len(flipped))] ^= 1 << mine.integers(8)
        connection.sendall(flipped)
        connection.shutdown(1)
        while connection.recv(1 << 16):
            pass

    known, buffer = partial(getaddrinfo, flags=AI_NUMERICHOST), RecordBuffer(2, 4000)
    monkeypatch.setattr("socket.getaddrinfo", known)  # how long the look-up of a name takes depends on where this runs
    with made_up(serve) as url:
        driver = redis_driver(buffer, url)
        tracemalloc.start()
        try:
            for _ in range(times):
                start = monotonic()
                call = random.integers(4)
                if call == 0:
                    driver.load(KEYS[:2], [0, 1], start + 1)
                elif call == 1:
                    driver.store(KEYS[:2], [0, 1], start + 1)
                else:
                    driver.lookup(KEYS[:8], start + 1, 0.0)
                assert monotonic() < start + 1.1 + SLACK
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
        driver.close()


def drip(connection: socket, _: int) -> None:
    while True:
        connection.sendall(b"$")
        sleep(0.01)


def drip_a_record(connection: socket, _: int) -> None:
    connection.sendall(b"$%d\r\n" % RECORD)
    while True:
        connection.sendall(b"x")
        sleep(0.01)


def flood(connection: socket, _: int) -> None:
    while True:
        connection.sendall(b"$536870912\r\n" + bytes(1 << 16))


def say_nothing(connection: socket, _: int) -> None:
    while connection.recv(1 << 16):
        pass


def read_nothing(connection: socket, _: int) -> None:
    sleep(3)


@pytest.mark.parametrize(
    ("serve", "is_polite"),
    [
        *product((drip, drip_a_record, flood, say_nothing, read_nothing), [True]),
        (drip, False),
        (flood, False),
    ],
)
def test_a_server_that_takes_its_time(serve: Callable[[socket, int], None], is_polite: bool) -> None:
    with made_up(serve, is_polite=is_polite) as url:
        assert talk_to(url) <= {TIMEOUT, UNAVAILABLE}


def test_a_large_record_to_a_server_that_does_not_read() -> None:
    buffer = RecordBuffer(1, 30_000_000)
    with made_up(read_nothing) as url:
        driver, start = redis_driver(buffer, url), monotonic()
        assert driver.store(KEYS[:1], [0], start + 0.3) == [TIMEOUT] and monotonic() < start + 0.33 + SLACK
        driver.close()


def test_redirections_without_end() -> None:
    """Each server sends to another one: after a few the key is not available, and no thread is left looking for a name."""
    asked, before = [], {thread.name for thread in threading.enumerate()}

    def serve(connection: socket, number: int) -> None:
        while connection.recv(1 << 16):
            asked.append(number)
            connection.sendall(b"-MOVED 7 name%d.invalid:1\r\n" % number * 3)

    with made_up(serve) as url:
        assert talk_to(url) == {UNAVAILABLE} and len(asked) < 200
    assert not {thread.name for thread in threading.enumerate() if "kvpagoda" in thread.name} - before


def test_nobody_there() -> None:
    (port,) = free_ports(1)
    for url in (f"redis://127.0.0.1:{port}", "unix:///nowhere/socket", f"redis://no-such-host.invalid:{port}"):
        driver = redis_driver(RecordBuffer(1, 100), url)
        assert driver.load(KEYS[:1], [0], monotonic() + 5) == [UNAVAILABLE] and driver.last_error
        assert driver.stats().nbytes == driver.stats().capacity_nbytes == 0
        driver.close()


def test_a_name_that_is_long_in_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's look-up of a name knows no deadline; the tier does."""
    may = Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: may.wait(5) and [])
    client = Client("redis://some.name")
    assert client.load(1, seconds=0.2) == [TIMEOUT]  # and the client proves that it is in time
    may.set()
    assert client.tier.close(monotonic() + 5)


# -- what cannot be --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    "  host http://host redis:// redis://host:0 redis://host:99999 redis://host/x unix:// redis://[::1 redis://host?ssl=x "
    "redis://host?db=x redis+sentinel://host:1 redis+sentinel://host:0#kv redis+sentinel://#kv".split(" "),
)
def test_a_url_that_is_none(url: str) -> None:
    with raises(BadInput, needed="url"):
        redis_driver(RecordBuffer(1, 100), url)


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(BadInput, needed=536875008, available=536870912):
        redis_driver(RecordBuffer(1, 512 << 20), "redis://host")
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in ("redis", "redis_connections"):
        monkeypatch.delitem(sys.modules, f"kvpagoda.tiers.{name}")
        monkeypatch.delattr(f"kvpagoda.tiers.{name}")  # set by the next import, and set back after the test
    without = import_module("kvpagoda.tiers.redis")
    with raises(MissingExtra, name="redis"):
        without.redis_driver(RecordBuffer(1, 100), "redis://host")
