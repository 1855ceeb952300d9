"""Real models whose layer kinds share one memory: blocks move and change kind all the time, the tokens stay the same."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvpagoda import Limits, Retention

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import EXACT, NEW, greedy, model_of  # noqa: E402
from test_reuse import recomputed, texts  # noqa: E402

from kvpagoda.core.kv_cache import KVCache  # noqa: E402
from kvpagoda.errors import NeverFits  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.compressed import CompressedRunner  # noqa: E402
from kvpagoda.hf.runner import ModelRunner  # noqa: E402
from kvpagoda.schema import Schema  # noqa: E402

SEVERAL_KINDS = [name for name in EXACT if len(Schema.from_hf_config(model_of(name).config).plan("1MiB", 1).groups) > 1]


def tight(schema: Schema) -> int:
    """Bytes for two of the test's requests, and hardly more."""
    for nbytes in (2**12 * step for step in count(1)):
        with suppress(NeverFits):
            if schema.plan(nbytes, 3, step_tokens=5).requests_at(60) >= 2:
                return nbytes
    raise AssertionError


def test_the_families_with_several_kinds_are_these() -> None:
    assert {"gemma3_text", "gpt_oss", "qwen3_next", "kimi_linear", "bamba", "deepseek_v4"} <= {*SEVERAL_KINDS}


@pytest.mark.parametrize("name", SEVERAL_KINDS)
def test_tokens_stay_the_same_while_memory_changes_kind(name: str) -> None:
    model: Any = model_of(name)
    schema = Schema.from_hf_config(model.config, dtype="float32")
    generator = Generator(
        model, tight(schema), max_requests=3, prefill_chunk=5, retention=Retention(checkpoint_every=1), poison=True
    )
    assert generator.cache.plan.num_sectors
    for _ in range(3):
        found = generator.generate(texts()[::2], NEW, on_step=lambda stats: generator.cache.check())
        assert found == recomputed(name)[::2]
    stats = generator.stats()
    assert stats.evicted_blocks + stats.evicted_checkpoints >= 10 and stats.cached_tokens > 20


@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("qwen3_next", "kimi_linear", "bamba")])
def test_tokens_taken_back_leave_no_trace(name: str) -> None:
    """After every piece of the text a few wrong tokens are computed, committed and taken back."""
    model: Any = model_of(name)
    schema = Schema.from_hf_config(model.config, dtype="float32", verify_width=3)
    cache = KVCache(schema, "4MiB", max_requests=2, device="cpu", poison=True, limits=Limits(step_tokens=8))
    runner = (CompressedRunner if name == "deepseek_v4" else ModelRunner)(model, cache)
    text, wrong = np.array(texts()[-1], np.int32), np.array([7, 3, 5], np.int32)

    def go(tokens: np.ndarray) -> int:
        sequence.extend(len(tokens))
        chosen = int(runner.step([(sequence, tokens)])[-1].argmax())
        sequence.commit(tokens)
        return chosen

    sequence, output = cache.open(text, capacity=0), []
    for start in range(0, len(text), 5):
        chosen = go(text[start : start + 5])
    sequence.close()
    sequence = cache.open(text[:1], capacity=0)
    for token in text:
        chosen = go(np.array([token], np.int32))
        number = sequence.length % 4
        if number and sequence.length > 1:
            go(wrong[:number])
            sequence.rewind(number)
            cache.check()
    while len(output) < NEW:
        output.append(chosen)
        chosen = go(np.array([chosen], np.int32))
    assert output == greedy(model, text.tolist(), NEW)
