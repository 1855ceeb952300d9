"""Heads in 8-bit formats under real models: warm runs compute what cold ones computed, to the bit; records of another format
or scale are not found; suspended and forked requests go on as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from test_hit_grid import CHUNK, first_logits  # noqa: E402

from kvpagoda import Identity, KVCache, Limits, Schema  # noqa: E402
from kvpagoda.hf import Generator, PagedCache  # noqa: E402
from kvpagoda.hf.runner import ModelRunner  # noqa: E402
from kvpagoda.scheduling import PreemptionMode, Youngest  # noqa: E402
from kvpagoda.tiers import disk_tier, host_tier  # noqa: E402
from models import tiny_model  # noqa: E402

MODELS = ("llama", "gemma3_text", "gpt_oss", "qwen3_next")
FORMATS: dict[str, Any] = {
    "fp8": "fp8", "e5m2": "fp8_e5m2", "int8": "int8", "full alone": {"full": "fp8"}, "int8 heads": "int8_per_token_head",
}  # fmt: skip


def texts(seed: int = 5, length: int = 75) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 90, length).tolist()
    return found


def scales_of(model: Any, kv_format: Any) -> dict[int, tuple[float, float]] | None:
    """Scales that are no power of two, where the format has some."""
    schema = Schema.from_hf_config(model.config, dtype="float32", kv_format=kv_format)
    has = any(rows.encoding.is_scaled for layer in schema.layers for rows in layer.rows())
    return {layer.index: (0.031, 0.017) for layer in schema.layers} if has else None


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_cold_equals_warm_to_the_bit(name: str, kv_format: str) -> None:
    model = tiny_model(name)
    arguments: dict[str, Any] = dict(kv_format=FORMATS[kv_format], kv_scales=scales_of(model, FORMATS[kv_format]))
    generator = Generator(
        model, "8MiB", prefill_chunk=CHUNK, limits=Limits(hit_grid=CHUNK), block_size=CHUNK, poison=True, **arguments
    )
    cold = first_logits(generator, texts())
    before = generator.stats().cached_tokens
    warm = first_logits(generator, texts())
    cached = generator.stats().cached_tokens - before
    assert cached >= CHUNK and cached % CHUNK == 0
    assert torch.equal(cold.view(torch.int32), warm.view(torch.int32))
    raw = Generator(model, "8MiB", prefill_chunk=CHUNK, limits=Limits(hit_grid=CHUNK), block_size=CHUNK)
    assert not torch.equal(cold, first_logits(raw, texts())), "the format changed nothing"


@pytest.mark.parametrize("name", MODELS)
def test_attention_reads_the_rounded_rows(name: str) -> None:
    """The rows of a request are codes times scale, of what the model computed: nearest, in every layer with the format."""
    model = tiny_model(name)
    scales = scales_of(model, "fp8")
    schema = Schema.from_hf_config(model.config, dtype="float32", kv_format="fp8", kv_scales=scales)
    made = {}
    for one in (schema, Schema.from_hf_config(model.config, dtype="float32")):
        cache = KVCache(one, num_blocks=20, max_requests=1, device="cpu", limits=Limits(step_tokens=64))
        sequence = cache.open(texts(length=8))
        ModelRunner(model, cache).step([(sequence, np.array(texts(length=8), np.int32))])
        first = next(layer.index for layer in one.layers if layer.block_rows())
        made[one.fingerprint] = cache.layer(first).blocks.read("k", (torch.arange(1, 2),))[0, :8]
    rounded, exact = made.values()
    assert scales is not None
    step = (exact.abs() / 16).clamp(min=0.031 * 2.0**-10)  # of 3 mantissa bits, and of the subnormal codes
    assert ((rounded - exact).abs() <= step).all() and not torch.equal(rounded, exact)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_stay_the_same_under_pressure_and_through_tiers(name: str, tmp_path: Path) -> None:
    """Alone, and many at once with suspends, forks and tiers: of 8-bit rows too."""
    model, prompts = tiny_model(name), [texts(seed, 21 + 9 * seed) for seed in range(4)]
    arguments: dict[str, Any] = dict(kv_format="fp8", kv_scales=scales_of(model, "fp8"), block_size=4)
    alone = [Generator(model, "8MiB", prefill_chunk=4, **arguments).generate([one], 6)[0] for one in prompts]
    generator = Generator(
        model, prefill_chunk=4, num_blocks=24, max_requests=3, preemption=Youngest(), poison=True,
        preemption_mode=lambda costs: PreemptionMode.SWAP, limits=Limits(swap="8MiB"),
        tiers=[host_tier("256KiB", staging="2MiB"), disk_tier(tmp_path, "32MiB", staging="2MiB", admit_all=True)], **arguments,
    )  # fmt: skip
    for _ in range(2):
        assert generator.generate(prompts, 6) == alone
        generator.cache.flush()
        generator.cache.reset()
    assert generator.stats().loaded_tokens > 0
    assert generator.generate(prompts[:1], 6, n=2) == [alone[0]] * 2
    generator.cache.check()
    generator.cache.close()


def test_another_format_or_scale_over_a_tier_is_a_miss(tmp_path: Path) -> None:
    model, prompt = tiny_model("llama"), texts()
    same: dict[str, Any] = dict(identity=Identity(weights="w"), block_size=16, prefill_chunk=16)
    loaded = []
    for kv_format, scale in (
        ("fp8", 0.5), ("fp8", 0.5), ("fp8", 0.25), ("fp8", 0.25), ("fp8_e5m2", 0.25), ("raw", None), ("int8", None),
    ):  # fmt: skip
        scales = None if scale is None else dict.fromkeys(range(9), (scale, scale))
        tiers = [disk_tier(tmp_path, "32MiB", staging="2MiB", admit_all=True)]
        generator = Generator(model, "8MiB", kv_format=kv_format, kv_scales=scales, tiers=tiers, **same)
        generator.generate([prompt], 2)
        loaded.append(generator.stats().loaded_tokens)
        generator.cache.flush()
        generator.cache.close()
    assert [number >= 48 for number in loaded] == [False, True, False, True, False, False, False], loaded


def test_a_paged_cache_takes_a_format_too() -> None:
    model = tiny_model("gemma3_text")
    cache = PagedCache(model, "8MiB", kv_format={"full": "fp8"}, kv_scales={3: (0.5, 0.5)})
    assert [one.format for one in cache.cache.schema.formats] == ["fp8_e4m3", "raw"]
    prompt = torch.tensor([texts(length=20)])
    found = [
        model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0, cache=cache).tolist()
        for _ in range(2)
    ]
    assert found[0] == found[1]
