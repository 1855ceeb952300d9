"""Checkpoints in fewer bytes under transformers' models: warm equals cold to the bit where the cold run rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.hf.test_hit_grid import CHUNK, first_logits  # noqa: E402

from kvpagoda import Limits, Retention  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from models import tiny_model  # noqa: E402

PROMPT = np.random.default_rng(5).integers(3, 90, 75).tolist()


def run(name: str, format: str | None, **options: Any) -> tuple[Any, Any]:
    """Return the logits after a prompt, cold, and started from its last checkpoint."""
    generator = Generator(
        tiny_model(name), "8MiB", prefill_chunk=CHUNK, limits=Limits(hit_grid=CHUNK), block_size=CHUNK,
        retention=Retention(checkpoint_format=format, **options),
    )  # fmt: skip
    cold = first_logits(generator, PROMPT)
    before = generator.stats().cached_tokens
    warm = first_logits(generator, PROMPT)
    assert generator.stats().cached_tokens - before == 64
    generator.cache.check()
    return cold, warm


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "mamba2"])
def test_warm_equals_cold_to_the_bit_where_the_cold_run_rounds(name: str, format: str) -> None:
    exact, again = run(name, None)
    assert torch.equal(exact, again)
    cold, warm = run(name, format)
    assert torch.equal(cold, exact) and not torch.equal(warm, exact)
    assert (warm - exact).abs().max() < 0.25 * exact.std()
    cold, warm = run(name, format, rounds_states=True)
    assert torch.equal(cold, warm) and not torch.equal(cold, exact)
