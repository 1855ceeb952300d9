"""Redis and Valkey: real servers that are well, full, hung, dead or move their keys."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from time import monotonic

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
    redis_cluster,
    redis_sentinel,
    redis_server,
    wait_for,
)

from kvpagoda.testing import DRIVER_CHECKS
from kvpagoda.tiers import RecordBuffer, Status
from kvpagoda.tiers.redis import PREFIX, RedisDriver, redis_driver

redis = pytest.importorskip("redis", reason="needs kvpagoda[redis]")

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
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with TLS, a password, and a user who may only read."""
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
        "--requirepass", "pass word@", "--user", *"reader on >read ~* +get +strlen".split(),
    ) as server:  # fmt: skip
        server.address = f"rediss://:pass%20word%40@127.0.0.1:{port}/3?ssl_ca_certs={certificate}"
        yield server


@pytest.fixture(params=["tcp", "unix", "tls", "cluster", "sentinel"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a store that is up and empty."""
    if request.param == "cluster":
        yield request.getfixturevalue("cluster").address
    elif request.param == "tls":
        with redis.Redis.from_url(request.getfixturevalue("secured").address) as client:
            client.flushall()
        yield request.getfixturevalue("secured").address
    else:
        server = request.getfixturevalue("server")
        if request.param == "sentinel":
            with redis_sentinel(tmp_path, server) as sentinel:
                yield sentinel.address
        else:
            yield server.address if request.param == "tcp" else f"unix://{server.folder}/socket"


# -- servers that are well -------------------------------------------------------------------------------------------------


@needs_redis
@pytest.mark.parametrize("check", DRIVER_CHECKS)
def test_the_driver_conforms(url: str, check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpagoda.tiers.redis.INFO_SECONDS", 0.0)
    made: list[RedisDriver] = []

    def make(buffer: RecordBuffer) -> RedisDriver:
        made.append(redis_driver(buffer, url))
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
    """None of ours: it is not found, and the next store puts the record in its place, whether or not it was loaded."""
    client, place = Client(server.address), server.folder / "socket"

    def write() -> None:
        assert client.store(1, 2, 3) == [OK] * 3
        if spoil == "flip":
            ask(place, "SETRANGE", name_of(2), 5000, b"\x77")
        elif spoil == "extend":
            ask(place, "APPEND", name_of(2), b"x" * 3_000_000)
        else:
            ask(place, "DEL", name_of(2))
            value = ("LPUSH", name_of(2), 1) if spoil == "no string" else ("SET", name_of(2), b"x" * (spoil != "empty"))
            ask(place, *value)

    write()
    assert client.load(1, 2, 3) == [OK, CORRUPT, OK]
    assert client.load(1, 2, 3) == [OK, MISS, OK] and client.store(2) == [OK] and client.load(2) == [OK]
    write()
    if spoil != "flip":  # which only a load can tell
        assert client.lookup(1, 2, 3) == [OK, MISS, OK]
        assert client.store(1, 2, 3) == [OK] * 3 and client.load(1, 2, 3) == [OK] * 3
    client.close()


@needs_redis
def test_who_may_not_is_told_why(secured: Server) -> None:
    buffer, right = RecordBuffer(1, 100), secured.address
    for url, why in (
        (right.replace("pass%20", "no%20"), "invalid username-password"),
        (right.replace(":pass%20word%40@", ""), "Authentication required"),
        (right.replace("/3", "/99"), "index is out of range"),
        (right.replace(":pass%20word%40@", "reader:read@").replace("/3", ""), "no permissions"),
        (right.partition("?")[0], "CERTIFICATE_VERIFY_FAILED"),
        (right.replace("127.0.0.1", "localhost"), "CERTIFICATE_VERIFY_FAILED"),
        (right.partition("?")[0].replace("rediss", "redis"), ""),
    ):
        driver = redis_driver(buffer, url)
        assert driver.store(KEYS[:1], [0], soon(2)) == [UNAVAILABLE] and why in driver.last_error, driver.last_error
        assert "pass word" not in driver.last_error
        driver.close()
    driver = redis_driver(buffer, right)
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


# -- several servers -------------------------------------------------------------------------------------------------------


def owner(cluster: Server, i: int) -> int:
    """The port of the server that has key ``i``."""
    return next(port for port in cluster.ports if ask(port, "STRLEN", name_of(i))[:1] == b":")


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
    assert client.load(i) == [OK] and client.store(i) == [OK] and client.lookup(i) == [OK]
    client.close()


@needs_redis
def test_a_server_of_a_cluster_that_dies(tmp_path: Path) -> None:
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


@needs_redis
@pytest.mark.parametrize("is_hung", [False, True])
def test_a_server_of_a_cluster_that_fails_is_left_alone(tmp_path: Path, is_hung: bool) -> None:
    """The records of the other two are found and stored all the time; few calls wait for the failing one."""
    with redis_cluster(tmp_path) as cluster:
        client = Client(cluster.address, faults=2)
        assert client.store(*range(12)) == [OK] * 12
        owners = [owner(cluster, i) for i in range(12)]
        victim = cluster.ports[1]
        assert 0 < owners.count(victim) < 12
        wanted = [UNAVAILABLE if port == victim else OK for port in owners]
        process = cluster.processes[1]
        if is_hung:
            process.send_signal(SIGSTOP)
        else:
            process.kill()
            process.communicate()
        try:
            for call in (client.lookup, client.load, client.store):
                for _ in range(2):
                    told = call(*range(12), seconds=2.0)
                    assert [status for status, port in zip(told, owners) if port != victim] == [OK] * wanted.count(OK)
            stats = client.tier.stats()
            assert stats.unavailable_shards == (f"127.0.0.1:{victim}",) and f"at 127.0.0.1:{victim}" in stats.last_fault
            begun = monotonic()
            for _ in range(20):
                assert client.lookup(*range(12)) == wanted and client.load(*range(12)) == wanted
            assert monotonic() < begun + 2.0, "calls wait for the failing server"
            fresh = [i for i in range(300, 330) if client.driver.shard_of(key_of(i)) != f"127.0.0.1:{victim}"]
            assert len(fresh) > 10
            for i in fresh:
                assert client.store(i) == [OK] and client.load(i) == [OK]
        finally:
            if is_hung:
                process.send_signal(SIGCONT)
            else:
                cluster.processes[1] = subprocess.Popen(
                    cluster.commands[1], cwd=cluster.folder, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
                )
        i = owners.index(victim)
        wait_for(lambda: ask(victim, "GET", name_of(i))[:1] == b"$")  # it takes keys again
        back = monotonic()
        wait_for(lambda: client.lookup(i)[0] in (OK, MISS))
        assert monotonic() < back + 1.0 + SLACK
        wait_for(lambda: client.store(*range(12)) == [OK] * 12)
        assert client.load(*range(12)) == [OK] * 12
        assert client.tier.stats().is_available and not client.tier.stats().unavailable_shards
        client.close()


@needs_redis
def test_another_master_is_found_by_the_sentinel(server: Server, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with redis_server(tmp_path / "second") as first, redis_sentinel(tmp_path, first) as sentinel:
        client = Client(sentinel.address)
        assert client.store(1) == [OK]
        ask(sentinel.ports[0], "SENTINEL", "REMOVE", "kv")
        ask(sentinel.ports[0], "SENTINEL", "MONITOR", "kv", "127.0.0.1", server.address.rpartition(":")[2], 1)
        first.kill()
        wait_for(lambda: client.store(2) == [OK])
        assert client.load(1, 2) == [MISS, OK]
        client.close()
