"""A cache with tiers below it: stored rows are loaded bit for bit, and every failure of a tier is a miss."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from gc import collect
from pathlib import Path
from threading import Lock
from threading import enumerate as threads
from time import monotonic, sleep
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda import Identity, Retention
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.core.offload.offloader import Offloader
from kvpagoda.errors import BadInput, CheckFailed
from kvpagoda.schema import Attention, Compressed, Growth, IndexKeys, Latent, Schema
from kvpagoda.schema.fields import Encoding
from kvpagoda.tiers import Driver, DriverStats, Lease, RecordBuffer, Status, TierSpec, disk_tier, host_driver, host_tier
from options import grouped
from raises import raises
from records import records_of
from test_manager import SCHEMAS, FakeEngine, schema_of, traffic
from test_swap import computed, fill_random, overwrite

TINY = {"staging": "1MiB"}


def cache_of(name: str | Schema, *tiers: TierSpec, num_blocks: int = 40, **arguments: object) -> KVCache:
    schema = SCHEMAS[name] if isinstance(name, str) else name
    settings: dict[str, object] = {
        "checkpoints": 4,
        "checkpoint_every": 2,
        "max_requests": 6,
        "poison": True,
        **arguments,
    }
    return KVCache(
        schema, num_blocks=num_blocks, block_size=4, device="cpu", tiers=tiers,
        **grouped(**{"step_tokens": 9, "weights": "w", **settings}),
    )  # fmt: skip


def run(cache: KVCache, text: np.ndarray, engine: FakeEngine | None = None) -> int:
    """Compute ``text`` in a request and close it. Returns how many tokens were cached."""
    engine = FakeEngine(cache) if engine is None else engine
    with cache.open(text, "tenant 0", capacity=0) as sequence:
        engine.spaces[id(sequence)] = 0
        cached = sequence.cached_tokens
        while sequence.length < len(text):
            end = min(sequence.length + min(9, cache.step_limit(sequence)), len(text))
            new = text[sequence.length : end].astype(np.int32)
            sequence.extend(len(new))
            engine.step([sequence], [new])
            sequence.commit(new)
        cache.check()
    return cached


def levels_of(cache: KVCache) -> tuple[Any, ...]:
    """Return the tiers of ``cache``, the fastest first."""
    return cache.core.tiers.levels


def forget(cache: KVCache) -> None:
    """Reset ``cache``, so that nothing is cached on the device."""
    cache.reset()
    assert not cache.core.prefix.tree.num_cached


class Flaky:
    """A driver around another one that fails, or reports wrong results, at random."""

    def __init__(self, driver: Driver, share: float, seed: int = 0) -> None:
        self.driver, self.share, self.random, self.num_faults = driver, share, np.random.default_rng(seed), 0

    def _hits(self) -> bool:
        hit = bool(self.random.random() < self.share)
        self.num_faults += hit
        return hit

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        statuses = self.driver.store(keys, rows, deadline) if not self._hits() else [Status.OK] * len(keys)
        return [Status.UNAVAILABLE if self._hits() else status for status in statuses]

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        if self._hits():
            raise OSError("the server is gone")
        lease = self.driver.lookup(keys, deadline, hold)
        return Lease(
            lease.keys, tuple(Status.OK if self._hits() else one for one in lease.statuses), lease.until, lease.release
        )

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        statuses = self.driver.load(keys, rows, deadline)
        for i, row in enumerate(rows):
            fault = int(self.random.integers(5)) if self._hits() else -1
            if fault == 0:
                statuses[i] = Status.MISS
            elif fault == 1:  # wrong bytes, reported as right
                self.rows[row][int(self.random.integers(len(self.rows[row])))] ^= 1 << int(self.random.integers(8))
            elif fault == 2:
                self.rows[row][int(self.random.integers(len(self.rows[row]))) :] = 0
            elif fault == 3:  # the bytes of another record
                self.rows[row][:] = self.rows[rows[0]]
            elif fault == 4:
                statuses[i] = Status.OK
        return statuses

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return self.driver.discard(keys, deadline)

    def stats(self) -> DriverStats:
        return self.driver.stats()

    def close(self) -> None:
        self.driver.close()

    @classmethod
    def tier(cls, share: float, **settings: object) -> tuple[TierSpec, list[Flaky]]:
        """Return a tier with such a driver, and a list that will hold the driver when a cache is made."""
        made: list[Flaky] = []

        def make(buffer: RecordBuffer) -> Driver:
            driver = cls(host_driver(buffer, "4MiB"), share)
            driver.rows = buffer.rows
            made.append(driver)
            return driver

        return TierSpec("flaky", make, **{**TINY, **settings}), made  # type: ignore[arg-type]

    rows: list[np.ndarray]


WAYS: dict[str, Callable[[Path], tuple[TierSpec, ...]]] = {
    "evict": lambda folder: (host_tier("1MiB", **TINY),),
    "commit": lambda folder: (host_tier("1MiB", write="commit", **TINY),),
    "reuse": lambda folder: (host_tier("1MiB", write="reuse", **TINY),),
    "several blocks in a record": lambda folder: (host_tier("1MiB", write="commit", record_nbytes=700, **TINY),),
    "disk": lambda folder: (disk_tier(folder, "2MiB", **TINY),),
    "host over disk": lambda folder: (host_tier("100KiB", **TINY), disk_tier(folder, "2MiB", admit_all=True, **TINY)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["full", "window", "mixed", "state", "latent"])
def test_rows_read_back_are_the_rows_written(name: str, way: str, tmp_path: Path) -> None:
    """Random traffic in a cache so small that it evicts all the time: every row that a step may read is compared."""
    cache = cache_of(name, *WAYS[way](tmp_path))
    cache.open = partial(cache.open, layerwise=way == "disk")  # type: ignore[method-assign]
    traffic(cache, 220, seed=5, engine=FakeEngine(cache))
    stats = cache.stats()
    assert sum(tier.failed for tier in stats.tiers) == 0
    assert stats.loaded_tokens > 0 or way == "reuse"
    assert cache.flush()
    for level in levels_of(cache):
        level.buffer.check()
        assert level.buffer.num_free == level.buffer.num_records
    cache.close()


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_rows_stay_right_while_a_tier_fails(name: str, share: float) -> None:
    spec, made = Flaky.tier(share, write="evict")
    cache = cache_of(name, spec)
    traffic(cache, 200, seed=6, engine=FakeEngine(cache))
    assert made[0].num_faults >= 3
    assert share < 1 or cache.stats().loaded_tokens == 0
    cache.close()


@pytest.mark.parametrize("name", ["full", "window", "mixed", "state", "latent"])
def test_another_cache_finds_what_was_stored_and_another_model_does_not(name: str, tmp_path: Path) -> None:
    text = np.arange(50) % 37
    first = cache_of(name, disk_tier(tmp_path, "2MiB", **TINY))
    assert run(first, text) == 0
    first.close()
    second = cache_of(name, disk_tier(tmp_path, "2MiB", **TINY))
    assert run(second, text) == 48 == second.stats().loaded_tokens
    forget(second)
    other = text.copy()
    other[30] += 1
    found = run(second, other)
    assert 0 < found <= 28
    second.close()
    for changed in ({"weights": "v"}, {"rank": 1, "num_ranks": 2}, {"block_size": 8}):
        cache = KVCache(
            SCHEMAS[name], num_blocks=40, device="cpu",
            **grouped(block_size=4, weights="w", tiers=[disk_tier(tmp_path / "other", "2MiB", **TINY)])
            | grouped(**{"weights": "w", **changed}),
        )  # fmt: skip
        assert run(cache, text) == 0
        cache.close()


FORMATS = {
    "fp8 latents": (Latent(256, 64, "bfloat16", encoding=Encoding("fp8", group=128), indexer=IndexKeys(128)),),
    "fp8 entries": (Compressed(192, 8, "bfloat16", 4, IndexKeys(64), Encoding("fp8_ue8m0", kept=64, group=64)),),
    "mxfp4 and nvfp4": (
        Attention(2, 64, 64, "bfloat16", encoding=Encoding("mxfp4", group=32)),
        Attention(2, 64, 64, "bfloat16", Growth(window=10), Encoding("nvfp4", group=16)),
    ),
    "packed heads": (
        Attention(2, 64, 64, "bfloat16", encoding=Encoding("gqa_nvfp4")),
        Attention(2, 64, 64, "bfloat16", Growth(window=10), Encoding("gqa_int4_group")),
    ),
    "heads packed apart": (Attention(2, 96, 64, "bfloat16", encoding=Encoding("gqa_int8_head")),),
}


def schemas() -> list[str]:
    pytest.importorskip("transformers")
    from models import TINY as CONFIGS

    return [*FORMATS, *sorted(CONFIGS)]


@pytest.mark.parametrize("name", schemas())
def test_every_byte_comes_back_for_every_family_and_format(name: str, tmp_path: Path) -> None:
    """Blocks, windows and states of random bytes are stored on disk and loaded; then the same with host memory."""
    from models import TINY as CONFIGS

    schema = schema_of(*FORMATS[name]) if name in FORMATS else Schema.from_hf_config(CONFIGS[name]())
    size, order = (16 if name == "deepseek_v4" else 8), ("block", "layer")[len(name) % 2]
    settings = {"staging": "4MiB", "timeout": 30.0}  # a busy machine drops nothing
    tiers = [host_tier("8MiB", **settings), disk_tier(tmp_path, "16MiB", **settings)]
    cache = KVCache(
        schema, num_blocks=24, max_requests=2, block_size=size, device="cpu", order=order,
        retention=Retention(checkpoints=2), tiers=tiers, identity=Identity(weights="w"),
    )  # fmt: skip
    text = range(5 * size + 3)
    fill_random(cache)
    with cache.open(text, capacity=0) as sequence:
        while sequence.length < len(text):
            end = min(len(text), sequence.length + min(size, cache.step_limit(sequence)))
            sequence.extend(end - sequence.length)
            sequence.commit(text[sequence.length : end])
            if sequence.length == 5 * size:
                before = needed_rows(sequence, cache)
    assert cache.flush()
    for source in (1, 0):  # from disk, then from host memory
        if source:
            forget(cache)
        else:
            for other in range(60, 120, 20):
                computed(cache, range(other, other + size + 1)).close()
            overwrite(cache, 60)
            assert cache.flush()
        loaded = cache.stats().tiers[source].loaded
        fill_random(cache)
        with cache.open(text, capacity=0) as sequence:
            assert sequence.match.resumable == 5 * size
            assert source or not cache.core.prefix.bounded or sequence.match.loaded
            after = needed_rows(sequence, cache)
            assert all(torch.equal(old, new) for old, new in zip(before, after))
            assert cache.stats().tiers[source].loaded > loaded or not sequence.match.loaded
    cache.check()
    cache.close()


def needed_rows(sequence: Any, cache: KVCache) -> list[torch.Tensor]:
    """Return the records that the next token of ``sequence`` reads, uint8 ``[n, nbytes]`` for each group."""
    found = []
    for ledger in cache.core.groups:
        first = ledger.growth.first_needed(sequence.length) // ledger.block_size
        ids = ledger.table.cells[sequence.slot, first : -(-sequence.length // ledger.block_size)]
        found.append(records_of(cache.core.memory.arenas[ledger.index], ids))
    return found


def test_what_is_stored_belongs_to_one_namespace_secret_and_image() -> None:
    store: list[Driver] = []

    def make(buffer: RecordBuffer) -> Driver:  # one store for several caches of the same layout
        if not store:
            store.append(Kept(host_driver(buffer, "1MiB")))
        kept = store[0]
        assert isinstance(kept, Kept)
        return kept.over(buffer)

    spec = TierSpec("shared", make, staging="1MiB")
    text = np.arange(33) % 7

    def cached(namespace: str | None, media: dict[int, bytes] | None, **arguments: object) -> int:
        cache = cache_of("full", spec, **arguments)
        with cache.open(text, namespace, media=media) as sequence:
            found = sequence.match.loaded
            sequence.commit(text[sequence.length :].astype(np.int32))
        cache.close()
        return found

    one, two = {9: b"1" * 16}, {9: b"2" * 16}
    assert [cached("a", None) for _ in range(2)] == [0, 32]
    assert cached("b", None) == 0 and cached("a", None, secret=b"s") == 0
    assert [cached("a", one) for _ in range(2)] == [8, 32]
    assert cached("a", two) == 8 and cached("a", {10: b"1" * 16}) == 8 and cached("a", one) == 32


class Kept:
    """A driver whose records outlive its caches: several caches use it in turn, each with its own buffer."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.records: dict[bytes, np.ndarray] = {}
        self.buffer: RecordBuffer | None = None

    def over(self, buffer: RecordBuffer) -> Kept:
        self.buffer = buffer
        return self

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        assert self.buffer is not None
        for key, row in zip(keys, rows):
            self.records.setdefault(key, self.buffer.rows[row].copy())
        return [Status.OK] * len(keys)

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        return Lease(tuple(keys), tuple(Status.OK if key in self.records else Status.MISS for key in keys), deadline)

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        assert self.buffer is not None
        for key, row in zip(keys, rows):
            if key in self.records:
                self.buffer.rows[row][:] = self.records[key]
        return [Status.OK if key in self.records else Status.MISS for key in keys]

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        return [Status.OK if self.records.pop(key, None) is not None else Status.MISS for key in keys]

    def stats(self) -> DriverStats:
        return DriverStats(len(self.records), 0, 1)

    def close(self) -> None:
        pass


def test_new_weights_hide_stored_blocks_until_the_old_weights_are_named_again() -> None:
    cache = cache_of("full", host_tier("1MiB", write="commit", **TINY))
    text = np.arange(40) % 31
    assert run(cache, text) == 0 and cache.flush()
    forget(cache)
    assert run(cache, text) == 36
    cache.invalidate(weights="x")
    assert run(cache, text) == 0 and cache.flush()
    forget(cache)
    cache.invalidate(weights="w")
    assert run(cache, text) == 36, "the first weights again"
    cache.invalidate()
    assert run(cache, text) == 0
    with raises(BadInput, field="weights, a digest of them,", needed=b"x"):
        cache.invalidate(weights=b"x")  # type: ignore[arg-type]
    with raises(BadInput, needed=0, available=1):
        cache.invalidate("a", weights="y")
    cache.close()


@pytest.mark.parametrize("name", ["full", "mixed"])
def test_a_prefetch_reads_while_a_request_waits(name: str, tmp_path: Path) -> None:
    cache = cache_of(name, disk_tier(tmp_path, "2MiB", **TINY))
    text = np.arange(70) % 41
    run(cache, text)
    assert cache.flush()
    forget(cache)
    ahead = cache.prefetch(text, "tenant 0")
    until = monotonic() + 5
    while not ahead.is_done and monotonic() < until:
        sleep(0.001)
    before = cache.stats().tiers[0].loaded
    assert before
    with cache.open(text, "tenant 0", prefetch=ahead) as sequence:
        assert sequence.cached_tokens == 68 == sequence.match.loaded
    assert cache.stats().tiers[0].loaded == before, "nothing was read twice"
    forget(cache)
    with cache.open(text[:20], "tenant 0", prefetch=cache.prefetch(text, "tenant 0")) as sequence:
        assert sequence.cached_tokens <= 16, "of another text nothing is taken"
    cache.prefetch(text, "tenant 1").close()
    cache.prefetch(text[:0], "tenant 0").close()
    assert cache.flush() and free_rows(cache) == levels_of(cache)[0].buffer.num_records
    cache.close()
    with raises(BadInput, needed="tiers"):
        cache_of(name).prefetch(text)


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("record_nbytes", [1, 2000])
def test_layers_are_loaded_when_their_views_are_made(order: str, record_nbytes: int) -> None:
    spec = host_tier("1MiB", write="commit", record_nbytes=record_nbytes, staging="1MiB")
    cache = cache_of("mixed", spec, order=order)
    text, engine = np.arange(80) % 41, FakeEngine(cache)
    run(cache, text)
    assert cache.flush()
    forget(cache)
    buffer = levels_of(cache)[0].buffer
    with cache.open(text, "tenant 0", layerwise=True) as sequence:
        assert sequence.match.loaded > 40 and buffer.num_free < buffer.num_records
        view = cache.batch([sequence], [1]).layer(0)
        block = int(view.block_table[0, 0])
        assert (view["k"][block] != cache.core.memory.arenas[0].layer(2)["k"][block]).any(), "layer 2 is not in yet"
        engine.spaces[id(sequence)] = 0
        engine.step([sequence], [text[sequence.length : sequence.length + 1].astype(np.int32)])
        assert buffer.num_free == buffer.num_records, "all layers are in"
    forget(cache)
    sequence = cache.open(text, "tenant 0", layerwise=True)
    sequence.close()
    assert buffer.num_free == buffer.num_records, "nothing is left behind"
    assert run(cache, text) > 40
    cache.close()


@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_a_cache_without_memory_loads_layers_at_once(name: str) -> None:
    cache = KVCache(
        SCHEMAS[name], num_blocks=60, max_requests=4, block_size=4, device="none", retention=Retention(4, 2),
        tiers=[host_tier("1MiB", write="commit", **TINY)],
    )  # fmt: skip
    text = np.arange(40) % 31
    for cached in (0, 36):
        with cache.open(text, layerwise=True) as sequence:
            assert sequence.cached_tokens == cached
            while sequence.length < len(text):
                end = min(len(text), sequence.length + cache.step_limit(sequence))
                sequence.extend(end - sequence.length)
                sequence.commit(text[sequence.length : end])
            cache.check()
        assert cache.flush()
        forget(cache)
        cache.check()
    cache.close()


def test_loading_is_skipped_when_computing_is_faster() -> None:
    cache = cache_of("full", host_tier("1MiB", write="commit", **TINY))
    text = np.arange(40) % 31
    run(cache, text)
    assert cache.flush()
    forget(cache)
    assert run(cache, text) == 36  # this load was measured
    assert isinstance(cache.core.tiers, Offloader)
    cache.core.tiers.reader.seconds_per_token = 1e-12
    forget(cache)
    assert run(cache, text) == 0
    cache.core.tiers.reader.seconds_per_token = 1.0
    forget(cache)
    assert run(cache, text) == 36
    cache.close()


def test_bad_tier_settings_are_refused_before_a_cache_is_made(tmp_path: Path) -> None:
    with raises(BadInput, needed="weights", available="disk"):
        KVCache(SCHEMAS["full"], num_blocks=8, device="cpu", tiers=[disk_tier(tmp_path, "1MiB")])
    with raises(BadInput, field="write", needed="commit", available=256):
        cache_of("full", host_tier("1MiB", record_nbytes="64KiB"))
    with raises(BadInput, field="staging", needed=24576, available=4096):
        cache_of("mixed", host_tier("1MiB", staging=4096))
    with raises(BadInput, needed=4096, available=100):
        cache_of("full", host_tier("1MiB", **TINY), host_tier(100, **TINY))
    timeouts = [{"timeout": seconds} for seconds in (0, -1.0, float("inf"), float("nan"))]
    for settings in ({"write": "never"}, *timeouts, {"record_nbytes": 0}, {"staging": "much"}):
        with pytest.raises(BadInput):
            host_tier("1MiB", **settings)  # type: ignore[arg-type]
    with raises(BadInput, field="checksum", needed="disk"):
        disk_tier(tmp_path, "1MiB", checksum=False)
    with raises(BadInput, field="tiers are made by host_tier, disk_tier and others, or are a TierSpec", needed=ANY):
        cache_of("full", host_driver)  # type: ignore[arg-type]
    for wrong, told in (
        ({"weights": b"w"}, {"field": "weights, a digest of them,", "needed": b"w"}),
        ({"rank": 2, "num_ranks": 2}, {"field": "rank", "needed": 2, "available": 0}),
        ({"rank": -1}, {"field": "rank", "needed": -1, "available": 0}),
    ):
        with raises(BadInput, **told):
            KVCache(SCHEMAS["full"], num_blocks=8, device="cpu", **grouped(**wrong))
    with raises(BadInput, field="disk", needed=("commit", 1.0, 0)):
        cache_of("full", disk_tier(tmp_path, "1MiB", workers=0, **TINY))
    cache_of("full", disk_tier(tmp_path, "1MiB", **TINY)).close()  # the cache that was refused left no locked file
    with raises(BadInput, field="order", needed="row"):
        cache_of("full", disk_tier(tmp_path, "1MiB", **TINY), order="row")
    cache_of("full", disk_tier(tmp_path, "1MiB", **TINY)).close()  # nor did the one that failed later
    with raises(
        BadInput,
        field="secret",
        needed=b"sssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssssss",
        available=64,
    ):
        cache_of("full", host_tier("1MiB", **TINY), secret=b"s" * 65)


def test_more_than_the_staging_memory_is_stored_a_piece_at_a_time() -> None:
    """A commit never waits, and no record is lost: one that finds no staging memory is stored later, if its block is
    still cached."""
    cache = cache_of("full", host_tier("4MiB", write="commit", staging=3 * 4096), num_blocks=200)
    text = np.arange(600) % 43
    run(cache, text)
    assert cache.flush() and cache.stats().tiers[0].num_records == 150
    forget(cache)
    assert run(cache, text) == 596
    cache.close()


def test_a_hung_tier_delays_an_open_by_its_timeout_and_no_more() -> None:
    class Hung(Flaky):
        def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
            sleep(1.5)
            return super().lookup(keys, deadline, hold)

    spec, _ = Hung.tier(0.0, timeout=0.2)
    cache = cache_of("full", spec)
    begin = monotonic()
    assert run(cache, np.arange(40)) == 0
    assert monotonic() - begin < 0.2 * 1.1 + 0.3
    cache.close(timeout=3.0)


class Slow(Flaky):
    """A driver that counts its calls, and delays each by ``seconds[name of the call]``."""

    seconds: dict[str, float]

    def _wait(self, kind: str) -> None:
        with self.lock:
            self.calls[kind] += 1
        sleep(self.seconds.get(kind, 0.0))

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        self._wait("store")
        return super().store(keys, rows, deadline)

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        self._wait("lookup")
        return super().lookup(keys, deadline, hold)

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        self._wait("load")
        return super().load(keys, rows, deadline)


def slow_tier(size: str = "4MiB", **settings: object) -> tuple[TierSpec, Slow]:
    """Return a tier and its driver, which is fast until a test sets its ``seconds``. The driver is initialised when a
    cache is made."""
    driver = Slow.__new__(Slow)

    def make(buffer: RecordBuffer) -> Driver:
        Slow.__init__(driver, host_driver(buffer, size), 0.0)
        driver.rows, driver.seconds, driver.calls, driver.lock = buffer.rows, {}, Counter(), Lock()
        return driver

    return TierSpec("slow", make, **{**TINY, **settings}), driver  # type: ignore[arg-type]


def free_rows(cache: KVCache) -> int:
    """Return how many staging records of the first tier are free, after at most 5 seconds for running calls to end."""
    (level, *_) = levels_of(cache)
    until = monotonic() + 5
    while level.buffer.num_free < level.buffer.num_records and monotonic() < until:
        sleep(0.001)
    return int(level.buffer.num_free)


@pytest.mark.parametrize("name", ["full", "mixed"])
def test_a_prefetch_that_is_loaded_layer_by_layer_frees_all_staging_records(name: str) -> None:
    cache, text = cache_of(name, host_tier("1MiB", write="commit", **TINY)), np.arange(70) % 41
    run(cache, text)
    whole = free_rows(cache)
    for _ in range(4):
        forget(cache)
        ahead = cache.prefetch(text, "tenant 0")
        until = monotonic() + 5
        while not ahead.is_done and monotonic() < until:
            sleep(0.001)
        cache.check()  # the staging records of the prefetch have an owner
        with cache.open(text, "tenant 0", prefetch=ahead, layerwise=True) as sequence:
            assert sequence.match.loaded == 68
            cache.check()
        cache.check()
        assert free_rows(cache) == whole
    cache.close()


def test_an_interrupted_request_releases_its_hit(tmp_path: Path) -> None:
    cache, text = cache_of("mixed", host_tier("1MiB", write="commit", **TINY)), np.arange(40) % 31
    run(cache, text)
    whole = free_rows(cache)
    forget(cache)
    admit, cache._admission._begin = cache._admission._begin, None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        cache.open(text, "tenant 0")
    cache._admission._begin = admit  # type: ignore[method-assign]
    assert run(cache, text) == 36 and free_rows(cache) == whole
    cache.close()


def test_what_a_prefetch_did_not_find_is_not_looked_up_again() -> None:
    spec, driver = slow_tier(write="commit")
    cache, text = cache_of("full", spec), np.arange(40)
    ahead = cache.prefetch(text, "tenant 0")
    while not ahead.is_done:
        sleep(0.001)
    asked = driver.calls["lookup"]
    assert asked
    cache.open(text, "tenant 0", prefetch=ahead).close()
    assert driver.calls["lookup"] == asked
    cache.open(text, "tenant 0", prefetch=ahead).close()
    assert driver.calls["lookup"] == asked + 1, "a prefetch is used once"
    cache.close()


@pytest.mark.parametrize("name", ["full", "mixed", "state"])
@pytest.mark.parametrize("slow", ["load", "lookup", "both"])
def test_an_open_waits_one_timeout_in_all(name: str, slow: str) -> None:
    """There are many candidate checkpoints, many records and little staging memory."""
    spec, driver = slow_tier(write="commit", timeout=0.4, staging="80KiB")
    cache = cache_of(name, spec, checkpoint_every=1, checkpoints=12)
    texts = [np.arange(80) % 41, np.arange(80) % 37]
    for text in texts:
        run(cache, text)
    assert cache.flush()
    kinds = ("load", "lookup") if slow == "both" else (slow,)
    driver.seconds = dict.fromkeys(kinds, 0.15)
    for text in texts:
        forget(cache)
        begin = monotonic()
        cache.open(text, "tenant 0").close()
        assert monotonic() - begin < 0.4 * 1.1 + 0.1
    forget(cache)
    ahead = cache.prefetch(texts[0], "tenant 0")
    begin = monotonic()
    cache.open(texts[0], "tenant 0", prefetch=ahead).close()
    assert monotonic() - begin < 0.4 * 1.1 + 0.1
    driver.seconds = {}
    cache.check()
    cache.close()


def test_a_hung_server_stalls_the_first_requests_and_no_other() -> None:
    spec, driver = slow_tier(write="commit", timeout=0.1)
    cache = cache_of("full", spec)
    driver.seconds = {"lookup": 0.3, "load": 0.3}
    stalled = []
    until = monotonic() + 4
    while monotonic() < until:
        begin = monotonic()
        cache.open(np.arange(40), "tenant 0").close()
        stalled.append(monotonic() - begin)
        sleep(0.02)
    assert sum(seconds > 0.05 for seconds in stalled) <= 7 and len(stalled) > 100
    (stats,) = cache.stats().tiers
    assert not stats.is_available and stats.last_fault == "lookup: no answer in 0.1 s"
    driver.seconds = {}
    until = monotonic() + 10
    while not cache.stats().tiers[0].is_available:
        assert monotonic() < until
        sleep(0.01)
    cache.close()


@pytest.mark.parametrize("timeout", [0.0, 0.5])
def test_closing_takes_its_timeout_in_all(timeout: float) -> None:
    spec, driver = slow_tier(write="commit", timeout=2.0)
    second, other = slow_tier(write="commit", timeout=2.0)
    cache = cache_of("full", spec, second)
    for one in (driver, other):
        one.seconds = {"lookup": 1.5, "load": 1.5, "store": 1.5}
    ahead = [cache.prefetch(np.arange(40) + i, "tenant 0") for i in range(4)]
    for sequence in [cache.open(np.arange(20), "tenant 1", prefetch=None)]:
        sequence.commit(np.arange(20, dtype=np.int32))
    begin = monotonic()
    cache.close(timeout)
    assert monotonic() - begin < timeout * 1.1 + 0.1
    assert all(one.take(monotonic()) is None for one in ahead)
    with raises(BadInput, field="the timeout, in seconds,", needed=ANY, available=0):
        cache_of("full", spec).close(float("nan"))


def test_a_load_takes_few_round_trips() -> None:
    spec, driver = slow_tier("16MiB", write="commit", staging="2MiB", timeout=5.0)
    cache, text = cache_of("full", spec, num_blocks=300), np.arange(1024) % 97
    run(cache, text)
    assert cache.flush()
    forget(cache)
    driver.calls.clear()
    driver.seconds = {"lookup": 0.05, "load": 0.05}
    begin = monotonic()
    with cache.open(text, "tenant 0") as sequence:
        assert sequence.match.loaded == 1020
    assert driver.calls["load"] <= 3 and driver.calls["lookup"] == 2 and monotonic() - begin < 0.5
    cache.close()


def test_the_time_of_loads_is_compared_with_the_time_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once enough tokens were computed, slower loads are skipped. After some skipped loads one is tried again."""
    monkeypatch.setattr("kvpagoda.core.offload.reader._LEAST_TOKENS", 60)
    spec, driver = slow_tier(write="commit", timeout=5.0)
    cache, text = cache_of("full", spec), np.arange(40) % 31
    run(cache, text)
    assert cache.flush()
    forget(cache)
    driver.seconds = {"load": 0.5}
    assert run(cache, text) == 36, "nobody knows yet what computing takes"
    run(cache, np.arange(40) + 50)
    driver.seconds = {}
    found = []
    for _ in range(80):
        forget(cache)
        found.append(run(cache, text))
    assert found[0] == 0 and found[-1] == 36
    cache.close()


def in_a_process(code: str, *arguments: object) -> str:
    """Run ``code`` in a process that has imported the names of this file, and return what it prints."""
    root = Path(__file__).parent
    prelude = f"import sys; sys.path[:0] = [{str(root.parent)!r}, {str(root)!r}]\nfrom test_below import *\n"
    command = [sys.executable, "-W", "ignore", "-c", prelude + code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


FORKED = """
import os, signal
from threading import enumerate as threads
cache, text = cache_of("full", disk_tier(sys.argv[1], "2MiB", **TINY)), np.arange(40)
print(run(cache, text), cache.flush())
forget(cache)
ahead = cache.prefetch(text, "tenant 0")
told, tell = os.pipe()
child = os.fork()
if not child:
    signal.alarm(20)
    begin = monotonic()
    said = [run(cache, np.arange(20) + 1)]
    with cache.open(text, "tenant 0", prefetch=ahead) as sequence: said.append(sequence.cached_tokens)
    with cache.open(text, "tenant 1", prefetch=cache.prefetch(text)) as sequence: said.append(sequence.cached_tokens)
    said.append(cache.stats().tiers[0].is_available)
    cache.close()
    os.write(tell, f"{said} {monotonic() - begin < 2}".encode())
    os._exit(0)
print(os.read(told, 999).decode())
os.waitpid(child, 0)
print(run(cache, text))
try: cache_of("full", disk_tier(sys.argv[1], "2MiB", **TINY))
except BadInput: print("locked")
cache.close()
"""


def test_a_forked_child_computes_what_its_parent_loads(tmp_path: Path) -> None:
    assert in_a_process(FORKED, tmp_path).splitlines() == ["0 True", "[0, 0, 0, False] True", "36", "locked"]


def test_a_dropped_cache_releases_its_threads_and_files(tmp_path: Path) -> None:
    before = {*threads()}
    cache = cache_of("full", disk_tier(tmp_path, "2MiB", **TINY))
    run(cache, np.arange(40))
    assert cache.flush() and cache.prefetch(np.arange(40) + 1).close() is None
    assert {*threads()} - before
    del cache
    until = monotonic() + 5
    while {*threads()} - before:
        assert monotonic() < until
        collect()
        sleep(0.01)
    again = cache_of("full", disk_tier(tmp_path, "2MiB", **TINY))
    assert run(again, np.arange(40)) == 36
    again.close()


KILLED = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_below import TINY, FakeEngine, cache_of, disk_tier, traffic
cache = cache_of({name!r}, disk_tier({folder!r}, "300KB", admit_all=True, **TINY))
print("begins", flush=True)
for number in range({seed}, 10**6):
    traffic(cache, 50, seed=number % 3, engine=FakeEngine(cache))
    cache.flush()
    print(cache.stats().loaded_tokens, flush=True)
    cache.reset()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_a_process_killed_at_any_moment_leaves_no_wrong_row(name: str, tmp_path: Path) -> None:
    """Each process opens the file of the process that was killed before, reuses some of its texts, and compares every
    row that it reads."""
    random, tests, most = np.random.default_rng(7), Path(__file__).parent, 0
    for number in range(20):
        program = KILLED.format(root=str(tests.parent), tests=str(tests), name=name, folder=str(tmp_path), seed=number)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "begins\n"
        sleep(float(random.uniform(0, 2)))
        process.kill()
        told, failed = process.communicate()
        assert "Error" not in failed, failed
        most = max([most, *map(int, told.split())])
    assert most > 20


@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_a_copy_to_the_host_that_fails_is_not_stored(name: str) -> None:
    cache = cache_of(name, host_tier("1MiB", **TINY), host_tier("1MiB", write="commit", record_nbytes=700, **TINY))
    random, num_failed, copy = np.random.default_rng(8), [0], cache.core.memory.to_host

    def failing(*arguments: Any) -> None:
        if random.random() < 0.2:
            num_failed[0] += 1
            raise MemoryError("no room to pack them")
        copy(*arguments)

    cache.core.memory.to_host = failing  # type: ignore[method-assign]
    traffic(cache, 300, seed=9, engine=FakeEngine(cache))
    assert num_failed[0] and cache.flush()
    for level in levels_of(cache):
        assert level.dropped and level.buffer.num_free == level.buffer.num_records
    cache.close()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["full", "mixed", "state"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_copy_to_the_device_that_fails_is_raised(name: str, error: type[BaseException], layerwise: bool) -> None:
    """Such an error is not a fault of a tier, so ``open`` raises it. The request leaves nothing behind, and the next
    request succeeds."""
    cache, text = cache_of(name, host_tier("1MiB", write="commit", **TINY)), np.arange(50) % 37
    run(cache, text)
    assert cache.flush()
    forget(cache)
    memory, num_left = cache.core.memory, [0]
    copies = memory.from_host, memory.from_host_later

    def failing(copy: Callable[..., None], *arguments: Any) -> None:
        if not num_left[0]:
            raise error("out of the device")
        num_left[0] -= 1
        copy(*arguments)

    memory.from_host = partial(failing, copies[0])  # type: ignore[method-assign]
    memory.from_host_later = partial(failing, copies[1])  # type: ignore[method-assign]
    for number in range(2):
        num_left[0] = number
        with suppress(error):
            cache.open(text, "tenant 0", layerwise=layerwise).close()
            assert number
        cache.check()
        assert all(level.buffer.num_free == level.buffer.num_records for level in levels_of(cache))
        assert not cache.stats().running
        forget(cache)
    memory.from_host, memory.from_host_later = copies  # type: ignore[method-assign]
    assert run(cache, text) == 48
    cache.close()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["copy", "store"])
def test_an_interrupted_store_frees_its_staging_memory(error: type[BaseException], where: str) -> None:
    cache = cache_of("full", host_tier("1MiB", write="commit", **TINY))
    (level,) = levels_of(cache)
    owner, name = (cache.core.memory, "to_host") if where == "copy" else (level.tier, "store")
    plain = getattr(owner, name)

    def failing(*_: Any) -> None:
        raise error("now")

    setattr(owner, name, failing)
    with suppress(KeyboardInterrupt):
        run(cache, np.arange(20))
    assert level.dropped and level.buffer.num_free == level.buffer.num_records
    setattr(owner, name, plain)
    cache.core.tiers.check()
    cache.close()


def test_what_was_evicted_to_make_room_for_a_load_that_failed_is_not_shared() -> None:
    """Making room for blocks that are then not loaded may evict the block whose first tokens were to be copied."""
    spec, made = Flaky.tier(0.0, write="commit")
    cache = cache_of("full", spec, num_blocks=6)
    engine, text = FakeEngine(cache), np.arange(24)
    run(cache, text, engine)
    assert cache.flush()
    forget(cache)
    other = np.concatenate((text[:3], np.arange(30, 50)))
    run(cache, other, engine)  # shares three tokens, in the block that is evicted first
    made[0].load = lambda keys, rows, deadline: [Status.MISS] * len(keys)  # type: ignore[method-assign]
    run(cache, text, engine)
    cache.check()
    cache.close()


@pytest.mark.parametrize("way", ["open", "prefetch", "layerwise", "resume"])
@pytest.mark.parametrize("name", ["full", "window", "mixed", "state"])
def test_hits_from_tiers_end_on_the_grid(name: str, way: str) -> None:
    cache = cache_of(name, host_tier("1MiB", write="commit", **TINY), hit_grid=16)
    text = np.arange(62) % 37
    run(cache, text)
    assert cache.flush()
    sequence = cache.open(text, "tenant 0")
    sequence.commit(text[sequence.length :])
    if way == "resume":
        sequence.suspend(whole=False)
        cache.core.capacity.forget(cache.core.prefix.clear)
        assert sequence.resume() == (0 if name == "state" else 62 - 48)  # states are copied whole: it goes on as it was
    else:
        sequence.close()
        forget(cache)
        ahead = cache.prefetch(text, "tenant 0") if way == "prefetch" else None
        sequence = cache.open(text, "tenant 0", prefetch=ahead, layerwise=way == "layerwise")
        assert sequence.cached_tokens == 48 == sequence.match.loaded
    sequence.close()
    with cache.open(text[:47], "tenant 0") as shorter:
        assert shorter.cached_tokens in (0, 32)
    cache.check()
    cache.close()


@pytest.mark.parametrize("num_loaded", [2, 5, 9])
def test_a_load_that_breaks_off_ends_on_the_grid(num_loaded: int) -> None:
    spec, made = Flaky.tier(0.0, write="commit")
    cache, text = cache_of("full", spec, hit_grid=16), np.arange(62) % 37
    engine = FakeEngine(cache)
    run(cache, text, engine)
    assert cache.flush()
    forget(cache)
    load = made[0].driver.load

    def load_some(keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        return [*load(keys[:num_loaded], rows[:num_loaded], deadline), *[Status.MISS] * (len(keys) - num_loaded)]

    made[0].load = load_some  # type: ignore[method-assign]
    assert run(cache, text, engine) == num_loaded * 4 // 16 * 16
    cache.close()


def test_check_finds_staging_records_without_an_owner() -> None:
    cache = cache_of("full", host_tier("1MiB", **TINY))
    buffer = cache.core.tiers.levels[0].buffer
    buffer._owners[0] = cache
    with raises(CheckFailed, available=[0]):
        cache.check()
    del buffer._owners[0]
    (row,) = buffer.acquire(1)
    with raises(CheckFailed, available=[0]):
        cache.check()
    buffer.release([row])
    cache.check()
    cache.core.tiers._hashes[3] = 1
    with raises(CheckFailed, available=[3]):
        cache.check()
