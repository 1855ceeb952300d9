"""Traces through the whole lifecycle of real schemas: one budget, hits, and memory that stays where it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpagoda.books import Books
from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.replay import serve, synthetic
from kvpagoda.schema import Attention, Layer, Recurrent, Rows, Schema
from kvpagoda.schema.presets import PRESETS

GEMMA3_27B = {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 16, "sliding_window": 1024, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 8, "sliding_window": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 256,
    "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "gemma3-27b": GEMMA3_27B, "gpt-oss-120b": GPT_OSS_120B, "qwen3-next-80b": QWEN3_NEXT_80B, "deepseek-v4": None,
}  # fmt: skip


def schema_of(name: str) -> Schema:
    config = SCHEMAS[name]
    schema = PRESETS["deepseek-v4-flash"]("raw") if config is None else Schema.from_hf_config(config)
    return replace(schema, max_positions=None)


BUDGETS = [("gemma3-27b", "24GiB"), ("gpt-oss-120b", "6GiB"), ("qwen3-next-80b", "12GiB"), ("deepseek-v4", "4GiB")]


@pytest.mark.parametrize(("name", "budget"), BUDGETS)
def test_hardly_a_byte_lies_with_the_wrong_kind(name: str, budget: str) -> None:
    """At steady pressure at most 5 % of the memory is of no use where it is; with a fixed split it is several times that."""
    trace, schema = synthetic(250), schema_of(name)
    both = [
        serve(trace, schema, budget, tokens_per_id=64, max_requests=32, step_tokens=1024, shared=shared)
        for shared in (True, False)
    ]
    together, split = both
    print(f"{name}: unusable {together.unusable_percent:.2f} %, fixed split {split.unusable_percent:.2f} %")
    assert together.pressed_steps > together.steps / 2 and not together.never_fit
    assert together.unusable_percent <= 5 < split.unusable_percent
    assert together.hit_rate >= split.hit_rate and together.mean_running >= 0.99 * split.mean_running


def test_what_is_counted() -> None:
    """Two requests of 40 tokens that share 32, by hand: 16 of blocks of 16, and what a checkpoint needs."""
    records = [
        {"timestamp": i, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3 + i]} for i in range(2)
    ]  # fmt: skip
    full = Schema((Layer(0, "full", (Attention(1, 8, 8, "float16"),)),))
    result = serve(records, full, "1MiB", tokens_per_id=16, max_requests=1)
    assert (result.requests, result.prompt_tokens, result.matched_tokens, result.cached_tokens) == (2, 80, 32, 32)
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
    with pytest.raises(BadInput, match="at least 1 token"):
        serve(records, full, "1MiB", tokens_per_id=0)
    with pytest.raises(NeverFits):
        serve(records, state, "128B")
    large = [{"timestamp": 0, "input_length": 10**6, "output_length": 1, "hash_ids": [1]}]
    assert serve([*records, *large], full, "64KiB", tokens_per_id=16).never_fit == 1


def test_checkpoints_of_a_long_prompt_stay_inside_their_budget() -> None:
    schema = schema_of("qwen3-next-80b")
    for shared, checkpoints in ((True, None), (True, 5), (False, 5)):
        plan = schema.plan("30GiB", 4, checkpoints=checkpoints, shared=shared)
        books = Books(plan, max_context=1_000_000, checkpoint_every=64)
        tokens = np.arange(900_000 if shared else 400_000, dtype=np.int32)
        with books.open(tokens, room=0) as sequence:
            while sequence.length < len(tokens):
                end = min(len(tokens), sequence.length + 4096, books.next_checkpoint(sequence) or len(tokens))
                sequence.extend(end - sequence.length)
                sequence.commit(tokens[sequence.length : end])
            group = books.stats().groups[1]
            assert group.name == "state" and group.spare <= plan.num_checkpoints
            assert (
                sum(books.ledgers[i].plan.row_nbytes * g.held for i, g in enumerate(books.stats().groups))
                <= plan.nbytes
            )
            assert checkpoints is None or group.held <= 1 + checkpoints
        books.check()
        assert books.open(tokens).cached_tokens > len(tokens) - 2 * 64 * 16


def test_a_pool_with_nothing_free_gives_a_verdict() -> None:
    """Window group, full group and states all taken: another request is told so at once, and runs when there is room."""
    books = Books(schema_of("gpt-oss-120b").plan("64MiB", 8, step_tokens=16))
    running = [books.open(range(i * 100, i * 100 + 20), reserve=400, room=0) for i in range(2)]
    with pytest.raises(Exception, match=r"more must be freed|at once") as error:
        for i in range(2, 8):
            running.append(books.open(range(i * 100, i * 100 + 20), reserve=400, room=0))
    assert type(error.value).__name__ == "RetryLater"
    running.pop().close()
    books.open(range(900, 920), reserve=400, room=0)
    with pytest.raises(NeverFits):
        books.open(range(10), reserve=10**6)
    books.check()
