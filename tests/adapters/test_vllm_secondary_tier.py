"""Our tiers below vLLM's CPU tier: through its factories, its manager and its shared memory, as a configuration names them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda import BadInput

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvpagoda.adapters.vllm.secondary_tier import KvpagodaTier
from kvpagoda.tiers import Status
from raises import raises

MODULE = "kvpagoda.adapters.vllm.secondary_tier"
PAGE = 8192


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), group)


def content(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, PAGE, np.uint8)


class Engine:
    """The scheduler's side of vLLM's tiering connector; ``chunks``: what the CPU tier holds."""

    def __init__(self, tier: str, chunks: int = 8, model: str = "model", **settings: Any) -> None:
        extra = {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": chunks * PAGE, "tier_poll_interval_s": 0,
            "secondary_tiers": [{"type": "KvpagodaTier", "module_path": MODULE, "tier": tier, **settings}],
        }  # fmt: skip
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),), worker_kv_bytes_per_block=PAGE,
            enable_kv_cache_events=False, extra_config=extra, engine_id=f"test-{os.getpid()}-{monotonic()}",
            model=OffloadingModelConfig(model, "float16"), cache=OffloadingCacheConfig(16, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )  # fmt: skip
        self.manager = OffloadingSpecFactory.create_spec(config).get_manager()
        (self.tier,) = self.manager.secondary_tiers
        assert isinstance(self.tier, KvpagodaTier)
        self.number = 0

    def request(self) -> ReqContext:
        self.number += 1
        context = ReqContext(f"{self.number}")
        self.manager.on_new_request(context)
        return context

    def memory(self) -> Any:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def step(self, context: Any = None) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], set()) if context is None else context)

    def store(self, numbers: list[int]) -> None:
        """Store the chunks ``numbers`` as a request does whose blocks were copied from the device."""
        context, keys = self.request(), [key(number) for number in numbers]
        done = self.manager.prepare_store(keys, context)
        assert done is not None
        for one, chunk in zip(done.keys_to_store, done.store_spec.chunk_ids):
            self.memory()[chunk] = content(int.from_bytes(one[:-4], "big"))
        self.manager.complete_store(keys, context)
        self.finish(context)

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        self.step()
        self.tier.drain_jobs()
        self.step()

    def found(self, numbers: list[int]) -> list[int]:
        """Return which chunks a request finds, after their bytes were compared."""
        context, end, results = self.request(), monotonic() + 20, dict[int, LookupResult]()
        while not results or {*results.values()} - {LookupResult.HIT, LookupResult.MISS}:
            assert monotonic() < end, results
            sleep(0.01)
            self.step()
            results = {number: self.manager.lookup(key(number), context) for number in numbers}
        hits = [number for number in numbers if results[number] is LookupResult.HIT]
        if hits:
            chunks = self.manager.prepare_load([key(number) for number in hits], context).chunk_ids
            for number, chunk in zip(hits, chunks):
                assert (self.memory()[chunk] == content(number)).all()
            self.manager.complete_load([key(number) for number in hits], context)
        self.finish(context)
        return hits


@contextmanager
def engine(tier: str, **settings: Any) -> Iterator[Engine]:
    made = Engine(tier, **settings)
    try:
        yield made
    finally:
        made.manager.shutdown()


def test_chunks_come_back_after_memory_forgot_them_and_after_a_restart(tmp_path: Path) -> None:
    tier = f"disk:{tmp_path}:1MiB"
    with engine(tier) as one:
        for first in range(0, 24, 4):
            one.store([*range(first, first + 4)])
        assert one.found([0, 1, 2, 3, 99]) == [0, 1, 2, 3]
    with engine(tier) as one:
        assert one.found([5, 6, 98, 23]) == [5, 6, 23]
    with engine(tier, weights="others") as one:
        assert one.found([5, 6]) == []
    with engine(tier, model="another model") as one:
        assert one.found([5, 6]) == []


def test_a_tier_in_memory_and_more_chunks_than_staging(tmp_path: Path) -> None:
    with engine("host:1MiB", chunks=32, staging=2 * (PAGE + 4096), workers=1) as one:
        one.store([*range(30)])
        one.store([*range(100, 130)])
        assert one.found([*range(30)]) == [*range(30)]


def test_a_damaged_record_is_a_miss_and_the_others_are_kept(tmp_path: Path) -> None:
    tier = f"disk:{tmp_path}:1MiB"
    with engine(tier) as one:
        one.store([0, 1, 2, 3])
    file = tmp_path / "records.slab"
    data, damaged = bytearray(file.read_bytes()), content(2).tobytes()[4096:4196]
    assert data.count(damaged) == 1
    at = data.index(damaged)
    data[at : at + 4] = b"oops"
    file.write_bytes(data)
    with engine(tier) as one:
        assert one.found([0, 1, 2, 3]) == [0, 1, 3]


def test_a_tier_that_is_down_stores_and_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(f"disk:{tmp_path}:1MiB", timeout=0.2) as one:
        driver = one.tier._tier.driver
        monkeypatch.setattr(driver, "store", lambda keys, rows, deadline: [Status.UNAVAILABLE] * len(keys))
        for first in range(0, 16, 4):
            one.store([*range(first, first + 4)])
        assert one.found([0, 1]) == [] and one.found([14, 15]) == [14, 15]  # these are in vLLM's own tier


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with raises(BadInput, needed=ANY, hint=None):
        Engine("tape:1MiB")
    with raises(BadInput, needed=2 * (PAGE + 4096), available=4096, field="staging"):
        Engine("host:1MiB", staging=4096)
