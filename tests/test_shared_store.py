"""Two caches over one store server: one loads what the other computed, and requests run on while the server fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "tiers"))

from servers import Server, has_redis, mooncake_server, redis_server, wait_for, why_no_mooncake

from kvpagoda.core.kv_cache import KVCache
from kvpagoda.tiers import TierSpec, tier_from_text
from test_below import cache_of, forget, run

Start = Callable[[Path], AbstractContextManager[Server]]
STORES = [
    pytest.param(
        redis_server, marks=pytest.mark.skipif(not has_redis(), reason="needs redis-server (make servers)"), id="redis"
    ),
    pytest.param(mooncake_server, marks=pytest.mark.skipif(bool(why_no_mooncake()), reason=why_no_mooncake()), id="mooncake"),
]  # fmt: skip
TEXT = np.arange(70) % 53


def tier(server: Server, **settings: object) -> TierSpec:
    return tier_from_text(server.address, **{"record_nbytes": 700, "staging": "2MiB", "timeout": 0.5, **settings})


@pytest.mark.parametrize("start", STORES)
@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_what_one_cache_computed_another_loads(start: Start, name: str, tmp_path: Path) -> None:
    with start(tmp_path) as server:
        one, other = (cache_of(name, tier(server, timeout=3.0)) for _ in range(2))
        wait_for(lambda: is_there(one) and is_there(other))
        assert run(one, TEXT) == 0 and one.flush()
        assert run(other, TEXT) >= 60 and other.stats().loaded_tokens >= 60
        for cache in (one, other):
            cache.close()


@pytest.mark.parametrize("start", STORES)
def test_requests_run_on_while_the_store_hangs_dies_and_restarts_empty(start: Start, tmp_path: Path) -> None:
    with start(tmp_path) as server:
        cache = cache_of("mixed", tier(server))
        wait_for(lambda: is_there(cache))
        run(cache, TEXT)
        assert cache.flush()
        server.hang()
        begin = monotonic()
        forget(cache)
        assert run(cache, TEXT) == 0
        assert monotonic() - begin < 3, "it waits for the store's timeout a few times, and no more"
        server.go_on()
        server.kill()
        forget(cache)
        assert run(cache, TEXT) == 0
        server.start()
        wait_for(lambda: is_there(cache), 20.0)
        forget(cache)
        run(cache, TEXT)  # stores it again
        assert cache.flush()
        forget(cache)
        assert run(cache, TEXT) >= 60
        cache.close()


def is_there(cache: KVCache) -> bool:
    """Return whether the store accepts records now."""
    level = cache.core.tiers.levels[0]
    before, text = level.stats().stored, np.random.default_rng(int(monotonic() * 1e6)).integers(100, 150, 30)
    run(cache, text)
    return cache.flush() and level.stats().stored > before
