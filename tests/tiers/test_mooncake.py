"""Mooncake Store: a real master and a process that gives memory, both well, full, hung, dead, and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from outages import ALONE, LONG, QUICK, more_than_fits, writers_that_are_killed
from servers import SERVERS, Client, Server, key_of, listening, mooncake_server, wait_for, why_no_mooncake

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.testing import DRIVER_CHECKS
from kvpagoda.tiers import RecordBuffer, Status
from kvpagoda.tiers.mooncake import MooncakeDriver, mooncake_driver
from raises import raises

OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE, REJECTED = Status
reason = why_no_mooncake()
needs_mooncake = pytest.mark.skipif(bool(reason), reason=reason)


def master_of(server: Server) -> str:
    return server.address.removeprefix("mooncake://")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mooncake_server(tmp_path_factory.mktemp("mooncake"), "32MiB") as server:
        yield server


@pytest.fixture(scope="module")
def cleaner(kept: Server) -> Iterator[MooncakeDriver]:
    driver = mooncake_driver(RecordBuffer(1, 100), master_of(kept))
    yield driver
    driver.close()


@pytest.fixture
def server(kept: Server, cleaner: MooncakeDriver) -> Server:
    """A store, up and empty."""
    cleaner._client.remove_all(True)
    return kept


@needs_mooncake
@pytest.mark.parametrize("check", DRIVER_CHECKS)
def test_the_driver_conforms(check: Callable[..., None], server: Server) -> None:
    made: list[MooncakeDriver] = []

    def make(buffer: RecordBuffer) -> MooncakeDriver:
        made.append(mooncake_driver(buffer, master_of(server)))
        return made[-1]

    check(make)
    assert not made[0].last_error


@needs_mooncake
@pytest.mark.parametrize("outage", QUICK)
def test_a_store_through_a_tier(outage: Callable[[Server], None], server: Server) -> None:
    outage(server)


@needs_mooncake
@pytest.mark.parametrize("outage", [*ALONE, *(pytest.param(outage, marks=pytest.mark.slow) for outage in LONG)])
def test_a_store_with_outages(outage: Callable[[Server], None], tmp_path: Path) -> None:
    with mooncake_server(tmp_path) as server:
        outage(server)


@needs_mooncake
@pytest.mark.slow
def test_writers_killed_at_many_moments(server: Server) -> None:
    writers_that_are_killed(server, rounds=40)


@needs_mooncake
@pytest.mark.slow
def test_storing_again_what_a_dead_writer_began_may_keep_nothing(server: Server) -> None:
    """The engine says OK and keeps nothing, for as long as the master was told. A load never says OK for it."""
    client = Client(server.address)
    with subprocess.Popen(
        [sys.executable, SERVERS, "store", server.address, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"begun\n"
        server.processes[1].send_signal(signal.SIGSTOP)
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
        sleep(0.3)
        writer.kill()
    server.processes[1].send_signal(signal.SIGCONT)
    assert client.store(1) == [OK] and client.load(1) == [MISS] and client.lookup(1) == [MISS]
    wait_for(lambda: client.store(1) == [OK] and client.load(1) == [OK])
    client.close()


@needs_mooncake
def test_a_full_store(server: Server) -> None:
    more_than_fits(server, 32 << 20)


@needs_mooncake
def test_a_master_that_comes_later(tmp_path: Path) -> None:
    with mooncake_server(tmp_path) as server:
        server.kill()
        client = Client(server.address)
        assert client.load(1) == client.store(1) == client.lookup(1) == client.discard(1) == [UNAVAILABLE]
        assert "refused" in client.driver.last_error
        server.start()
        wait_for(client.is_back)
        client.close()
        server.kill()
        never = Client(server.address)
        never.close()


@needs_mooncake
def test_a_process_that_gives_memory(server: Server) -> None:
    """Its segment is all that it counts; and the ports are open to all, as the documentation says: this pins the warning."""
    before = listening()
    driver = mooncake_driver(RecordBuffer(1, 1000), master_of(server), segment="16MiB")
    assert driver.stats().nbytes == driver.stats().capacity_nbytes == 16 << 20
    assert driver.store([key_of(600)], [0], monotonic() + 5) == [OK]
    assert {address for address, _ in listening() - before} == {"00000000", "0" * 32}
    child = os.fork()
    if not child:  # the engine is the parent's
        os._exit(driver.load([key_of(600)], [0], monotonic() + 5) != [UNAVAILABLE])
    assert os.waitpid(child, 0)[1] == 0 and driver.load([key_of(600)], [0], monotonic() + 5) == [OK]
    driver.close()
    assert driver.load([key_of(600)], [0], monotonic() + 5) == [UNAVAILABLE] and driver.stats().nbytes == 0


def test_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with raises(MissingExtra, name="mooncake"):
        mooncake_driver(RecordBuffer(1, 100), "127.0.0.1:50051")


@pytest.mark.parametrize(
    ("master", "options"),
    [("host", {}), ("host:0", {}), ("host:x", {}), ("", {}), ("host:1", {"host": ""}), ("host:1", {"segment": "1MiB"})],
)
def test_what_cannot_be(master: str, options: dict[str, Any]) -> None:
    names = (master, options.get("host", "127.0.0.1"))
    told = {"needed": 16 << 20, "available": 1 << 20} if "segment" in options else {"needed": names}
    with raises(BadInput, **told):
        mooncake_driver(RecordBuffer(1, 100), master, **options)


def test_an_engine_that_raises_while_it_is_set_up_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """What a driver calls before its first record and at its end."""

        def register_buffer(self, *_: int) -> int:
            return 0

        def unregister_buffer(self, *_: int) -> int:
            return 0

        def close(self) -> None:
            ends.append(True)

    def make() -> Engine:
        tries.append(True)
        if len(tries) == 1:
            raise RuntimeError("the transport is not ready")
        return Engine()

    tries, ends = list[bool](), list[bool]()
    monkeypatch.setattr(MooncakeDriver, "_is_reachable", lambda _: True)
    monkeypatch.setattr("kvpagoda.tiers.mooncake._RETRY_SECONDS", 0.01)
    driver = MooncakeDriver(RecordBuffer(4, 100), make, "127.0.0.1:1", 0)
    assert driver._client is not None and len(tries) == 2 and driver.last_error == ""
    driver.close()
    wait_for(lambda: bool(ends))
