"""The cache of a hybrid compressed-attention model: slots, blocks and handles, by case and by random traffic."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpagoda.compat.deepseek_v4 import (
    DSV4Config,
    build_schedule,
    compute_block_budget,
)
from kvpagoda.compat.kv_cache_manager import KVCacheManager
from kvpagoda.compat.layer_handle import dequantize_entries, dequantize_swa
from kvpagoda.errors import BadInput, CheckFailed, NeverFits, NotOwned, OutOfBlocks, RetryLater
from kvpagoda.formats import decode, encode
from kvpagoda.schema import NVFP4, RAW, Encoding
from raises import raises

Tensor = torch.Tensor
SMALL = DSV4Config(
    (0, 4, 128, 4), "small", head_dim=48, rope_dim=16, window=16, index_dim=32, max_positions=2048, num_hash_layers=1
)
"""One window layer, two CSA, one HCA; real ratios, tiny rows."""


def small(requests: int = 3, csa: int = 6, hca: int = 5, config: DSV4Config = SMALL) -> KVCacheManager:
    return KVCacheManager(
        config,
        build_schedule(config),
        max_concurrent_requests=requests,
        num_blocks_per_csa_layer=csa,
        num_blocks_per_hca_layer=hca,
        device="cpu",
    )


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def shape(tensor: Tensor | None) -> tuple[int, ...]:
    assert tensor is not None
    return tuple(tensor.shape)


# -- slots and blocks ------------------------------------------------------------------------------------------------


def test_manager_owns_pools_of_every_layer() -> None:
    manager = small()
    assert manager.num_layers == len(manager.state_pools) == len(manager.paged_pools) == 4
    assert [pool is None for pool in manager.paged_pools] == [True, False, False, False]
    assert [schema.attn.name for schema in manager.schemas] == ["SWA", "CSA", "HCA", "CSA"]
    assert [pool.num_blocks for pool in manager.paged_pools if pool is not None] == [6, 5, 6]
    pools = [pool for pool in (*manager.paged_pools, *manager.state_pools) if pool is not None]
    assert manager.memory_bytes() == sum(pool.memory_bytes() for pool in pools) > 0
    assert [None if table is None else tuple(table.shape) for table in manager.block_tables] == [
        None,
        (4, 6),
        (4, 5),
        (4, 6),
    ]


def test_slots_are_recycled_and_one_too_many_raises() -> None:
    manager = small(requests=2)
    first, second = manager.admit_request(), manager.admit_request()
    assert {first, second} == {0, 1} and manager.num_free_slots == 0
    with raises(RetryLater, needed=1, available=0) as caught:
        manager.admit_request()
    assert isinstance(caught.value, RetryLater)
    manager.release_request(first)
    assert manager.admit_request() == first
    manager.check()


def test_an_admission_that_fails_on_the_device_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = small()

    def fail(slot: int) -> None:
        raise MemoryError("no device memory")

    monkeypatch.setattr(manager.state_pools[2], "reset_slot", fail)
    with pytest.raises(MemoryError):
        manager.admit_request()
    monkeypatch.undo()
    assert manager.num_free_slots == 3 and manager.admit_request() == 0
    manager.check()


def test_release_gives_back_every_block_of_every_layer() -> None:
    manager = small()
    slot, other = manager.admit_request(), manager.admit_request()
    for layer_idx in (1, 2, 3):
        kept = manager.allocate_block(layer_idx, other)
        for _ in range(3):
            manager.allocate_block(layer_idx, slot)
        assert len(manager.blocks_of(layer_idx, slot)) == 3 and manager.blocks_of(layer_idx, other) == [kept]
    assert [a.num_free for a in manager.allocators if a is not None] == [2, 1, 2]
    manager.release_request(slot)
    assert [a.num_free for a in manager.allocators if a is not None] == [5, 4, 5]
    assert all((table[slot] == -1).all() for table in manager.block_tables if table is not None)
    manager.check()


def test_double_release_raises_and_changes_nothing() -> None:
    manager = small()
    slot = manager.admit_request()
    manager.allocate_block(1, slot)
    manager.release_request(slot)
    for bad in (slot, 2, -1, 99, True, None, 0.0, "0"):
        field, available = (None, None) if bad in (slot, 2) and type(bad) is int else ("an id of the request slots", 0)
        with raises(NotOwned, field=field, needed=bad, available=available):
            manager.release_request(bad)  # type: ignore[arg-type]
    assert manager.num_free_slots == 3 and manager.allocators[1] is not None
    assert manager.allocators[1].num_free == 6
    manager.check()


def test_allocate_block_appends_to_the_table() -> None:
    manager = small()
    slot = manager.admit_request()
    ids = [manager.allocate_block(1, slot) for _ in range(6)]
    assert sorted(ids) == list(range(6)) and all(isinstance(block, int) for block in ids)
    table = manager.block_tables[1]
    assert table is not None and table.dtype == torch.int32
    assert table[slot].tolist() == ids and (table[slot + 1 :] == -1).all()


def test_out_of_blocks_takes_nothing() -> None:
    manager = small(csa=2)
    slot, other = manager.admit_request(), manager.admit_request()
    manager.allocate_block(1, slot)
    manager.allocate_block(1, other)
    table = manager.block_tables[1]
    assert table is not None
    before = table.clone()
    with raises(OutOfBlocks, needed=1, available=0, group="layer 1 (CSA)"):
        manager.allocate_block(1, slot)
    with raises(OutOfBlocks, needed=1, available=0, group="layer 1 (CSA)"):
        manager.allocate_block(1, slot)
    assert torch.equal(table, before) and len(manager.blocks_of(1, slot)) == 1
    assert manager.allocate_block(3, slot) in (0, 1), "the other layers have blocks of their own"
    manager.release_request(other)
    manager.allocate_block(1, slot)
    manager.check()


def test_allocate_block_refuses_what_cannot_be() -> None:
    manager = small()
    slot = manager.admit_request()
    with raises(BadInput, needed=0):
        manager.allocate_block(0, slot)
    for bad in (-1, 4, True, 1.0, None):
        with raises(BadInput, field="the index of a layer", needed=bad, available=0):
            manager.allocate_block(bad, slot)  # type: ignore[arg-type]
    with raises(NotOwned, needed=1):
        manager.allocate_block(1, slot + 1)
    manager.check()


def test_a_request_cannot_outgrow_the_model() -> None:
    manager = small(hca=20)
    slot = manager.admit_request()
    for _ in range(2048 // 128):
        manager.allocate_block(2, slot)
    with raises(NeverFits, needed=17, available=16, group="layer 2 (HCA)"):
        manager.allocate_block(2, slot)
    manager.check()


@pytest.mark.parametrize(
    "change", [{"max_concurrent_requests": 0}, {"num_blocks_per_csa_layer": 0}, {"num_blocks_per_hca_layer": -3}]
)
def test_manager_refuses_nonsense_sizes(change: dict[str, int]) -> None:
    sizes = {"max_concurrent_requests": 2, "num_blocks_per_csa_layer": 2, "num_blocks_per_hca_layer": 2, **change}
    ((name, wrong),) = change.items()
    with raises(BadInput, field=name, needed=wrong, available=1):
        KVCacheManager(SMALL, build_schedule(SMALL), device="cpu", **sizes)


def test_a_kind_that_no_layer_has_needs_no_blocks() -> None:
    manager = KVCacheManager(SMALL, build_schedule(SMALL)[:1], 2, 0, 0, device="cpu")
    assert manager.paged_pools == [None]


@pytest.mark.parametrize("what", ["request_slots", "positions", "request_ids"])
def test_a_step_takes_tensors_only(what: str) -> None:
    manager = KVCacheManager(SMALL, build_schedule(SMALL), 2, 2, 2, device="cpu")
    step: dict[str, Any] = dict.fromkeys(
        ("request_slots", "positions", "request_ids"), torch.zeros(1, dtype=torch.int32)
    )
    with raises(BadInput, field=what, needed="list"):
        manager.acquire(0, **step | {what: [0]})


def test_manager_refuses_a_schedule_with_holes() -> None:
    for schedule in (build_schedule(SMALL)[1:], []):
        with raises(BadInput, needed=[layer.layer_idx for layer in schedule]):
            KVCacheManager(SMALL, schedule, 2, 2, 2, device="cpu")


def test_check_finds_broken_books() -> None:
    manager = small()
    slot = manager.admit_request()
    block = manager.allocate_block(1, slot)
    table, allocator = manager.block_tables[1], manager.allocators[1]
    assert table is not None and allocator is not None
    table[slot, 0] = 5 - block
    with raises(CheckFailed, available=[0, 5], group="layer 1 (CSA)"):
        manager.check()
    table[slot, 0] = block
    manager.check()
    stolen = allocator.acquire(1)
    with raises(CheckFailed, available=[1], group="layer 1 (CSA)"):
        manager.check()
    allocator.give(stolen)
    manager.check()


@pytest.mark.parametrize("operations", [3_000, 12_000])
def test_random_life_of_a_small_manager(operations: int) -> None:
    """Operations, good and bad, against a dict; ``check()`` after each."""
    manager, rng = small(requests=4, csa=7, hca=4), random.Random(0)
    held: dict[int, dict[int, list[int]]] = {}
    sizes = {1: 7, 2: 4, 3: 7}
    counts = {"full": 0, "oom": 0, "double": 0}
    for _ in range(operations):
        choice, slot = rng.random(), rng.randrange(4)
        if choice < 0.12:
            if len(held) == 4:
                counts["full"] += 1
                with raises(RetryLater, needed=1, available=0):
                    manager.admit_request()
            else:
                got = manager.admit_request()
                assert got not in held
                held[got] = {1: [], 2: [], 3: []}
        elif choice < 0.22:
            if slot in held:
                manager.release_request(slot)
                del held[slot]
            else:
                counts["double"] += 1
                with pytest.raises(NotOwned):
                    manager.release_request(slot)
        else:
            layer_idx = rng.choice([1, 2, 3])
            if slot not in held:
                with pytest.raises(NotOwned):
                    manager.allocate_block(layer_idx, slot)
            elif sum(len(blocks[layer_idx]) for blocks in held.values()) == sizes[layer_idx]:
                counts["oom"] += 1
                with pytest.raises(OutOfBlocks):
                    manager.allocate_block(layer_idx, slot)
            else:
                block = manager.allocate_block(layer_idx, slot)
                assert all(block not in blocks[layer_idx] for blocks in held.values())
                held[slot][layer_idx].append(block)
        manager.check()
        assert manager.num_free_slots == 4 - len(held)
    assert min(counts.values()) > operations // 120
    for slot, blocks in held.items():
        assert all(manager.blocks_of(layer_idx, slot) == ids for layer_idx, ids in blocks.items())
        manager.release_request(slot)
    manager.check()
    assert [a.num_free for a in manager.allocators if a is not None] == [7, 4, 7]


# -- one step --------------------------------------------------------------------------------------------------------


class NoOperation(TorchDispatchMode):
    """Fails on every torch operation: none means none that allocates, none that waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


def test_a_device_may_be_named_otherwise_than_its_tensors_name_it() -> None:
    """As "cuda" and "cuda:0" do."""
    manager = KVCacheManager(SMALL, build_schedule(SMALL), 3, 6, 5, device="cpu:0")
    assert manager.device != int32(0).device
    manager.acquire(0, int32(0), int32(0), int32(0))


def test_acquire_runs_no_operation_at_all() -> None:
    manager = small()
    slots, positions, ids = int32(0, -1, 1), int32(0, 0, 5), int32(7, 0, 8)
    with NoOperation():
        handles = [manager.acquire(i, slots, positions, ids) for i in range(4)]
    assert [handle.paged is None for handle in handles] == [True, False, False, False]
    for i, handle in enumerate(handles):
        assert handle.paged is manager.paged_pools[i] and handle.state is manager.state_pools[i]
        assert handle.request_slots is slots and handle.positions is positions and handle.request_ids is ids


def test_acquire_and_views_allocate_no_memory() -> None:
    manager, step = small(), (int32(0, 1), int32(3, 4), int32(0, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for i in range(4):
            handle = manager.acquire(i, *step)
            handle.read_swa_view()
            if handle.paged is not None:
                handle.read_classical_view()
            if handle.kind.index_dim is not None:
                handle.read_indexer_view()
    assert "aten::slice" in {event.name for event in profile.events()}, "the profiler sees what runs"
    assert [event.name for event in profile.events() if event.self_cpu_memory_usage > 0] == []
    assert [event.name for event in profile.events() if "alloc" in event.name or "empty" in event.name] == []


@pytest.mark.parametrize("broken", range(3))
def test_acquire_refuses_what_kernels_could_not_read(broken: int) -> None:
    manager = small()
    good, names = [int32(0, 1), int32(3, 4), int32(0, 1)], ("request_slots", "positions", "request_ids")
    for bad in (good[broken].long(), int32(1, 2, 3), good[broken][None], good[broken].float()):
        step = [*good[:broken], bad, *good[broken + 1 :]]
        field = "positions" if bad is step[0] and len(bad) == 3 else names[broken]  # the first says how long all are
        with raises(BadInput, field=field, needed=ANY, available=ANY):
            manager.acquire(1, *step)
    step = [*good[:broken], good[broken].to("meta"), *good[broken + 1 :]]
    with raises(BadInput, field=names[broken], needed=torch.device("meta"), available=torch.device("cpu")):
        manager.acquire(1, *step)
    with raises(BadInput, field="the index of a layer", needed=4, available=0):
        manager.acquire(4, *good)


def test_views_alias_the_pools_and_have_the_documented_shapes() -> None:
    manager = small()
    handle = manager.acquire(1, int32(0), int32(0), int32(0))
    paged, state = manager.paged_pools[1], manager.state_pools[1]
    swa, entries, keys = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
    assert paged is not None
    for view, pool in (
        (swa.swa_fp8, state.swa_fp8),
        (swa.swa_rope, state.swa_rope),
        (swa.swa_inv_scale, state.swa_inv_scale),
        (swa.swa_pos, state.swa_pos),
        (entries.entries_fp8, paged.entries_fp8),
        (entries.entries_rope, paged.entries_rope),
        (entries.inv_scale, paged.inv_scale),
        (keys.keys_fp4, paged.indexer_keys_fp4),
        (keys.key_scales, paged.indexer_keys_scales),
    ):
        assert pool is not None
        assert view.data_ptr() == pool.data_ptr() and view.shape == pool.shape and view.dtype == pool.dtype
    assert shape(entries.block_table) == shape(keys.block_table) == (3, 6) and entries.block_table.dtype == torch.int32
    assert shape(entries.num_entries) == (3,) and entries.num_entries.dtype == torch.int32
    assert shape(dequantize_swa(swa)) == (3, 16, 48) and shape(dequantize_entries(entries)) == (6, 32, 48)


def test_write_swa_at_full_size() -> None:
    """One token of each of three requests, and a padded row: RoPE part exact, FP8 part within its error, isolated."""
    config = replace(DSV4Config.flash(), compress_ratios=(0,))
    manager = KVCacheManager(config, build_schedule(config), 4, 1, 1, device="cpu")
    for _ in range(4):
        manager.admit_request()
    kv = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    handle = manager.acquire(0, int32(2, -1, 0, 3), int32(130, 9, 5, 127), int32(0, 1, 2, 3))
    handle.write_swa(kv)
    rows, view = dequantize_swa(handle.read_swa_view()).float(), handle.read_swa_view()
    for slot, ring, i, position in ((2, 2, 0, 130), (0, 5, 2, 5), (3, 127, 3, 127)):
        assert torch.equal(view.swa_rope[slot, ring], kv[i, 448:])
        assert int(view.swa_pos[slot, ring]) == position
        got, wanted = rows[slot, ring, :448], kv[i, :448].float()
        assert (got - wanted).norm() / wanted.norm() < 0.036
        assert ((got - wanted).abs() <= 0.0625 * wanted.abs() + 2e-4 * wanted.abs().max()).all()
    assert (view.swa_pos >= 0).sum() == 3
    assert manager.state_pools[0].swa_head.tolist() == [6, 0, 131, 128]


def test_a_prefill_longer_than_the_ring_keeps_its_end() -> None:
    manager = small()
    slot = manager.admit_request()
    n, generator = 53, torch.Generator().manual_seed(1)
    kv = torch.randn(n, 48, generator=generator).bfloat16()
    handle = manager.acquire(0, torch.full((n,), slot, dtype=torch.int32), torch.arange(n).int(), torch.zeros(n).int())
    handle.write_swa(kv)
    view = handle.read_swa_view()
    rows, stored = dequantize_swa(view), decode(SMALL.encoding, encode(SMALL.encoding, kv), torch.bfloat16)
    for position in range(n - 16, n):
        assert int(view.swa_pos[slot, position % 16]) == position
        assert torch.equal(rows[slot, position % 16], stored[position])
    assert (view.swa_pos[:slot] == -1).all() and (view.swa_pos[slot + 1 :] == -1).all()


def test_tail_len_is_the_open_window() -> None:
    manager = small()
    slot = manager.admit_request()
    for at in range(9):
        manager.acquire(1, int32(slot), int32(at), int32(0)).write_swa(torch.zeros(1, 48).bfloat16())
        tails = manager.state_pools[1].tail_len
        assert tails is not None and int(tails[slot]) == (at + 1) % 4


def test_counts_follow_the_newest_position_also_after_tokens_were_taken_back() -> None:
    """What a step writes says how many entries there are; nothing else need be called."""
    manager = small()
    slot = manager.admit_request()
    handle = manager.acquire(1, int32(*[slot] * 10), torch.arange(10).int(), torch.zeros(10).int())
    handle.write_swa(torch.zeros(10, 48).bfloat16())
    pool, view = manager.state_pools[1], handle.read_classical_view()
    assert (int(pool.swa_head[slot]), int(pool.tail_len[slot]), int(view.num_entries[slot])) == (10, 2, 2)
    handle = manager.acquire(1, int32(slot, slot), int32(5, 6), int32(0, 0))
    handle.write_swa(torch.zeros(2, 48).bfloat16())
    assert (int(pool.swa_head[slot]), int(pool.tail_len[slot]), int(view.num_entries[slot])) == (7, 3, 1)
    manager.release_request(slot)
    assert manager.admit_request() == slot and int(pool.swa_head[slot]) == 0


def test_rows_of_a_step_may_come_in_any_order() -> None:
    """Two requests with more tokens than the ring, interleaved: the bytes of two prefills one after the other."""
    mixed, plain = small(), small()
    slots = [mixed.admit_request(), mixed.admit_request()]
    assert slots == [plain.admit_request(), plain.admit_request()]
    n, kv = 200, torch.randn(400, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    ids, positions = torch.tensor(slots, dtype=torch.int32).repeat(n), torch.arange(n).repeat_interleave(2).int()
    order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(4))
    mixed.acquire(1, ids[order], positions[order], ids[order]).write_swa(kv[order])
    for one in slots:
        mine = ids == one
        plain.acquire(1, ids[mine], positions[mine], ids[mine]).write_swa(kv[mine])
    for name in ("swa_fp8", "swa_rope", "swa_inv_scale", "swa_pos", "swa_head"):
        assert torch.equal(getattr(mixed.state_pools[1], name), getattr(plain.state_pools[1], name)), name


def test_entries_of_empty_cells_are_zero_and_wrong_ids_are_refused() -> None:
    manager = small()
    slot = manager.admit_request()
    block = manager.allocate_block(1, slot)
    view = manager.acquire(1, int32(slot), int32(0), int32(0)).read_classical_view()
    view.entries_rope.fill_(3.0)
    table = view.block_table[slot, :2]
    rows = dequantize_entries(view, table)
    assert table.tolist() == [block, -1] and rows[0].any() and not rows[1].any()
    assert torch.equal(dequantize_entries(view, [block, -1]), rows)
    for bad in ([len(view.entries_rope)], [-2], [0.5], "a"):
        with pytest.raises(BadInput):
            dequantize_entries(view, bad)
    for bad in (None, [1.0], torch.zeros(1, 47)):
        with pytest.raises(BadInput):
            manager.acquire(1, int32(slot), int32(0), int32(0)).write_swa(bad)


FORMS = {
    "fp8": SMALL,
    "ue8m0": replace(SMALL, encoding=Encoding("fp8_ue8m0", group=16), index_encoding=NVFP4),
    "raw": replace(SMALL, encoding=RAW, index_encoding=RAW),
}


class Requests:
    """Requests of all layers over one manager, with everything they wrote. Recycled slots, NaN in freed memory."""

    def __init__(self, config: DSV4Config, seed: int, requests: int, tokens: int) -> None:
        self.rng, self.tokens = random.Random(seed), tokens
        self.generator = torch.Generator().manual_seed(seed)
        budget = compute_block_budget(config, build_schedule(config), tokens, requests)
        self.manager = small(requests, budget["csa"], budget["hca"], config)
        self.length: dict[int, int] = {}
        self.kv: dict[tuple[int, int], list[Tensor]] = {}
        self.entries: dict[tuple[int, int], list[Tensor]] = {}
        for pool in (*self.manager.state_pools, *self.manager.paged_pools):
            if pool is not None:
                pool.arena.buffer.fill_(255)

    def admit(self) -> None:
        slot = self.manager.admit_request()
        self.length[slot] = 0
        for i in range(self.manager.num_layers):
            self.kv[i, slot], self.entries[i, slot] = [], []

    def release(self) -> None:
        """Leave NaN where the request was: whoever comes next must not see it."""
        slot = self.rng.choice(list(self.length))
        blocks = {i: self.manager.blocks_of(i, slot) for i in (1, 2, 3)}
        self.manager.release_request(slot)
        del self.length[slot]
        for i, pool in enumerate(self.manager.state_pools):
            for tensor in pool.fields.values():
                tensor[slot] = float("nan") if tensor.is_floating_point() else 127
            paged = self.manager.paged_pools[i]
            for tensor in paged.fields.values() if paged is not None else ():
                tensor[blocks[i]] = float("nan") if tensor.is_floating_point() else 255

    def step(self) -> None:
        """One chunk for some of the requests, all layers; blocks are allocated with their first entry, not before."""
        left = self.tokens - sum(self.length.values())
        tokens: list[tuple[int, int]] = []
        for slot in self.rng.sample(list(self.length), self.rng.randint(1, len(self.length))):
            count = min(self.rng.choice([1, 1, 2, 3, 4, 5, 17, 127, 128, 129, 200]), left)
            left -= count
            tokens += [(-1, 0)] * self.rng.choice([0, 2])
            tokens += [(slot, self.length[slot] + i) for i in range(count)]
            self.length[slot] += count
        if not tokens:
            return
        slots, positions = torch.tensor(tokens, dtype=torch.int32).T.contiguous()
        for i, schema in enumerate(self.manager.schemas):
            handle = self.manager.acquire(i, slots, positions, torch.zeros_like(slots))
            kind = handle.kind
            kv = torch.randn(len(tokens), kind.dim, generator=self.generator).bfloat16()
            rows, valid = handle.read_window(kv)
            stored = decode(kind.encoding, encode(kind.encoding, kv), torch.bfloat16)
            for (slot, _), row in zip(tokens, stored):
                if slot >= 0:
                    self.kv[i, slot].append(row)
            for at in self.rng.sample(range(len(tokens)), min(4, len(tokens))):
                slot, position = tokens[at]
                seen = [] if slot < 0 else self.kv[i, slot][max(0, position - kind.window + 1) : position + 1]
                assert int(valid[at].sum()) == len(seen)
                assert not seen or torch.equal(rows[at, -len(seen) :], torch.stack(seen))
            handle.write_swa(kv)
            if not kind.ratio:
                continue
            streams = 2 if kind.overlap else 1
            for slot, length in self.length.items():
                while len(self.manager.blocks_of(i, slot)) * schema.entries_per_block < length // kind.ratio:
                    self.manager.allocate_block(i, slot)
            closed = handle.close_windows(*torch.randn(2, len(tokens), streams * kind.dim, generator=self.generator))
            assert not closed.keys.isnan().any() and not closed.scores.isnan().any()
            entries = torch.randn(len(closed.tokens), kind.dim, generator=self.generator).bfloat16()
            handle.write_entries(closed, entries)
            stored = decode(kind.encoding, encode(kind.encoding, entries), torch.bfloat16)
            for token, row in zip(closed.tokens.tolist(), stored):
                self.entries[i, tokens[token][0]].append(row)
            self.compare(i)

    def compare(self, i: int) -> None:
        view = self.manager.acquire(i, int32(), int32(), int32()).read_classical_view()
        blocks, per_block = dequantize_entries(view), self.manager.schemas[i].entries_per_block
        for slot, length in self.length.items():
            entries = self.entries[i, slot]
            assert int(view.num_entries[slot]) == len(entries) == length // self.manager.schemas[i].kind.ratio
            if entries:
                order = torch.arange(len(entries))
                ids = view.block_table[slot, order // per_block].long()
                assert (ids >= 0).all()
                assert torch.equal(blocks[ids, order % per_block], torch.stack(entries))


@pytest.mark.parametrize("form", FORMS)
def test_requests_come_and_go_within_the_budget(form: str) -> None:
    """Blocks by ``compute_block_budget`` for 1,100 tokens: never short of one, however the requests divide them."""
    traffic = Requests(FORMS[form], 2, requests=3, tokens=1100)
    traffic.admit()
    for _ in range(60):
        if len(traffic.length) < 3 and traffic.rng.random() < 0.4:
            traffic.admit()
        traffic.step()
        full = sum(traffic.length.values()) == traffic.tokens
        if len(traffic.length) > 1 and (full or traffic.rng.random() < 0.1):
            traffic.release()
        traffic.manager.check()


def test_padded_steps_touch_no_request() -> None:
    manager = small()
    manager.admit_request()
    before = [{n: t[:-1].clone() for n, t in pool.fields.items()} for pool in manager.state_pools]
    n = 33
    slots = torch.full((n,), -1, dtype=torch.int32)
    for i, schema in enumerate(manager.schemas):
        handle = manager.acquire(i, slots, torch.arange(n).int(), slots)
        handle.write_swa(torch.ones(n, 48).bfloat16())
        if schema.entries_per_block:
            handle.close_windows(*torch.ones(2, n, 96 if schema.overlap_size else 48))
        for name, tensor in manager.state_pools[i].fields.items():
            assert torch.equal(as_bytes(tensor[:-1]), as_bytes(before[i][name]))


@pytest.mark.gpu
def test_acquire_allocates_nothing_on_the_gpu() -> None:
    manager = KVCacheManager(SMALL, build_schedule(SMALL), 3, 6, 5, device="cuda")
    slot = manager.admit_request()
    manager.allocate_block(1, slot)
    step = [int32(slot).cuda() for _ in range(3)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for i in range(4):
        manager.acquire(i, *step)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    manager.check()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
