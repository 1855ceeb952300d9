"""Random configs of every covered type: other numbers of heads, widths that heads do not divide, other windows. Tokens equal
full recomputation cold and warm, in chunks, beside longer requests, under pressure, after forks and refused proposals."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from huggingface_hub.errors import StrictDataclassError  # noqa: E402
from test_every_family import TEXT_PARTS  # noqa: E402
from test_generator import told_again  # noqa: E402

from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.scheduling import Youngest  # noqa: E402
from models import BASE, FAMILIES, TINY, tiny_model  # noqa: E402
from more_models import MORE  # noqa: E402

NEW = 4
NAMES = sorted({*TINY, *MORE} - {*TEXT_PARTS})
TRIES = 40
"""Drawn configs of which transformers must run one."""


def drawn(name: str, source: random.Random) -> dict[str, Any]:
    """Changes of a tiny config: heads, K/V heads, widths and windows, where it has them."""
    base = {**BASE, **FAMILIES.get(name, MORE.get(name, {}))}
    heads = source.choice([2, 3, 4, 5, 6])
    few = source.choice([n for n in range(1, heads + 1) if heads % n == 0])
    changes: dict[str, Any] = dict(num_attention_heads=heads, num_key_value_heads=few)
    if base["num_key_value_heads"] == base["num_attention_heads"]:
        changes["num_key_value_heads"] = heads
    if "decoder_layers" in base:
        changes |= dict(decoder_attention_heads=heads, decoder_layers=3, d_model=heads * source.choice([8, 12]))
    else:
        changes["hidden_size"] = heads * source.choice([8, 12, 16]) + source.choice([0, 0, 4])
    if "head_dim" in base:
        changes["head_dim"] = source.choice([8, 12, 20])
    if "sliding_window" in base:
        changes["sliding_window"] = source.choice([3, 5, 11, 17, 40])
    return changes


def model_of(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """A random model, and how its config differs from the tiny one: the first drawn config that transformers runs, as the
    tiny one is where it runs none."""
    monkeypatch.setitem(FAMILIES, name, FAMILIES.get(name, MORE.get(name, {})))
    source = random.Random(f"{name} {seed}")
    for changes in [*(drawn(name, source) for _ in range(TRIES)), {}]:
        try:
            model = tiny_model(name, seed=seed, **changes)
            with torch.no_grad():
                model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        except (ValueError, RuntimeError, TypeError, StrictDataclassError):
            continue
        return model, changes
    raise AssertionError(f"transformers runs no config of {name}")


def check(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, changes = model_of(name, seed, monkeypatch)
    source = torch.Generator().manual_seed(seed)
    text = torch.randint(2, 100, (37,), generator=source).tolist()
    prompts = [text[:1], text[:9], text, [7, *text[:16]], text[:20] + text[:8]]
    expected: list[list[int]] = []
    settings: dict[str, dict[str, Any]] = {
        "in chunks": dict(num_blocks=60, max_requests=3, prefill_chunk=7),
        "under pressure, with proposals": dict(
            num_blocks=7, max_requests=4, prefill_chunk=16, preemption=Youngest(), lookup=2
        ),
    }
    for how, arguments in settings.items():
        generator = Generator(model, poison=True, **arguments)
        monkeypatch.setattr(generator, "_ends", frozenset())
        for run in ("cold", "warm") if how == "in chunks" else ("cold",):
            found = generator.generate(prompts, NEW)
            expected = expected or [told_again(model, prompt, new) for prompt, new in zip(prompts, found)]
            assert found == expected and len(found[0]) == NEW, (how, run, changes)
        generator.cache.check()
    assert generator.generate(prompts[1:3], NEW, n=2) == [expected[1]] * 2 + [expected[2]] * 2, ("forked", changes)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_random_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_more_random_configs(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, seed, monkeypatch)
