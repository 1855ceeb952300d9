"""Types that engines serve and transformers has no causal model of, and the kinds that they need."""

from __future__ import annotations

from collections import Counter

import pytest

from kvpagoda import KVCache, Schema
from kvpagoda.errors import BadInput, KVPagodaError, SchemaError
from kvpagoda.schema import Attention, Compressed, IndexKeys, Latent, Layer
from kvpagoda.schema.families import served_types
from kvpagoda.schema.presets import presets


def test_an_open_pool_is_a_state_and_its_keys_are_one_row_for_several_tokens() -> None:
    schema = Schema.from_hf_config("glm-5.3-flash")
    pooled = [kind for layer in schema.layers for kind in layer.kinds if isinstance(kind, Latent)]
    assert len(pooled) == 11 and {kind.rope_dim for kind in pooled} == {0}
    assert [(row.name, row.tokens_per_row) for row in pooled[0].block_rows()] == [("latent", 1), ("index_key", 4)]
    assert [(row.name, row.count, row.shape) for row in pooled[0].state_rows()] == [("index_tail", 4, (2, 128))]
    assert schema.tokens_per_row == 4
    with pytest.raises(BadInput, match="multiple of 4"):
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
    with pytest.raises(SchemaError, match=r"packed rows of DeepSeek-V4\.1 were not verified"):
        Schema.from_hf_config("deepseek-v4.1-flash", kv_format="fp8")


def test_types_of_draft_layers_after_those_of_the_model_are_left_out() -> None:
    """As the config of Step-3.5 lists them."""
    config = presets()["step-3.5-flash"]["config"]
    types = ["full_attention", *["sliding_attention"] * 3] * 12
    listed = {**config, "layer_types": types, "num_nextn_predict_layers": 3}
    assert Schema.from_hf_config(listed).layers == Schema.from_hf_config(config).layers
    with pytest.raises(SchemaError, match="48 types"):
        Schema.from_hf_config({**listed, "num_nextn_predict_layers": 2})
    with pytest.raises(SchemaError, match="num_nextn_predict_layers is '3'; expected a whole number"):
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
