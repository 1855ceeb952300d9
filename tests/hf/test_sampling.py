"""Drawn tokens follow their probabilities, and n answers are those of n requests."""

from __future__ import annotations

from unittest.mock import ANY

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import EXACT, model_of, prompts  # noqa: E402

from kvpagoda.errors import BadInput  # noqa: E402
from kvpagoda.hf import Generator, Sampling  # noqa: E402
from raises import raises  # noqa: E402

NEW = 9
LOGITS = np.array([2.0, -1.0, 0.5, 2.0, -np.inf, 1.0], np.float32)


def frequencies(sampling: Sampling, n: int = 20_000) -> np.ndarray:
    stream = sampling.stream(0)
    drawn = [sampling.draw(LOGITS, stream) for _ in range(n)]
    return np.bincount(drawn, minlength=len(LOGITS)) / n


def probabilities(temperature: float) -> np.ndarray:
    return torch.from_numpy(LOGITS).div(temperature).softmax(0).double().numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    found = frequencies(Sampling(temperature, seed=0))
    assert np.abs(found - probabilities(temperature)).max() < 0.012 and found[4] == 0


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=1, seed=0), [0, 3]),  # equals stay together
        (Sampling(1.0, top_k=3, seed=0), [0, 3, 5]),
        (Sampling(1.0, top_k=99, seed=0), [0, 1, 2, 3, 5]),
        (Sampling(1.0, top_p=0.1, seed=0), [0]),
        (Sampling(1.0, top_p=0.7, seed=0), [0, 3]),
        (Sampling(1.0, top_p=0.76, seed=0), [0, 3, 5]),
        (Sampling(1.0, top_p=0.9, top_k=3, seed=0), [0, 3, 5]),
        (Sampling(1e-30, seed=0), [0, 3]),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest_in_proportion(sampling: Sampling, kept: list[int]) -> None:
    expected = np.zeros(len(LOGITS))
    expected[kept] = probabilities(1.0)[kept]
    if sampling.temperature < 1:
        expected[kept] = 1
    assert np.abs(frequencies(sampling) - expected / expected.sum()).max() < 0.012


def test_values_that_make_no_sense() -> None:
    for wrong in (dict(temperature=-1), dict(temperature=float("nan")), dict(top_p=0), dict(top_p=1.1)):
        with raises(BadInput, needed=(ANY, wrong.get("top_p", 1.0))):
            Sampling(**wrong)
    for wrong in (dict(top_k=0), dict(seed=-1)):
        with raises(BadInput, needed=(wrong.get("top_k"), wrong.get("seed"))):
            Sampling(**wrong)
    with raises(BadInput, field="n", needed=0, available=1):
        Generator(model_of("llama"), num_blocks=4).submit([1], n=0)


@pytest.mark.parametrize("name", EXACT)
def test_n_answers_are_those_of_n_requests_with_their_seeds(name: str) -> None:
    """Prompts around blocks and windows, answers that fork and interleave, fewer rows than answers."""
    texts, n = [prompts()[i] for i in (0, 6, 8, 10, 13)], 3
    generator = Generator(model_of(name), num_blocks=60, max_requests=4, prefill_chunk=7, poison=True)
    together = generator.generate(
        texts, NEW, lambda stats: generator.cache.check(), n=n, sampling=Sampling(1.0, seed=5)
    )
    apart = Generator(model_of(name), num_blocks=60, max_requests=2)
    for number in range(n):
        assert together[number::n] == apart.generate(texts, NEW, sampling=Sampling(1.0, seed=5 + number))
    assert len({tuple(tokens) for tokens in together}) == len(together)
    assert generator.stats().running == 0


def test_the_prompt_is_computed_once() -> None:
    prompt = prompts()[13]  # 41 tokens, the last 9 of them in no whole block
    generator = Generator(model_of("llama"), num_blocks=60, max_requests=8)
    found = generator.generate([prompt], NEW, n=5)
    assert found == [generator.generate([prompt], NEW)[0]] * 5
    for num_blocks, most_held in (
        (60, 2 + 5 * 2),
        (8, 3 + 5),
    ):  # equal answers come to share the third block where memory lacks
        generator = Generator(model_of("llama"), num_blocks=num_blocks, max_requests=8)
        generator.generate([prompt], NEW, n=5)
        assert generator.stats().computed_tokens == len(prompt) + 5 * (NEW - 1)
        assert generator.stats().groups[0].peak_held <= most_held and generator.stats().groups[0].held == 4


def test_answers_without_room_to_fork_start_later() -> None:
    prompt = prompts()[13]
    generator = Generator(model_of("qwen3_next"), num_blocks=8, max_requests=2, poison=True)
    found = generator.generate(
        [prompt], NEW, lambda stats: generator.cache.check(), n=4, sampling=Sampling(1.0, seed=1)
    )
    alone = Generator(model_of("qwen3_next"), num_blocks=60, max_requests=8)
    assert found == alone.generate([prompt], NEW, n=4, sampling=Sampling(1.0, seed=1))
    assert generator.stats().computed_tokens <= len(prompt) + 4 * (NEW - 1) + 2 * 16


def test_without_a_seed_answers_differ() -> None:
    generator = Generator(model_of("llama"), num_blocks=60)
    found = generator.generate([[1, 2, 3]], 20, n=3, sampling=Sampling(1.0))
    assert len({tuple(tokens) for tokens in found}) == 3


def test_an_answer_of_one_token_needs_no_fork() -> None:
    generator = Generator(model_of("llama"), num_blocks=4, max_requests=1)
    found = generator.generate([[1, 2, 3]], 1, n=20, sampling=Sampling(1.0, seed=0))
    assert [len(tokens) for tokens in found] == [1] * 20 and generator.stats().opened == 1
