"""Types that engines serve and transformers has no causal model of, and the kinds that they need."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpagoda import KVCache, Schema
from kvpagoda.errors import BadInput, KVPagodaError, SchemaError
from kvpagoda.schema import Attention, Compressed, IndexKeys, Latent, Layer
from kvpagoda.schema.families import known_types, other_names, served_types
from kvpagoda.schema.from_hf import TEXT
from kvpagoda.schema.presets import presets
from raises import raises


def test_an_open_pool_is_a_state_and_its_keys_are_one_row_for_several_tokens() -> None:
    schema = Schema.from_hf_config("glm-5.3-flash")
    pooled = [kind for layer in schema.layers for kind in layer.kinds if isinstance(kind, Latent)]
    assert len(pooled) == 11 and {kind.rope_dim for kind in pooled} == {0}
    assert [(row.name, row.tokens_per_row) for row in pooled[0].block_rows()] == [("latent", 1), ("index_key", 4)]
    assert [(row.name, row.count, row.shape) for row in pooled[0].state_rows()] == [("index_tail", 4, (2, 128))]
    assert schema.tokens_per_row == 4
    with raises(BadInput, field="block_size", needed=18, available=4):
        schema.block_size(18)


@pytest.mark.parametrize("kind", [Latent(8, 0, "float32", indexer=IndexKeys(4, pool=4)),
                                  Attention(1, 4, 4, "float32", indexer=IndexKeys(4, pool=4))])  # fmt: skip
def test_tokens_of_an_open_pool_can_be_taken_back_as_far_as_its_rows_reach(kind: Latent | Attention) -> None:
    schema = Schema((Layer(0, "indexed_attention", (kind,)),), vocab_size=100)
    assert kind.rewinds() == 0 and schema.rewindable(3).layers[0].kinds[0].rewinds() == 3
    assert schema.rewindable(3).layers[0].kinds[0].state_rows()[0].count == 7
    cache = KVCache(schema.rewindable(3), num_blocks=8, max_requests=2, device="none")
    with cache.open(range(20)) as sequence:
        sequence.extend(20)
        sequence.commit(range(20))
        sequence.rewind(3)
        with pytest.raises(KVPagodaError):
            sequence.rewind(4)
        cache.check()


def test_keys_of_single_tokens_have_no_tail() -> None:
    kind = Latent(8, 4, "float32", indexer=IndexKeys(4))
    assert kind.state_rows() == () and kind.rewinds() is None
    assert Schema((Layer(0, "x", (kind,)),)).rewindable(3).layers[0].kinds == (kind,)


def test_deepseek_v41_keeps_entries_on_the_layers_that_others_read() -> None:
    schema = Schema.from_hf_config("deepseek-v4.1-flash")
    kinds = [kind for layer in schema.layers for kind in layer.kinds if isinstance(kind, Compressed)]
    assert Counter(kind.ratio for kind in kinds) == {0: 36, 2: 3, 1: 1}
    assert [row.name for row in kinds[2].block_rows()] == ["entries", "indexer_keys"]
    assert [row.name for row in kinds[2].state_rows()][3:] == ["tail_ka", "tail_za"]
    assert [row.name for row in kinds[20].state_rows()] == ["swa", "swa_pos", "swa_head"]  # one token is a whole entry
    with raises(SchemaError, field="kv_format", needed="raw"):
        Schema.from_hf_config("deepseek-v4.1-flash", kv_format="fp8")


def test_types_of_draft_layers_after_those_of_the_model_are_left_out() -> None:
    """As the config of Step-3.5 lists them."""
    config = presets()["step-3.5-flash"]["config"]
    types = ["full_attention", *["sliding_attention"] * 3] * 12
    listed = {**config, "layer_types": types, "num_nextn_predict_layers": 3}
    assert Schema.from_hf_config(listed).layers == Schema.from_hf_config(config).layers
    with raises(SchemaError, field="layer_types", needed=45, available=48):
        Schema.from_hf_config({**listed, "num_nextn_predict_layers": 2})
    with raises(SchemaError, field="num_nextn_predict_layers", needed="3", available=0):
        Schema.from_hf_config({**listed, "num_nextn_predict_layers": "3"})


def test_tokens_of_an_open_pool_beside_recurrent_states_cannot_be_taken_back_and_the_type_says_so() -> None:
    """The states of a request move from place to place together; the keys of an open pool are written in place."""
    told = {
        name
        for name, row in served_types().items()
        if row.get("remark", "").startswith("verify_width above 0 is refused")
    }
    refused = set()
    for preset in presets().values():
        if (model_type := preset["config"]["model_type"]) in served_types():
            try:
                Schema.from_hf_config(preset["config"], verify_width=1)
            except SchemaError as error:
                assert "these layers have different numbers of places" in str(error) and error.needed == 1
                refused.add(model_type)
    assert refused == told == {"glm5_next_text", "qwen4_exp_pooled"}


LLAMA = dict(num_hidden_layers=4, hidden_size=64, num_attention_heads=8, num_key_value_heads=2)


def attention(heads_in_group: int | None) -> dict[str, object]:
    return {"attention": {"no_op": heads_in_group is None, "n_heads_in_group": heads_in_group}}


def test_layers_of_a_searched_model_have_heads_of_their_own_or_no_attention() -> None:
    blocks = [attention(4), attention(None), attention(2), {"attention": {"replace_with_linear": True}}]
    config = {**LLAMA, "model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": blocks}
    schema = Schema.from_hf_config(config)
    assert [[kind.num_kv_heads for kind in x.kinds if isinstance(kind, Attention)] for x in schema.layers] == [
        [2], [], [4], [],
    ]  # fmt: skip
    assert schema.bytes_per_token == (2 + 4) * 8 * 4
    for bad, figures in (
        (blocks[:3], {"field": "block_configs", "needed": 3, "available": 3}),
        (None, {"field": "block_configs", "needed": 0}),
        ([*blocks[:3], 3], {"field": "layer", "needed": 3}),
        ([*blocks[:3], attention(3)], {"field": "num_attention_heads", "needed": 8, "available": 3}),
        ([*blocks[:3], {"attention": {}}], {"field": "n_heads_in_group", "available": 1}),
    ):  # fmt: skip
        with raises(SchemaError, **figures):
            Schema.from_hf_config({**config, "block_configs": bad})


def test_letters_of_a_pattern_repeat_and_the_last_layer_is_full() -> None:
    config = {**LLAMA, "model_type": "exaone4", "num_hidden_layers": 6, "sliding_window": 8}

    def letters(pattern: object) -> str:
        schema = Schema.from_hf_config({**config, "sliding_window_pattern": pattern})
        return "".join(layer.label[0] for layer in schema.layers)

    assert letters("LLLG") == "sssfsf" and letters(4) == "sssfss" and letters("G") == "ffffff"
    for bad in ("", "LLX"):
        with raises(SchemaError, field="sliding_window_pattern", needed=bad):
            letters(bad)
    assert (
        Schema.from_hf_config({**config, "sliding_window": None, "sliding_window_pattern": "LG"}).groups[0].name
        == "full"
    )


SAME: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1]},
     {"model_type": "minimax", "layer_types": ["linear_attention"] * 3 + ["full_attention"]}),
    ({"model_type": "minimax_m1", "attn_type_list": [1, 0, 1, 0]}, {"model_type": "minimax"}),
    ({"model_type": "mimo"}, {"model_type": "qwen2"}),
    ({"model_type": "internlm2"}, {"model_type": "llama"}),
    ({"model_type": "minimax_m3_text"}, {"model_type": "minimax_m3_vl_text"}),
    ({"model_type": "step3p7", "sliding_window": 8}, {"model_type": "step3p5", "sliding_window": 8}),
    ({"model_type": "qwen2_5_omni_text"}, {"model_type": "qwen2"}),
    ({"model_type": "qwen3_omni_moe_text"}, {"model_type": "llama"}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "known"), SAME, ids=[str(config["model_type"]) for config, _ in SAME])
def test_other_names_of_layers_that_are_known(config: dict[str, object], known: dict[str, object]) -> None:
    flags = {"use_sliding_window": False}
    wanted = Schema.from_hf_config({**LLAMA, **flags, **known})
    assert Schema.from_hf_config({**LLAMA, **flags, **config}).layers == wanted.layers
    for field in TEXT:
        assert Schema.from_hf_config({"model_type": "x", field: {**LLAMA, **flags, **config}}).layers == wanted.layers


def test_other_names_are_of_known_types() -> None:
    assert set(other_names().values()) <= known_types().keys() and not other_names().keys() & known_types().keys()


@pytest.mark.parametrize(
    "fields", [{"num_sliding_attention_heads": 12},
               {"attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 12}}],
)  # fmt: skip
def test_query_heads_of_sliding_layers(fields: dict[str, object]) -> None:
    config = {**LLAMA, "model_type": "step3p5", "sliding_window": 8}
    schema = Schema.from_hf_config({**config, **fields})
    assert [layer.num_query_heads for layer in schema.layers] == [8, 12, 12, 12]
    with raises(SchemaError, field="query heads", needed=8, available=12):
        schema.split(tp=8)
    assert {layer.num_query_heads for layer in Schema.from_hf_config(config).layers} == {8}
