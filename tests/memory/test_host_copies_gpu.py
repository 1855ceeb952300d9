"""Copies between a GPU and the host: bytes, what they wait for, and what is page-locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda import KVCache, Limits, Schema
from kvpagoda.core.kernels.copy_rows import FEW, copy_tables
from kvpagoda.core.memory import host_copy
from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.device_memory import CudaPages
from kvpagoda.core.memory.host_copy import CudaStreams, HostCopies, LayerwiseCopy
from kvpagoda.core.memory.page_locks import PageLocks
from kvpagoda.pages import pages
from kvpagoda.schema import Field, RowLayout
from kvpagoda.tiers import host_tier
from kvpagoda.units import table_rows
from options import evict
from records import put_records, records_of

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
]  # fmt: skip
CUDA = torch.device("cuda")
LAYOUT = RowLayout.build((layer, Field(name, 16, (64,), "bfloat16")) for layer in range(4) for name in "kv")
LLAMA = dict(
    model_type="llama", num_hidden_layers=4, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
    torch_dtype="bfloat16",
)  # fmt: skip


def arena(order: str, seed: int) -> Arena:
    made = Arena(LAYOUT, 64, device=CUDA, order=order)
    random = np.random.default_rng(seed)
    put_records(made, range(64), torch.from_numpy(random.integers(0, 256, (64, LAYOUT.nbytes), np.uint8)))
    return made


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copies_of(table: Any, most: int = 1 << 40) -> HostCopies:
    locks = PageLocks(CudaPages(CUDA), most)
    locks.watch(table)
    locks.num_rows(table, len(table) - 1)
    locks.settle()
    return HostCopies(CUDA, locks, CudaStreams(CUDA))


@pytest.mark.parametrize("width_of_record", [0.25, 1, 2.5])
@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("stage, most", [(64 << 20, 1 << 40), (0, 1 << 40), (64 << 20, 0)])
def test_bytes_that_cross_are_the_same(
    width_of_record: float, order: str, stage: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "_STAGE_NBYTES", stage)
    source, target, random = arena(order, 1), arena(order, 2), np.random.default_rng(3)
    width = int(LAYOUT.nbytes * width_of_record)
    table = pages(600 * width).reshape(600, width)
    copies, before = copies_of(table, most), records_of(target, range(64))
    for n in (1, 9, 40):
        out, into = (random.permutation(64)[:n].astype(np.int32) for _ in range(2))
        rows = random.permutation(600)[: table_rows(n, LAYOUT.nbytes, width)].tolist()
        before[into] = records_of(source, out)
        copies.out(source, out, table, rows)
        copies.into(target, into, table, rows)
        assert torch.equal(records_of(target, range(64)), before)
    assert bool(copies.num_pageable) == (not most) and bool(copies.num_staged) == bool(stage and most)
    copies.close()


def test_nothing_waits_and_blocks_may_be_written_at_once() -> None:
    """Also behind other work, and when they come back before the host has them."""
    source, target = arena("block", 1), arena("block", 2)
    table = pages(64 * LAYOUT.nbytes).reshape(64, -1)
    copies, ids = copies_of(table), np.arange(64)
    copies.out(source, ids, table, range(64))  # compiles
    copies.into(target, ids, table, range(64))
    copies.wait()
    expected, busy = records_of(source, ids), torch.rand(4096, 4096, device=CUDA)
    target.buffer.zero_()
    torch.cuda.synchronize()
    with waiting_is_an_error():
        for _ in range(30):
            busy = busy @ busy
        copies.out(source, ids, table, range(64))
        source.buffer.zero_()
        copies.into(target, ids, table, range(64))
    assert torch.equal(records_of(target, ids), expected)
    copies.wait()
    assert torch.equal(torch.from_numpy(table), expected)


def test_layers_arrive_in_their_order() -> None:
    source, target = arena("layer", 1), arena("layer", 2)
    table, told = pages(64 * LAYOUT.nbytes).reshape(64, -1), list[int]()
    copies, ids = copies_of(table), np.arange(20)
    copies.out(source, ids, table, range(20))
    copy = LayerwiseCopy(target, [(ids, table, range(20))], lambda: told.append(1), copies)
    for layer in range(4):
        copy.wait(layer)
        for name, field in target.layer(layer).items():
            wanted = source.layer(layer)[name][:20]
            assert torch.equal(field[:20].contiguous().view(torch.int16), wanted.contiguous().view(torch.int16))
    copies.close()
    assert told == [1]


@pytest.mark.parametrize("nbytes", [8 << 10, 75008, 584, 7])
@pytest.mark.parametrize("programs", [0, FEW])
def test_many_tables_in_one_launch(nbytes: int, programs: int) -> None:
    tables = [torch.randint(0, 256, (2, 40, nbytes), dtype=torch.uint8, device=CUDA) for _ in range(3)]
    pairs = torch.stack((torch.randperm(40)[:20], torch.randperm(40)[:20]), 1)
    for placed in (pairs, pairs.to(CUDA)):
        copy_tables([(one[0], one[1]) for one in tables], placed, programs)
        for one in tables:
            assert torch.equal(one[1][pairs[:, 1]], one[0][pairs[:, 0]])
            one[1].zero_()


def test_memory_is_locked_piece_by_piece_and_unlocked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpagoda.core.memory.page_locks.PIECE", 1 << 20)
    memory = pages(4 << 20, large=True)
    locks = PageLocks(CudaPages(CUDA), 1 << 40)
    locks.watch(memory)
    locks.settle()
    ends = [torch.from_numpy(memory)[at:] for at in (0, 3 << 20)]
    assert [one.is_pinned() for one in ends] == [True, False]
    locks.num_rows(memory.reshape(4, -1), 3)
    locks.settle()
    assert locks.nbytes == 4 << 20 and all(one.is_pinned() for one in ends)
    locks.close()
    assert not locks.nbytes and not any(one.is_pinned() for one in ends)


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("page_locked", [None, 0])
def test_a_host_tier_and_a_swap_give_back_the_rows(order: str, page_locked: int | None) -> None:
    cache = KVCache(
        Schema.from_hf_config(LLAMA), num_blocks=64, block_size=16, device="cuda", max_requests=4, order=order,
        tiers=[host_tier("64MiB", staging="32MiB")], limits=Limits(page_locked=page_locked),
    )  # fmt: skip
    (pool,), tokens = cache.core.memory.arenas, np.arange(16 * 20)  # type: ignore[attr-defined]
    cache.core.tiers.reader.seconds_per_token = 1.0  # loading is worth it
    written = torch.randint(0, 256, (20, pool.layout.nbytes), dtype=torch.uint8)
    sequence = cache.open(tokens)
    group = cache.core.groups[0]
    put_records(pool, group.places_between(sequence._request.slot, 0, 20), written)
    sequence.commit(tokens)
    sequence.suspend(True)
    sequence.resume()
    assert torch.equal(records_of(pool, group.places_between(sequence._request.slot, 0, 20)), written)
    sequence.close()
    evict(cache, 20)
    pool.buffer.zero_()  # in stream order: behind the gathering
    assert cache.flush()
    with cache.open([*tokens, 1]) as again:
        assert again.cached_tokens == len(tokens) and again.match.loaded
        assert torch.equal(records_of(pool, group.places_between(again._request.slot, 0, 20)), written)
    cache.check()
    assert bool(cache.stats().page_locked_nbytes) == (page_locked is None)
    cache.close()
    assert not cache.stats().page_locked_nbytes


def test_evicting_to_a_host_tier_waits_for_nothing() -> None:
    cache = KVCache(
        Schema.from_hf_config(LLAMA), num_blocks=128, block_size=16, device="cuda", max_requests=4,
        tiers=[host_tier("64MiB", staging="64MiB")],
    )  # fmt: skip
    cache.core.memory.locks.settle()  # type: ignore[attr-defined]
    for number in range(3):
        with cache.open(np.arange(16 * 40) + number) as sequence:
            sequence.commit(np.arange(16 * 40) + number)
        if number:
            with waiting_is_an_error():
                evict(cache, 40)
        else:
            evict(cache, 40)  # compiles
        assert cache.flush()
    assert cache.stats().tiers[0].stored == 120 and not cache.stats().tiers[0].dropped
    cache.close()
