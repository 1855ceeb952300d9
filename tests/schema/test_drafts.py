"""Draft layers in a schema: MTP layers, EAGLE heads and small models beside the layers of the model whose text they draft."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.schema import Attention, Growth, Latent, Layer, Recurrent, Rows, Schema
from kvpagoda.schema.families import mtp_layers
from kvpagoda.schema.presets import presets
from raises import raises

LLAMA: dict[str, Any] = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
)  # fmt: skip
MISTRAL: dict[str, Any] = {**LLAMA, "model_type": "mistral", "sliding_window": 32, "max_position_embeddings": 4096}
MAMBA: dict[str, Any] = dict(
    model_type="mamba", vocab_size=128, hidden_size=16, num_hidden_layers=2, state_size=4, conv_kernel=4, expand=2,
    time_step_rank=4,
)  # fmt: skip


def test_fingerprints_without_a_draft_are_those_of_before() -> None:
    """Of a model with windows: records in tiers of a cache without a draft stay valid."""
    assert Schema.from_hf_config("gpt-oss-20b").fingerprint == "7048500e88d4f81c89a95e56ab2b37cc"


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "glm-4.5", "qwen3-next-80b-a3b"])
def test_mtp_layers_lie_behind_the_models_own_in_the_same_blocks(name: str) -> None:
    own, both = Schema.from_hf_config(name), Schema.from_hf_config(name, draft="mtp")
    assert both.layers[: len(own.layers)] == own.layers and both.without_drafts == own
    (layer,) = both.draft_layers
    assert layer.index == len(own.layers) and layer.label.startswith("draft ")
    assert [group.growth for group in both.all_groups] == [group.growth for group in own.all_groups]
    assert both.bytes_per_token - own.bytes_per_token == sum(rows.row_nbytes for rows in layer.block_rows())
    assert both.state_layout.nbytes == own.state_layout.nbytes
    assert both.fingerprint != own.fingerprint
    assert both == Schema.from_hf_config(name, draft=True)
    labels = {kind["label"]: kind for kind in both.plan("40GiB").to_dict()["layer_kinds"]}
    assert labels[layer.label]["bytes_per_token"] == both.bytes_per_token - own.bytes_per_token
    assert own == Schema.from_hf_config(name, draft=None) == Schema.from_hf_config(name, draft=False)


def test_as_many_mtp_layers_as_the_config_names() -> None:
    config = {**presets()["glm-4.5"]["config"], "num_nextn_predict_layers": 3}
    assert [layer.index for layer in Schema.from_hf_config(config, draft="mtp").draft_layers] == [92, 93, 94]
    for number, available in ((0, 10_000), (None, None), ("2", 0)):
        with raises(SchemaError, field="num_nextn_predict_layers", needed=number, available=available):
            Schema.from_hf_config({**config, "num_nextn_predict_layers": number}, draft="mtp")


def test_an_mtp_format_is_that_of_the_model() -> None:
    packed = Schema.from_hf_config("deepseek-v3", kv_format="fp8", draft="mtp")
    assert packed.draft_layers[0].block_rows() == packed.layers[0].block_rows()
    assert isinstance(packed.draft_layers[0].kinds[0], Latent)


def test_mtp_layers_that_are_not_known_are_refused_by_name() -> None:
    with raises(SchemaError, needed="llama", available=ANY):
        Schema.from_hf_config(LLAMA, draft="mtp")
    assert "llama" not in mtp_layers()


def test_mtp_layers_of_sparse_models_select_tokens_themselves() -> None:
    """Whatever the layers of the model share: vLLM builds an indexer for each of them."""
    glm = dict(
        model_type="glm_moe_dsa", num_hidden_layers=6, hidden_size=64, num_attention_heads=4, kv_lora_rank=32,
        qk_rope_head_dim=8, index_head_dim=16, indexer_types=["full", "shared"] * 3, num_nextn_predict_layers=2,
    )  # fmt: skip
    rows = [[row.name for row in layer.block_rows()] for layer in Schema.from_hf_config(glm, draft="mtp").layers]
    assert rows[:2] == [["latent", "k_rope", "index_key"], ["latent", "k_rope"]]
    assert rows[6:] == [["latent", "k_rope", "index_key"]] * 2
    sparse = {"sparse_attention_freq": [0, 0, 1], "sparse_index_dim": 16}
    text = dict(LLAMA, model_type="minimax_m3_text", num_hidden_layers=3, sparse_attention_config=sparse)
    m3 = Schema.from_hf_config({"model_type": "minimax_m3_vl", "text_config": text}, draft="mtp")
    (layer,) = m3.draft_layers
    assert layer.block_rows() == m3.layers[2].block_rows() and len(layer.block_rows()) == 3
    two = Schema.from_hf_config({"text_config": {**text, "num_mtp_modules": 2}}, draft="mtp")
    assert len(two.draft_layers) == 2


def test_mtp_layers_of_kimi_and_mimo() -> None:
    kimi = {"model_type": "kimi_k3", "text_config": {**presets()["kimi-k3"]["config"], "num_nextn_predict_layers": 1}}
    schema = Schema.from_hf_config(kimi, draft="mtp")
    (layer,) = schema.draft_layers
    assert [(row.name, row.row_nbytes) for row in layer.block_rows()] == [("latent", 1024), ("k_rope", 128)]
    mimo = Schema.from_hf_config({**LLAMA, "model_type": "mimo", "num_nextn_predict_layers": 1}, draft="mtp")
    assert mimo.draft_layers[0].block_rows() == mimo.layers[0].block_rows()


def test_mtp_layers_that_no_engine_runs_are_refused_with_what_works() -> None:
    with raises(SchemaError, needed="minimax_m2"):
        Schema.from_hf_config({**LLAMA, "model_type": "minimax_m2", "num_mtp_modules": 3}, draft="mtp")


WRAPPED: list[Any] = [
    lambda head: head,
    lambda head: {"model_type": "eagle", "model": head},
    lambda head: {"speculators_model_type": "eagle3", "transformer_layer_config": head},
]


@pytest.mark.parametrize("wrap", WRAPPED, ids=["plain", "eagle", "speculators"])
def test_an_eagle_head_is_one_more_layer(wrap: Any) -> None:
    head = wrap({**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 4, "draft_vocab_size": 32})
    schema = Schema.from_hf_config(LLAMA, draft=head, dtype="float32")
    assert [layer.index for layer in schema.layers] == [0, 1, 2] and len(schema.groups) == 1
    assert schema.draft_layers[0].kinds == (Attention(4, 16, 16, "float32"),)


def test_a_smaller_model_by_name() -> None:
    schema = Schema.from_hf_config("qwen3-8b", draft="qwen3-0.6b")
    assert (schema.name, len(schema.layers), len(schema.draft_layers)) == ("qwen3-8b", 36 + 28, 28)
    assert schema.draft_alone("qwen3").layers[0].index == 0


def test_layers_of_another_growth_get_an_optional_group() -> None:
    full, window = Schema.from_hf_config(LLAMA, draft=MISTRAL), Schema.from_hf_config(MISTRAL, draft=LLAMA)
    assert [group.name for group in full.groups] == ["full", "optional window(32)"]
    assert [group.name for group in window.groups] == ["window(32)", "optional full"]
    same = Schema.from_hf_config(MISTRAL, draft={**MISTRAL, "num_hidden_layers": 1})
    assert [(group.name, len(group.layers)) for group in same.groups] == [("window(32)", 3)]
    assert [group.name for group in same.rewindable(4).groups] == ["window(32)"]
    assert [group.name for group in window.plan("1MiB").groups] == ["window(32)", "optional full"]


def test_an_optional_law_is_another_group_and_another_fingerprint() -> None:
    def schema(law: Growth) -> Schema:
        layer = Layer(1, "attention", (Attention(1, 4, 4, "float32", law),), is_draft=True)
        return Schema((Layer(0, "attention", (Attention(1, 4, 4, "float32"),)), layer))

    window, optional = schema(Growth(window=8)), schema(Growth(window=8, is_optional=True))
    assert window.fingerprint != optional.fingerprint
    assert [group.name for group in optional.groups] == ["full", "optional window(8)"]


def test_drafts_that_cannot_share_the_text_are_refused() -> None:
    with raises(SchemaError, needed=64, available=128):
        Schema.from_hf_config(LLAMA, draft={**LLAMA, "vocab_size": 64})
    with raises(SchemaError, needed="mamba"):
        Schema.from_hf_config(LLAMA, draft=MAMBA)
    with raises(SchemaError, needed=0, available=2):
        Schema.from_hf_config(LLAMA, draft=LLAMA).drafted_by(Schema.from_hf_config(LLAMA))
    with pytest.raises(SchemaError):
        Schema.from_hf_config(LLAMA, draft={"model_type": "no such type"})
    states = Recurrent((Rows("recurrent", (4,), "float32"),))
    both = Schema((Layer(0, "linear", (states,)),)).drafted_by(Schema((Layer(0, "linear", (states,)),)))
    assert (
        both.state_layout.nbytes == 2 * 16 and both.draft_layers[0].state_rows()
    )  # their hits end at the same checkpoints


def test_ranks_divide_the_draft_and_the_last_stage_has_it() -> None:
    schema = Schema.from_hf_config(LLAMA, draft={**LLAMA, "num_hidden_layers": 1, "num_key_value_heads": 4})
    first, last = (schema.split(tp=2, pp=2, rank=rank) for rank in (0, 1))
    assert [layer.index for layer in first.layers] == [0] and [layer.index for layer in last.layers] == [1, 2]
    assert last.draft_layers[0].kinds == (Attention(2, 16, 16, "bfloat16"),)
    with raises(BadInput, needed=(1, 3, 0), available=2):
        schema.split(pp=3)
