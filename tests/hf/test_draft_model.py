"""A draft model proposes tokens over the cache of the model itself, and what comes out are the tokens of plain decoding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import greedy, model_of  # noqa: E402

from kvpagoda import Limits  # noqa: E402
from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.hf import Generator, Sampling  # noqa: E402
from kvpagoda.scheduling import LeastComputed  # noqa: E402
from models import VOCAB, tiny_model  # noqa: E402
from raises import raises  # noqa: E402

NEW = 14


@functools.cache
def draft_of(name: str, seed: int = 1) -> Any:
    """Return a tiny model of another seed: its proposals are mostly wrong; with seed 0 they are those of the model."""
    return tiny_model(name, seed=seed)


@functools.cache
def prompts() -> list[list[int]]:
    source = torch.Generator().manual_seed(3)
    piece = torch.randint(0, VOCAB, (12,), generator=source).tolist()
    return [[5], [7, 7, 7], piece + piece[:5], piece * 4, list(range(20)), piece * 3 + [1, 2, 3]]


@functools.cache
def expected(name: str) -> list[list[int]]:
    return [greedy(model_of(name), prompt, NEW) for prompt in prompts()]


PAIRS = [
    ("qwen3_next", "llama"),
    ("llama", "llama"), ("llama", "mistral"), ("mistral", "llama"), ("gemma3_text", "llama"), ("gpt_oss", "mistral"),
    ("deepseek_v3", "llama"), ("qwen3", "deepseek_v3"), ("mistral", "gemma3_text"), ("deepseek_v4", "llama"),
    ("llama", "gpt2"),
]  # fmt: skip
"""Target and draft: with one growth law, with a window beside full attention, and the other way round."""


@pytest.mark.parametrize(("name", "draft"), PAIRS, ids=map("-".join, PAIRS))
def test_tokens_stay_those_of_plain_decoding_cold_and_warm(name: str, draft: str) -> None:
    generator = Generator(
        model_of(name), num_blocks=60, max_requests=4, prefill_chunk=7, draft=draft_of(draft), lookup=3, poison=True,
        limits=Limits(max_context=300),
    )  # fmt: skip
    for _ in range(2):
        assert generator.generate(prompts(), NEW) == expected(name)
        generator.cache.check()
    assert generator.num_proposed > 20
    assert generator.stats().cached_tokens > 30


def test_a_draft_that_is_the_model_itself_is_always_right() -> None:
    """So what the draft reads after a hit is what it read when it was cold: one wrong row would be a rejected token."""
    for name in ("llama", "mistral", "gemma3_text", "deepseek_v3"):
        generator = Generator(
            model_of(name), num_blocks=60, max_requests=4, prefill_chunk=7, draft=draft_of(name, 0), lookup=3
        )
        for _ in range(2):
            assert generator.generate(prompts(), NEW) == expected(name)
        assert generator.num_accepted == generator.num_proposed > 100, name


@pytest.mark.parametrize("name", ["mistral", "llama"])
def test_what_an_optional_group_lacks_is_computed_again(name: str) -> None:
    """The draft has a group of its own. All of its cached blocks are evicted, none of the model's: the hit is the same,
    and the draft, which is the model with another window, proposes the same tokens as before."""
    draft = tiny_model("mistral", seed=0, sliding_window=None if name == "mistral" else 8)
    generator = Generator(model_of(name), num_blocks=60, draft=draft, lookup=3)
    (window,) = generator.cache._core.prefix.optional
    text, proposals = prompts()[5] * 2, []
    for round_number in range(3):
        if round_number == 2:
            core = generator.cache._core
            assert window.num_cold
            core.capacity.forget(window.evict, window.num_cold)
            assert not window.num_cached
        hits, before = generator.stats().cached_tokens, generator.num_accepted
        (answer,) = generator.generate([text], NEW)
        assert answer == greedy(model_of(name), text, NEW)
        proposals.append((generator.stats().cached_tokens - hits, generator.num_accepted - before))
        generator.cache.check()
    assert proposals[1] == proposals[2] and proposals[1][0] > 60


def test_sampled_tokens_and_several_answers_are_those_without_a_draft() -> None:
    model, sampling = model_of("llama"), Sampling(temperature=1.5, top_p=0.9, seed=5)
    plain = Generator(model, num_blocks=60).generate(prompts(), NEW, n=2, sampling=sampling)
    for seed in (0, 1):
        drafted = Generator(model, num_blocks=60, draft=draft_of("llama", seed))
        assert drafted.generate(prompts(), NEW, n=2, sampling=sampling) == plain
        assert drafted.num_proposed > 100


PRESSED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "mistral", {"num_blocks": 8}),
    ("mistral", "llama", {"num_blocks": 8}),
    ("llama", "llama", {"budget": 8 * 16 * 2400}),
]


@pytest.mark.parametrize(("name", "draft", "size"), PRESSED, ids=["draft-window", "draft-full", "same-blocks"])
def test_under_pressure(name: str, draft: str, size: dict[str, Any]) -> None:
    texts = [[*prompts()[3][:13], i] for i in range(4)]
    plain = Generator(model_of(name), num_blocks=60).generate(texts, 40)
    generator = Generator(
        model_of(name), max_requests=4, prefill_chunk=16, draft=draft_of(draft), preemption=LeastComputed(), **size
    )
    assert generator.generate(texts, 40) == plain
    assert generator.num_preempted
    generator.cache.check()


def test_a_step_that_fails_leaves_the_rows_of_the_draft_right(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(model_of("llama"), num_blocks=60, draft=draft_of("llama", 0), lookup=3)
    request = generator.submit(prompts()[3], NEW)
    for _ in range(3):
        generator.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no"):
        patch.setattr(generator._runner, "step", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
        generator.step()
    while not request.done:
        generator.step()
    assert request.output == expected("llama")[3]
    assert generator.num_accepted == generator.num_proposed


@pytest.mark.parametrize(
    ("name", "draft", "figures"),
    [
        ("inkling_text", "llama", {"needed": "inkling_text"}),
        ("llama", "mamba", {"needed": "mamba"}),
        ("llama", "deepseek_v4", {"needed": "deepseek_v4"}),
    ],
)
def test_drafts_that_cannot_go_back_are_refused(name: str, draft: str, figures: dict[str, Any]) -> None:
    with raises(SchemaError, **figures):
        Generator(model_of(name), num_blocks=60, draft=draft_of(draft))


def test_a_draft_for_shorter_texts_or_of_another_vocabulary_is_refused() -> None:
    with raises(SchemaError, needed=960, available=512):
        Generator(model_of("llama"), num_blocks=60, draft=tiny_model("llama", max_position_embeddings=512))
    with raises(SchemaError, needed=64, available=128):
        Generator(model_of("llama"), num_blocks=60, draft=tiny_model("llama", vocab_size=64))


def test_one_cache_has_the_rows_of_both() -> None:
    model, draft = model_of("llama"), tiny_model("llama", num_hidden_layers=1, num_key_value_heads=1)
    generator = Generator(model, num_blocks=60, draft=draft)
    schema = generator.cache.schema
    assert [layer.index for layer in schema.draft_layers] == [len(model.model.layers)]
    assert len(schema.groups) == 1
    generator.generate([prompts()[3]], 2)
    before = np.asarray(generator.cache.layer(4)["k"])
    assert np.count_nonzero(before.any(axis=(1, 2, 3))) >= 3  # blocks of the draft's layer
