"""The reasons for which model types are refused, looked up in what transformers does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from kvpagoda import Schema  # noqa: E402
from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.schema.families import refused  # noqa: E402
from models import randomise  # noqa: E402
from raises import raises  # noqa: E402

SMALL: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, pad_token_id=0)
IDS = torch.tensor([[3, 7, 11, 5, 9, 4, 12, 8]])


def arguments(name: str) -> set[str]:
    """Of the forward pass of a causal model."""
    return {*inspect.signature(getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]).forward).parameters}


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[name](**{**SMALL, **changes})).eval()
    randomise(model)
    return model


@torch.no_grad()
def changed_by_later_tokens(model: Any) -> float:
    """How much the first token's logits change with the last token."""
    other = IDS.clone()
    other[0, -1] = 20
    one, two = (model(input_ids=ids).logits[0, 0] for ids in (IDS, other))
    return float((one - two).abs().max() / one.std())


def test_types_whose_tokens_change_with_those_after_them() -> None:
    cpmant = dict(dim_head=8, num_hidden_layers=2, dim_ff=32, prompt_length=2, prompt_types=4, init_std=0.5)
    assert changed_by_later_tokens(model_of("cpmant", **cpmant)) > 0.01
    assert (
        changed_by_later_tokens(model_of("xlnet", d_model=32, d_inner=32, n_head=4, n_layer=2, initializer_range=0.3))
        > 0.01
    )
    xlm = model_of(
        "xlm",
        emb_dim=32,
        n_heads=4,
        n_layers=2,
        n_words=64,
        mask_token_id=5,
        pad_index=0,
        init_std=0.3,
        embed_init_std=0.3,
    )
    assert changed_by_later_tokens(xlm) > 0.01
    assert xlm.prepare_inputs_for_generation(IDS)["input_ids"][0].tolist() == [*IDS[0].tolist(), 5]


def test_prophetnets_logits_depend_on_how_many_tokens_stand_in_a_pass() -> None:
    """With the axes of one tensor in the other order, which its neighbours have, they do not."""
    model = model_of(
        "prophetnet", num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=32, num_encoder_layers=1,
        num_encoder_attention_heads=2, is_encoder_decoder=False, add_cross_attention=False, num_buckets=4,
        relative_max_distance=8, init_std=0.3, max_position_embeddings=32,
    )  # fmt: skip
    with torch.no_grad():
        whole, part = (model(input_ids=ids, use_cache=False).logits[0, 4] for ids in (IDS, IDS[:, :5]))
    assert (whole - part).abs().max() > 0.1 * whole.std()


def test_types_that_take_no_cache_or_keep_none() -> None:
    caches = {"past_key_values", "cache_params", "cache", "state", "mems", "past_buckets_states"}
    assert not arguments("openai-gpt") & caches
    for name in ("gemma4_assistant", "gemma4_unified_assistant"):
        assert "shared_kv_states" in arguments(name) and not arguments(name) & caches
    assert arguments("reformer") & caches == {"past_buckets_states"}
    assert arguments("xlnet") & caches == {"mems"}
    assert transformers.CONFIG_MAPPING["reformer"]().hash_seed is None


def test_types_of_several_codebooks() -> None:
    for name in ("musicgen", "musicgen_melody"):
        assert transformers.CONFIG_MAPPING[f"{name}_decoder"]().num_codebooks > 1


def test_blts_transformer_over_patches_takes_no_cache() -> None:
    source = inspect.getsource(transformers.BltModel.forward)
    call = source[source.index("self.global_transformer(") :]
    assert "past_key_values" not in call[: call.index(")")]


def test_every_reason_was_looked_up() -> None:
    assert {*refused()} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} == {
        "blt", "cpmant", "gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody", "openai-gpt",
        "prophetnet", "reformer", "xlm", "xlnet",
    }  # fmt: skip


@torch.no_grad()
def test_the_rows_of_a_prefix_language_model_change_with_later_tokens() -> None:
    """PaliGemma's prompt: its beginning has other keys before another question."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    text = dict(sizes, model_type="gemma2", vocab_size=64, num_key_value_heads=2, head_dim=8)
    vision = dict(sizes, model_type="siglip_vision_model", image_size=8, patch_size=4, projection_dim=32)
    kinds = dict(text_config=text, vision_config=vision, image_token_id=63, projection_dim=32, hidden_size=32)
    torch.manual_seed(0)
    model = transformers.PaliGemmaForConditionalGeneration(transformers.PaliGemmaConfig(**kinds)).eval()

    def keys(last: int) -> Any:
        ids = torch.tensor([[63] * 4 + [*range(1, 9), last]])
        types = torch.zeros_like(ids)
        out = model(input_ids=ids, pixel_values=torch.ones(1, 3, 8, 8), token_type_ids=types, use_cache=True)
        return out.past_key_values.layers[1].keys[0, :, :-1]

    assert float((keys(20) - keys(30)).abs().max()) > 0.001
    with raises(SchemaError, field="model_type", needed="paligemma"):
        Schema.from_hf_config(model.config)
