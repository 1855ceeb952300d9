"""What any store that processes share has to stand: each function takes a server that is up, and leaves it up."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

import numpy as np
from servers import NUM_SHARED, PAYLOAD, Client, Server, key_of, told_by, wait_for, worker

from kvpagoda.tiers import RecordBuffer, Status

OK, MISS, CORRUPT, TIMEOUT, UNAVAILABLE, REJECTED = Status


def a_store_that_hangs(server: Server) -> None:
    """Every call is over in time, and nobody does anything for it to be in use again."""
    client = Client(server.address)
    assert client.store(1, 2, 3) == [OK] * 3
    server.hang()
    try:
        for call in (client.load, client.store, client.lookup, client.discard):
            (told,) = call(1, seconds=0.3)  # an engine may give up before it is time
            assert told in (TIMEOUT, UNAVAILABLE), (told, client.driver.last_error)
        while client.tier.stats().is_available:
            (told,) = client.load(2, seconds=0.3)
            assert told in (TIMEOUT, UNAVAILABLE), (told, client.driver.last_error)
        start = monotonic()
        told = client.load(2)[0]
        assert told is UNAVAILABLE and monotonic() < start + 1, (told, monotonic() - start)
    finally:
        server.go_on()
    wait_for(client.is_back)
    found, late = client.load(2, 3), client.load(1)  # which may be discarded just now
    assert found == [OK, OK] and late[0] in (OK, MISS, CORRUPT), (found, late, client.driver.last_error)
    client.close()


def a_store_that_dies(server: Server) -> None:
    """All keys are lost: misses, and then they are stored again."""
    client = Client(server.address)
    assert client.store(1, 2) == [OK, OK]
    server.kill()
    for call in (client.load, client.store, client.lookup, client.discard):
        assert call(1, seconds=0.3)[0] in (TIMEOUT, UNAVAILABLE)
    server.start()
    wait_for(client.is_back, 30)
    assert client.load(1, 2) == [MISS, MISS] and client.lookup(1, 2) == [MISS, MISS]
    assert client.store(1, 2) == [OK, OK] and client.load(1, 2) == [OK, OK]
    client.close()


def two_processes(server: Server) -> None:
    """What one stored the other loads, while both store and load the same keys."""
    workers = [worker(server.address, 1.0, seed) for seed in (1, 2)]
    told = [told_by(process) for process in workers]
    assert all(one["load ok"] > 20 for one in told), told
    assert not sum(one["load corrupt"] + one["load timeout"] + one["load unavailable"] for one in told), told
    client = Client(server.address)
    assert client.lookup(*range(NUM_SHARED)).count(OK) > NUM_SHARED // 2
    assert OK in client.load(*range(NUM_SHARED))
    client.close()


def two_processes_whose_store_hangs_and_dies(server: Server) -> None:
    """Both end well: right bytes, answers in time, and the store in use again."""
    workers = [worker(server.address, 6.0, seed) for seed in (1, 2)]  # the second may begin a second or two later
    sleep(0.5)
    server.hang()
    sleep(0.7)
    server.go_on()
    sleep(0.7)
    server.kill()
    sleep(0.7)
    server.start()
    told = [told_by(process) for process in workers]
    assert all(one["load ok"] and one["load timeout"] + one["load unavailable"] for one in told), told


def writers_that_are_killed(server: Server, rounds: int = 6) -> None:
    """At any moment: what they were writing is not there, or whole; the others go on."""
    client, random = Client(server.address), np.random.default_rng(rounds)
    survivor = worker(server.address, 0.5 * rounds, 3)
    found = 0
    for seed in range(rounds):
        victim = worker(server.address, 60, 10 + seed)
        sleep(float(random.random()) * 0.1)
        victim.kill()
        victim.communicate()
        found += client.load(*range(NUM_SHARED)).count(OK)
    assert found > rounds and told_by(survivor)["load ok"]
    client.close()


def what_lies_there_is_spoilt(server: Server) -> None:
    """A store that gives other bytes, or another record: CORRUPT, which makes room for the right one."""
    client = Client(server.address)
    assert client.store(2) == [OK]
    (row,) = client.buffer.acquire(1)
    for spoilt in (0, 40, 127, 128, 20_000, 128 + PAYLOAD - 1, None):
        assert client.store(1) == [OK] and client.load(1, 2) == [OK, OK]
        assert client.driver.load([key_of(2 if spoilt is None else 1)], [row], monotonic() + 5) == [OK]
        if spoilt is not None:
            client.buffer.rows[row][spoilt] ^= 4
        assert client.discard(1) == [OK] and client.driver.store([key_of(1)], [row], monotonic() + 5) == [OK]
        assert client.lookup(1) == [OK] and client.load(2, 1) == [OK, CORRUPT] and client.load(1) == [MISS]
    client.buffer.release([row])
    client.close()


def another_layout(server: Server) -> None:
    """Records of another length, and of another fingerprint under the same key, are none of ours."""
    client = Client(server.address)
    assert client.store(1, 2) == [OK, OK]
    for payload in (PAYLOAD // 3, 3 * PAYLOAD):
        other = Client(server.address, payload=payload)
        assert other.load(1) == [CORRUPT] and other.load(1) == [MISS] and other.store(1) == [OK]
        assert client.load(1, 2) == [CORRUPT, OK] and client.store(1) == [OK] and client.load(1) == [OK]
        other.close()
    client.close()


def more_than_fits(server: Server, nbytes: int) -> None:
    """Four times what it may hold: it goes on, and what is still there is right."""
    client = Client(server.address, payload=1_000_000)
    count = 4 * nbytes // RecordBuffer.nbytes_for(1, 1_000_000)
    for i in range(1, count):
        assert client.store(i)[0] in (OK, REJECTED)
        client.load(i // 2, i)
    assert 1 <= client.lookup(*range(count)).count(OK) <= count // 4 and client.told["load ok"] >= count // 4
    client.close()


QUICK: tuple[Callable[[Server], None], ...] = (
    two_processes,
    what_lies_there_is_spoilt,
    another_layout,
)
# These leave a store that may keep nothing for a while: each wants one of its own.
ALONE: tuple[Callable[[Server], None], ...] = (
    a_store_that_hangs,
    a_store_that_dies,
)
LONG: tuple[Callable[[Server], None], ...] = (
    two_processes_whose_store_hangs_and_dies,
    writers_that_are_killed,
)
