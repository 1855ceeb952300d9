"""Redis and Valkey: real servers that are well, full, hung, dead or move their keys, and made-up ones that say anything."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import AI_NUMERICHOST, create_server, gaierror, socket
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from outages import ALONE, LONG, QUICK, more_than_fits, writers_that_are_killed
from servers import (
    SLACK,
    Client,
    Server,
    ask,
    free_ports,
    has_redis,
    key_of,
    listening,
    redis_cluster,
    redis_server,
    wait_for,
)

from kvpagoda.errors import BadInput
from kvpagoda.tiers import RecordBuffer, Status, redis, resp
from kvpagoda.tiers.conformance import CHECKS
from kvpagoda.tiers.redis import PREFIX, RedisDriver, redis_driver

OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE, REJECTED = Status
needs_redis = pytest.mark.skipif(not has_redis(), reason="no redis-server: apt-get install redis-server")
KEYS = [key_of(i) for i in range(64)]


def soon(seconds: float = 5.0) -> float:
    return monotonic() + seconds


def name_of(i: int) -> bytes:
    return PREFIX + KEYS[i].hex().encode()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis"), memory="64mb") as server:
        yield server


@pytest.fixture
def server(kept: Server) -> Server:
    """A server, up and empty."""
    ask(kept.folder / "socket", "FLUSHALL")
    return kept


@pytest.fixture(scope="module")
def kept_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as server:
        yield server


@pytest.fixture
def cluster(kept_cluster: Server) -> Server:
    """Three servers that are a cluster, up and empty."""
    for port in kept_cluster.ports:
        ask(port, "FLUSHALL")
    return kept_cluster


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ssl.SSLContext]]:
    """A server with TLS and a password, and what it takes to trust it."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key", folder / "certificate"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=kvpagoda -addext"
    subprocess.run(
        [*request.split(), "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    (port,) = free_ports(1)
    with redis_server(
        folder, "--tls-port", port, "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no",
        "--requirepass", "pass word@",
    ) as server:  # fmt: skip
        server.address = f"rediss://:pass%20word%40@127.0.0.1:{port}/3"
        yield server, ssl.create_default_context(cafile=certificate)


# -- servers that are well -------------------------------------------------------------------------------------------------


@needs_redis
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("how", ["tcp", "unix", "tls", "cluster"])
def test_the_driver_conforms(
    how: str, check: Callable[..., None], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "_INFO_SECONDS", 0.0)
    options: dict[str, Any] = {}
    if how == "cluster":
        server = request.getfixturevalue("cluster")
        url = server.address
    elif how == "tls":
        server, options["tls"] = request.getfixturevalue("secured")
        url = server.address
    else:
        server = request.getfixturevalue("server")
        url = server.address if how == "tcp" else f"unix://{server.folder}/socket"
    made: list[RedisDriver] = []

    def make(buffer: RecordBuffer) -> RedisDriver:
        made.append(redis_driver(buffer, url, **options))
        made[-1]._exchange(made[-1]._seed, [((b"FLUSHALL",), memoryview(b""))], redis._done, soon())
        return made[-1]

    check(make)
    stats = made[0].stats()
    assert not made[0].last_error and 0 < stats.nbytes <= stats.capacity_nbytes and stats.num_records


@needs_redis
@pytest.mark.parametrize("outage", QUICK)
def test_a_server_through_a_tier(outage: Callable[[Server], None], server: Server) -> None:
    outage(server)


@needs_redis
@pytest.mark.parametrize("outage", [*ALONE, *LONG])
def test_a_server_with_outages(outage: Callable[[Server], None], tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        outage(server)


@needs_redis
@pytest.mark.slow
def test_writers_killed_at_a_hundred_moments(server: Server) -> None:
    writers_that_are_killed(server, rounds=100)


@needs_redis
@pytest.mark.parametrize("policy", ["allkeys-lru", "noeviction"])
def test_a_full_server(tmp_path: Path, policy: str) -> None:
    with redis_server(tmp_path, memory="24mb", policy=policy) as server:
        more_than_fits(server, 24 << 20)
        client = Client(server.address)
        if policy == "noeviction":
            told = [client.store(i)[0] for i in range(900, 940)]
            assert told.count(REJECTED) == client.driver.stats().rejected > 0
            assert client.tier.stats().is_available  # it is well, and full
        else:
            assert client.store(900) == [OK] and client.driver.stats().evicted > 40
        client.close()


@needs_redis
@pytest.mark.parametrize("spoil", ["flip", "truncate", "extend", "empty", "no string"])
def test_a_value_that_somebody_else_wrote(server: Server, spoil: str) -> None:
    client, place = Client(server.address), server.folder / "socket"
    assert client.store(1, 2, 3) == [OK] * 3
    if spoil == "flip":
        ask(place, "SETRANGE", name_of(2), 5000, b"\x77")
    elif spoil == "extend":
        ask(place, "APPEND", name_of(2), b"x" * 3_000_000)
    else:
        ask(place, "DEL", name_of(2))
        ask(
            place,
            *(("LPUSH", name_of(2), 1) if spoil == "no string" else ("SET", name_of(2), b"x" * (spoil != "empty"))),
        )
    assert client.load(1, 2, 3) == [OK, CORRUPT, OK]
    assert client.load(1, 2, 3) == [OK, MISS, OK] and client.store(2) == [OK] and client.load(2) == [OK]
    client.close()


@needs_redis
def test_who_may_not_is_told_why(secured: tuple[Server, ssl.SSLContext]) -> None:
    server, trusted = secured
    buffer, right = RecordBuffer(1, 100), server.address
    for url, tls, why in (
        (right.replace("pass%20", "no%20"), trusted, "WRONGPASS"),
        (right.replace(":pass%20word%40@", ""), trusted, "NOAUTH"),
        (right.replace("/3", "/99"), trusted, "index is out of range"),
        (right, None, "CERTIFICATE_VERIFY_FAILED"),
        (right.replace("127.0.0.1", "localhost"), trusted, "CERTIFICATE_VERIFY_FAILED"),
        (right.replace("rediss", "redis"), None, ""),
    ):
        driver = redis_driver(buffer, url, tls=tls)
        assert driver.store(KEYS[:1], [0], soon(2)) == [UNAVAILABLE] and why in driver.last_error, driver.last_error
        assert driver.load(KEYS[:1], [0], soon(2)) == [UNAVAILABLE] and "pass word" not in driver.last_error
        driver.close()
    driver = redis_driver(buffer, right, tls=trusted)
    assert driver.store(KEYS[:1], [0], soon()) == [OK] and driver.stats().num_records
    driver.close()


@needs_redis
def test_a_late_answer_reaches_nobody(server: Server) -> None:
    """A connection that was given up is closed: what it still says is not taken for the answer to the next question."""
    buffer = RecordBuffer(2, 100_000)
    driver = redis_driver(buffer, server.address)
    buffer.records[0], buffer.records[1] = 1, 2
    assert driver.store(KEYS[:2], [0, 1], soon()) == [OK, OK]
    server.hang()
    for _ in range(3):
        assert driver.load(KEYS[:1], [0], soon(0.05)) == [TIMEOUT]
    server.go_on()
    for _ in range(20):
        assert driver.load([KEYS[1], KEYS[9]], [0, 1], soon()) == [OK, MISS] and (buffer.records[0] == 2).all()
    driver.close()


@needs_redis
def test_a_server_that_hung_up_is_asked_again(server: Server) -> None:
    client = Client(server.address)
    for _ in range(3):
        assert client.store(1) == [OK] and client.load(1) == [OK]
        ask(server.folder / "socket", "CLIENT", "KILL", "TYPE", "normal")
    client.close()


@needs_redis
def test_a_forked_process_has_its_own_connections(server: Server) -> None:
    buffer = RecordBuffer(2, 1000)
    driver = redis_driver(buffer, server.address)
    buffer.records[0] = 5
    assert driver.store(KEYS[:1], [0], soon()) == [OK]
    child = os.fork()
    if not child:
        is_well = all(driver.load(KEYS[:1], [1], soon()) == [OK] for _ in range(200))
        os._exit(0 if is_well and (buffer.records[1] == 5).all() else 1)
    assert all(driver.load([KEYS[0], KEYS[7]], [0, 1], soon()) == [OK, MISS] for _ in range(200))
    assert os.waitpid(child, 0)[1] == 0
    driver.close()


@needs_redis
def test_nothing_listens(server: Server) -> None:
    before = listening()
    client = Client(server.address)
    assert client.store(1) == [OK] and listening() <= before
    client.close()


# -- clusters --------------------------------------------------------------------------------------------------------------


def owner(cluster: Server, i: int) -> int:
    """The port of the server that has key ``i``."""
    return next(port for port in cluster.ports if ask(port, "STRLEN", name_of(i))[:1] == b":")


@needs_redis
def test_the_keys_of_a_cluster_are_where_it_says(cluster: Server) -> None:
    client = Client(cluster.address)
    for i in range(0, 48, 12):
        assert client.store(*range(i, i + 12)) == [OK] * 12
    assert len(client.driver._nodes) == 3 == len({owner(cluster, i) for i in range(48)})
    other = Client(cluster.address.replace(str(cluster.ports[0]), str(cluster.ports[2])))
    assert other.load(*range(12)) == [OK] * 12 and other.discard(*range(48)) == [OK] * 48
    for one in (client, other):
        one.close()


@needs_redis
def test_a_slot_that_moves(cluster: Server) -> None:
    """On its way (ASK) and at its new place (MOVED), its records are found and can be stored."""
    client, i = Client(cluster.address), 5
    assert client.store(i) == [OK]
    old = owner(cluster, i)
    new = next(port for port in cluster.ports if port != old)
    slot = int(ask(old, "CLUSTER", "KEYSLOT", name_of(i))[1:])
    old_id, new_id = (ask(port, "CLUSTER", "MYID", lines=2).split()[1] for port in (old, new))
    ask(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
    ask(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
    assert client.load(i) == [OK]
    assert ask(old, "MIGRATE", "127.0.0.1", new, name_of(i), 0, 1000) == b"+OK\r\n"
    assert client.load(i) == [OK] and client.discard(i) == [OK] and client.load(i) == [MISS]
    assert client.store(i) == [OK] and client.load(i) == [OK]
    for port in (new, old):
        ask(port, "CLUSTER", "SETSLOT", slot, "NODE", new_id)
    assert client.load(i) == [OK] and client.driver._slots[slot] == ("127.0.0.1", new)
    client.close()


@needs_redis
def test_a_node_of_a_cluster_that_dies(tmp_path: Path) -> None:
    """What it had is not available, the rest is; when it is back, so is everything."""
    with redis_cluster(tmp_path) as cluster:
        client = Client(cluster.address, faults=1000)
        assert client.store(*range(12)) == [OK] * 12
        at = cluster.ports[0]  # the one that the client was told of
        lost = [owner(cluster, i) == at for i in range(12)]
        process = cluster.processes.pop(0)
        process.kill()
        process.communicate()
        for _ in range(3):
            assert client.load(*range(12)) == [UNAVAILABLE if is_lost else OK for is_lost in lost]
        assert any(lost) and not all(lost)
        cluster.kill()
        cluster.start()
        wait_for(lambda: UNAVAILABLE not in client.store(*range(12)))
        assert client.load(*range(12)) == [OK] * 12
        client.close()


# -- servers that say anything at all --------------------------------------------------------------------------------------


@contextmanager
def made_up(serve: Callable[[socket, int], None]) -> Iterator[str]:
    """A server that does ``serve(connection, its number)``; its url."""
    with create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def accept() -> None:
            number = 0
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                Thread(target=one, args=(connection, number), daemon=True).start()
                number += 1

        def one(connection: socket, number: int) -> None:
            with connection, suppress(OSError):
                serve(connection, number)

        thread = Thread(target=accept, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{port}"
        listening.shutdown(2)
        thread.join(5)


RECORD = RecordBuffer.nbytes_for(1, 4000)
REPLIES = [
    b"", b"\r\n", b"\n", b"+OK", b"+\r\n", b"OK\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n", b"*-1\r\n", b"$-1\r\n", b"$-2\r\n",
    b"$\r\n", b"$0\r\n\r\n", b"$5\r\nhello\r\n", b"$5\r\nhel", b"$5\r\nhello+OK\r\n", b"$5\r\nhello-MOVED 1 x:1\r\n",
    b":\r\n", b":-1\r\n", b":1\r\n", b"$%d\r\n" % RECORD, b"$%d\r\n" % RECORD + b"x" * RECORD,
    b"$%d\r\n" % RECORD + b"x" * RECORD + b"\r\n", b"$536870912\r\n" + b"y" * 70000, b"$536870913\r\n",
    b"$99999999999999999999999999999999\r\n", b"$1_0\r\n" + b"z" * 12, "$٣\r\nabc\r\n".encode(), b"$+5\r\nhello\r\n",
    b"$ 5\r\nhello\r\n", b"x" * 10000, b"\0" * 5000, b"\xff\xfe\r\n", b"-\r\n", b"-ERR\r\n", b"-MOVED\r\n",
    b"-MOVED 1\r\n", b"-MOVED 1 \r\n", b"-MOVED 1 :0\r\n", b"-MOVED 1 :99999999999999999999\r\n",
    b"-MOVED 1 ../../etc:1\r\n", b"-MOVED 1 " + b"a" * 3000 + b":1\r\n", b"-MOVED 1 \xff\xff:1\r\n",
    b"-MOVED 1 a\0b:1\r\n", b"-ASK 1 127.0.0.1:1\r\n", b"-MOVED 99999 127.0.0.1:1\r\n", b"-OOM\r\n", b"-LOADING \r\n",
    b"-WRONGTYPE\r\n", b"-NOAUTH\r\n", b"%2\r\n+a\r\n:1\r\n", b"_\r\n", b"#t\r\n", b"(123\r\n", b"!5\r\nERR x\r\n",
    b">2\r\n+a\r\n+b\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n",
]  # fmt: skip


def talk_to(url: str, seconds: float = 0.3) -> set[Status]:
    """Ask everything once; each answer is in time."""
    buffer, seen = RecordBuffer(2, 4000), set()
    driver = redis_driver(buffer, url)
    calls: list[Callable[[float], Sequence[Status]]] = [
        lambda deadline: driver.load(KEYS[:2], [0, 1], deadline),
        lambda deadline: driver.store(KEYS[:2], [0, 1], deadline),
        lambda deadline: driver.lookup(KEYS[:2], deadline, 0.0).statuses,
        lambda deadline: driver.discard(KEYS[:2], deadline),
    ]
    for call in calls:
        start = monotonic()
        told = call(start + seconds)
        assert len(told) == 2 and monotonic() <= start + 1.1 * seconds + SLACK
        seen.update(told)
    driver.stats()
    driver.close()
    return seen


@pytest.mark.parametrize("number", range(len(REPLIES)))
def test_a_reply_that_is_none(number: int) -> None:
    """Said once to every question, and then the connection is closed."""

    def serve(connection: socket, _: int) -> None:
        connection.recv(100)
        connection.sendall(REPLIES[number])
        connection.shutdown(1)
        while connection.recv(1 << 16):
            pass

    with made_up(serve) as url:
        talk_to(url)


@pytest.mark.parametrize("count", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_many_replies_that_are_none(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of right and wrong replies in any order, cut anywhere: no exception, nothing late, no memory taken."""
    random = np.random.default_rng(count)

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

    real, buffer = resp.socket.getaddrinfo, RecordBuffer(2, 4000)
    numbers = partial(real, flags=AI_NUMERICHOST)  # how long the names take depends on where this runs
    monkeypatch.setattr(resp.socket, "getaddrinfo", lambda *words, type, flags=0: numbers(*words, type=type))
    with made_up(serve) as url:
        driver = redis_driver(buffer, url)
        tracemalloc.start()
        try:
            for _ in range(count):
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


@pytest.mark.parametrize("serve", [drip, drip_a_record, flood, say_nothing, read_nothing])
def test_a_server_that_takes_its_time(serve: Callable[[socket, int], None]) -> None:
    with made_up(serve) as url:
        assert talk_to(url) <= {TIMEOUT, UNAVAILABLE}


def test_a_large_record_to_a_server_that_does_not_read() -> None:
    buffer = RecordBuffer(1, 30_000_000)
    with made_up(read_nothing) as url:
        driver, start = redis_driver(buffer, url), monotonic()
        assert driver.store(KEYS[:1], [0], start + 0.3) == [TIMEOUT] and monotonic() < start + 0.33 + SLACK
        driver.close()


def test_redirections_without_end() -> None:
    """Each server sends to another port of its own choice: after a few the key is not available."""
    asked = []

    def serve(connection: socket, number: int) -> None:
        while connection.recv(1 << 16):
            asked.append(number)
            connection.sendall(b"-MOVED 7 :%d\r\n" % port * 3)

    with made_up(serve) as url:
        port = int(url.rpartition(":")[2])
        assert talk_to(url) == {UNAVAILABLE} and len(asked) < 200


def test_nobody_there() -> None:
    (port,) = free_ports(1)
    for url in (f"redis://127.0.0.1:{port}", "unix:///nowhere/socket", f"redis://no-such-host.invalid:{port}"):
        driver = redis_driver(RecordBuffer(1, 100), url)
        assert driver.load(KEYS[:1], [0], soon()) == [UNAVAILABLE] and driver.last_error
        assert driver.stats().nbytes == driver.stats().capacity_nbytes == 0
        driver.close()


def test_a_name_that_is_long_in_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's look-up of a name knows no deadline; the call does."""
    monkeypatch.setattr(resp.socket, "getaddrinfo", slow := Slow())
    driver, start = redis_driver(RecordBuffer(1, 100), "redis://some.name"), monotonic()
    assert driver.load(KEYS[:1], [0], start + 0.2) == [TIMEOUT] and monotonic() < start + 0.22 + SLACK
    slow.may.set()
    driver.close()


class Slow:
    """A resolver that knows numbers, and names when it is let."""

    def __init__(self) -> None:
        self.may = Event()

    def __call__(self, *_: object, flags: int = 0, **__: object) -> None:
        if not flags:
            self.may.wait(5)
        raise gaierror


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "http://host",
        "redis://",
        "redis://host:0",
        "redis://host:99999",
        "redis://host/x",
        "unix://",
        "redis://[::1",
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(BadInput, match=r"a url is redis://"):
        redis_driver(RecordBuffer(1, 100), url)


def test_what_cannot_be() -> None:
    with pytest.raises(BadInput, match=r"at most 512\.0 MiB, a record is 512\.0 MiB"):
        redis_driver(RecordBuffer(1, 512 << 20), "redis://host")
    with pytest.raises(BadInput, match="rediss://, not with redis://"):
        redis_driver(RecordBuffer(1, 100), "redis://host", tls=ssl.create_default_context())
