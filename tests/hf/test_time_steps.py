"""Mamba-2 layers clamp their time steps in passes of one token as in longer ones: with a cache, cold or warm, tokens are
those of full recomputation."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from unittest.mock import ANY  # noqa: E402

from test_generator import greedy, prompts  # noqa: E402
from test_paged_cache import generated  # noqa: E402

from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.hf import Generator, PagedCache  # noqa: E402
from kvpagoda.hf.cache_name import OUTPUT_NAME  # noqa: E402
from kvpagoda.hf.time_steps import UPDATE, TimeSteps  # noqa: E402
from models import tiny_model  # noqa: E402
from raises import raises  # noqa: E402

NEW = 8
LIMITS: list[tuple[str, dict[str, Any]]] = [
    ("nemotron_h", dict(time_step_min=0.5)),
    ("zamba2", dict(time_step_min=0.5)),
    ("mamba2", dict(time_step_limit=(0.5, 1.0))),
    ("bamba", dict(time_step_limit=(0.5, 1.0))),
    ("granitemoehybrid", dict(time_step_limit=(0.5, 1.0))),
    ("falcon_h1", dict(time_step_limit=(0.0, 0.7))),
]


def model_of(name: str, **changes: Any) -> Any:
    """Return a model with time steps on both sides of its limits."""
    model = tiny_model(name, **changes)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part, value in model.named_parameters():
            if part.endswith("dt_bias"):
                value.normal_(-1, 2, generator=source)
    return model


@pytest.mark.parametrize(("name", "changes"), LIMITS, ids=[name for name, _ in LIMITS])
def test_tokens_with_a_cache_are_those_of_full_recomputation(name: str, changes: dict[str, Any]) -> None:
    model, texts = model_of(name, **changes), prompts()[5:12:2]
    expected = [greedy(model, text, NEW) for text in texts]
    generator = Generator(model, num_blocks=60, max_requests=4, prefill_chunk=8, poison=True)
    for _ in range(2):
        assert generator.generate(texts, NEW) == expected
    assert generator.stats().cached_tokens > 0
    cache = PagedCache(model, num_blocks=80, prefill_chunk=1)
    assert generated(model, texts, cache, max_new_tokens=NEW) == expected


@pytest.mark.parametrize(
    ("name", "changes", "limit"),
    [
        ("nemotron_h", {}, (0.001, math.inf)),
        ("mamba2", {}, None),
        ("mamba2", dict(time_step_limit=[-1.0, math.inf]), None),
        ("bamba", dict(time_step_limit=[0.0, 0.5]), (0.0, 0.5)),
        ("jamba", {}, None),
        ("llama", {}, None),
    ],
)
def test_limits_that_change_something(name: str, changes: dict[str, Any], limit: tuple[float, float] | None) -> None:
    assert TimeSteps(tiny_model(name, **changes)).limit == limit


@torch.no_grad()
def test_outside_of_our_steps_transformers_computes_what_it_did() -> None:
    model = model_of("nemotron_h", time_step_min=0.5)
    file, ids = sys.modules[type(model).__module__], torch.tensor([prompts()[9]])

    def told() -> Any:
        past = model(input_ids=ids, use_cache=True)[OUTPUT_NAME]
        return model(input_ids=ids[:, :1], use_cache=True, **{OUTPUT_NAME: past}).logits

    steps, wrapped = TimeSteps(model), getattr(file, UPDATE)
    with_it = told()
    with steps.clamped():
        clamped = told()
    setattr(file, UPDATE, wrapped.__wrapped__)
    assert torch.equal(told(), with_it) and not torch.allclose(clamped, with_it)
    TimeSteps(model)
    again = getattr(file, UPDATE)
    TimeSteps(model)
    assert getattr(file, UPDATE) is again is not wrapped


def test_what_cannot_be_clamped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("nemotron_h", time_step_min=0.5)
    with monkeypatch.context() as patch:
        patch.delattr(sys.modules[type(model).__module__], UPDATE)
        with raises(SchemaError, field="time_step_limit", needed=ANY):
            Generator(model, num_blocks=60)
        model.model.layers[0].mixer.time_step_limit = model.model.layers[4].mixer.time_step_limit = (0, math.inf)
        Generator(model, num_blocks=60)
    model.model.layers[0].mixer.time_step_limit = (0, math.inf)
    model.model.layers[4].mixer.time_step_limit = (0.5, 1)
    with raises(SchemaError, field="time_step_limit", needed=[None, (0.5, 1.0)]):
        Generator(model, num_blocks=60)
