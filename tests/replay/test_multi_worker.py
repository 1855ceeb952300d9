"""Several workers that serve one trace, alone and with a store below them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpagoda.errors import BadInput
from kvpagoda.replay import serve, serve_multi_worker, synthetic
from kvpagoda.schema import Attention, Layer, Recurrent, Rows, Schema

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from servers import has_redis, redis_server

from raises import raises

FULL = Layer(0, "full", (Attention(2, 64, 64, "float16"),))
STATE = Layer(1, "state", (Recurrent((Rows("r", (64, 64), "float32"),)),))
SCHEMAS = {"full": Schema((FULL,), "full"), "hybrid": Schema((FULL, STATE), "hybrid")}
SETTINGS = {"tokens_per_id": 64, "max_requests": 8}
needs_redis = pytest.mark.skipif(not has_redis(), reason="needs redis-server (make servers)")


def test_without_a_store_each_worker_is_alone() -> None:
    trace, schema = synthetic(60), SCHEMAS["hybrid"]
    done: list[int] = []
    results = serve_multi_worker(trace, schema, "64MiB", workers=2, on_request=done.append, **SETTINGS)
    alone = [serve(trace, schema, "64MiB", part=range(i, 60, 2), **SETTINGS) for i in range(2)]
    assert results == alone and [r.requests for r in results] == [30, 30]
    assert done[-1] == 60 and done == sorted(done)


@needs_redis
@pytest.mark.parametrize("name", SCHEMAS)
def test_workers_hit_what_others_computed(name: str, tmp_path: Path) -> None:
    trace, schema = synthetic(40), SCHEMAS[name]
    with redis_server(tmp_path, memory="256mb") as server:
        alone, together = (
            serve_multi_worker(trace, schema, "64MiB", workers=2, store=store, **SETTINGS)
            for store in (None, server.address)
        )
        again = serve_multi_worker(trace, schema, "64MiB", workers=1, store=server.address, **SETTINGS)
    # how much they find of each other depends on who is when where
    assert sum(r.cached_tokens for r in together) >= sum(r.cached_tokens for r in alone)
    assert again[0].hit_rate > 0.9 and again[0].loaded_tokens > 0, "all of it is in the store by then"
    assert [replace(r, loaded_tokens=0).requests for r in together] == [20, 20]


@needs_redis
def test_the_command_shows_the_joint_hit_rate(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvpagoda", "replay", "--schema", "deepseek-v4-flash", "--budget", "2GiB"]
    command += ["--limit", "40", "--workers", "2"]
    with redis_server(tmp_path) as server:
        told = [
            subprocess.run(
                [*command, "--store", server.address, *more], capture_output=True, text=True, check=True, timeout=60,
                env={"COLUMNS": "70", "PATH": ""},
            ).stdout
            for more in ([], ["--json"])
        ]  # fmt: skip
    assert "together" in told[0] and "from store" in told[0] and max(map(len, told[0].splitlines())) <= 70
    figures = json.loads(told[1])
    assert figures["workers"] == 2 and 0 < figures["from_store"] <= figures["hit_rate"] < 1
    assert sum(result["requests"] for result in figures["results"]) == 40


@pytest.mark.parametrize("workers", [0, True, 1.5, 2000])
def test_a_number_of_workers_that_cannot_be(workers: object) -> None:
    with raises(BadInput, field="workers", needed=workers, available=1):
        serve_multi_worker(synthetic(2), SCHEMAS["full"], "64MiB", workers=workers)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", ["redis", "http://x", "mooncake:x", "disk:folder", "host:"])
def test_a_store_that_is_not_known_is_told_before_a_process_starts(store: str) -> None:
    with pytest.raises(BadInput):
        serve_multi_worker(synthetic(2), SCHEMAS["full"], "64MiB", workers=1, store=store)


@pytest.mark.parametrize(
    "options",
    [
        ["--store", "redis://h"],
        ["--schema", "deepseek-v4-flash", "--store", "redis://h"],
        ["--schema", "deepseek-v4-flash", "--workers", "2", "--policy", "lru,fifo"],
        ["--schema", "deepseek-v4-flash", "--workers", "2", "--capacity", "100"],
    ],
)
def test_options_that_do_not_go_together(options: list[str], here: Callable[..., Any]) -> None:
    done = here("replay", *options)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
