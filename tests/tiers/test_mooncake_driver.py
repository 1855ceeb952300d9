"""Mooncake Store: a real master and a process that gives memory, both well, full, hung, dead, and started again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from outages import LONG, QUICK, more_than_fits, writers_that_are_killed
from servers import PAYLOAD, PRINT, Client, Server, free_ports, key_of, mooncake_server, wait_for, why_no_mooncake, worker

from kvpagoda.errors import BadInput
from kvpagoda.tiers import RecordBuffer, Status
from kvpagoda.tiers.conformance import CHECKS
from kvpagoda.tiers.mooncake import MooncakeDriver, mooncake_driver
from kvpagoda.tiers.records import pack_record

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
@pytest.mark.parametrize("check", CHECKS)
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
@pytest.mark.slow
@pytest.mark.parametrize("outage", LONG)
def test_a_store_that_dies(outage: Callable[[Server], None], tmp_path: Any) -> None:
    with mooncake_server(tmp_path) as server:
        outage(server)


@needs_mooncake
@pytest.mark.slow
def test_writers_killed_at_many_moments(server: Server) -> None:
    writers_that_are_killed(server, rounds=40)


@needs_mooncake
def test_a_full_store(server: Server) -> None:
    more_than_fits(server, 32 << 20)
