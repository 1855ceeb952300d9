"""Models over a cache that sleeps between steps: the tokens stay the same, and what is kept is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import NEW, model_of, prompts, recomputed  # noqa: E402

from kvpagoda import Asleep, Identity, Retention  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.paged_cache import PagedCache  # noqa: E402
from kvpagoda.tiers import disk_tier  # noqa: E402
from models import tiny_model  # noqa: E402


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v4"])
def test_tokens_stay_the_same_while_the_cache_sleeps_between_steps(name: str) -> None:
    generator = Generator(model_of(name), num_blocks=60, max_requests=5, prefill_chunk=5, poison=True)
    num_steps, ran = 0, 0

    def on_step(stats: Any) -> None:
        nonlocal num_steps, ran
        num_steps += 1
        if num_steps % 3 == 0:
            slept = generator.cache.sleep("tree" if num_steps % 2 else "nothing")
            assert slept.given_back
            ran += slept.running
            with pytest.raises(Asleep):
                generator.cache.open([1])
            generator.cache.check()
            generator.cache.wake()
            generator.cache.check()

    assert generator.generate(prompts(), NEW, on_step) == recomputed(name)
    assert ran > 10 and generator.stats().sleeps == num_steps // 3
    before = [found.resumable for found in generator.cache.lookup(prompts())]
    assert any(before) or name != "llama"
    generator.cache.sleep("tree")
    generator.cache.wake()
    assert [found.resumable for found in generator.cache.lookup(prompts())] == before
    assert generator.generate(prompts()[-2:], NEW) == recomputed(name)[-2:]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_tokens_stay_the_same_with_the_tree_on_disk(name: str, tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")
    generator = Generator(
        model_of(name), num_blocks=60, max_requests=5, prefill_chunk=5, poison=True, retention=Retention(40, 1),
        tiers=[disk_tier(tmp_path, "32MiB", admit_all=True, staging="2MiB", timeout=10.0)], identity=Identity("w"),
    )  # fmt: skip
    assert generator.generate(prompts(), NEW) == recomputed(name)
    assert generator.cache.sleep("tree").kept > 0
    generator.cache.wake()
    generator.cache.core.tiers.took(1.0)  # computing takes longer than loading
    assert generator.generate(prompts(), NEW) == recomputed(name)
    assert generator.stats().loaded_tokens > 16
    generator.cache.close()


def test_a_trainer_changes_the_weights_while_it_sleeps() -> None:
    model, later = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    cache = PagedCache(model, num_blocks=60, max_requests=4)
    ids = torch.tensor([list(range(3, 40))])
    told = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    first = model.generate(ids, cache=cache, **told)
    cache.reset()
    cache.cache.sleep("tree")
    model.load_state_dict(later.state_dict())
    with pytest.raises(Asleep):
        model.generate(ids, cache=cache, **told)
    cache.cache.wake()
    second = model.generate(ids, cache=cache, **told)
    assert second.tolist() == later.generate(ids, **told).tolist() != first.tolist()
    assert cache.cache.epoch == 1
