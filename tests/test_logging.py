"""What the library logs, and that it is quiet by default."""

from __future__ import annotations

import logging
import subprocess
import sys
from hashlib import sha256
from time import monotonic, sleep

import pytest

from kvpagoda import KVCache, Schema
from kvpagoda.schema import Attention, Layer
from kvpagoda.tiers import Driver, Lease, RecordBuffer, Status, Tier, host_driver

FULL = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "tiny")
LOUD = """
import logging
import kvpagoda
logging.getLogger("kvpagoda.tiers.tier").warning("a tier is left alone")
{more}
logging.getLogger("kvpagoda.tiers.tier").warning("again")
"""


@pytest.mark.parametrize(("more", "heard"), [("", ""), ("logging.basicConfig(format='%(message)s')", "again\n")])
def test_quiet_until_logging_is_configured(more: str, heard: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOUD.format(more=more)], capture_output=True, text=True, check=True)
    assert done.stderr == heard and done.stdout == ""


def test_what_a_cache_logs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvpagoda"):
        cache = KVCache(FULL, num_blocks=12, block_size=4, max_requests=2, device="none")
        with cache.open([*range(16)], "tenant secret") as sequence:
            sequence.commit([*range(16)])
        cache.pin([*range(16)], "tenant secret")
        cache.open([7] * 44).close()
        cache.invalidate("tenant secret")
        cache.invalidate()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "cache of 416 B for 2 requests: 12 blocks of full",
        "a pin of 4 blocks is ended to make room for a request",
        "invalidated 1 namespaces; epoch 0",
        "invalidated all; epoch 1",
    ]


def test_a_failing_tier_is_logged_once_and_again_when_it_works(caplog: pytest.LogCaptureFixture) -> None:
    buffer = RecordBuffer(4, 4096)
    inner: Driver = host_driver(buffer, "1MiB")
    is_well = [False]

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def lookup(self, keys: list[bytes], deadline: float, hold: float) -> Lease:
            if is_well[0]:
                return inner.lookup(keys, deadline, hold)
            return Lease(tuple(keys), (Status.UNAVAILABLE,) * len(keys), 0.0)

    tier = Tier(Failing(), buffer, sha256(b"layout").digest(), faults=2, pause=0.02)  # type: ignore[arg-type]
    tier.name = "far away"
    keys = [sha256(b"key").digest()]
    with caplog.at_level(logging.INFO, "kvpagoda"):
        for _ in range(5):
            tier.lookup(keys, monotonic() + 1).result()
        is_well[0] = True
        until = monotonic() + 10
        while len(caplog.records) < 2 and monotonic() < until:
            sleep(0.01)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "tier far away: no lookup for a while; lookup: unavailable"),
        ("INFO", "tier far away: lookup works again"),
    ]
    tier.close(monotonic() + 5)
