"""Indexers with few heads give many tokens the same score, exactly zero. Which of them are taken then depends on how many
tokens there are to rank, so transformers' own cache and full recomputation differ; ours does what that cache does."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvpagoda.hf import Generator  # noqa: E402
from models import FAMILIES, tiny_model  # noqa: E402
from more_models import MORE  # noqa: E402

NEW = 7


@torch.no_grad()
def with_own_cache(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens with transformers' cache, which gets the prompt at once."""
    cache, tokens, found = DynamicCache(config=model.config), prompt, []
    for _ in range(NEW):
        output = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        tokens = [int(output.logits[0, -1].argmax())]
        found += tokens
    return found


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"])
def test_tokens_equal_those_of_transformers_cache(name: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside longer requests."""
    check(name, monkeypatch, index_n_heads=heads, index_topk=5)


@pytest.mark.parametrize("seed", [5, 6])
def test_repeated_tokens_of_doge_are_ranked_as_in_transformers_cache(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ranks values, which do not depend on positions, so repeated tokens are equal in its first layer."""
    check("doge", monkeypatch, seed=seed, keep_window_size=8, sliding_window=None)


def check(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setitem(FAMILIES, name, FAMILIES.get(name, MORE.get(name, {})))
    model, source = tiny_model(name, **changes), torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 100, (n,), generator=source).tolist() for n in (3, 9, 17, 30, 33)]
    generator = Generator(model, num_blocks=60, max_requests=4, prefill_chunk=64, poison=True)
    monkeypatch.setattr(generator, "_ends", frozenset())
    prompts.append(torch.randint(2, 100, (14,), generator=source).tolist() * 2)
    assert generator.generate(prompts, NEW) == [with_own_cache(model, prompt) for prompt in prompts]
