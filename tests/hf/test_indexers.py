"""Indexers with few heads give many tokens the same score, exactly zero. Which of them are taken then depends on how many
tokens there are to rank, so transformers' own cache and full recomputation differ; ours does what that cache does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvpagoda.core.kv_cache import KVCache  # noqa: E402
from kvpagoda.formats import decode, encode  # noqa: E402
from kvpagoda.formats.encoding import Encoding  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.cache_name import cache_name_of  # noqa: E402
from kvpagoda.hf.runner import ModelRunner  # noqa: E402
from kvpagoda.schema import Schema  # noqa: E402
from models import FAMILIES, tiny_model  # noqa: E402
from more_models import MORE  # noqa: E402

NEW = 7


@torch.no_grad()
def with_own_cache(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens with transformers' cache, which gets the prompt at once."""
    cache, tokens, found = DynamicCache(config=model.config), prompt, []
    given = {cache_name_of(model): cache}
    for _ in range(NEW):
        output = model(input_ids=torch.tensor([tokens]), use_cache=True, **given)
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


class Rounded(DynamicCache):  # type: ignore[misc]
    """transformers' own cache, into which latents and indexer keys go as they read back from fp8 codes."""

    def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key), value, *args, **kwargs)

    def update_indexer(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update_indexer(rounded(key), *args, **kwargs)


def rounded(rows: Any) -> Any:
    encoding = Encoding("fp8", group=128)
    return decode(encoding, encode(encoding, rows), rows.dtype)


@torch.no_grad()
def test_fp8_logits_are_those_of_transformers_cache_with_rounded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fp8 latents and keys cost is their rounding, and nothing else: with the model's own attention, which adds in
    the same order, the logits are equal bit for bit."""
    model = tiny_model("deepseek_v32", kv_lora_rank=128, index_head_dim=128)
    ids, ours, theirs = np.arange(60, dtype=np.int32) * 7 % 97 + 2, [], []
    cache = KVCache(Schema.from_hf_config(model.config, kv_format="fp8", dtype="float32"), num_blocks=9)
    runner, own = ModelRunner(model, cache), Rounded(config=model.config)
    monkeypatch.setattr(runner, "_attention", None)
    given = {cache_name_of(model): own}
    with cache.open(ids, lookup=False) as sequence:
        for step in np.split(ids, [40, 41, 57]):
            ours.append(runner.step([(sequence, step)], [len(step)]))
            sequence.commit(step)
            taken = torch.from_numpy(step).long()[None]
            theirs.append(model(input_ids=taken, use_cache=True, **given).logits[0])
    assert torch.equal(torch.cat(ours), torch.cat(theirs))
    raw = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0]
    assert (torch.cat(ours) - raw).square().mean().sqrt() > 0.1, "rows were rounded"
