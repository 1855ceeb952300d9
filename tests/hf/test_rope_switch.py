"""Models whose position encodings switch with the length of the text: tokens equal full recomputation on both sides of the
switch, while texts cross it, and beside texts of the other side."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import greedy  # noqa: E402

from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.rope_switch import RopeSwitch, media_past  # noqa: E402
from kvpagoda.scheduling import PreemptionMode, Youngest  # noqa: E402
from models import FAMILIES, tiny_model  # noqa: E402
from more_models import MORE  # noqa: E402

SWITCH, NEW = 24, 8
LENGTHS = (1, 15, 16, 17, 18, 20, 23, 24, 25, 40)
"""Texts that stay short, cross the switch while they grow, end on it, or begin past it."""


def longrope(pairs: int, **more: float) -> dict[str, Any]:
    """LongRoPE parameters for ``pairs`` rotated pairs of channels: two sets of factors that differ much."""
    return dict(
        original_max_position_embeddings=SWITCH,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": SWITCH, **more,
            "short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [3.0 + 2.0 * i for i in range(pairs)],
        },
    )  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "phi3": dict(longrope(6), sliding_window=11),
    "phimoe": dict(longrope(6, short_mscale=1.1, long_mscale=1.6), head_dim=12),
    "llama": longrope(6, factor=4.0),
    "minicpm3": longrope(4, factor=4.0),
}


@functools.cache
def model_of(name: str) -> Any:
    with patch.dict(FAMILIES, {name: FAMILIES.get(name, MORE.get(name, {}))}):
        return tiny_model(name, **MODELS[name])


@functools.cache
def prompts() -> list[list[int]]:
    """Some are beginnings of others, so that a short text would find rows of a long one."""
    source = torch.Generator().manual_seed(3)
    text = torch.randint(2, 100, (max(LENGTHS),), generator=source).tolist()
    other = torch.randint(2, 100, (max(LENGTHS),), generator=source).tolist()
    return [text[:n] for n in LENGTHS] + [other[:n] for n in LENGTHS]


@functools.cache
def recomputed(name: str) -> list[list[int]]:
    return [greedy(model_of(name), prompt, NEW) for prompt in prompts()]


@pytest.mark.parametrize("lookup", [0, 3])
@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_full_recomputation_cold_and_warm(name: str, chunk: int, lookup: int) -> None:
    generator = Generator(
        model_of(name), num_blocks=60, max_requests=4, prefill_chunk=chunk, lookup=lookup, poison=True
    )
    for _ in range(2):
        found = generator.generate(prompts(), NEW, on_step=lambda stats: generator.cache.check())
        assert found == recomputed(name)


def test_angles_may_be_complex_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a cosine and a sine."""
    monkeypatch.setitem(MODELS, "llama4_text", longrope(8, factor=4.0))
    model, texts = model_of("llama4_text"), prompts()[5:10]
    generator = Generator(model, num_blocks=60, max_requests=4, prefill_chunk=5, poison=True)
    assert generator.generate(texts, NEW) == [greedy(model, text, NEW) for text in texts]


@pytest.mark.parametrize("mode", PreemptionMode)
def test_tokens_stay_the_same_under_pressure(mode: PreemptionMode) -> None:
    generator = Generator(
        model_of("phi3"), num_blocks=7, max_requests=4, prefill_chunk=7, preemption=Youngest(),
        preemption_mode=lambda costs: mode, poison=True,
    )  # fmt: skip
    assert generator.generate(prompts(), NEW) == recomputed("phi3")
    assert generator.num_preempted


def test_forks_cross_the_switch_too() -> None:
    generator = Generator(model_of("phi3"), num_blocks=40, max_requests=6, poison=True)
    for at in (6, 7):  # the prompt ends one token before the switch, and on it
        found = generator.generate([prompts()[at]], NEW, n=3)
        assert found == [recomputed("phi3")[at]] * 3


def test_invalidating_a_namespace_reaches_both_sides() -> None:
    generator = Generator(model_of("phi3"), num_blocks=40)
    prompt = prompts()[-1]
    generator.generate([prompt], 1, namespace="a")
    computed = generator.stats().computed_tokens
    generator.cache.invalidate("a")
    generator.generate([prompt], 1, namespace="a")
    assert generator.stats().computed_tokens - computed == len(prompt)


def test_sides_of_a_switch() -> None:
    switch = RopeSwitch(model_of("phi3"))
    assert switch.lengths == (SWITCH,)
    assert [switch.passed(n) for n in (0, SWITCH, SWITCH + 1)] == [0, 0, SWITCH]
    assert [switch.room(n) for n in (20, SWITCH, SWITCH + 1)] == [4, 0, None]
    assert not media_past(0, 7)
    assert len({media_past(at, token)[0] for at in (1, 2) for token in (1, 2)}) == 4
    assert RopeSwitch(tiny_model("llama")).lengths == ()
