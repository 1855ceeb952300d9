"""Models over a cache with tiers: the same tokens with every tier on, off or failing, and after a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvpagoda import Identity, Retention

pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import NEW, model_of
from test_reuse import recomputed, texts

from kvpagoda.hf import Generator, weights_digest
from kvpagoda.tiers import disk_tier, host_tier
from test_below import Flaky

SMALL = {"num_blocks": 14, "max_requests": 3, "prefill_chunk": 5, "retention": Retention(2), "poison": True}


def generate_twice(name: str, generator: Generator) -> int:
    """Tokens are those of full recomputation, twice over, with nothing left on the device; returns how many were loaded."""
    for _ in range(2):
        generator.cache.flush()
        generator.cache.reset()
        assert generator.generate(texts(), NEW, on_step=lambda stats: generator.cache.check()) == recomputed(name)
    loaded = generator.stats().loaded_tokens
    generator.cache.close()
    return loaded


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "kimi_linear", "deepseek_v4"])
def test_tokens_stay_the_same_while_what_is_evicted_goes_to_host_memory_and_disk(name: str, tmp_path: Path) -> None:
    tiers = [host_tier("256KiB", staging="2MiB"), disk_tier(tmp_path, "32MiB", staging="2MiB", admit_all=True)]
    assert generate_twice(name, Generator(model_of(name), tiers=tiers, **SMALL)) > 0


@pytest.mark.parametrize("share", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "deepseek_v4"])
def test_tokens_stay_the_same_while_a_tier_fails(name: str, share: float) -> None:
    spec, made = Flaky.tier(share, write="evict", staging="2MiB")
    loaded = generate_twice(name, Generator(model_of(name), tiers=[spec], identity=Identity(weights="w"), **SMALL))
    assert made[0].num_faults > 0 and (share < 1 or loaded == 0)


RESTARTED = """
import sys
sys.path[:0] = [{tests!r}, {hf!r}]
from test_generator import NEW, model_of
from test_reuse import texts
from kvpagoda.hf import Generator
from kvpagoda.tiers import disk_tier
generator = Generator(model_of({name!r}), num_blocks=200, tiers=[disk_tier({folder!r}, "32MiB", staging="4MiB")])
print(generator.generate(texts(), NEW), generator.stats().loaded_tokens)
generator.cache.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next"])
def test_a_new_process_with_the_same_model_finds_what_the_last_one_left(name: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    program = RESTARTED.format(tests=str(here.parent), hf=str(here), name=name, folder=str(tmp_path))
    told = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
        tokens, _, loaded = done.stdout.strip().rpartition(" ")
        told.append((tokens, int(loaded)))
    assert told[0][0] == told[1][0] == str(recomputed(name))
    assert told[0][1] == 0 and told[1][1] >= 48


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "recurrent_gemma", "lfm2"])
def test_the_first_text_of_a_cache_may_come_from_a_tier(name: str, tmp_path: Path) -> None:
    """Whatever models say of convolution tails when they compute a text from its beginning: none was computed so."""
    prompt, told = list(range(60)), []
    for _ in range(2):
        tiers = [disk_tier(tmp_path, "32MiB", staging="4MiB")]
        generator = Generator(model_of(name), num_blocks=60, tiers=tiers, poison=True)
        told.append((generator.generate([prompt], NEW), generator.stats().loaded_tokens))
        generator.cache.flush()
        generator.cache.close()
    assert told[0] == (told[1][0], 0) and told[1][1] >= 48


def test_the_digest_is_that_of_weights_and_config() -> None:
    from models import tiny_model

    one, same, other = tiny_model("llama", seed=1), tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    assert weights_digest(one) == weights_digest(same) != weights_digest(other)
    same.config.rms_norm_eps *= 2
    assert weights_digest(one) != weights_digest(same)
