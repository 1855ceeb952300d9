"""With ``hit_grid`` as long as a prefill chunk a warm run computes in the same pieces as a cold one: logits to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from test_generator import model_of  # noqa: E402

from kvpagoda import Limits  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from models import FAMILIES  # noqa: E402

CHUNK = 16


def first_logits(generator: Generator, prompt: list[int]) -> Any:
    """What the last token of ``prompt`` gives, when it runs alone."""
    seen: list[Any] = []
    take = generator._take

    def spy(piece: Any, logits: Any, best: list[int]) -> None:
        seen.append(logits.clone())
        take(piece, logits, best)

    generator._take = spy  # type: ignore[method-assign]
    try:
        generator.generate([prompt], max_new_tokens=2)
    finally:
        generator._take = take  # type: ignore[method-assign]
    return seen[-2][-1]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_cold_equals_warm_to_the_bit(name: str) -> None:
    model, random = model_of(name), np.random.default_rng(5)
    prompt = random.integers(3, 90, 75).tolist()
    generator = Generator(model, "8MiB", prefill_chunk=CHUNK, limits=Limits(hit_grid=CHUNK), block_size=CHUNK)
    cold = first_logits(generator, prompt)
    before = generator.stats().cached_tokens
    warm = first_logits(generator, prompt)
    cached = generator.stats().cached_tokens - before
    assert cached >= CHUNK and cached % CHUNK == 0
    assert torch.equal(cold.view(torch.int32), warm.view(torch.int32))
