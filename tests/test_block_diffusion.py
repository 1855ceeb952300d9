"""Block diffusion: rows of an open block are written again and again, and nobody finds them before ``commit``."""

from __future__ import annotations

from typing import Any

import pytest

from kvpagoda import KVCache, Schema

torch = pytest.importorskip("torch")

LLAMA: dict[str, Any] = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1
)
GEMMA: dict[str, Any] = dict(
    LLAMA, model_type="gemma3_text", head_dim=16, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
PROMPT, ANSWER = list(range(8)), list(range(50, 62))


def write(cache: KVCache, sequence: Any, width: int, value: float) -> list[list[int]]:
    """A denoising step: the rows of the ``width`` open tokens in every layer are ``value``. Returns the slots."""
    batch, slots = cache.batch([sequence], [width]), []
    for layer in cache.schema.layers:
        view = batch.layer(layer.index)
        rows = torch.full((width, 1, 16), value)
        view.write(k=rows, v=rows)
        slots.append(view.slot_mapping.tolist())
    return slots


def found(cache: KVCache, text: list[int]) -> int:
    """How many tokens of ``text`` a new request finds."""
    with cache.open(text, capacity=0, publish=False) as other:
        return other.cached_tokens


@pytest.mark.parametrize("config", [LLAMA, GEMMA])
@pytest.mark.parametrize("width", [4, 12])  # as long as a block of the cache, and three blocks at once
def test_an_open_block_is_never_found_and_a_finished_one_is(config: dict[str, Any], width: int) -> None:
    cache = KVCache(
        Schema.from_hf_config(config, dtype="float32"), num_blocks=24, max_requests=2, block_size=4, device="cpu"
    )
    text = PROMPT + ANSWER + [1]
    with cache.open(PROMPT, reserve=40) as sequence:
        sequence.extend(len(PROMPT))
        write(cache, sequence, len(PROMPT), 1.0)
        sequence.commit(PROMPT)
        for start in range(0, len(ANSWER), width):
            sequence.extend(width)
            first = write(cache, sequence, width, 2.0)
            for step in range(3):
                assert write(cache, sequence, width, 3.0 + step) == first
                assert found(cache, text) == len(PROMPT) + start
                cache.check()
            sequence.commit(ANSWER[start : start + width])
            assert found(cache, text) == len(PROMPT) + start + width
    with cache.open(text) as other:
        assert other.cached_tokens == len(PROMPT) + len(ANSWER)
        other.extend(1)
        view, positions = cache.batch([other], [1]).layer(1), torch.arange(len(text) - 1)
        rows = view.blocks.read("k", (view.block_table[0, positions // 4].long(), positions % 4))
        assert rows[:, 0, 0].tolist() == [1.0] * len(PROMPT) + [5.0] * len(ANSWER)


def test_a_block_that_was_not_finished_is_given_up_with_its_request() -> None:
    cache = KVCache(
        Schema.from_hf_config(LLAMA, dtype="float32"), num_blocks=24, max_requests=2, block_size=4, device="cpu"
    )
    with cache.open(PROMPT, reserve=40) as sequence:
        sequence.extend(len(PROMPT))
        sequence.commit(PROMPT)
        sequence.extend(4)
        write(cache, sequence, 4, 2.0)
    assert found(cache, PROMPT + ANSWER) == len(PROMPT)
    cache.check()
