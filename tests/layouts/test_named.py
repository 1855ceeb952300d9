"""Layouts by name: all can be made, said and moved; and what their names promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from test_layout import ORDERS

from kvpagoda.errors import BadInput, LayoutError
from kvpagoda.layouts import Layout, judge, named, names, read, reshard
from raises import raises

BY_NAME = {
    **{f"vllm_packed_{order}C": f"vllm-{order.lower()}c" for order in "LBHN LBNH LHBN BLHN BLNH BHLN".split()},
    "kv_split_L_2_BNHD": "vllm-flash-attention", "kv_split_L_B2_NHD": "vllm-flashinfer",
    "kv_split_L_2_BHND": "vllm-flash-attention-hnd", "kv_split_L_B2_HND": "vllm-flashinfer-hnd",
    "cross_layer_BL2_NHD": "vllm-cross-layer", "cross_layer_BL2_HND": "trtllm", "tokens_2L_NHD": "sglang-mha",
    "sglang_page_first": "sglang-host-page-first", "sglang_page_first_direct": "sglang-host-page-first-direct",
    "sglang_page_head": "sglang-host-page-head",
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_a_layout_by_name_round_trips_and_moves_to_itself(name: str) -> None:
    layout = named(name)
    again = Layout.from_json(layout.to_json())
    assert again == layout and again.name == layout.name and again.fingerprint == layout.fingerprint
    assert layout.expression in str(layout) and layout.payload_nbytes <= layout.nbytes
    assert reshard(layout, again).nbytes >= layout.payload_nbytes


@pytest.mark.parametrize("order", BY_NAME)
def test_names_stand_for_the_engines_orders(order: str) -> None:
    sizes = dict(layers=2, blocks=3, heads=2, head_dim=4, dtype="uint16")
    expression = Layout.of(ORDERS[order], L=2, B=3, N=4, H=2, D=4, Dv=4)
    paged = {} if BY_NAME[order] in ("sglang-mha", "sglang-host-page-first") else {"page_size": 4}
    if not paged:
        sizes["tokens"] = 4 * int(sizes.pop("blocks"))
    found = named(BY_NAME[order], **sizes, **paged)  # type: ignore[arg-type]
    for part in "kv":
        assert np.array_equal(found.addresses(part), expression.addresses(part))


@pytest.mark.parametrize(
    ("name", "row", "page", "stride"),
    [
        ("flashmla-v32", 656, 41_984, 41_984),
        ("flashmla-dsv4", 584, 37_376, 37_440),
        ("sglang-v41", 528, 33_792, 33_792),
        ("sglang-v41-fp4", 288, 18_432, 18_432),
        ("flashinfer-nvfp4-384", 384, 24_576, 24_576),
        ("vllm-nvfp4-mla", 352, 22_528, 22_528),
        ("deepgemm-indexer", 132, 8_448, 8_448),
        ("deepgemm-indexer-fp4", 68, 4_352, 4_352),
        ("trtllm-mla", 1_152, 73_728, 73_728),
    ],
)
def test_rows_and_pages_have_the_bytes_that_kernels_expect(name: str, row: int, page: int, stride: int) -> None:
    layout = named(name, page_size=64, blocks=2, layers=1)
    part = layout.places[0].name
    assert layout.strides(part)["B"] == stride and page == 64 * row
    first = sum(
        place.itemsize * int(np.prod([layout.axis(axis).size for axis in place.axes])) for place in layout.places
    )
    assert first == 2 * page


def rows_of(layout: Layout) -> dict[str, object]:
    """One layer of encoded rows as kernels are given it: rows of bytes side by side, though scales may lie in a footer."""
    whole = layout.resized(L=1, T=layout.page_size)
    row = sum(place.itemsize * whole.addresses(place.name).size for place in whole.places) // layout.page_size
    pages, stride = layout.view("code", "B").shape[0], layout.strides("code")["B"]
    return {"kv": {"shape": [pages, layout.page_size, 1, row], "strides": [stride, row, row, 1], "dtype": "uint8"}}


def tensors_of(layout: Layout) -> dict[str, object]:
    """One layer of rows that are not encoded: K and V, latent and RoPE, or the two as one row."""
    found: dict[str, object] = {}
    for name, of_kernel in (("k", "k"), ("v", "v"), ("latent", "ckv"), ("rope", "kpe")):
        if name in layout.movable:
            last = [word for word in layout.strides(name) if word not in "LBNH"]
            view = layout.view(name, "B", "N", *(["H"] if "H" in layout.strides(name) else []), *last)
            found[of_kernel] = {"shape": [*view.shape], "strides": [*view.strides], "dtype": view.dtype}
    return found


def fused(layout: Layout) -> dict[str, object]:
    """Latent and RoPE as one tensor, side by side in a row."""
    view = layout.view("latent", "B", "N", "512")
    return {"kv": {"shape": [*view.shape[:2], 576], "strides": [*view.strides], "dtype": view.dtype}}


@pytest.mark.parametrize(
    ("kernel", "arch", "tensors", "expect"),
    [
        ("flash_attention_2", "any", tensors_of(named("flash-attention-2")), "ok"),
        ("flash_attention_2", "any", tensors_of(named("flash-attention-2", page_size=16)), "reject"),
        ("flash_attention_3", "sm90", tensors_of(named("flash-attention-3")), "ok"),
        ("flashinfer_fa2_prefill", "any", tensors_of(named("flashinfer-gqa-nhd", layers=2)), "ok"),
        ("flashinfer_fa2_decode", "any", tensors_of(named("vllm-blnhc", layers=2)), "ok"),
        ("flashinfer_fa2_mla", "any", tensors_of(named("flashinfer-mla")), "ok"),
        ("cutlass_mla", "sm100", fused(named("cutlass-mla", layers=3)), "ok"),
        ("cutlass_mla", "sm100", fused(named("sglang-host-mla-page-first-direct", layers=3, page_size=128)), "garbage"),
        ("trtllm_mla", "sm100", fused(named("trtllm-mla")), "ok"),
        ("flashmla_sparse_v32", "sm100", rows_of(named("flashmla-v32")), "ok"),
        ("flashmla_sparse_model1", "sm100", rows_of(named("flashmla-dsv4")), "ok"),
        ("flashmla_sparse_model1", "sm100", rows_of(named("flashmla-dsv4", block_stride=37_376 + 128)), "reject"),
        ("deepgemm_paged_mqa_logits_fp8", "sm90", rows_of(named("deepgemm-indexer")), "ok"),
        ("deepgemm_paged_mqa_logits_fp4", "sm100", rows_of(named("deepgemm-indexer-fp4")), "ok"),
    ],
)
def test_kernels_can_read_the_layouts_that_bear_their_names(
    kernel: str, arch: str, tensors: dict[str, dict[str, object]], expect: str
) -> None:
    verdict = judge(kernel, tensors={name: {**one, "base_alignment": 16} for name, one in tensors.items()}, arch=arch)
    assert verdict.expect == expect, verdict


def test_groups_that_are_fewer_than_ranks_are_shared_while_heads_are_divided() -> None:
    """Mamba-2: x is cut by heads, B and C by groups, each part for itself (vllm#55208, vllm#37638)."""
    layout = named("vllm-mamba2-conv-ds", layers=1, states=1, groups=2, group_channels=64, heads=8, channels=128)
    ranks = layout.split(tp=8)
    assert [(rank.axis("X").first, rank.axis("X").size) for rank in ranks] == [(16 * r, 16) for r in range(8)]
    assert [(rank.axis("J").first, rank.axis("J").size) for rank in ranks] == [(r // 4 * 32, 32) for r in range(8)]
    whole = np.random.default_rng(0).integers(0, 256, layout.nbytes).astype(np.uint8)
    half = [np.zeros(rank.nbytes, np.uint8) for rank in layout.split(tp=2)]
    parts = [np.zeros(rank.nbytes, np.uint8) for rank in ranks]
    reshard(layout, layout.split(tp=2)).run(whole, half)
    reshard(layout.split(tp=2), ranks).run(half, parts)
    x, b, c = np.split(whole.reshape(-1, 6), [128, 192])  # three columns of bfloat16 for each channel
    for number, part in enumerate(parts):
        heads, group = slice(16 * number, 16 * number + 16), slice(number // 4 * 32, number // 4 * 32 + 32)
        assert np.array_equal(part, np.concatenate((x[heads], b[group], c[group])).ravel())
    back = np.zeros_like(whole)
    reshard(ranks, layout).run(parts, back)
    assert np.array_equal(back, whole)


def test_sizes_follow_from_arguments() -> None:
    assert named("vllm-nvfp4", head_dim=64, tokens=16).axis("G").size == 4
    assert named("vllm-blhnc", head_dim=64).axis("Dv").size == 64
    assert named("vllm-blhnc", head_dim=64, v_head_dim=32).axis("Dv").size == 32
    assert named("trtllm", tokens=45, page_size=16).nbytes == named("trtllm", blocks=3, page_size=16).nbytes
    assert named("vllm-blhnc", block_stride=40_000, blocks=2, heads=1, page_size=64).nbytes == 80_000
    assert named("FlashMLA-DSV4", dialect="vllm").dialect == "vllm" and named("lmcache-8") == named("trtllm")


@pytest.mark.parametrize(
    ("arguments", "rule", "figures"),
    [
        (dict(name="flashmla-v23"), "name", {"needed": "flashmla-v23", "rule": "name"}),
        (dict(name="qqq"), "name", {"needed": "qqq", "rule": "name"}),
        (dict(name=None), "name", {"rule": "name"}),
        (dict(name="trtllm", head_size=64), "size", {"needed": "head_size", "available": ANY, "rule": "size"}),
        (
            dict(name="flashmla-v32", heads=2),
            "size",
            {"needed": "heads", "available": ("blocks", "layers", "page_size", "tokens"), "rule": "size"},
        ),
        (
            dict(name="sglang-mha", blocks=2),
            "size",
            {"needed": "blocks", "available": ("head_dim", "heads", "layers", "tokens", "v_head_dim"), "rule": "size"},
        ),
        (dict(name="trtllm", tokens=32, blocks=2), "size", {"needed": "tokens or blocks", "rule": "size"}),
        (
            dict(name="vllm-nvfp4", head_dim=24),
            "size",
            {"field": "head_dim", "needed": 24, "available": 16, "rule": "size"},
        ),
        (dict(name="flashmla-v32", dtype="float16"), "dtype", {"needed": "float16", "rule": "dtype"}),
        (dict(name="trtllm", dtype="float12"), "dtype", {"needed": "k[D]:float12", "available": ANY, "rule": "dtype"}),
        (
            dict(name="flashmla-dsv4", dialect="sglang"),
            "dialect",
            {"needed": "sglang", "available": ("flashmla", "vllm"), "rule": "dialect"},
        ),
        (dict(name="trtllm", dialect="vllm"), "dialect", {"needed": "vllm", "available": ("",), "rule": "dialect"}),
        (dict(name="vllm-flash-attention", block_stride=9), "stride", {"needed": 2, "available": 1, "rule": "stride"}),
        (dict(name="vllm-blhnc", block_stride=9), "stride", {"needed": 65536, "available": 9, "rule": "stride"}),
    ],
)
def test_what_a_name_does_not_have_is_refused(arguments: dict[str, object], rule: str, figures: dict[str, Any]) -> None:
    with raises(LayoutError, **figures) as raised:
        named(**arguments)  # type: ignore[arg-type]
    assert raised.value.rule == rule


def test_the_document_lists_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    assert [name for name in names() if f"`{name}`" not in text] == []


def test_layouts_as_a_command_line_says_them(tmp_path: Path) -> None:
    assert read("trtllm,page_size=16, heads=4,tp=2,pp=1") == named("trtllm", page_size=16, heads=4).split(tp=2)
    assert read("flashmla-dsv4,dialect=vllm") == (named("flashmla-dsv4", dialect="vllm"),)
    path = tmp_path / "pool.json"
    path.write_text(named("trtllm").to_json())
    assert read(f"{path},T=32,tp=2") == named("trtllm", tokens=32).split(tp=2)
    for text in ("trtllm,", "trtllm,page_size", "trtllm,=4", "trtllm,heads="):
        with raises(LayoutError, rule="syntax", needed=text.partition(",")[2]):
            read(text)
    for text, field in (("trtllm,tp=two", "tp"), ("trtllm,heads=²", "heads"), (f"{path},T=x", "size of axis 'T'")):
        with raises(BadInput, field=field, needed=text.rpartition("=")[2], available=1):
            read(text)


def test_the_room_works_alone() -> None:
    """Without torch, and without the rest of the package but its errors, units and what loads files."""
    program = """
import json, sys
sys.modules["torch"] = None
import numpy as np
from kvpagoda.layouts import Layout, named, reshard
source, target = named("vllm-flashinfer", page_size=16), named("trtllm", page_size=32)
plan = reshard(source.split(tp=2), target)
moved = np.zeros(target.nbytes, np.uint8)
plan.run([np.ones(rank.nbytes, np.uint8) for rank in plan.sources], moved)
assert moved.all() and str(plan) and plan.spans
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "kvpagoda")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rooms = {".".join(name.split(".")[:2]) for name in json.loads(done.stdout)}
    names = ("", ".errors", ".units", ".loading", ".text", ".layouts")
    assert rooms == {f"kvpagoda{name}" for name in names}
    assert (Path(sys.modules["kvpagoda.layouts"].__file__ or "").parent / "named.json").exists()
