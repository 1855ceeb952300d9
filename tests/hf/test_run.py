"""A run measures what a prompt waits for its first token, and a restart is a process with nothing but the tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raises import raises

pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from kvpagoda.errors import NeverFits
from kvpagoda.hf.generator import Generator
from kvpagoda.hf.run import answer, answer_after_restart, embedded_on_one_thread
from kvpagoda.tiers import disk_tier

PROMPTS = [list(b"a block of the tree that is " * 12), list(b"the state of a request and " * 12)]
HOW: dict[str, Any] = {"max_new_tokens": 3, "n": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(folder: Path) -> dict[str, Any]:
    return {"budget": "8MiB", "max_requests": 2, "kv_format": "raw", "tiers": [disk_tier(folder, "8MiB")]}


def test_a_run_counts_tokens_and_waits_for_the_first_of_each(tmp_path: Path) -> None:
    """The rows of the prompts pass through a file: another process finds all whole blocks, and gives the same tokens."""
    generator, steps = Generator(embedded_on_one_thread("raw"), **arguments(tmp_path)), []
    cold = answer("cold", generator, PROMPTS, HOW, steps.append)
    assert cold.outputs == Generator(embedded_on_one_thread("raw"), "8MiB", max_requests=2).generate(PROMPTS, 3)
    assert (cold.computed_tokens, cold.cached_tokens, cold.loaded_tokens) == (sum(map(len, PROMPTS)), 0, 0)
    assert 0 < cold.first_token_seconds < cold.seconds and len(steps) >= 3
    warm = answer("warm", generator, PROMPTS, HOW)
    assert warm.outputs == cold.outputs and (warm.cached_tokens, warm.loaded_tokens) == (2 * 256, 0)
    generator.cache.close()
    restarted = answer_after_restart("restarted", arguments(tmp_path), PROMPTS, HOW)
    assert restarted.outputs == cold.outputs
    assert (restarted.cached_tokens, restarted.loaded_tokens) == (2 * 256, 2 * 256)
    assert restarted.to_dict()["computed_tokens"] == restarted.computed_tokens == cold.computed_tokens - 2 * 256


def test_the_mean_is_over_requests_not_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at once, the third waits for one of them: each counts once, at the step that gave its first token."""
    generator = Generator(embedded_on_one_thread("raw"), "8MiB", max_requests=2)
    clock = iter(range(1000))
    monkeypatch.setattr("kvpagoda.hf.run.perf_counter", lambda: next(clock))
    found = answer("cold", generator, [[1], [2], [3]], {"max_new_tokens": 2, "n": 1})
    # the clock ticks at the start, after each of four steps, and at the end; the third prompt starts in the third step
    assert (found.first_token_seconds, found.seconds) == ((1 + 1 + 3) / 3, 5)


def test_errors_of_the_other_process_arrive(tmp_path: Path) -> None:
    small = {**arguments(tmp_path), "budget": "1KiB"}
    with raises(NeverFits, needed=795_456, available=1024):
        answer_after_restart("restarted", small, PROMPTS, HOW)
