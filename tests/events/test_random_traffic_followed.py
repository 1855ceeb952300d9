"""Random traffic of every layer kind, tier and policy, with memory that fails, followed from outside after each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache
from random_driver import caches
from random_driver.caches import settings_of
from random_driver.driver import driving
from random_driver.schemas import SCHEMA_NAMES
from random_driver.texts import NAMESPACES, epoch_of

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from following import Line

from kvpagoda.events import EventLog

OPERATIONS = 120
SEEDS = {"deepseek_v4": 10, "mamba": 10, "mixed": 10, "wide": 10}
"""Where the usual seed has few hits in so short a run; some seeds have a quota of nothing."""


def follow(schema: str, seed: int, num_operations: int, monkeypatch: pytest.MonkeyPatch) -> Line:
    """A run of the driver; its cache is compared with what a follower says of the driver's documents."""
    logs: list[EventLog] = []

    def make(*arguments: Any, **settings: Any) -> KVCache:
        logs.append(EventLog(settings.pop("capacity", 64)))
        return KVCache(*arguments, events=logs[-1], **settings)

    settings = settings_of(schema, seed)
    if "disk" in settings.tiers and not caches.has_xxhash():
        pytest.skip("records on disk need xxhash for their checksums: pip install kvpagoda[disk]")
    monkeypatch.setattr(caches, "KVCache", make)
    with driving(settings) as driver:
        line = Line(driver.cache, logs[-1], np.random.default_rng(seed), loss=0.1)
        for _ in range(num_operations):
            driver.operate()
            if line.cache is not driver.cache:
                line.num_events += line.stream.num_events
                line.follow(driver.cache, logs[-1])
            line.catch_up()
            for _ in range(4):
                tokens, media = driver.documents.one()
                line.compare(tokens, driver.one(None, None, *NAMESPACES), media)
            told = [one for one in driver.requests.values() if epoch_of(one.namespace) is None]
            for request in told[:3]:
                media = {at: one for at, one in request.media.items() if at < request.length}
                line.compare(request.text, request.namespace, media)
        line.check()
        driver.cache.check()
        line.num_events += line.stream.num_events
        driver.cache.close()
    return line


@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_random_traffic_is_followed(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = follow(schema, SEEDS.get(schema, 8), OPERATIONS, monkeypatch)
    assert line.num_events > 10 and line.num_hits > 10


def test_a_restart_does_not_wait_for_what_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are invalidated, and the last that observers are told is of blocks that another one hears of."""
    assert follow("deepseek_v4", 2, OPERATIONS, monkeypatch).num_events > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 18))
@pytest.mark.parametrize("schema", SCHEMA_NAMES)
def test_long_random_traffic_is_followed(schema: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    line = follow(schema, seed, 2000, monkeypatch)
    print(f"{schema} {seed}: {line.num_events:,} events, {line.num_compared:,} look-ups compared")
