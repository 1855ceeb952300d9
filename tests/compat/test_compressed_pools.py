"""The two pools of a compressed-attention layer: every array's shape, what is None, what is hidden, what reset clears."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda.compat.compressed_pools import PagedKVPool, StateCachePool
from kvpagoda.compat.deepseek_v4 import (
    FP8_UE8M0,
    AttentionType,
    DSV4Config,
    LayerSchema,
    build_schedule,
    build_schema,
)
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.schema import NVFP4, RAW
from raises import raises

Tensor = torch.Tensor
FLASH = DSV4Config.flash()


def layer(attn: str, config: DSV4Config = FLASH) -> LayerSchema:
    spec = next(spec for spec in build_schedule(config) if spec.attn is AttentionType[attn])
    return build_schema(config, spec)


def shape(tensor: Tensor | None) -> tuple[int, ...]:
    assert tensor is not None
    return tuple(tensor.shape)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_csa_paged_pool() -> None:
    pool = PagedKVPool(layer("CSA"), 5, device="cpu")
    assert pool.entries_fp8 is not None and pool.entries_rope is not None and pool.inv_scale is not None
    assert (shape(pool.entries_fp8), pool.entries_fp8.dtype) == ((5, 32, 448), torch.uint8)
    assert (shape(pool.entries_rope), pool.entries_rope.dtype) == ((5, 32, 64), torch.bfloat16)
    assert (shape(pool.inv_scale), pool.inv_scale.dtype) == ((5, 32), torch.float32)
    assert shape(pool.indexer_keys_fp4) == (5, 32, 64)
    assert shape(pool.indexer_keys_scales) == (5, 32, 4)
    assert pool.entries is None and pool.indexer_keys is None and pool.entries_scales is None
    assert pool.memory_bytes() == pytest.approx(6 * 32 * (580 + 68), abs=6 * 256)
    assert pool.memory_bytes() == pool.arena.buffer.numel()
    assert all(part is not None and part.is_contiguous() for part in (pool.entries_fp8, pool.entries_rope))


def test_hca_paged_pool_has_one_entry_a_block_and_no_indexer() -> None:
    pool = PagedKVPool(layer("HCA"), 7, device="cpu")
    assert [shape(part) for part in (pool.entries_fp8, pool.entries_rope, pool.inv_scale)] == [
        (7, 1, 448),
        (7, 1, 64),
        (7, 1),
    ]
    assert pool.indexer_keys_fp4 is None and pool.indexer_keys_scales is None


def test_other_forms_of_entries() -> None:
    pool = PagedKVPool(layer("CSA", DSV4Config.flash(encoding=FP8_UE8M0, index_encoding=NVFP4)), 2, device="cpu")
    assert shape(pool.entries_fp8) == (2, 32, 448) and shape(pool.entries_scales) == (2, 32, 8)
    assert pool.inv_scale is None and shape(pool.indexer_keys_scales) == (2, 32, 8)
    pool = PagedKVPool(layer("CSA", DSV4Config.flash(encoding=RAW, index_encoding=RAW)), 2, device="cpu")
    assert shape(pool.entries) == (2, 32, 512) and shape(pool.indexer_keys) == (2, 32, 128)
    assert pool.entries_fp8 is pool.entries_rope is pool.inv_scale is pool.indexer_keys_fp4 is None


def test_a_window_layer_has_no_paged_pool() -> None:
    with raises(BadInput, needed=0):
        PagedKVPool(layer("SWA"), 4, device="cpu")


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_pools_refuse_nonsense_sizes(count: Any) -> None:
    with raises(BadInput, field="num_blocks", needed=count, available=1):
        PagedKVPool(layer("CSA"), count, device="cpu")
    with raises(BadInput, field="max_requests", needed=count, available=1):
        StateCachePool(layer("CSA"), count, device="cpu")


@pytest.mark.parametrize("attn", ["CSA", "HCA", "SWA"])
def test_state_pool(attn: str) -> None:
    pool = StateCachePool(layer(attn), 3, device="cpu")
    assert [shape(part) for part in (pool.swa_fp8, pool.swa_rope, pool.swa_inv_scale, pool.swa_pos, pool.swa_head)] == [
        (3, 128, 448),
        (3, 128, 64),
        (3, 128),
        (3, 128),
        (3,),
    ]
    assert (pool.swa_pos == -1).all() and (pool.swa_head == 0).all()
    assert pool.swa_pos.dtype == pool.swa_head.dtype == torch.int32
    names = ("tail_ka", "tail_za", "tail_kb", "tail_zb", "overlap_k", "overlap_z")
    shapes = [None if (part := getattr(pool, name)) is None else shape(part) for name in names]
    indexer = [None if (part := getattr(pool, f"idx_{name}")) is None else shape(part) for name in names]
    if attn == "CSA":
        assert shapes == [(3, 3, 512)] * 4 + [(3, 4, 512)] * 2
        assert indexer == [(3, 3, 128)] * 4 + [(3, 4, 128)] * 2
    elif attn == "HCA":
        assert shapes == [(3, 127, 512)] * 2 + [None] * 4 and indexer == [None] * 6
    else:
        assert shapes == indexer == [None] * 6 and pool.tail_len is None
    if attn != "SWA":
        assert pool.tail_len is not None and pool.tail_len.tolist() == [0, 0, 0]
        assert pool.tail_ka is not None and pool.tail_ka.dtype == torch.float32
    payload = layer(attn).state_layout().payload_nbytes
    assert pool.memory_bytes() == pytest.approx(4 * payload, abs=256 * 24)


def test_attributes_alias_the_pool_and_hide_the_dummy_row() -> None:
    pool = StateCachePool(layer("CSA"), 2, device="cpu")
    assert pool.tail_ka is not None
    pool.tail_ka[1] = 7
    assert (pool["tail_ka"][1] == 7).all() and len(pool["tail_ka"]) == 3


def test_reset_slot_clears_one_row() -> None:
    pool = StateCachePool(layer("CSA"), 3, device="cpu")
    fresh = {name: tensor[0].clone() for name, tensor in pool.fields.items()}
    pool.arena.buffer.fill_(0x7F)
    dirty = {name: tensor.clone() for name, tensor in pool.fields.items()}
    pool.reset_slot(np.int64(1))
    for name, tensor in pool.fields.items():
        assert torch.equal(tensor[1], fresh[name])
        for other in (0, 2, 3):
            assert torch.equal(as_bytes(tensor[other]), as_bytes(dirty[name][other]))


@pytest.mark.parametrize("slot", [-1, 3, True, "0"])
def test_reset_slot_refuses_what_is_no_slot(slot: Any) -> None:
    pool = StateCachePool(layer("SWA"), 3, device="cpu")
    with raises(NotOwned, field="an id of the request slots", needed=slot, available=0):
        pool.reset_slot(slot)
