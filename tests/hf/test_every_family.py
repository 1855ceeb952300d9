"""Every model type that has a schema: its tokens equal full recomputation, or the generator refuses it by name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import EXACT, greedy, told_again  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from models import FAMILIES, FULL, SLIDING, TINY, randomise, tiny_config, tiny_model  # noqa: E402
from more_models import MORE, MULTIMODAL  # noqa: E402
from raises import raises  # noqa: E402

TEXT_PARTS = """emu3_text_model glm4v_moe_text glm4v_text hy_v4_vl_text mllama_text_model qwen2_5_vl_text qwen2_vl_text
qwen3_vl_moe_text qwen3_vl_text""".split()
"""Parts of multimodal models, which transformers does not build as language models by themselves."""
REST = sorted({*TINY, *MORE} - {*EXACT, *TEXT_PARTS})


MIXED: dict[str, Any] = dict(sliding_window=5, layer_types=[FULL, SLIDING, SLIDING, FULL])
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, MIXED) for name in "doge ministral3 mistral mixtral phi3 phimoe qwen3_moe starcoder2".split()),
    ("ministral", MIXED),
    ("llama4_text", dict(floor_scale=4)),
    ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2)),
    ("modernbert-decoder", dict(local_attention=11)),
    ("modernbert-decoder", dict(local_attention=8, sliding_window=7)),
    ("jamba", dict(hidden_size=52, num_attention_heads=5, num_key_value_heads=5)),
    ("qwen2", dict(hidden_size=62, num_attention_heads=5, num_key_value_heads=5)),
    ("phi3", dict(hidden_size=50, sliding_window=6)),
]
"""Models that mask every layer alike whatever ``layer_types`` say, and one that reads them; windows spelled in two ways;
heads that do not divide the hidden size, of which the models take the whole part; queries that grow with their position;
heads that the model repeats."""


def tiny(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setitem(FAMILIES, name, FAMILIES.get(name, MORE.get(name, {})))
    return tiny_model(name, **changes)


CASES = [*((name, {}) for name in REST), *VARIANTS]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_tokens_equal_full_recomputation(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = tiny(name, monkeypatch, **changes), torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 100, (n,), generator=source).tolist() for n in (1, 3, 9, 17, 20, 33)]
    generator = Generator(model, num_blocks=60, max_requests=4, prefill_chunk=7, poison=True)
    monkeypatch.setattr(generator, "_ends", frozenset())
    found = generator.generate(prompts, 6)
    assert [len(new) for new in found] == [6] * len(prompts)
    assert found == [told_again(model, prompt, new) for prompt, new in zip(prompts, found)]


def multimodal(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A multimodal model, also where the config around that of the text names no end. ``changes``: of the text part."""
    text, others = MULTIMODAL[name]
    monkeypatch.setitem(FAMILIES, text, FAMILIES.get(text, MORE.get(text, {})))
    config = CONFIG_MAPPING[name](text_config={**tiny_config(text, **changes).to_dict(), "pad_token_id": 0}, **others)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    for field in ("bos_token_id", "eos_token_id", "encoder_no_repeat_ngram_size", "forced_eos_token_id"):
        setattr(model.generation_config, field, None)
    return model


@pytest.mark.parametrize("name", MULTIMODAL)
def test_texts_of_multimodal_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = multimodal(name, monkeypatch)
    prompts = [[3, 4, 5, 6, 7, 8, 9] * 3, [7], [3, 4, 5, 6, 7, 8, 9] * 4]
    generator = Generator(model, num_blocks=60, max_requests=2, prefill_chunk=7, poison=True)
    monkeypatch.setattr(generator, "_ends", frozenset())
    found = generator.generate(prompts, 5)
    assert [len(new) for new in found] == [5] * len(prompts)
    assert found == [told_again(model, prompt, new) for prompt, new in zip(prompts, found)]


def test_padding_tokens_in_a_text_have_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoBERTa counts positions without them, wherever they stand."""
    model = tiny("roberta", monkeypatch, pad_token_id=3)
    prompts = [[3, 5, 6, 3, 3, 7, 8], [5] * 15 + [3, 3, 9], [5] * 15 + [3, 3, 9, 3, 4]]
    generator = Generator(model, num_blocks=60, max_requests=2, prefill_chunk=4, poison=True)
    for _ in range(2):
        assert generator.generate(prompts, 5) == [greedy(model, prompt, 5) for prompt in prompts]


@pytest.mark.parametrize("changes", [dict(alibi=True), dict(alibi=True, multi_query=False), dict(multi_query=False)])
def test_falcon_with_biases_for_distance(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("falcon", monkeypatch, **changes)
    prompts = [[5, 6, 7], [8] * 18 + [9, 10], [11]]
    generator = Generator(model, num_blocks=60, max_requests=3, prefill_chunk=5, poison=True)
    assert generator.generate(prompts, 5) == [greedy(model, prompt, 5) for prompt in prompts]


def test_a_model_that_takes_no_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", monkeypatch)
    monkeypatch.setattr(model, "forward", lambda input_ids: None)
    with raises(SchemaError, needed=("cache", "past_key_values", "cache_params")):
        Generator(model, num_blocks=4)
