"""``kv_format``: one name or names by layer kind, what has the format and what stays, scales, layouts, splits, plans."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from kvpagoda import KVCache, Schema
from kvpagoda.compat.deepseek_v4 import PRESETS
from kvpagoda.errors import SchemaError
from kvpagoda.formats.encoding import INLINE, RAW, Encoding
from kvpagoda.layouts import read, reshard
from kvpagoda.schema import Attention, Growth, IndexKeys, Layer
from kvpagoda.schema.kv_format import KV_FORMATS, LAYER_KINDS, as_text, parsed
from raises import raises

LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
BASE: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=256, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=65536, dtype="bfloat16",
)  # fmt: skip
LLAMA = dict(BASE, model_type="llama")
GEMMA = dict(BASE, model_type="gemma3_text", sliding_window=512, layer_types=[SLIDING] * 3 + [FULL])
NEXT = dict(
    BASE, model_type="qwen3_next", layer_types=[LINEAR] * 3 + [FULL], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=32,
)  # fmt: skip
KIMI = dict(
    model_type="kimi_linear", num_hidden_layers=4, hidden_size=256, num_attention_heads=8, head_dim=32, kv_lora_rank=512,
    num_key_value_heads=8, qk_rope_head_dim=64, dtype="bfloat16", linear_attn_config={
        "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 32, "num_heads": 4, "short_conv_kernel_size": 4,
    },
)  # fmt: skip
FP8_SCALES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def dtypes(schema: Schema) -> list[list[str]]:
    """The dtypes of the block rows of every layer, as they lie in memory."""
    return [[field.dtype for rows in layer.block_rows() for field in rows.fields(1)] for layer in schema.layers]


def encodings(schema: Schema) -> list[str]:
    """The encodings of the block rows, one letter or name a layer."""
    return ["/".join(dict.fromkeys(rows.encoding.name for rows in layer.block_rows())) for layer in schema.layers]


# ---- which rows ----


@pytest.mark.parametrize(("name", "dtype"), FP8_SCALES.items())
def test_heads_are_one_byte_an_element_and_nothing_else(name: str, dtype: str) -> None:
    raw, schema = Schema.from_hf_config(LLAMA), Schema.from_hf_config(LLAMA, kv_format=name)
    assert dtypes(schema) == [[dtype] * 2] * 4
    assert schema.bytes_per_token == raw.bytes_per_token / 2 == 4 * 2 * 2 * 64
    assert [rows.dtype for rows in schema.layers[0].block_rows()] == ["bfloat16"] * 2, "what is written and read"


def test_names_by_layer_kind() -> None:
    schema = Schema.from_hf_config(GEMMA, kv_format={"full": "fp8_e5m2", "window": "fp8"})
    assert encodings(schema) == ["fp8_e4m3"] * 3 + ["fp8_e5m2"]
    assert encodings(Schema.from_hf_config(GEMMA, kv_format={"full": "fp8"})) == ["raw"] * 3 + ["fp8_e4m3"]
    assert encodings(Schema.from_hf_config(GEMMA, kv_format={"full": "raw", "window": "raw"})) == ["raw"] * 4
    assert encodings(Schema.from_hf_config(GEMMA, kv_format="fp8")) == ["fp8_e4m3"] * 4


@pytest.mark.parametrize("name", sorted(KV_FORMATS))
def test_every_format_with_heads_has_its_bytes(name: str) -> None:
    """A head of 64 elements, by hand."""
    nbytes = {
        "raw": 128, "fp8": 64, "fp8_e4m3": 64, "fp8_e5m2": 64, "fp8_per_token_head": 68, "int8_per_token_head": 68,
        "int8": 68, "mxfp4": 32 + 2, "nvfp4": 32 + 4, "int4": 32 + 2 * 4,
    }[name]  # fmt: skip
    schema = Schema.from_hf_config(LLAMA, kv_format=name)
    assert schema.bytes_per_token == 4 * 2 * 2 * nbytes


def test_a_model_with_states_or_latents_takes_the_format_where_it_fits_and_says_what_stays() -> None:
    hybrid = Schema.from_hf_config(NEXT, kv_format="fp8")
    assert hybrid.state_layout == Schema.from_hf_config(NEXT).state_layout
    assert list(map(str, hybrid.formats)) == [
        "fp8_e4m3: k, v of 1 full layer",
        "raw: conv, recurrent of 3 state layers (states stay as the model computes them)",
    ]
    latents = Schema.from_hf_config(KIMI, kv_format="fp8")
    assert [(one.kind, one.format, one.layers) for one in latents.formats] == [
        ("latent", "v32_656 (flashmla)", (3,)), ("state", "raw", (0, 1, 2)),
    ]  # fmt: skip
    by_kind = Schema.from_hf_config(GEMMA, kv_format={"full": "fp8"})
    assert [(one.kind, one.format, one.layers, one.why) for one in by_kind.formats] == [
        ("full", "fp8_e4m3", (3,), ""), ("window", "raw", (0, 1, 2), "kv_format leaves them"),
    ]  # fmt: skip


def test_keys_of_an_indexer_beside_heads_stay_and_are_named() -> None:
    kind = Attention(2, 64, 64, "bfloat16", encoding=Encoding("fp8_e4m3"), indexer=IndexKeys(32))
    schema = Schema((Layer(0, "full_attention", (kind,)),))
    assert dtypes(schema) == [["float8_e4m3fn", "float8_e4m3fn", "bfloat16"]]
    assert (
        str(schema.formats[1]) == "raw: index_key of 1 full layer (keys of an indexer beside heads have no such form)"
    )


def test_sinks_are_stored_as_the_rows_of_their_window() -> None:
    kind = Attention(2, 64, 64, "bfloat16", Growth(window=8), Encoding("fp8_e4m3", scale=0.5), num_sinks=4)
    assert [field.dtype for rows in kind.state_rows() for field in rows.fields(4)] == ["float8_e4m3fn"] * 2
    assert kind.scaled((0.1, 0.2)).state_rows()[1].encoding == Encoding("fp8_e4m3", scale=0.2)


def test_the_plan_says_it() -> None:
    plan = Schema.from_hf_config(NEXT, kv_format="fp8").plan("64MiB")
    assert "fp8_e4m3: k, v of 1 full layer" in plan.text() and "states stay as the model computes them" in plan.text()
    assert plan.to_dict()["formats"][0] == {
        "kind": "full", "rows": ("k", "v"), "format": "fp8_e4m3", "layers": (3,), "why": "",
    }  # fmt: skip
    assert "kv_format" not in Schema.from_hf_config(NEXT).plan("64MiB").text()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("kv_format", "message"),
    [
        ("fp9", "unknown kv_format 'fp9'; known: raw, fp8, "),
        ({"full": "fp9"}, "unknown kv_format 'fp9'; known: raw, fp8, "),
        ({"full": None}, "unknown kv_format None"),
        ({}, "unknown kv_format {}"),
        ({"fulll": "fp8"}, "known: full, window, chunk, latent, compressed; did you mean 'full'?"),
        ({"state": "fp8"}, "unknown layer kind of kv_format 'state'"),
        ({3: "fp8"}, "unknown layer kind of kv_format 3"),
        ({"latent": "fp8_e5m2"}, "kv_format 'fp8_e5m2' has no form for 'latent' layers; these have: fp8, mxfp4, nvfp4, int8"),
        ({"chunk": "fp8"}, "layers of kind 'chunk', and a gemma3_text model has none; it has: 3 window, 1 full"),
    ],
    ids=str,
)  # fmt: skip
def test_unknown_names_kinds_and_kinds_that_a_model_lacks(kv_format: Any, message: str) -> None:
    with pytest.raises(SchemaError) as error:
        Schema.from_hf_config(GEMMA, kv_format=kv_format)
    assert message in str(error.value)


def test_a_format_that_no_layer_takes() -> None:
    mamba = dict(
        model_type="mamba", vocab_size=1000, hidden_size=16, num_hidden_layers=2, state_size=4, conv_kernel=4, expand=2,
        time_step_rank=4,
    )  # fmt: skip
    with raises(SchemaError, needed="fp8", available="none that a format changes"):
        Schema.from_hf_config(mamba, kv_format="fp8")
    with raises(SchemaError, needed="fp8_e5m2", available="1 latent"):
        Schema.from_hf_config(KIMI, kv_format="fp8_e5m2")
    with raises(SchemaError, needed="fp8_e4m3", available="43 compressed"):
        PRESETS["deepseek-v4-flash"]("fp8_e4m3")
    with raises(SchemaError, needed="fp3", available=ANY):
        PRESETS["deepseek-v4-flash"]("fp3")
    assert PRESETS["deepseek-v4-pro"]({"compressed": "fp8"}) == PRESETS["deepseek-v4-pro"]("fp8")


@pytest.mark.parametrize(("name", "dim", "multiple"), [("mxfp4", 48, 32), ("nvfp4", 24, 16), ("int4", 48, None)])
def test_heads_of_a_size_that_a_format_cannot_hold(name: str, dim: int, multiple: int | None) -> None:
    told = (
        pytest.raises(SchemaError)
        if multiple is None
        else raises(SchemaError, field=name, needed=dim, available=multiple)
    )
    with told:
        Schema.from_hf_config({**LLAMA, "head_dim": dim}, kv_format=name)


def test_k_and_v_differ_in_their_scale_alone() -> None:
    with raises(SchemaError, needed="fp8_e5m2", available="fp8_e4m3"):
        Attention(2, 64, 64, "bfloat16", encoding=Encoding("fp8_e4m3"), v_encoding=Encoding("fp8_e5m2"))


def test_codes_and_scales_in_arrays_of_their_own_fit_no_layout() -> None:
    with raises(SchemaError, needed="trtllm", available="int8"):
        Schema.from_hf_config(LLAMA, kv_format="int8", layout="trtllm")


# ---- scales ----


def test_scales_are_data_of_the_schema() -> None:
    scales = {layer: (0.01 * (layer + 1), 0.02) for layer in range(9)}
    schema = Schema.from_hf_config(LLAMA, kv_format="fp8", kv_scales=scales)
    found = [[rows.encoding.scale for rows in layer.block_rows()] for layer in schema.layers]
    assert found == [[float(np.float32(number)) for number in scales[layer]] for layer in range(4)]
    plain = Schema.from_hf_config(LLAMA, kv_format="fp8")
    assert schema.fingerprint != plain.fingerprint and schema.plan("1MiB").groups == plain.plan("1MiB").groups
    assert plain.scaled(dict.fromkeys(range(4), (1.0, 1))) == plain
    assert (
        len({Schema.from_hf_config(LLAMA, kv_format=name).fingerprint for name in ("raw", "fp8", "fp8_e5m2", "int8")})
        == 4
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-50, "1", True], ids=repr)
def test_scales_that_are_none(bad: Any) -> None:
    schema = Schema.from_hf_config(LLAMA, kv_format="fp8")
    with raises(SchemaError, field="fp8_e4m3", needed=bad, available=0):
        schema.scaled({**dict.fromkeys(range(4), (1.0, 1.0)), 2: (1.0, bad)})
    with raises(SchemaError, field="fp8_e5m2", needed=bad, available=0):
        Encoding("fp8_e5m2", scale=bad)


def test_scales_that_are_missing_or_have_no_use() -> None:
    schema = Schema.from_hf_config(GEMMA, kv_format={"window": "fp8"})
    with raises(SchemaError, needed=3, available=1) as error:
        schema.scaled({1: (1.0, 1.0), 3: (1.0, 1.0)})
    assert (error.value.needed, error.value.available) == (3, 1)
    for bad in (0.5, (0.5,), (0.5, None)):
        with raises(SchemaError, needed=2, available=bad):
            schema.scaled(dict.fromkeys(range(4), bad))  # type: ignore[arg-type]
    with raises(SchemaError, needed="a scale a tensor"):
        Schema.from_hf_config(LLAMA, kv_scales={0: (1.0, 1.0)})
    with raises(SchemaError, field="int8", needed=0.5):
        Encoding("int8", scale=0.5)


# ---- what else takes a schema ----


@pytest.mark.parametrize(
    "layout", ["trtllm", "vllm-blhnc", "vllm-lhbnc", "vllm-bhlnc", "sglang-mha", "vllm-flashinfer"]
)
def test_every_layout_of_raw_rows_holds_them(layout: str) -> None:
    """With half the bytes, and the strides in elements of raw rows."""
    raw, schema = (Schema.from_hf_config(LLAMA, kv_format=name, layout=layout) for name in ("raw", "fp8"))
    assert dtypes(schema) == [["float8_e4m3fn"] * 2] * 4
    ours, theirs = (one.groups[0].block_layout(16).pages for one in (schema, raw))
    assert len(ours) == len(theirs)
    for page, other in zip(ours, theirs):
        assert page.nbytes * 2 == other.nbytes and [2 * n for n in page.places[-1].strides] == [
            *other.places[-1].strides
        ]
        assert page.places[-1].offset * 2 == other.places[-1].offset


def test_kernels_are_planned_for_by_their_dtypes() -> None:
    schema = Schema.from_hf_config(LLAMA, kv_format="fp8", layout="vllm-flashinfer")
    assert schema.plan("64MiB", kernels="fa3").kernel_notes
    with raises(SchemaError, needed="fa3", available=ANY):
        Schema.from_hf_config(LLAMA, kv_format="fp8_e5m2").plan("64MiB", 64, 16, kernel_page=16, kernels="fa3")


@pytest.mark.parametrize("kv_format", ["fp8", "fp8_e5m2", "int8", "mxfp4"])
def test_ranks_keep_a_share_of_the_heads_and_all_scales(kv_format: str) -> None:
    whole = Schema.from_hf_config(LLAMA, kv_format=kv_format)
    if kv_format.startswith("fp8"):
        whole = whole.scaled(dict.fromkeys(range(4), (0.5, 0.25)))
    half = whole.split(tp=2)
    assert half.bytes_per_token * 2 == whole.bytes_per_token
    assert [rows.encoding for rows in half.layers[3].rows()] == [rows.encoding for rows in whole.layers[3].rows()]
    assert whole.split(pp=2, rank=1).layers == whole.layers[2:]


def test_replay_without_memory_holds_twice_as_many_blocks() -> None:
    raw, fp8 = (
        KVCache(Schema.from_hf_config(LLAMA, kv_format=name), "4MiB", device="none").plan for name in ("raw", "fp8")
    )
    assert fp8.groups[0].num_blocks + 1 == 2 * (raw.groups[0].num_blocks + 1)


def test_formats_as_text() -> None:
    for kv_format in ("fp8", {"full": "fp8", "window": "raw"}):
        assert parsed(as_text(kv_format)) == kv_format
    with raises(SchemaError, needed="full"):
        parsed("full=fp8,full=raw")


def test_without_a_format_nothing_changed() -> None:
    """Records of older versions are found: the fingerprints are those of before there were formats for heads."""
    assert Schema.from_hf_config(LLAMA).fingerprint == "6a1412b8c9f2d2d8a6a5a53b77d026e8"
    assert Schema.from_hf_config(GEMMA).fingerprint == "970e8cb28b5e61ccd99371153a4ab579"
    assert Schema.from_hf_config(NEXT).fingerprint == "67ad319c9ce0a89b5956fa699da66c49"
    assert Schema.from_hf_config(KIMI).fingerprint == "281a259ed2bd0ae1327bec7b246ecb98"
    assert PRESETS["deepseek-v4-flash"]("fp8").fingerprint == "37145bb24484532dd43546c2446643d7"


def test_the_table_names_known_encodings_and_kinds() -> None:
    assert {*LAYER_KINDS.values()} == {"heads", "latents", "entries"}
    for name, each in KV_FORMATS.items():
        assert each.heads != RAW or name == "raw"
        assert each.heads.name in INLINE or each.heads.is_packed or each.heads.keeps_shape


def test_pages_of_8_bits_are_resharded() -> None:
    sizes = "layers=4,heads=8,head_dim=64"
    nbytes = []
    for dtype in ("bfloat16", "float8_e4m3fn"):
        sides = (
            f"vllm-flashinfer,page_size=16,{sizes},dtype={dtype},tp=2",
            f"trtllm,page_size=32,{sizes},dtype={dtype}",
        )
        nbytes.append(reshard(*map(read, sides)).nbytes)
    assert nbytes[0] == 2 * nbytes[1] > 0
