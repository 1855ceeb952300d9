"""Cached beginnings are really skipped, for every layer kind, and the tokens stay those of full recomputation."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvpagoda import Retention

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import EXACT, NEW, greedy, model_of  # noqa: E402

from kvpagoda.hf import Generator  # noqa: E402
from models import VOCAB  # noqa: E402

CUTS = (1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48)
"""Where a text leaves the common beginning: around the tiny ratios (4, 8), windows (8) and blocks (16)."""


@functools.cache
def texts() -> list[list[int]]:
    source = torch.Generator().manual_seed(2)
    head = torch.randint(0, VOCAB, (48,), generator=source).tolist()
    return [head[:cut] + torch.randint(0, VOCAB, (cut % 5 + 1,), generator=source).tolist() for cut in CUTS] + [head]


@functools.cache
def recomputed(name: str) -> list[list[int]]:
    return [greedy(model_of(name), text, NEW) for text in texts()]


@pytest.mark.parametrize("name", EXACT)
def test_shared_beginnings_give_the_same_tokens_and_a_second_run_computes_little(name: str) -> None:
    generator = Generator(
        model_of(name),
        num_blocks=200,
        max_requests=4,
        prefill_chunk=7,
        retention=Retention(checkpoints=40),
        poison=True,
    )
    check = lambda stats: generator.cache.check()  # noqa: E731
    assert generator.generate(texts(), NEW, on_step=check) == recomputed(name)
    first = generator.stats()
    assert generator.generate(texts(), NEW, on_step=check) == recomputed(name)
    second = generator.stats()
    computed = second.computed_tokens - first.computed_tokens - len(texts()) * (NEW - 1)
    assert len(texts()) <= computed <= 16 * len(texts())  # at least one token, at most one block a request


@pytest.mark.parametrize("name", EXACT)
def test_tokens_stay_the_same_while_everything_is_evicted_all_the_time(name: str) -> None:
    generator = Generator(
        model_of(name), num_blocks=14, max_requests=3, prefill_chunk=5, retention=Retention(checkpoints=2), poison=True
    )
    for _ in range(2):
        found = generator.generate(texts(), NEW, on_step=lambda stats: generator.cache.check())
        assert found == recomputed(name)


@pytest.mark.parametrize("name", ["llama", "deepseek_v4", "qwen3_next", "gemma3_text"])
def test_a_conversation_goes_on_where_it_ended(name: str) -> None:
    """Each turn repeats the whole text before: only what follows the last boundary is computed."""
    model: Any = model_of(name)
    generator = Generator(model, num_blocks=100, max_requests=2, prefill_chunk=16, poison=True)
    text = texts()[5]
    for turn in range(4):
        before = generator.stats().computed_tokens
        answer = generator.generate([text], NEW)[0]
        assert answer == greedy(model, text, NEW)
        computed = generator.stats().computed_tokens - before - (NEW - 1)
        assert turn == 0 or computed <= 16 + NEW
        text = text + answer + [turn + 1]


def test_namespaces_share_nothing() -> None:
    generator = Generator(model_of("llama"), num_blocks=60)
    cache, tokens = generator.cache, texts()[-1]
    with cache.open(tokens, "a") as sequence:
        sequence.commit(tokens)
    assert cache.open(tokens, "a").cached_tokens == 47
    for other in ("b", b"a", None, ""):
        assert cache.open(tokens, other).cached_tokens == 0
