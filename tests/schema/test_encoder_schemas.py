"""Schemas and plans of models with an encoder, against what transformers' ``EncoderDecoderCache`` really keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from encoder_decoders import ENCODERS, inputs_of, model_of, run  # noqa: E402
from kvpagoda import Schema  # noqa: E402
from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.schema.families import known_types  # noqa: E402
from raises import raises  # noqa: E402

LLAMA = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=128)


def test_every_family_with_an_encoder_is_tested() -> None:
    assert {name for name, row in known_types().items() if row["family"].encoder is not None} == {*ENCODERS}


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_rows_of_both_attentions_are_those_that_transformers_keeps(name: str) -> None:
    model = model_of(name, torch.bfloat16)
    schema = Schema.from_hf_config(model.config)
    assert Schema.from_hf_config(json.loads(model.config.to_json_string())) == schema
    (given,) = inputs_of(model, (10,))
    kept = run(model, given, [1, 5, 9]).past_key_values
    for tokens, cache in ((3, kept.self_attention_cache), (10, kept.cross_attention_cache)):
        assert len(cache.layers) == len(schema.layers)
        for layer, real in zip(schema.layers, cache.layers):
            rows = {row.name: row for row in layer.block_rows()}
            assert rows.keys() == {"k", "v"}
            for row, tensor in ((rows["k"], real.keys), (rows["v"], real.values)):
                assert [1, row.shape[0], tokens, row.shape[1]] == [*tensor.shape]
                assert tensor.dtype == torch.bfloat16 and row.dtype == "bfloat16"
                assert row.row_nbytes * tokens == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_limits_are_those_of_the_encoder_and_of_the_decoder(name: str) -> None:
    schema = Schema.from_hf_config(model_of(name).config)
    has_limits = "t5" not in name
    assert schema.max_positions == (64 if has_limits else None)
    assert schema.encoder_positions == ((10 if name == "whisper" else 64) if has_limits else 0)
    plan = schema.plan("1MiB", max_requests=2, block_size=16)
    assert plan.max_positions == (64 + (16 if name == "whisper" else 64) if has_limits else None)
    assert plan.bytes_per_token == schema.bytes_per_token
    assert "each position of its input is a token" in str(plan)


def test_a_whisper_request_in_bytes() -> None:
    """1,500 positions of the encoder and 448 tokens: 94 and 28 blocks, of K and V in four layers of 384 bfloat16."""
    whisper = dict(model_type="whisper", decoder_layers=4, d_model=384, decoder_attention_heads=6,
                   max_target_positions=448, max_source_positions=1500)  # fmt: skip
    plan = Schema.from_hf_config(whisper).plan(num_blocks=10 * (94 + 28), max_requests=16)
    assert plan.longest_context == 1504 + 448 and plan.requests_at(1504 + 448) == 10
    assert plan.groups[0].row_nbytes == 16 * 4 * 2 * 384 * 2


def test_without_an_encoder_nothing_changed() -> None:
    decoder = dict(ENCODERS["bart"], model_type="bart", is_encoder_decoder=False, max_position_embeddings=64)
    schema = Schema.from_hf_config(decoder)
    assert schema.encoder_positions is None and schema.plan("1MiB", max_requests=1).max_positions == 64
    assert "encoder" not in str(schema.plan("1MiB", max_requests=1))
    both = Schema.from_hf_config({**decoder, "is_encoder_decoder": True})
    assert both.layers == schema.layers and both.encoder_positions == 64


def test_what_is_not_named_is_no_limit() -> None:
    nothing: dict[str, Any] = {
        "model_type": "florence2",
        "is_encoder_decoder": True,
        "text_config": {"model_type": "bart"},
    }
    schema = Schema.from_hf_config(nothing)
    assert (schema.max_positions, schema.encoder_positions) == (None, 0)
    assert schema.plan("1GiB", max_requests=1).max_positions is None
    with raises(SchemaError, field="max_source_positions", needed=0, available=1):
        Schema.from_hf_config(dict(ENCODERS["whisper"], model_type="whisper", max_source_positions=0))


def test_drafts_of_models_with_an_encoder_are_refused() -> None:
    model, llama = Schema.from_hf_config(model_of("bart").config), Schema.from_hf_config(LLAMA)
    for one, draft in ((model, llama), (llama, model), (model, model)):
        with raises(SchemaError, needed=draft.name, available=one.name):
            one.drafted_by(draft)
