"""Traces through the whole lifecycle of real schemas: one budget, hits, and memory that stays where it is needed."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.one_budget import MODELS

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.compat.deepseek_v4 import PRESETS
from kvpagoda.errors import BadInput, NeverFits, RetryLater
from kvpagoda.replay import serve, synthetic
from kvpagoda.schema import Attention, Layer, Recurrent, Rows, Schema
from raises import raises


def schema_of(name: str) -> Schema:
    config = {model: config for model, config, _ in MODELS}[name]
    schema = PRESETS["deepseek-v4-flash"]("raw") if config is None else Schema.from_hf_config(config)
    return replace(schema, max_positions=None)


@pytest.mark.parametrize(("name", "budget"), [(name, budget) for name, _, budget in MODELS])
def test_hardly_a_byte_lies_with_the_wrong_kind(name: str, budget: str) -> None:
    """At steady pressure at most 5 % of the memory is of no use where it is; a fixed split reuses less of it."""
    trace, schema = synthetic(250), schema_of(name)
    both = [
        serve(trace, schema, budget, tokens_per_id=64, max_requests=32, step_tokens=1024, shared=shared)
        for shared in (True, False)
    ]
    together, split = both
    print(f"{name}: unusable {together.unusable_percent:.2f} %, fixed split {split.unusable_percent:.2f} %")
    assert together.pressed_steps > together.steps / 2 and not together.never_fit
    assert together.unusable_percent <= 5
    assert together.hit_rate >= split.hit_rate and together.steps <= split.steps


@pytest.mark.parametrize("step_tokens", [2048, 8192])
def test_long_steps_of_a_short_window_take_no_places_to_resume(step_tokens: int) -> None:
    """A step takes up to 64 times as many window blocks as a checkpoint keeps. What was used longest ago goes for them, in
    whichever group it is, so at most a tenth of what is found cannot be resumed."""
    trace, schema = synthetic(300), schema_of("gpt-oss-120b")
    served = serve(trace, schema, "2GiB", tokens_per_id=64, max_requests=8, step_tokens=step_tokens)
    assert served.evicted_blocks > 200_000 and not served.never_fit
    assert served.cached_tokens >= 0.9 * served.matched_tokens > 0.35 * served.prompt_tokens


def test_all_requests_of_a_step_share_its_tokens() -> None:
    """Two prompts of 48 tokens, equal but for their ends, and answers of 3. In steps of 48 tokens of each, both begin in the
    first step, and the second finds nothing. In steps of 48 of all the second waits for the next step, and finds 32: 48; 1 and
    16; 1 and 1; 1 and 1; 1."""
    records = [
        {"timestamp": i, "input_length": 48, "output_length": 3, "hash_ids": [1, 2, 3 + i]} for i in range(2)
    ]  # fmt: skip
    schema = Schema((Layer(0, "full_attention", (Attention(1, 1, 8, "float16"),)),), "full")
    arguments = {"tokens_per_id": 16, "step_tokens": 48, "block_size": 16}
    each, shared = (serve(records, schema, "1MiB", batch_tokens=most, **arguments) for most in (None, 48))  # type: ignore[arg-type]
    assert (each.cached_tokens, each.steps) == (0, 2)
    assert (shared.cached_tokens, shared.steps) == (32, 5)
    with raises(BadInput, field="batch_tokens", needed=0, available=1):
        serve(records, schema, "1MiB", batch_tokens=0)


@pytest.mark.parametrize("steps, has_states", [(3, False), (4, True)])
def test_a_request_waits_while_a_step_computes_its_prompt(steps: int, has_states: bool) -> None:
    """Prompts of 48 tokens and answers of 1, in steps of 100 tokens of all. The second text, equal to the first but for its
    end, waits for the end of the first step, and finds 32, also with states, for which a step ends there. The third, another
    text, waits behind it. Where less than a block can be found, nobody waits."""
    chains = ([1, 2, 3], [1, 2, 4], [5, 6, 7])
    records = [{"timestamp": 0, "input_length": 48, "output_length": 1, "hash_ids": chain} for chain in chains]
    layers = [Layer(0, "full_attention", (Attention(1, 1, 8, "float16"),))]
    if has_states:
        layers.append(Layer(1, "state", (Recurrent((Rows("r", (4, 8), "float32"),)),)))
    schema, arguments = Schema(tuple(layers), "small"), {"tokens_per_id": 16, "step_tokens": 100, "block_size": 16}
    served = serve(records, schema, "1MiB", batch_tokens=100, **arguments)  # type: ignore[arg-type]
    assert (served.each[:, 2].tolist(), served.steps) == ([0, 32, 0], steps)
    short = [{**record, "input_length": 16, "hash_ids": [1]} for record in records]
    assert serve(short, schema, "1MiB", batch_tokens=100, **arguments).steps == 2  # type: ignore[arg-type]


def test_a_running_request_keeps_its_states_where_a_waiting_one_parts_from_it() -> None:
    """The first prompt has 96 tokens; the second parts from it after 64, in the middle of what the first step would compute,
    also when it computes all tokens of a step. So that step ends there."""
    records = [
        {"timestamp": 0, "input_length": 97, "output_length": 1, "hash_ids": chain}
        for chain in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8])
    ]
    state = Layer(1, "state", (Recurrent((Rows("r", (4, 8), "float32"),)),))
    schema = Schema((Layer(0, "full_attention", (Attention(1, 1, 8, "float16"),)), state), "states")
    for tokens in (200, 90):
        served = serve(
            records, schema, "1MiB", tokens_per_id=16, step_tokens=tokens, batch_tokens=tokens, block_size=16
        )
        assert served.each[:, 2].tolist() == [0, 64]


def test_what_is_counted() -> None:
    """Two requests of 40 tokens that share 32, by hand: 16 of blocks of 16, and what a checkpoint needs."""
    records = [
        {"timestamp": i, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3 + i]} for i in range(2)
    ]  # fmt: skip
    full = Schema((Layer(0, "full", (Attention(1, 8, 8, "float16"),)),))
    result = serve(records, full, "1MiB", tokens_per_id=16, max_requests=1)
    assert (result.requests, result.prompt_tokens, result.matched_tokens, result.cached_tokens) == (2, 80, 32, 32)
    assert result.blocks_per_run == 2 == result.to_dict()["blocks_per_run"]  # blocks 1, 2, 3 and 1, 2, 4
    assert result.limited_by == {"nothing": 2} and result.hit_rate == 0.4 and result.to_dict()["hit_rate"] == 0.4
    state = replace(full, layers=(*full.layers, Layer(1, "state", (Recurrent((Rows("r", (4, 4), "float32"),)),))))
    result = serve(records, state, "1MiB", tokens_per_id=16, max_requests=1)
    assert (result.matched_tokens, result.cached_tokens) == (32, 32)  # the prompt's last boundary is where they part
    result = serve([*records, {**records[0], "hash_ids": [1, 9]}], state, "1MiB", tokens_per_id=16, max_requests=1)
    assert result.cached_tokens == 32 and result.limited_by == {"nothing": 2, "checkpoint": 1}
    result = serve(
        [*records, {**records[0], "hash_ids": [1, 9]}] * 2, state, "1MiB", tokens_per_id=16, checkpoint_every=1
    )
    assert result.limited_by.get("checkpoint", 0) == 0
    with raises(BadInput, field="tokens_per_id", needed=0, available=1):
        serve(records, full, "1MiB", tokens_per_id=0)
    with pytest.raises(NeverFits):
        serve(records, state, "128B")
    large = [{"timestamp": 0, "input_length": 10**6, "output_length": 1, "hash_ids": [1]}]
    assert serve([*records, *large], full, "64KiB", tokens_per_id=16).never_fit == 1


def test_checkpoints_of_a_long_prompt_stay_inside_their_budget() -> None:
    schema = schema_of("Qwen3-Next-80B")
    for shared, checkpoints in ((True, None), (True, 5), (False, 5)):
        books = KVCache(
            dataclasses.replace(schema, vocab_size=None), "30GiB", max_requests=4, device="none",
            order=None if shared else "layer", limits=Limits(max_context=1_000_000), retention=Retention(checkpoints, 64),
        )  # fmt: skip
        plan = books.plan
        tokens = np.arange(900_000 if shared else 400_000, dtype=np.int32)
        with books.open(tokens, capacity=0) as sequence:
            while sequence.length < len(tokens):
                end = min(
                    len(tokens), sequence.length + 4096, sequence.length + books.step_limit(sequence), len(tokens)
                )
                sequence.extend(end - sequence.length)
                sequence.commit(tokens[sequence.length : end])
            group = books.stats().groups[1]
            assert group.name == "state" and group.evictable <= plan.num_checkpoints
            assert (
                sum(books.core.groups[i].plan.row_nbytes * g.held for i, g in enumerate(books.stats().groups))
                <= plan.nbytes
            )
            assert checkpoints is None or group.held <= 1 + checkpoints
        books.check()
        assert books.open(tokens).cached_tokens > len(tokens) - 2 * 64 * 16


def test_a_pool_with_nothing_free_gives_a_verdict() -> None:
    """Window group, full group and states all taken: another request is told so at once, and runs when there is room."""
    books = KVCache(schema_of("gpt-oss-120b"), "64MiB", max_requests=8, device="none", limits=Limits(step_tokens=16))
    running = [books.open(range(i * 100, i * 100 + 20), reserve=400, capacity=0) for i in range(2)]
    with raises(RetryLater, needed=25, available=7, group="full") as error:
        for i in range(2, 8):
            running.append(books.open(range(i * 100, i * 100 + 20), reserve=400, capacity=0))
    assert type(error.value).__name__ == "RetryLater"
    running.pop().close()
    books.open(range(900, 920), reserve=400, capacity=0)
    with pytest.raises(NeverFits):
        books.open(range(10), reserve=10**6)
    books.check()


def test_tokens_of_each_block_are_heard() -> None:
    """Ids of 16, 32 and 16 tokens: the second request shares the first two, which are 48 tokens of its 64."""
    record = {"timestamp": 0, "input_length": 64, "output_length": 1, "block_tokens": [16, 32, 16]}
    schema = Schema((Layer(0, "full", (Attention(1, 8, 8, "float32"),)),))
    trace = [{**record, "hash_ids": [1, 2, 3]}, {**record, "hash_ids": [1, 2, 4]}]
    found = serve(trace, schema, "1MiB", block_size=16, max_requests=1)
    assert found.prompt_tokens == 128 and found.cached_tokens == 48
