"""``plan(kernels=)``: what a kernel would refuse, copy or read wrongly is refused here or put right, and said."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import ANY

import pytest
from test_layout_choice import GDN, LLAMA, V32

from kvpagoda import DSV4Config, KVCache, Schema
from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.schema.kernel_fit import readers_of, unmet
from raises import raises

PACKED = Schema.from_hf_config(V32, layout=["flashmla-v32", "deepgemm-indexer"])
RAW = Schema.from_hf_config(V32)
DSV4 = DSV4Config.flash().schema().laid_out(["flashmla-dsv4", "deepgemm-indexer"])
HEADS = Schema.from_hf_config(LLAMA)
DELTA = Schema.from_hf_config(dict(GDN, linear_value_head_dim=128), dtype="bfloat16")


@pytest.mark.parametrize(
    ("schema", "kernels", "block_size", "expected"),
    [
        (PACKED, "flashmla-sparse-sm100", None, (16, 16)),
        (PACKED, ["flashmla-sparse-sm100", "deepgemm-indexer-sm90"], None, (64, 64)),
        (PACKED, ["flashmla-sparse-sm100", "deepgemm-indexer-sm90"], 256, (256, 64)),
        (DSV4, "flashmla-sparse-sm100", None, (128, 128)),
        (DSV4, ["flashmla-sparse-sm100", "deepgemm-indexer-sm90"], None, (256, 256)),
        (RAW, "flashmla-dense", None, (64, 64)),
        (RAW, "flashmla-dense-sm90", 128, (128, 64)),
        (RAW, {"latent": "flashinfer-mla"}, None, (16, 16)),
        (RAW, "fa3-qv", None, (16, 16)),
        (RAW, "trtllm-mla", 128, (128, 64)),
        (HEADS, "flash-attention-2", None, (256, 256)),
        (HEADS, ["fa3", "flashinfer-decode", "flashinfer-append", "vllm-reshape-and-cache"], None, (16, 16)),
        (HEADS, "trtllm-gqa-sm100", None, (16, 16)),
        (DELTA, ["fla", "flashinfer-gdn-decode", "fa3"], None, (16, 16)),
    ],
)
def test_sizes_are_chosen_so_that_kernels_read_them(
    schema: Schema, kernels: Any, block_size: int | None, expected: tuple[int, int]
) -> None:
    plan = schema.plan("64GiB", max_requests=2, block_size=block_size, kernels=kernels)
    assert (plan.block_size, plan.kernel_page) == expected
    for group in plan.groups:
        assert not [*unmet(group.layout, schema.layers, readers_of(kernels), plan.order, group.row_nbytes)]
    assert any("kernel pages" in note for note in plan.kernel_notes) == (expected[0] != expected[1])


def test_records_are_padded_as_readers_of_packed_rows_ask_and_the_plan_shows_it() -> None:
    plan = DSV4.plan("40GiB", kernels="flashmla-sparse-sm100")
    assert [group.layout.multiple for group in plan.groups] == [576, 576]
    assert all(group.row_nbytes % 576 == 0 for group in plan.groups) and plan.sector_nbytes % 576 == 0
    assert "padded to multiples of 576 bytes (full), 576 bytes (state)" in str(plan)
    figures = plan.to_dict()
    assert figures["padding_percent"] > 0 and figures["kernel_page"] == 128 and figures["order"] == "block"


@pytest.mark.parametrize(
    ("schema", "kernels", "arguments", "message"),
    [
        (PACKED, "deepgemm-indexer-sm90", dict(block_size=16), "page size on sm90: kv.size.token = 16 must be 64"),
        (RAW, "cutlass-mla", {}, "reads wrong bytes: dense pages.*order='layer' gives each layer pages of its own"),
        (RAW, "flashmla-sparse-sm100", {}, "must be one of float8_e4m3fn, int8, uint8"),
        (HEADS, "flash-attention-2", dict(block_size=64), "k.size.token = 64 must be a multiple of 256"),
        (HEADS, "torch-sdpa", {}, "have no such form; choose another layout"),
        (HEADS, "flashmla-dense", {}, "reads latent, entries; no layer keeps such rows"),
        (HEADS, "flash-attention-3-sm100", {}, "runs on sm90, not on sm100"),
        (RAW.laid_out("kvpagoda-mla"), "flashmla-dense", {}, "have no such form"),
        (DSV4Config.flash().schema(), "flashmla-sparse-dsv4-sm100", {}, "these rows have no such form"),
        (RAW.laid_out("sglang-dsa"), "flashmla-sparse-sm100", {}, "truncates scales to powers of two"),
        (DELTA.laid_out("gdn-state-kv"), "fla", {}, "state order: declared.order = KV must be one of VK"),
    ],
)
def test_what_is_not_legal_is_refused_with_the_rule_and_a_way_out(
    schema: Schema, kernels: Any, arguments: dict[str, Any], message: str
) -> None:
    with raises(SchemaError, needed=kernels, available=ANY):
        schema.plan("8GiB", kernels=kernels, **arguments)


def test_an_error_names_the_layouts_that_fit() -> None:
    both = ["flashmla-v32", "deepgemm-indexer"]
    with raises(SchemaError, needed="flashmla_sparse_v32", available=["flashmla-v32"]) as caught:
        KVCache(RAW, "1GiB", device="none", kernels=["flashmla_sparse_v32"])
    assert caught.value.available == both[:1] and caught.value.hint == "it fits with layout='flashmla-v32'"
    by_kind = {"latent": "flashmla_sparse_v32", "indexer": "deepgemm-indexer"}
    with raises(SchemaError, needed="flashmla_sparse_v32", available=["flashmla-v32", "deepgemm-indexer"]) as caught:
        RAW.plan("1GiB", kernels=by_kind)
    assert RAW.laid_out(caught.value.available).plan("1GiB", kernels=by_kind).kernel_page == 64
    with raises(SchemaError, needed="flashmla"):
        HEADS.plan("1GiB", kernels="flashmla")


def test_layers_apart_suit_a_kernel_that_reads_no_strides() -> None:
    plan = RAW.plan("8GiB", kernels="cutlass-mla-sm100", order="layer")
    assert plan.order == "layer" and plan.num_sectors == 0


def test_bad_names_and_sizes() -> None:
    with raises(BadInput, needed="flashmlaa", available=ANY):
        RAW.plan("1GiB", kernels="flashmlaa")
    with raises(BadInput, needed="latent", available=("attention",)):
        RAW.plan("1GiB", kernels={"latent": "fa3"})
    with raises(BadInput, field="kernel_page", needed=48, available=64):
        RAW.plan("1GiB", block_size=64, kernel_page=48)
    with raises(BadInput, field="kernel_page", needed=64, available=128):
        DSV4.plan("1GiB", kernel_page=64)
    with raises(BadInput, field="order", needed="row"):
        RAW.plan("1GiB", order="row")


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("kernel_page", [8, 16, 32])
def test_plans_and_arenas_agree_on_every_byte(order: str, kernel_page: int) -> None:
    for schema, name in ((HEADS, "trtllm"), (RAW, "flashmla-v32"), (RAW, "vllm-mla"), (DELTA, "gdn-state-kv")):
        laid = schema.laid_out(name)
        plan = laid.plan("64MiB", max_requests=2, block_size=32, kernel_page=kernel_page, order=order)
        cache = KVCache(
            laid, "64MiB", max_requests=2, block_size=32, kernel_page=kernel_page, order=order, device="cpu"
        )
        memory = cache.core.memory
        assert plan.nbytes == cache.plan.nbytes == memory.nbytes <= 64 << 20
        for group, arena in zip(plan.groups, memory.arenas):
            assert arena.nbytes == group.nbytes
            assert group.row_nbytes % math.lcm(group.layout.multiple, group.layout.kernel_pages) == 0
