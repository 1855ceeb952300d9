"""``hit_bound``: the most that any cache finds of a trace, with the layers of a model."""

from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.one_budget import GEMMA3_27B, GPT_OSS_120B, NEMOTRON_H_8B, QWEN3_NEXT_80B, schema_of

from kvpagoda import BadInput, NeverFits, Schema
from kvpagoda.replay import Trace, hit_bound, replay, serve, synthetic
from kvpagoda.units import parse_bytes
from raises import raises

LLAMA = dict(
    model_type="llama", num_hidden_layers=8, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8,
    dtype="bfloat16",
)  # fmt: skip
"""32 KiB a token."""
LLAMA4 = LLAMA | dict(model_type="llama4_text", attention_chunk_size=512, no_rope_layers=[1, 1, 1, 0] * 2)
MODELS: dict[str, tuple[Any, str]] = {
    "Gemma-3": (GEMMA3_27B, "3GiB"), "gpt-oss": (GPT_OSS_120B, "512MiB"), "Qwen3-Next": (QWEN3_NEXT_80B, "2GiB"),
    "Nemotron-H": (NEMOTRON_H_8B, "1.7GiB"), "Llama": (LLAMA, "200MiB"), "Llama-4": (LLAMA4, "200MiB"),
    "DeepSeek-V4": ("deepseek-v4.1-flash", "450MiB"),
}  # fmt: skip


def layers_of(config: Any) -> Schema:
    return schema_of(config) if isinstance(config, dict) else Schema.from_hf_config(config)


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("model", MODELS)
def test_our_cache_finds_no_more(model: str, at_once: int) -> None:
    config, budget = MODELS[model]
    schema, settings = layers_of(config), dict(tokens_per_id=64, max_requests=at_once, step_tokens=512)
    for seed, nbytes in enumerate((parse_bytes(budget), 4 * parse_bytes(budget))):
        trace = synthetic(60, seed=seed)
        most = hit_bound(trace, schema, nbytes, **settings, rounds=200)
        ours = serve(trace, schema, nbytes, **settings)
        assert (most.served_tokens, most.prompt_tokens) == (ours.cached_tokens, ours.prompt_tokens)
        assert 0 < most.served <= most.packed <= most.bound <= most.unlimited < 1
        assert seed or most.bound < most.unlimited or model == "DeepSeek-V4"  # its texts are small


@pytest.mark.parametrize("model", ["gpt-oss", "Qwen3-Next"])
def test_our_cache_finds_no_more_in_steps_that_all_requests_share(model: str) -> None:
    config, budget = MODELS[model]
    schema, settings = layers_of(config), dict(tokens_per_id=64, max_requests=16, step_tokens=512, batch_tokens=512)
    trace = synthetic(60)
    most = hit_bound(trace, schema, budget, **settings, rounds=200)
    ours, other = (serve(trace, schema, budget, **{**settings, "batch_tokens": tokens}) for tokens in (512, None))
    assert most.served_tokens == ours.cached_tokens and ours.steps > 2 * other.steps
    assert 0 < most.served <= most.packed <= most.bound <= most.unlimited < 1


def test_with_full_attention_alone_it_is_that_of_blocks() -> None:
    """``opt`` has blocks of 64 tokens in as many bytes. Requests that run take none of its capacity, and here they do."""
    trace, schema = synthetic(200), layers_of(LLAMA)
    size, most = trace.block_size, (trace.input_lengths + trace.output_lengths).max()
    for tokens in (60_000, 120_000):
        hits = replay(trace, tokens // size, "opt").hits * size
        found = np.minimum(hits, trace.input_lengths - 1).sum()
        bounds = [
            hit_bound(
                trace, schema, int(room * schema.bytes_per_token), tokens_per_id=size, max_requests=1, rounds=1000
            )
            for room in (tokens, tokens + most)
        ]
        assert bounds[0].bound_tokens < 1.001 * found <= 1.001 * bounds[1].bound_tokens
        assert [one.never_fit for one in bounds] == [0, 0]


def test_one_at_a_time_the_steps_do_not_matter() -> None:
    """The bound is that of every cache that serves one request after the other, however long its steps are."""
    trace, schema = synthetic(60), layers_of(GPT_OSS_120B)
    settings = dict(tokens_per_id=64, max_requests=1, rounds=100)
    short, long = (hit_bound(trace, schema, "2GiB", step_tokens=step, **settings) for step in (512, 4096))
    assert short.bound_tokens == long.bound_tokens < short.unlimited_tokens


def test_a_trace_without_requests_or_without_ids_finds_nothing() -> None:
    schema, request = layers_of(GPT_OSS_120B), {"timestamp": 0, "input_length": 99, "output_length": 9, "hash_ids": []}
    for at_once in (1, 4):
        nothing = hit_bound([], schema, "1GiB", max_requests=at_once)
        assert (nothing.requests, nothing.prompt_tokens, nothing.bound, nothing.unlimited) == (0, 0, 0.0, 0.0)
        alone = hit_bound([request] * 9, schema, "1GiB", max_requests=at_once)
        assert (alone.prompt_tokens, alone.bound_tokens, alone.unlimited_tokens) == (891, 0, 0)


@pytest.mark.parametrize("at_once", [1, 4])
def test_requests_that_never_fit_do_not_count(at_once: int) -> None:
    schema, settings = layers_of(LLAMA), dict(tokens_per_id=64, max_requests=at_once)
    small = {"timestamp": 0, "input_length": 640, "output_length": 64, "hash_ids": [*range(10)]}
    large = {"timestamp": 0, "input_length": 64_000, "output_length": 64, "hash_ids": [*range(1000)]}
    some = hit_bound([small, large, large] * 8, schema, "40MiB", **settings)
    assert (some.requests, some.never_fit, some.prompt_tokens) == (24, 16, 8 * 640)
    assert 0 < some.served_tokens <= some.bound_tokens <= 7 * 639
    none = hit_bound([large] * 3, schema, "40MiB", **settings)
    assert (none.never_fit, none.prompt_tokens, none.bound) == (3, 0, 0.0)


def test_it_says_how_far_it_is() -> None:
    trace, told = synthetic(30), list[int]()
    hit_bound(trace, layers_of(LLAMA), "400MiB", tokens_per_id=64, rounds=50, on_request=told.append)
    assert told == sorted(told) and told[-1] == len(trace) and {5, 15, 25} <= set(told)


def test_bad_arguments() -> None:
    trace, schema = synthetic(5), layers_of(LLAMA)
    for settings, figures in (
        ({"budget": "many"}, {"needed": "many"}),
        ({"max_requests": 0}, {"field": "max_requests", "needed": 0, "available": 1}),
        ({"tokens_per_id": 0}, {"field": "tokens_per_id", "needed": 0, "available": 1}),
        ({"rounds": -1}, {"field": "rounds", "needed": -1, "available": 0}),
        ({"checkpoint_every": -1}, {"field": "checkpoint_every", "needed": -1, "available": 0}),
    ):  # fmt: skip
        with raises(BadInput, **figures):
            hit_bound(trace, schema, **{"budget": "1GiB", **settings})
    with raises(NeverFits, needed=1048576, available=100):
        hit_bound(trace, schema, "100")
    sized = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2], "block_tokens": [2, 3]}
    with raises(BadInput, needed=2, available=3):
        hit_bound(Trace.read([sized]), schema, "1GiB")


def test_as_json_it_is_the_policy_opt() -> None:
    found = hit_bound(synthetic(30), layers_of(LLAMA), "300MiB", tokens_per_id=64, rounds=50).to_dict()
    assert found["policy"] == "opt" and found["hit_rate"] == found["bound_tokens"] / found["prompt_tokens"] > 0


@pytest.mark.parametrize("module", ["bound", "demand"])
def test_the_examples_run(module: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"kvpagoda.replay.offline.{module}"))
    assert tried.attempted and not tried.failed
