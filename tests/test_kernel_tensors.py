"""``view.kernel_tensors``: what every kernel of the table takes, from memory that ``judge`` says it reads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from kvpagoda import DSV4Config, KVCache, Schema
from kvpagoda.errors import BadInput
from kvpagoda.layouts import judge
from kvpagoda.layouts.demands import kernels
from kvpagoda.schema import Attention, Layer
from raises import raises
from schema.test_layout_choice import GDN, LLAMA, V32

MAMBA2 = dict(
    model_type="mamba2", num_hidden_layers=2, hidden_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=1,
    expand=2, conv_kernel=4, vocab_size=9,
)  # fmt: skip
SCHEMAS = {
    "heads": Schema.from_hf_config(LLAMA), "mla": Schema.from_hf_config(V32), "dsv4": DSV4Config.flash().schema(),
    "delta": Schema.from_hf_config(dict(GDN, linear_value_head_dim=128), dtype="bfloat16"),
    "mamba2": Schema.from_hf_config(MAMBA2),
}  # fmt: skip
Case = tuple[str, str, str, int, dict[str, list[int]]]
K_V = {"k": [64, 2, 64], "v": [64, 2, 64]}
ROW, STATE, CONV = {"kv": [64, 576]}, {"state": [32, 128, 128]}, {"state": [8192, 3]}
NHD: Case = ("heads", "", "block", 64, K_V)
PARTS: Case = ("mla", "", "block", 64, {"ckv": [64, 512], "kpe": [64, 64]})
CASES: dict[str, Case] = {
    "flash_attention_2": ("heads", "", "block", 256, {"k": [256, 2, 64], "v": [256, 2, 64]}),
    **dict.fromkeys((
        "vllm_flash_attention_2", "flash_attention_3", "flash_attention_4", "flashinfer_fa2_prefill",
        "flashinfer_fa2_decode", "flashinfer_fa3_prefill", "flashinfer_append", "flashinfer_trtllm_gqa",
        "vllm_triton_unified", "vllm_reshape_and_cache_flash", "vllm_reshape_and_cache_per_token_head",
    ), NHD),
    "vllm_trtllm_gqa": ("heads", "trtllm", "block", 64, {"k": [2, 64, 64], "v": [2, 64, 64]}),
    "sglang_mha_pool": ("heads", "", "layer", 1, {"k": [2, 64], "v": [2, 64]}),
    "flashinfer_fa2_mla": PARTS, "flashinfer_fa3_mla": PARTS,
    "flash_attention_3_qv": ("mla", "", "block", 64, {"k": [64, 1, 64], "v": [64, 1, 512]}),
    "vllm_flash_attention_3_mla": ("mla", "", "block", 64, {"k": [64, 1, 64], "v": [64, 1, 512]}),
    "cutlass_mla": ("mla", "", "layer", 64, ROW), "vllm_cutlass_mla": ("mla", "", "layer", 128, {"kv": [128, 576]}),
    "trtllm_mla": ("mla", "", "block", 64, ROW), "vllm_mla_dense_view": ("mla", "", "layer", 64, ROW),
    "flashmla_dense": ("mla", "", "block", 64, {"kv": [64, 1, 576]}),
    "vllm_flashmla": ("mla", "", "block", 64, {"kv": [64, 1, 576]}),
    "vllm_flashmla_sparse": ("mla", "", "layer", 64, {"kv": [64, 1, 576]}),
    "vllm_sparse_swa": ("mla", "", "block", 64, {"kv": [64, 1, 576]}),
    "sglang_mla_pool": ("mla", "", "layer", 1, {"kv": [1, 576]}),
    "flashmla_sparse_v32": ("mla", "flashmla-v32", "block", 64, {"kv": [64, 1, 656]}),
    "flashinfer_sparse_sm120_v32": ("mla", "flashmla-v32", "block", 64, {"kv": [64, 656]}),
    "flashmla_sparse_model1": ("dsv4", "flashmla-dsv4", "block", 256, {"kv": [64, 1, 584]}),
    "flashinfer_sparse_sm120_dsv4": ("dsv4", "flashmla-dsv4", "block", 256, {"kv": [64, 584]}),
    "flashinfer_nvfp4_384": ("dsv4", "flashinfer-nvfp4-384", "block", 256, {"kv": [64, 1, 384]}),
    "sglang_dsv4_pool": ("dsv4", "flashmla-dsv4", "layer", 256, {"kv": [37440]}),
    "deepgemm_paged_mqa_logits_fp8": ("mla", "deepgemm-indexer", "block", 64, {"kv": [64, 1, 132]}),
    "deepgemm_paged_mqa_logits_fp4": ("mla", "deepgemm-indexer-fp4", "block", 64, {"kv": [64, 1, 68]}),
    "vllm_indexer": ("mla", "", "block", 64, {"kv": [64, 128]}),
    "sglang_indexer": ("mla", "deepgemm-indexer", "layer", 64, {"kv": [8448]}),
    **dict.fromkeys(
        ("flashinfer_gdn_decode", "flashinfer_gdn_mtp", "flashinfer_gdn_prefill", "fla"), ("delta", "", "block", 64, STATE)
    ),
    **dict.fromkeys(
        ("flashinfer_gdn_decode_nontranspose", "transformers_gdn"), ("delta", "gdn-state-kv", "block", 64, STATE)
    ),
    **dict.fromkeys(("causal_conv1d_update", "sglang_conv", "transformers_conv"), ("delta", "", "block", 64, CONV)),
    "sglang_kda_conv": ("delta", "sglang-kda-conv", "block", 64, {"state": [3, 8192]}),
    "mamba2_selective_state_update": ("mamba2", "", "block", 64, {"state": [8, 16, 16]}),
}  # fmt: skip
"""Kernel -> schema, layout, order and block size of a cache that it reads, and the axes of its tensors after the first."""
NOT_OURS = {
    "torch_sdpa": "reads dense rows, no pages", "page_transfer": "moves any bytes", "state_transfer": "moves any bytes",
    "trtllm_sparse_dsv4": "its rows of 512 plain elements are no layout of a cache",
}  # fmt: skip


@cache
def cache_of(schema: str, layout: str, order: str, block_size: int) -> tuple[KVCache, Schema]:
    small = SCHEMAS[schema]
    small = replace(small, layers=tuple({layer.kinds: layer for layer in small.layers}.values()))
    laid = small.laid_out(layout) if layout else small
    return KVCache(laid, num_blocks=2, max_requests=1, device="cpu", block_size=block_size, order=order), laid


def views_of(name: str) -> list[tuple[Any, dict[str, Any]]]:
    """Return the views of the layers that give kernel ``name`` tensors, and these."""
    cache, schema = cache_of(*CASES[name][:4])
    found = []
    for layer in schema.layers:
        view = cache.layer(layer.index)
        try:
            found.append((view, view.kernel_tensors(name)))
        except BadInput:
            continue
    return found


def test_every_kernel_of_the_table_has_a_case() -> None:
    assert {*CASES} | {*NOT_OURS} == {*kernels()} and not {*CASES} & {*NOT_OURS}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gets_what_it_takes_and_reads_it(name: str) -> None:
    wanted = CASES[name][-1]
    fitting = []
    for view, given in views_of(name):
        shapes = {key: list(one.shape[1:]) for key, one in given.items() if key != "declared"}
        verdict = judge(name, view)
        assert verdict == judge(name, given)
        fields = [
            *(view.blocks.fields.values() if view.blocks else ()),
            *(view.state.fields.values() if view.state else ()),
        ]
        for key, one in given.items():
            assert key == "declared" or one.untyped_storage().data_ptr() in {
                field.untyped_storage().data_ptr() for field in fields
            }
        if shapes == wanted:
            fitting.append(verdict)
    assert fitting and all(verdict.expect == "ok" for verdict in fitting), fitting


@pytest.mark.parametrize("name", NOT_OURS)
def test_a_kernel_that_takes_no_cache_is_told(name: str) -> None:
    for schema in SCHEMAS:
        cache, small = cache_of(schema, "", "block", 256)
        for layer in small.layers:
            try:
                assert judge(name, cache.layer(layer.index)).expect == "reject"
            except BadInput as error:
                assert "takes no rows of layer" in str(error)


@pytest.mark.parametrize(
    ("layout", "kernel", "axes"),
    [
        ("", "flashinfer-decode", [16, 2, 64]), ("flashinfer-gqa-nhd", "flashinfer-decode", [16, 2, 64]),
        ("flashinfer-gqa-hnd", "flashinfer-decode", [2, 16, 64]), ("trtllm", "trtllm", [2, 16, 64]),
        ("trtllm", "trtllm-gqa-sm100", [2, 16, 64]), ("vllm-flashinfer-hnd", "vllm-trtllm-gqa", [2, 16, 64]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", ["block", "layer"])
def test_k_and_v_are_one_tensor_of_five_axes(layout: str, kernel: str, axes: list[int], order: str) -> None:
    schema = SCHEMAS["heads"].laid_out(layout) if layout else SCHEMAS["heads"]
    cache = KVCache(schema, num_blocks=4, max_requests=1, device="cpu", block_size=16, order=order)
    sequence = cache.open(range(20))
    sequence.extend(20)
    view = cache.batch([sequence], [20]).layer(1)
    k, v = torch.randn(2, 20, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    view.write(k=k, v=v)
    joined = view.kernel_tensor(kernel)
    assert list(joined.shape[1:]) == [2, *axes] and joined.dtype == torch.bfloat16
    ours = joined[view.block_table[0].long()]  # [2 pages, 2, ..]
    rows = ours if axes[0] == 16 else ours.transpose(2, 3)
    for number, wanted in enumerate((k, v)):
        assert torch.equal(rows[:, number].flatten(0, 1)[:20], wanted)
    both = view.kernel_tensors(kernel)
    assert both["declared"]["layout"] == ("NHD" if axes[0] == 16 else "HND")
    assert torch.equal(joined[:, 0], both["k"]) and torch.equal(joined[:, 1], both["v"])


def test_one_tensor_is_refused_where_a_kernel_takes_two() -> None:
    view = cache_of("heads", "", "block", 64)[0].layer(1)
    with raises(BadInput, needed=("k", "v"), available="fa3"):
        view.kernel_tensor("fa3")
    with raises(BadInput, needed="flashmla", available="layer 1 (full_attention)"):
        view.kernel_tensor("flashmla")
    with raises(BadInput, needed="fa9", available=ANY):
        view.kernel_tensors("fa9")
    wide = Schema((Layer(0, "full", (Attention(2, 64, 32, "bfloat16"),)),))
    with raises(BadInput, needed=[3, 16, 2, 64], available=[3, 16, 2, 32]):
        KVCache(wide, num_blocks=2, device="cpu").layer(0).kernel_tensor("flashinfer-prefill")
    nothing = KVCache(SCHEMAS["heads"], num_blocks=2, device="none").layer(0)
    with raises(BadInput, needed="tensors for kernel 'fa3'", available="layer 0 (full_attention)"):
        nothing.kernel_tensors("fa3")


def test_judge_takes_tensors_views_and_descriptions_and_names_what_is_none_of_them() -> None:
    view = cache_of("heads", "", "block", 64)[0].layer(1)
    k, v = view["k"], view["v"]
    assert judge("fa3", {"k": k, "v": v}).key == judge("fa3", view).key
    assert judge("fa3", {"k": k[..., ::2], "v": v[..., ::2]}).rule == "innermost stride"
    for bad in (None, 3, k, [k, v], KVCache):
        with raises(BadInput, needed="k and v"):
            judge("fa3", bad)  # type: ignore[arg-type]
    for one in (None, 7, "k"):
        with raises(BadInput, field="k", needed=type(one).__name__):
            judge("fa3", {"k": one, "v": v})
    with raises(BadInput, needed=3, available=ANY):
        judge(3, view)  # type: ignore[arg-type]
