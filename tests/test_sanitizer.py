"""``KVCache(sanitize=True)`` raises before a step that would read another's row or state, and at nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpagoda import BadInput, CheckFailed, Identity, KVCache, Limits, Namespace, Schema
from kvpagoda.tiers import disk_tier, host_tier
from raises import raises

pytest.importorskip("torch")
pytest.importorskip("xxhash")

_BASE: dict[str, Any] = dict(
    vocab_size=1000, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)  # fmt: skip
HYBRID = Schema.from_hf_config(
    dict(
        _BASE, model_type="qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    ),
    dtype="float32",
)  # fmt: skip
WINDOW = Schema.from_hf_config(
    dict(
        _BASE, model_type="gemma3_text", num_hidden_layers=2, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    ),
    dtype="float32",
)  # fmt: skip
DEEPSEEK = Schema.from_hf_config(
    dict(
        _BASE, model_type="deepseek_v4", num_hidden_layers=3, head_dim=16, num_experts_per_tok=1, n_routed_experts=2,
        moe_intermediate_size=16, q_lora_rank=16, index_n_heads=2, index_head_dim=8, index_topk=4, sliding_window=8,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    ),
    dtype="float32",
)  # fmt: skip
BLOCK = 16


def cache_of(schema: Schema, **options: Any) -> Any:
    return KVCache(schema, num_blocks=40, block_size=BLOCK, max_requests=4, device="cpu", sanitize=True, **options)


def tokens(first: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(first).integers(0, 900, count).astype(np.int32)


def write(batch: Any, values: Any, memory: Any = None, left: bool = True) -> None:
    """Do what kernels do: write ``values[i]`` to all that token i of a step leaves in each layer. ``memory``: of a worker.
    ``left``: whether it leaves states inside of the step, too."""
    import torch

    values = torch.as_tensor(values).float()
    of_states = torch.as_tensor(batch.state_writes).flatten().long()
    for layer in batch._schema.layers:
        view = batch.layer(layer.index)
        at = memory.layer(layer.index) if memory is not None else view
        if at.blocks is not None:
            slots = torch.as_tensor(view.slot_mapping).long()
            for name in at.blocks.fields:
                array = at[name]
                rows = slots % BLOCK // (BLOCK // array.shape[1])
                array[slots // BLOCK, rows] = values.reshape(-1, *[1] * (array.ndim - 2)).to(array.dtype)
        if at.state is not None:
            places = torch.as_tensor(batch.checkpoints.places).long() if left else of_states[:0]
            for name in at.state.fields:
                at[name][torch.cat((of_states, places))] = values[-1].to(at[name].dtype)


def compute(cache: Any, sequence: Any, text: np.ndarray[Any, Any], most: int = 48) -> None:
    """Run ``sequence`` to the end of ``text``, in steps of at most ``most`` tokens."""
    while sequence.length < len(text):
        begin = sequence.length
        n = min(len(text) - begin, int(cache.step_limit(sequence)), most)
        write(cache.batch([sequence], [n]), text[begin : begin + n] + 0.001 * np.arange(begin, begin + n))
        sequence.commit(text[begin : begin + n])


def step(cache: Any, sequence: Any) -> None:
    """Run a step of one token, but do not commit it."""
    sequence.extend(1)
    write(cache.batch([sequence], [1]), [7])


@pytest.mark.parametrize("schema", [HYBRID, WINDOW], ids=["states", "window"])
@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_clean_traffic_raises_nothing(schema: Schema, tier: str, tmp_path: Path) -> None:
    tiers = {"none": (), "host": [host_tier("4MiB")], "disk": [disk_tier(tmp_path / "kv", "4MiB")]}[tier]
    cache = cache_of(schema, tiers=tiers, limits=Limits(swap="1MiB"), identity=Identity("w"))
    rng, hits = np.random.default_rng(1), 0
    for turn in range(60):
        text = np.concatenate([tokens(turn % 3, int(rng.choice([3, 64, 128]))), tokens(100 + turn, 9)])
        with cache.open(text, ["a", None][turn % 2]) as sequence:
            hits += sequence.cached_tokens
            compute(cache, sequence, text)
            child = sequence.fork()
            child.suspend()
            child.resume()
            for one in (sequence, child):
                step(cache, one)
                one.commit([7])
            child.close()
    assert hits > 100 and (tier == "none" or cache.stats().tiers[0].loaded_tokens > 0)
    cache.check()
    cache.close()


def _swapped_blocks(cache: Any) -> Any:
    """Two blocks of a prompt change places in the block table."""
    text = tokens(1, 60)
    sequence = cache.open(text)
    compute(cache, sequence, text)
    cells = cache.core.groups[0].table.cells[sequence._request.slot]
    cells[[0, 1]] = cells[[1, 0]]
    return sequence


def _one_token_too_long(cache: Any) -> Any:
    """A request goes on after one token more than it was found to have."""
    text = tokens(1, 64)
    with cache.open(text) as sequence:
        compute(cache, sequence, text)
    sequence = cache.open(np.concatenate([text[:40], tokens(2, 20)]))
    assert sequence.cached_tokens == 40
    request = sequence._request
    request.match, request.own_length = request.match._replace(resumable=41), 41
    return sequence


def _another_namespace(cache: Any) -> Any:
    """A request shows a block with the same text of another namespace."""
    text, slots = tokens(1, 64), []
    for salt in "ab":
        sequence = cache.open(text, Namespace(salt=salt))
        compute(cache, sequence, text)
        slots.append(sequence._request.slot)
        step(cache, sequence)
    cells = cache.core.groups[0].table.cells
    cells[slots[1], 0] = cells[slots[0], 0]
    return sequence


def _freed_block(cache: Any) -> Any:
    """A block is freed while a request uses it."""
    text = tokens(1, 40)
    sequence = cache.open(text)
    compute(cache, sequence, text)
    step(cache, sequence)
    group = cache.core.groups[-1]
    cache.core.memory.freed(group.index, group.held_places(sequence._request.slot)[-1:])
    return sequence


def _wrong_copy(cache: Any) -> Any:
    """A fork copies a neighbour of the partial block."""
    text = tokens(1, 40)
    sequence = cache.open(text, reserve=64)
    compute(cache, sequence, text)
    memory = cache.core.memory
    copy = memory.copy
    memory.copy = lambda group, sources, targets, rows=None: copy(group, sources - 1, targets, rows)
    try:
        child = sequence.fork()
        child.extend(1)
    finally:
        memory.copy = copy
    return child


FAULTS: list[Callable[[Any], Any]] = [
    _swapped_blocks,
    _one_token_too_long,
    _another_namespace,
    _freed_block,
    _wrong_copy,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_found_before_the_step(plant: Callable[[Any], Any]) -> None:
    cache = cache_of(Schema.from_hf_config(dict(_BASE, model_type="llama", num_hidden_layers=2), dtype="float32"))
    sequence = plant(cache)
    with pytest.raises(CheckFailed) as raised:
        step(cache, sequence)
    assert raised.value.needed != raised.value.available and raised.value.group == "full"


def test_a_state_of_another_boundary_is_found() -> None:
    cache, text = cache_of(HYBRID), tokens(1, 100)
    with cache.open(text) as sequence:
        compute(cache, sequence, text)
    states = cache.core.states
    restore = states.restore
    with cache.open(tokens(2, 100)) as other:
        compute(cache, other, tokens(2, 100))
        wrong = states.names_at(states.held_places(other._request.slot))[:1]
        states.restore = lambda copy, length, own: restore(wrong, length, own)
        sequence = cache.open(np.append(text, 1))
        assert sequence.cached_tokens > 0
        with pytest.raises(CheckFailed) as raised:
            cache.batch([sequence], [1])
    assert raised.value.group == "state"


def test_a_record_of_another_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier gives another record of the same size for a key."""
    cache = cache_of(
        Schema.from_hf_config(dict(_BASE, model_type="llama", num_hidden_layers=2), dtype="float32"),
        tiers=[host_tier("4MiB", write="commit")],
    )  # fmt: skip
    for first in range(1, 14):
        with cache.open(tokens(first, 64)) as sequence:
            compute(cache, sequence, tokens(first, 64))
    from_host = type(cache.core.memory).from_host

    def shifted(memory: Any, group: int, ids: Any, table: Any, rows: Any) -> None:
        from_host(memory, group, ids, table, [*rows[1:], rows[0]])

    monkeypatch.setattr(type(cache.core.memory), "from_host", shifted)
    sequence = cache.open(np.append(tokens(1, 64), 5))
    assert sequence.cached_tokens == 64
    with pytest.raises(CheckFailed):
        cache.batch([sequence], [1])


def test_it_costs_nothing_when_off() -> None:
    cache = KVCache(WINDOW, num_blocks=40, block_size=BLOCK, device="cpu")
    assert cache.core.sanitizer is None and type(cache.core.memory).__name__ == "DeviceMemory"
    with raises(BadInput, field="sanitize", needed=2):
        KVCache(WINDOW, num_blocks=40, sanitize=2)  # type: ignore[arg-type]


def test_moved_blocks_are_nobodys_where_they_were() -> None:
    cache = cache_of(Schema.from_hf_config(dict(_BASE, model_type="llama", num_hidden_layers=2), dtype="float32"))
    text = tokens(1, 40)
    sequence = cache.open(text)
    compute(cache, sequence, text)
    step(cache, sequence)
    group = cache.core.groups[0]
    source, target = group.held_places(sequence._request.slot)[:1], group.free.peek(1)
    cache.core.memory.move(group.index, source, target)  # but the table still shows the old place
    with pytest.raises(CheckFailed) as raised:
        cache.batch([sequence], [1])
    assert raised.value.available == "nobody's"


def test_what_goes_to_a_tier_allocates_no_swap() -> None:
    cache = cache_of(WINDOW, tiers=[host_tier("4MiB", write="commit")], limits=Limits(swap="1MiB"))
    with cache.open(tokens(1, 64)) as sequence:
        compute(cache, sequence, tokens(1, 64))
    assert cache.core.swap._table is None and cache.flush(5.0)


def test_a_state_in_one_place_may_be_taken_back() -> None:
    """DeepSeek-V4's states hold what their last tokens added apart: a step past a boundary leaves the one there, too."""
    cache, text = cache_of(DEEPSEEK.rewindable(2)), tokens(1, 30)
    first = cache.open(text)
    compute(cache, first, text[: BLOCK + 1])
    first.close()
    with cache.open(text) as again:
        assert again.cached_tokens == BLOCK
        compute(cache, again, text[:20])
    with cache.open(text, lookup=False) as alone:
        compute(cache, alone, text[:1])
        alone.rewind(1)
        compute(cache, alone, text[:20])
    cache.close()


def test_a_state_that_woke_may_be_taken_back() -> None:
    """What wakes is of unknown provenance: a step shows what it reads then, but not what a shorter text would read."""
    cache, text = cache_of(DEEPSEEK.rewindable(2)), tokens(1, 30)
    sequence = cache.open(text)
    compute(cache, sequence, text)
    cache.sleep()
    cache.wake()
    step(cache, sequence)
    sequence.rewind(1)
    step(cache, sequence)
    cache.close()


def test_equal_bytes_of_a_hand_over_name_nobody() -> None:
    """What is handed over is cut anew, with zeros behind its end: its bytes may be those of another text's block."""
    cache = cache_of(WINDOW)
    texts = [tokens(1, 40), tokens(2, 40)]
    sequences = [cache.open(text) for text in texts]
    for sequence, text in zip(sequences, texts):
        compute(cache, sequence, text)
    memory, group = cache.core.memory, cache.core.full
    first, second = (group.held_places(one._request.slot)[:1] for one in sequences)
    table = np.zeros((1, memory.record_nbytes(group.index)), np.uint8)
    memory.to_host(group.index, first, table, [0])
    memory.from_host(group.index, second, table, [0])
    step(cache, sequences[1])
    cache.close()
