"""Configs as people have them: ``config.json`` of real models, differences from defaults, and what cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from unittest.mock import ANY  # noqa: E402

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

import models  # noqa: E402
from kvpagoda import Schema  # noqa: E402
from kvpagoda.errors import NeverFits, SchemaError  # noqa: E402
from kvpagoda.formats.encoding import Encoding  # noqa: E402
from kvpagoda.hf.model_cache import schema_of  # noqa: E402
from kvpagoda.schema import Attention, Compressed, Growth, Shared  # noqa: E402
from kvpagoda.schema.families import families  # noqa: E402
from kvpagoda.schema.from_hf import TEXT  # noqa: E402
from models import tiny_config  # noqa: E402
from more_models import DECODERS, MORE  # noqa: E402
from raises import raises  # noqa: E402

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
V4 = {
    "model_type": "deepseek_v4", "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    "max_position_embeddings": 1048576, "vocab_size": 129280,
}  # fmt: skip
FLASH = {**V4, "num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
PRO = {**V4, "num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
V32 = {
    "model_type": "deepseek_v32", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip
KIMI_LINEAR = {
    "model_type": "kimi_linear", "num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32, "head_dim": 72,
    "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16", "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [i for i in range(1, 28) if i not in (4, 8, 12, 16, 20, 24, 27)],
    },
}  # fmt: skip

MIMO = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 192,
    "num_key_value_heads": 4, "v_head_dim": 128, "sliding_window_size": 128, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
}  # fmt: skip


def labels(schema: Schema) -> str:
    """The first letter of every layer's type."""
    return "".join(layer.label[0] for layer in schema.layers)


# ---- figures that are known from elsewhere ----


@pytest.mark.parametrize(("config", "types", "per_token"), [(FLASH, (2, 21, 20), 3514), (PRO, (0, 30, 31), 5031.4)])
def test_deepseek_v4(config: dict[str, Any], types: tuple[int, ...], per_token: float) -> None:
    schema = Schema.from_hf_config(config, kv_format="fp8")
    found = [layer.label for layer in schema.layers]
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    assert tuple(found.count(kind) for kind in kinds) == types
    assert schema.bytes_per_token == pytest.approx(per_token, abs=0.5)
    kind = schema.layers[2].kinds[0]
    assert isinstance(kind, Compressed)
    assert (kind.encoding, kind.index_encoding) == (
        Encoding("dsv4_584", dialect="flashmla"),
        Encoding("index_68", dialect="deepgemm"),
    )
    assert (kind.dtype, kind.tail_dtype, kind.ratio, kind.overlap) == ("bfloat16", "float32", 4, True)
    assert {row.name: row.row_nbytes for row in kind.block_rows()} == {"entries": 584, "indexer_keys": 68}
    real = transformers.CONFIG_MAPPING["deepseek_v4"](**{key: config[key] for key in config if key != "model_type"})
    for kv_format in ("raw", "fp8"):
        assert Schema.from_hf_config(real, kv_format=kv_format) == Schema.from_hf_config(config, kv_format=kv_format)


def test_llama_8b() -> None:
    schema = Schema.from_hf_config(LLAMA_8B)
    assert schema.bytes_per_token == 131_072
    assert (schema.max_positions, schema.vocab_size, schema.name) == (131072, 128256, "llama")
    assert Schema.from_hf_config(LLAMA_8B, dtype="float32").bytes_per_token == 262_144


def test_deepseek_v32() -> None:
    assert Schema.from_hf_config(V32, kv_format="fp8").bytes_per_token == 61 * (656 + 132) == 48_068
    assert Schema.from_hf_config(V32).bytes_per_token == 61 * 2 * (512 + 64 + 128)


def test_qwen3_next_80b() -> None:
    schema = Schema.from_hf_config(transformers.CONFIG_MAPPING["qwen3_next"]())
    assert labels(schema) == "lllf" * 12
    assert schema.state_layout.nbytes == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) == 77_266_944


def test_kimi() -> None:
    """The linear model's layers come from its own table, counted from 1; K2 is a V3 under another name."""
    linear = Schema.from_hf_config(KIMI_LINEAR)
    assert labels(linear) == "lllf" * 6 + "llf"
    assert linear.state_layout.nbytes == 20 * (32 * 128 * 128 * 4 + 12288 * 3 * 2)
    assert linear.bytes_per_token == 7 * 576 * 2
    v3 = transformers.CONFIG_MAPPING["deepseek_v3"]().to_dict()
    k2 = {**v3, "model_type": "kimi_k2"}
    assert Schema.from_hf_config(k2).layers == Schema.from_hf_config(v3).layers
    assert Schema.from_hf_config({"model_type": "kimi_k25", "text_config": k2}) == Schema.from_hf_config(k2)


def test_mimo_v2_flash_has_sizes_of_its_own_for_windows() -> None:
    """transformers' model doubles the heads of the other layers; the published config says how many there are."""

    def bytes_of(schema: Schema) -> dict[str, int]:
        rows = {group.name: [row for layer in group.layers for row in layer.block_rows()] for group in schema.groups}
        return {name: sum(row.row_nbytes * row.count for row in kept) for name, kept in rows.items()}

    def laws(**changes: Any) -> dict[str, int]:
        return bytes_of(Schema.from_hf_config({**MIMO, **changes}))

    published = {"full": 9 * 4 * (192 + 128) * 2, "window(129)": 39 * 8 * (192 + 128) * 2}
    unnamed = dict.fromkeys((field for field in MIMO if field.startswith("swa_")), None)
    assert laws() == laws(**unnamed) == published
    real = transformers.CONFIG_MAPPING["mimo_v2_flash"](sliding_window_size=128)
    assert bytes_of(Schema.from_hf_config(real, dtype="bfloat16")) == published
    assert laws(swa_num_key_value_heads=16)["window(129)"] == 39 * 16 * (192 + 128) * 2
    assert laws(swa_head_dim=64, swa_v_head_dim=32) == {**published, "window(129)": 39 * 8 * (64 + 32) * 2}
    with raises(SchemaError, field="num_attention_heads", needed=60, available=8):
        laws(swa_num_attention_heads=60)


def test_gemma3n_shares_the_last_layer_of_each_type() -> None:
    schema = Schema.from_hf_config(transformers.CONFIG_MAPPING["gemma3n_text"]())
    assert [layer.owner for layer in schema.layers[:20]] == list(range(20))
    assert {layer.owner for layer in schema.layers[20:]} == {18, 19}
    assert all(layer.kinds == (Shared(19 if layer.index % 5 == 4 else 18),) for layer in schema.layers[20:])


def test_layers_with_nothing_and_layers_with_two_kinds() -> None:
    nemotron = Schema.from_hf_config(tiny_config("nemotron_h"))
    assert [len(layer.kinds) for layer in nemotron.layers] == [1, 0, 1, 0, 1]
    zamba = Schema.from_hf_config(tiny_config("zamba2"))
    assert [len(layer.kinds) for layer in zamba.layers] == [1, 2, 1, 2]
    zaya = Schema.from_hf_config(tiny_config("zaya", **MORE["zaya"]))
    assert [group.name for group in zaya.groups] == ["full", "window(8)"]


def test_growth_laws() -> None:
    def laws(name: str) -> list[str]:
        return [layer.growth.name for layer in Schema.from_hf_config(tiny_config(name)).layers if layer.growth]

    assert laws("mistral") == ["window(8)"] * 4
    assert laws("gpt_oss") == ["window(8)", "full"] * 2
    assert laws("llama4_text") == ["chunk(16)"] * 3 + ["full"]


@pytest.mark.parametrize(("name", "field"), [("mistral", "sliding_window"), ("llama4_text", "attention_chunk_size")])
def test_a_window_or_chunk_that_no_text_leaves_is_full_attention(name: str, field: str) -> None:
    def growth(size: int) -> Growth:
        return Schema.from_hf_config(tiny_config(name, max_position_embeddings=64, **{field: size})).layers[0].growth

    assert [growth(size).span for size in (63, 64, 65)] == [63, None, None]
    assert Schema.from_hf_config(tiny_config(name, max_position_embeddings=64, **{field: 64})).groups[0].name == "full"


def test_a_limit_that_no_config_names_is_none() -> None:
    bare = {key: value for key, value in LLAMA_8B.items() if key != "max_position_embeddings"}
    assert Schema.from_hf_config(bare).max_positions is None
    assert Schema.from_hf_config({"text_config": bare}).max_positions is None
    assert Schema.from_hf_config({**bare, "n_positions": 77}).max_positions == 77


def test_a_text_past_the_models_limit_is_told_so() -> None:
    plan = Schema.from_hf_config({**LLAMA_8B, "max_position_embeddings": 100}).plan("1GiB")
    with raises(NeverFits, needed=101, available=100):
        plan.blocks_wanted(101, longest=plan.longest_context)
    with raises(NeverFits, needed=60, available=50):
        plan.blocks_wanted(60, longest=50)


def test_tensor_parallel_ranks_divide_heads_and_replicate_what_is_few() -> None:
    qwen = Schema.from_hf_config(transformers.CONFIG_MAPPING["qwen3_next"]())
    conv, recurrent = qwen.split(tp=4).layers[0].state_rows()
    assert (conv.shape, recurrent.shape) == ((8192 // 4, 3), (8, 128, 128))
    bamba = Schema.from_hf_config(tiny_config("bamba"))
    conv, recurrent = bamba.split(tp=2).split(tp=2).layers[0].state_rows()
    assert (conv.shape, recurrent.shape) == ((24 + 2 * 16, 3), (1, 24, 16))


# ---- dtype, formats ----


def test_dtype_is_the_callers_then_the_configs_then_bfloat16() -> None:
    torch = pytest.importorskip("torch")

    def dtype(config: Any, **kwargs: Any) -> str:
        return Schema.from_hf_config(config, **kwargs).layers[0].block_rows()[0].dtype

    bare = {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"}
    assert dtype(bare) == "bfloat16"
    assert dtype({**bare, "torch_dtype": "float16"}) == dtype({**bare, "dtype": torch.float16}) == "float16"
    assert dtype({"dtype": "float16", "text_config": bare}) == "float16"
    assert dtype(LLAMA_8B, dtype="float32") == dtype(LLAMA_8B, dtype=torch.float32) == "float32"
    with raises(SchemaError, needed="float31", available=ANY):
        dtype(LLAMA_8B, dtype="float31")


def test_raw_tails_are_in_the_models_dtype() -> None:
    kind = Schema.from_hf_config(FLASH, dtype="float16").layers[2].kinds[0]
    assert isinstance(kind, Compressed) and (kind.dtype, kind.tail_dtype) == ("float16", "float16")


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({}, [656, 132]),
        ({"dtype": "float16"}, [512 + 16, 128, 128 + 4]),
        ({"kv_lora_rank": 256}, [256 + 8, 128, 128 + 4]),
        ({"index_head_dim": 256}, [512 + 16, 128, 256 + 8]),
    ],
)
def test_fp8_is_the_packed_rows_of_kernels_where_a_model_has_rows_of_their_sizes(
    changes: dict[str, Any], nbytes: list[int]
) -> None:
    schema = Schema.from_hf_config({**V32, **changes}, kv_format="fp8")
    assert [row.row_nbytes for row in schema.layers[0].block_rows()] == nbytes
    kernels = ["flashmla-sparse-sm100", "deepgemm-indexer-sm90"]
    if nbytes == [656, 132]:
        assert schema.plan("64GiB", kernels=kernels).block_size == 64
    else:
        with raises(SchemaError, needed="flashmla-sparse-sm100", available=ANY):
            schema.plan("64GiB", kernels=kernels)


def test_fp8_of_models_with_heads_and_with_states_beside_latents() -> None:
    llama, kimi = (Schema.from_hf_config(config, kv_format="fp8") for config in (LLAMA_8B, KIMI_LINEAR))
    assert llama.bytes_per_token == 32 * 2 * 8 * 128
    assert kimi.bytes_per_token == 7 * 656 and kimi.state_layout == Schema.from_hf_config(KIMI_LINEAR).state_layout


def test_unknown_format() -> None:
    with raises(SchemaError, needed="int3", available=ANY):
        Schema.from_hf_config(LLAMA_8B, kv_format="int3")


# ---- what is missing or absurd ----


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({"num_hidden_layers": None}, {"field": "num_hidden_layers", "available": 1}),
        ({"num_hidden_layers": 0}, {"field": "num_hidden_layers", "needed": 0, "available": 1}),
        ({"num_hidden_layers": 2.5}, {"field": "num_hidden_layers", "needed": 2.5, "available": 1}),
        ({"num_hidden_layers": True}, {"field": "num_hidden_layers", "needed": True, "available": 1}),
        ({"num_key_value_heads": -8}, {"field": "num_key_value_heads", "needed": -8, "available": 1}),
        ({"num_key_value_heads": "8"}, {"field": "num_key_value_heads", "needed": "8", "available": 1}),
        ({"num_key_value_heads": 5}, {"field": "num_attention_heads", "needed": 32, "available": 5}),
        ({"num_attention_heads": None}, {"field": "num_attention_heads", "available": 1}),
        ({"model_type": "gpt2", "num_attention_heads": 24}, {"field": "hidden_size", "needed": 4096, "available": 24}),
        ({"hidden_size": None}, {"field": "hidden_size", "available": 1}),
        ({"head_dim": 0}, {"field": "head_dim", "needed": 0, "available": 1}),
        ({"layer_types": ["full_attention"] * 3}, {"field": "layer_types", "needed": 32, "available": 3}),
        ({"layer_types": "full_attention"}, {"field": "layer_types", "needed": 32, "available": "full_attention"}),
        ({"layer_types": ["full_attention"] * 31 + ["psychic"]},
         {"field": "layer_types", "needed": "psychic", "available": ("full_attention",)}),
        ({"layer_types": [["full_attention"]] * 32},
         {"field": "layer_types", "needed": ["full_attention"], "available": ("full_attention",)}),
        ({"sliding_window": 4096}, {"field": "layer_types", "needed": "sliding_attention", "available": ("full_attention",)}),
        ({"vocab_size": 0}, {"field": "vocab_size", "needed": 0, "available": 1}),
        ({"per_layer_config": [1]}, {"field": "per_layer_config", "needed": [1]}),
        ({"model_type": None}, {"field": "model_type"}),
        ({"model_type": "lama"}, {"field": "model_type", "needed": "lama"}),
        ({"model_type": "mamba"}, {"field": "intermediate_size", "needed": -1, "available": 1}),
        ({"model_type": "deepseek_v4", "compress_ratios": [4] * 30},
         {"field": "compress_ratios", "needed": 32, "available": ANY}),
        ({"model_type": "deepseek_v4", "compress_ratios": [0, 5] * 16},
         {"field": "compress_ratios", "needed": 5, "available": (0, 4, 128)}),
        ({"model_type": "deepseek_v4"}, {"field": "compress_ratios", "needed": 32}),
        ({"model_type": "mistral", "sliding_window": 0}, {"field": "sliding_window", "needed": 0, "available": 1}),
        ({"model_type": "kimi_linear", "linear_attn_config": [1]}, {"field": "linear_attn_config", "needed": [1]}),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, {"field": "indexer_types", "needed": 1, "available": 1}),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*X"},
         {"field": "hybrid_override_pattern", "needed": "X", "available": 2}),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 32},
         {"field": "num_kv_shared_layers", "needed": 32, "available": 0}),
        ({"use_bidirectional_attention": True}, {"field": "use_bidirectional_attention", "needed": True}),
    ],
)  # fmt: skip
def test_absurd_configs(changes: dict[str, Any], figures: dict[str, Any]) -> None:
    config = {**LLAMA_8B, "intermediate_size": -1, **changes}
    config = {field: value for field, value in config.items() if value is not None or field == "sliding_window"}
    with raises(SchemaError, **figures) as caught:
        Schema.from_hf_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [None, 7, "llama", {}, [], object()])
def test_things_that_are_no_config(config: Any) -> None:
    with pytest.raises(SchemaError):
        Schema.from_hf_config(config)


TWO = dict(num_hidden_layers=2, hidden_size=64)
QUERIES: list[tuple[dict[str, Any], int]] = [
    (dict(TWO, model_type="falcon", hidden_size=4544, num_attention_heads=71), 2),  # one K/V head, on every rank
    (dict(TWO, model_type="gpt_bigcode", hidden_size=48, num_attention_heads=6), 4),
    (dict(TWO, model_type="llama", num_attention_heads=24, num_key_value_heads=8), 16),
    (dict(TWO, model_type="deepseek_v3", num_attention_heads=12), 8),
    (dict(TWO, model_type="deepseek_v4", num_attention_heads=20, compress_ratios=[0, 4]), 8),
]


@pytest.mark.parametrize(("config", "ranks"), QUERIES, ids=[config["model_type"] for config, _ in QUERIES])
def test_query_heads_divide_over_tensor_parallel_ranks(config: dict[str, Any], ranks: int) -> None:
    schema, heads = Schema.from_hf_config(config), config["num_attention_heads"]
    with raises(SchemaError, field="query heads", needed=ranks, available=heads):
        schema.split(tp=ranks)
    one = schema.split(tp=heads)
    assert [layer.num_query_heads for layer in one.layers] == [1, 1]
    with raises(SchemaError, field="query heads", needed=2, available=1):
        one.split(tp=2)


FALCON_40B = dict(
    model_type="falcon",
    hidden_size=8192,
    num_hidden_layers=60,
    num_attention_heads=128,
    num_kv_heads=8,
    vocab_size=65024,
)


def test_falcons_heads_are_those_that_engines_keep() -> None:
    """transformers repeats them for each query head: 16 times as many."""
    falcon = {**FALCON_40B, "new_decoder_architecture": True}
    assert Schema.from_hf_config(falcon).bytes_per_token == 60 * 8 * 64 * 4
    assert Schema.from_hf_config(falcon).split(tp=16).bytes_per_token == 60 * 1 * 64 * 4
    assert schema_of(config_class("falcon")(**falcon)).bytes_per_token == 60 * 128 * 64 * 4
    assert schema_of(config_class("falcon")(**FALCON_40B)).bytes_per_token == 60 * 1 * 64 * 4
    with raises(SchemaError, field="num_attention_heads", needed=128, available=7):
        Schema.from_hf_config({**falcon, "num_kv_heads": 7})


LAGUNA = dict(
    model_type="laguna", num_hidden_layers=8, hidden_size=3072, num_attention_heads=48, num_key_value_heads=8, head_dim=128,
    sliding_window=512, layer_types=["full_attention", *["sliding_attention"] * 3] * 2,
    num_attention_heads_per_layer=[48, 72, 72, 72] * 2,
)  # fmt: skip


def test_every_layer_divides_its_own_query_heads() -> None:
    schema = Schema.from_hf_config(LAGUNA)
    assert [layer.num_query_heads for layer in schema.layers] == [48, 72, 72, 72] * 2
    assert [layer.num_query_heads for layer in schema.split(tp=8).layers] == [6, 9, 9, 9] * 2
    with raises(SchemaError, field="query heads", needed=16, available=72):
        schema.split(tp=16)
    real = Schema.from_hf_config(config_class("laguna")(**LAGUNA))
    assert [layer.num_query_heads for layer in real.layers] == [48, 72, 72, 72] * 2 and real.layers == schema.layers
    with raises(SchemaError, field="num_attention_heads_per_layer", needed=3, available=3):
        Schema.from_hf_config({**LAGUNA, "num_attention_heads_per_layer": [48, 72, 72]})


PASSED_OVER = [
    ("llama", {"num_key_value_heads_per_layer": [1, 2]}),
    ("llama", {"num_attention_heads_per_layer": [32, 16]}),
    ("llama", {"block_configs": [{"attention": {"n_heads_in_group": 4}}] * 2}),
    ("hunyuan_v1_moe", {"use_cla": True, "cla_share_factor": 2}),
    ("qwen3", {"attn_type_list": [0, 1]}),
]


@pytest.mark.parametrize(("name", "fields"), PASSED_OVER)
def test_what_changes_layers_and_is_not_read_is_refused(name: str, fields: dict[str, Any]) -> None:
    config = {**LLAMA_8B, "model_type": name, "num_hidden_layers": 2}
    with raises(SchemaError, field=next(iter(fields)), needed=next(iter(fields.values()))):
        Schema.from_hf_config({**config, **fields})
    same = {"num_key_value_heads_per_layer": [8, 8], "num_attention_heads_per_layer": (32, 32), "use_cla": False}
    assert Schema.from_hf_config({**config, **same}) == Schema.from_hf_config(config)


@pytest.mark.parametrize(
    ("fields", "figures"),
    [
        (
            {"model_type": "llama", "use_mla": True, "kv_lora_rank": 64},
            {"field": "use_mla", "needed": True},
        ),
        ({"model_type": "deepseek_v2", "use_mla": False}, {"field": "use_mla", "needed": False}),
        (
            {"model_type": "mpt", "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8}},
            {"field": "attn_type", "needed": "multihead_attention", "available": "grouped_query_attention"},
        ),
    ],
)
def test_another_attention_than_that_of_the_type_is_refused(fields: dict[str, Any], figures: dict[str, Any]) -> None:
    for config in ({**LLAMA_8B, **fields}, {"model_type": "x", "language_config": {**LLAMA_8B, **fields}}):
        with raises(SchemaError, **figures):
            Schema.from_hf_config(config)
    plain = {**LLAMA_8B, "model_type": "mpt", "attn_config": {"attn_type": "multihead_attention"}}
    assert Schema.from_hf_config(plain).layers == Schema.from_hf_config({**LLAMA_8B, "model_type": "mpt"}).layers
    assert Schema.from_hf_config({**LLAMA_8B, "use_mla": False}) == Schema.from_hf_config(LLAMA_8B)


def test_layers_by_the_lists_of_checkpoints() -> None:
    four = dict(LLAMA_8B, num_hidden_layers=4)
    listed = Schema.from_hf_config({**four, "model_type": "minimax", "attn_type_list": [0, 0, 0, 1]})
    assert labels(listed) == "lllf"
    types = ["linear_attention", "full_attention"] * 2
    both = {**four, "model_type": "minimax", "attn_type_list": [0, 0, 0, 1], "layer_types": types}
    assert labels(Schema.from_hf_config(both)) == "lflf"
    mimo = Schema.from_hf_config({**MIMO, "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 0, 1]})
    assert labels(mimo) == "ffs"


def test_messages_name_the_model_and_the_layer() -> None:
    types = ["full_attention"] * 32
    with raises(SchemaError, field="head_dim", needed=0, available=1):
        Schema.from_hf_config({**LLAMA_8B, "head_dim": 0, "layer_types": types})


# ---- every model type ----


def config_class(name: str) -> Any:
    return models.config_class({"kimi_k2": "deepseek_v3"}.get(name, name))


NOT_WITHOUT = {
    "deepseek_v4": "compress_ratios", "nemotron_h": "num_hidden_layers", "qwen4_exp_text": "indexer_head_dim",
}  # fmt: skip
"""Types that have no sound defaults, and the field that their configs must have."""


AS_DECODER = ("is_decoder", "is_encoder_decoder", "attention_type")
"""Fields that make a decoder of a model that is none by default."""


@pytest.mark.parametrize("name", sorted(families()))
def test_fields_that_are_left_out(name: str) -> None:
    """A multimodal config is written as differences: what is not there is what transformers takes."""
    decoder = {key: MORE[name][key] for key in AS_DECODER if key in MORE[name]} if name in DECODERS else {}
    nothing: dict[str, Any] = {"model_type": "multimodal", "text_config": {"model_type": name, **decoder}}
    if name in NOT_WITHOUT:
        with raises(SchemaError, field=NOT_WITHOUT[name], needed=ANY, available=ANY):
            Schema.from_hf_config(nothing)
        return
    found, real = Schema.from_hf_config(nothing), Schema.from_hf_config(config_class(name)(**decoder))
    assert found.vocab_size == real.vocab_size
    assert found.max_positions is None  # a limit is never a guess
    if real.max_positions is not None:
        nothing["text_config"]["max_position_embeddings"] = real.max_positions
    assert Schema.from_hf_config(nothing).layers == real.layers


FOUR = dict(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
LISTED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
QSA = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=256, indexer_budget=8, indexer_compress_ratio=4)
DORY = dict(
    FOUR, num_hidden_layers=8, layer_types=[block for each in LISTED for block in (each, "mlp")], n_input_layers=2,
    n_recurrent_layers=4, n_output_layers=2, n_recurrent_loops=4,
)  # fmt: skip
"""Attention and MLP of a layer are listed, and counted, apart."""
CHECKPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("dots3_note_text", dict(FOUR, num_key_value_heads=4, num_hidden_layers=9)),
    (
        "dots3_note_text",
        dict(FOUR, num_key_value_heads=4, layer_types=LISTED, swa_kv_lora_rank=96, sliding_window_size=64),
    ),
    ("dots3_note_text", dict(FOUR, num_key_value_heads=4, use_dsa=False, swa_head_dim=224)),
    ("dots3_note_text", dict(FOUR, num_key_value_heads=4, use_sliding_window=False, swa_qk_rope_head_dim=64)),
    ("dory", dict(FOUR, n_input_layers=1, n_output_layers=1, n_recurrent_loops=3)),
    ("dory", DORY),
    ("exaone", dict(num_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)),
    (
        "inkling2_loop_text",
        dict(
            FOUR, n_layers_per_attn_res_block=1, loop_config=dict(core_start=1, core_end=3, num_passes=4, gate_rank=8)
        ),
    ),
    ("minimax", dict(FOUR, sliding_window=64)),
    ("minimax", dict(FOUR, sliding_window=64, layer_types=["linear_attention", "full_attention"] * 2)),
    (
        "minimax_m3_vl_text",
        dict(FOUR, sparse_attention_config={"sparse_attention_freq": [0, 1, 1, 0], "sparse_index_dim": 32}),
    ),
    ("qwen4_exp_text", dict(FOUR, **QSA, layer_types=["linear_attention"] * 3 + ["full_attention"])),
    (
        "qwen4_exp_text",
        dict(FOUR, **QSA, full_attention_interval=2, ple_layer_ids=[1, 3], ple_embed_dim=32, eos_token_id=2),
    ),
    ("rwkv", dict(num_hidden_layers=4, hidden_size=64, attention_hidden_size=96)),
    ("xlstm", dict(num_hidden_layers=4, num_blocks=4, hidden_size=128, qk_dim_factor=1.0)),
]
"""Fields as checkpoints spell them, which transformers puts in other words."""


@pytest.mark.parametrize(("name", "raw"), CHECKPOINTS)
def test_checkpoints_have_spellings_of_their_own(name: str, raw: dict[str, Any]) -> None:
    real = Schema.from_hf_config(config_class(name)(**raw, dtype="float32"))
    assert Schema.from_hf_config({"model_type": name, "dtype": "float32", **raw}).layers == real.layers


def test_layers_that_run_again_have_rows_of_their_own_after_all_others() -> None:
    schema = Schema.from_hf_config(
        {"model_type": "dory", "dtype": "float32", **DORY, "head_dim": 16, "sliding_window": 64}
    )
    assert [layer.label for layer in schema.layers] == [*LISTED, *LISTED[1:3] * 3]
    assert [layer.index for layer in schema.layers] == [*range(10)]
    assert schema.bytes_per_token == 10 * 2 * 2 * 16 * 4
    inkling = {"model_type": "inkling2_loop_text", "text_config": {"model_type": "inkling2_loop_text"}}
    assert len(Schema.from_hf_config(inkling).layers) == 24 + 2 * 12


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        (
            dict(recurrent_kv_cache_mode="last_loop"),
            {"field": "recurrent_kv_cache_mode", "needed": "per_loop", "available": "last_loop"},
        ),
        (dict(n_recurrent_layers=8), {"field": "n_recurrent_layers", "needed": 4, "available": 8}),
        (
            dict(n_recurrent_loops=10**9),
            {"needed": 3, "available": 4},
        ),
        (dict(n_recurrent_loops=0), {"field": "n_recurrent_loops", "needed": 0, "available": 1}),
        (
            dict(layer_types=[*LISTED, *["mlp"] * 4]),
            {"field": "layer_types", "needed": 4, "available": 8},
        ),
    ],
)
def test_loops_that_no_model_runs(changes: dict[str, Any], figures: dict[str, Any]) -> None:
    with raises(SchemaError, **figures):
        Schema.from_hf_config({"model_type": "dory", "head_dim": 16, "sliding_window": 64, **DORY, **changes})


@pytest.mark.parametrize(
    ("end", "figures"),
    [(9, {"needed": 9, "available": 4}), (0, {"field": "loop_config.core_end", "needed": 0, "available": 1})],
)
def test_loops_lie_within_the_layers(end: int, figures: dict[str, Any]) -> None:
    fields = dict(FOUR, loop_layer_index_start=1, loop_layer_index_end=end, loop_num_passes=2)
    with raises(SchemaError, **figures):
        Schema.from_hf_config(
            {"model_type": "multimodal", "text_config": {"model_type": "inkling2_loop_text", **fields}}
        )


def test_doges_experts_are_refused() -> None:
    """Their router mixes the tokens of a forward pass, as transformers' own code says of it."""
    assert Schema.from_hf_config(config_class("doge")()).layers
    with raises(SchemaError, field="is_moe", needed=False, available=True):
        Schema.from_hf_config(config_class("doge")(is_moe=True))


def test_a_flat_config_of_a_multimodal_model() -> None:
    flat = {**LLAMA_8B, "model_type": "qwen2_vl", "use_sliding_window": False, "sliding_window": 32768}
    schema = Schema.from_hf_config({**flat, "max_window_layers": 28})
    assert schema.name == "qwen2_vl_text"
    assert {layer.kinds for layer in schema.layers} == {(Attention(8, 128, 128, "bfloat16"),)}


def told(config: Any) -> Any:
    """The schema of a config; without one, that it is refused."""
    try:
        return Schema.from_hf_config(config)
    except SchemaError:
        return "refused"


DIRECTIONS = ("is_encoder_decoder", "use_bidirectional_attention", "is_decoder")


def without(fields: Any, names: tuple[str, ...]) -> Any:
    """A config without ``names``, on every level."""
    if not isinstance(fields, dict):
        return fields
    return {name: without(value, names) for name, value in fields.items() if name not in names}


WRAPPERS = sorted(
    name for name, config in transformers.CONFIG_MAPPING.items() if {*config.sub_configs} & {*TEXT} or name in DECODERS
)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_file_and_an_object_are_read_alike(name: str) -> None:
    """A file leaves out what its type adds: on load, transformers writes it into the object."""
    try:
        config = config_class(name)()
    except Exception:
        pytest.skip("its config has no defaults")
    written = json.loads(config.to_json_string(use_diff=True))
    assert told(config) == told(written) == told(without(config.to_dict(), DIRECTIONS))


LLAMA = dict(LLAMA_8B, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("config", "figures"),
    [
        (
            {"model_type": "paligemma", "text_config": dict(LLAMA, model_type="gemma")},
            {"field": "model_type", "needed": "paligemma"},
        ),
        ({"is_encoder_decoder": True, "text_config": LLAMA}, {"field": "is_encoder_decoder", "needed": True}),
        (
            {"use_bidirectional_attention": True, "text_config": LLAMA},
            {"field": "use_bidirectional_attention", "needed": True},
        ),
        ({"thinker_config": {"is_causal": False, "text_config": LLAMA}}, {"field": "is_causal", "needed": False}),
        (dict(LLAMA, is_causal=False), {"field": "is_causal", "needed": False}),
        (
            dict(LLAMA, model_type="trocr", decoder_layers=2, decoder_attention_heads=8, is_encoder_decoder=True),
            {"field": "is_encoder_decoder", "needed": True},
        ),
        (
            dict(LLAMA, model_type="bigbird_pegasus", decoder_layers=2, decoder_attention_heads=8),
            {"field": "is_encoder_decoder", "needed": True},
        ),
        (
            dict(LLAMA, model_type="mpt", attn_config={"prefix_lm": True}),
            {"field": "attn_config.prefix_lm", "needed": True},
        ),
    ],
)
def test_what_attends_to_later_tokens_is_refused_on_every_level(
    config: dict[str, Any], figures: dict[str, Any]
) -> None:
    with raises(SchemaError, **figures):
        Schema.from_hf_config(config)


def test_what_is_causal_stays() -> None:
    plain = Schema.from_hf_config(LLAMA)
    for fields in ({"is_causal": True}, {"is_causal": None}, {"attn_config": {"prefix_lm": False}}):
        assert Schema.from_hf_config({**LLAMA, **fields}) == plain
    assert Schema.from_hf_config({"use_bidirectional_attention": "vision", "text_config": LLAMA}) == plain


def test_objects_without_to_dict() -> None:
    class Bag:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    assert Schema.from_hf_config(Bag(**LLAMA_8B)) == Schema.from_hf_config(LLAMA_8B)
    window = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
    assert Schema.from_hf_config(Bag(text_config=Bag(**window))).layers[0].growth == Growth(window=4096)


CONTRACT = """llama qwen2 qwen3 mistral mixtral gpt_oss gemma2 gemma3 gemma3_text llama4 llama4_text deepseek_v2 deepseek_v3
deepseek_v32 qwen3_next qwen3_5 qwen3_5_text kimi_linear nemotron_h granitemoehybrid jamba bamba zamba2 gemma3n gemma3n_text
deepseek_v4""".split()


def test_every_causal_model_is_covered_or_refused_by_name() -> None:
    covered: list[str] = []
    refused: dict[str, str] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = config_class(model_type)()
        except Exception:  # a type whose config has no defaults of its own
            config = {"model_type": model_type}
        text = getattr(config, "text_config", None)
        names = {model_type, *(getattr(each, "model_type", model_type) for each in (config, text))}
        try:
            Schema.from_hf_config(config)
            covered.append(model_type)
        except SchemaError as error:
            if names & NOT_WITHOUT.keys() and names & families().keys():
                covered.append(model_type)
                continue
            refused[model_type] = str(error)
            assert any(name in str(error) for name in names), (model_type, str(error))
    print(f"\n{len(covered)} covered: {' '.join(covered)}\n{len(refused)} refused: {' '.join(refused)}")
    assert not set(CONTRACT) - set(covered)
    assert len(covered) + len(refused) == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
