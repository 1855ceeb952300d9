"""DeepSeek-V4 layers through the handle: the cache holds what transformers' own cache holds, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvpagoda.hf.compressed import ROPE_KINDS, CompressedRunner, attention  # noqa: E402
from kvpagoda.manager import KVCache  # noqa: E402
from kvpagoda.schema import Schema  # noqa: E402
from models import TINY, VOCAB, tiny_model  # noqa: E402


@functools.cache
def model() -> Any:
    return tiny_model("deepseek_v4")


def tokens(n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


@pytest.mark.parametrize("chunks", [(37,), (1,) * 19, (5, 1, 9, 1, 17, 3), (3, 1, 4, 8, 16, 1, 1, 1, 7), (7, 1, 8)])
@torch.no_grad()
def test_every_layer_keeps_what_transformers_keeps_bit_for_bit(chunks: tuple[int, ...]) -> None:
    """Each layer is driven with the hidden states that transformers gave its own: then the arithmetic is the same."""
    net, ids = model(), tokens(sum(chunks))
    own = DynamicCache(config=net.config)
    cache = KVCache(Schema.from_hf_config(net.config), num_blocks=30, max_requests=3, device="cpu", poison=True)
    cache.open([1]), cache.open([2])  # so that slot and blocks are not the first
    sequence, done = cache.open(ids), 0
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _, args, kwargs, out, i=i: seen.update({i: (args[0] if args else kwargs["hidden_states"], out[0])}),
            with_kwargs=True,
        )
        for i, layer in enumerate(net.model.layers)
    ]
    try:
        for n in chunks:
            step = torch.from_numpy(ids[done : done + n]).long()[None]
            net(input_ids=step, past_key_values=own, use_cache=True)
            batch = cache.batch([sequence], [n])
            embedded, positions = net.model.embed_tokens(step), batch.positions.long()[None]
            turns = {k: net.model.rotary_emb(embedded, position_ids=positions, layer_type=k) for k in ROPE_KINDS}
            for i, layer in enumerate(net.model.layers):
                hidden, expected = seen[i]
                out = attention(layer.self_attn, hidden, turns, batch.layer(i).handle())
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)
            sequence.commit(ids[done : done + n])
            done += n
            for i in range(len(net.model.layers)):
                compare(net, own.layers[i], cache, sequence, i)
    finally:
        for hook in hooks:
            hook.remove()


def compare(net: Any, own: Any, cache: KVCache, sequence: Any, index: int) -> None:
    """All that transformers' layer keeps against our rows, exactly."""
    sequence.extend(1)
    view = cache.batch([sequence], [1]).layer(index)
    handle, kind = view.handle(), view.handle().kind
    state, slot, length = view.state, int(view.state_indices[0]), sequence.length
    recent = torch.arange(max(0, length - kind.window + 1), length)
    assert torch.equal(state["swa"][slot, recent % kind.window], own.keys[0, 0])
    assert torch.equal(state["swa_pos"][slot, recent % kind.window].long(), recent)
    if not kind.ratio:
        return
    compressor = net.model.layers[index].self_attn.compressor
    parts = {"compressor": ("", compressor, handle.read_entries)}
    if kind.index_dim is not None:
        parts["indexer"] = ("idx_", compressor.indexer, handle.read_indexer_keys)
    for name, (prefix, module, read) in parts.items():
        windows = torch.arange(length // kind.ratio)[None]
        if windows.numel():
            assert torch.equal(read(windows), own.compressed_kv[name])
        assert own.entry_count[name] == length // kind.ratio
        pending = torch.arange(length // kind.ratio * kind.ratio, length)
        ring, bias = pending % (kind.ratio - 1), module.position_bias[pending % kind.ratio]
        streams = ("a", "b") if kind.overlap else ("a",)
        if len(pending):
            keys = torch.cat([state[f"{prefix}tail_k{s}"][slot, ring] for s in streams], -1)
            scores = torch.cat([state[f"{prefix}tail_z{s}"][slot, ring] for s in streams], -1)
            assert torch.equal(keys, own.buffer_kv[name][0])
            assert torch.equal(scores, own.buffer_gate[name][0] + bias)
        if kind.overlap and length >= kind.ratio:
            assert torch.equal(state[f"{prefix}overlap_k"][slot], own.overlap_kv[name][0])
            assert torch.equal(state[f"{prefix}overlap_z"][slot], own.overlap_gate[name][0])


def logits(net: Any, schema: Schema, ids: np.ndarray) -> torch.Tensor:
    """Logits after every token, one token a step."""
    cache = KVCache(schema, num_blocks=20, max_requests=1, device="cpu", poison=True)
    runner, sequence, found = CompressedRunner(net, cache), cache.open(ids), []
    for token in ids:
        found.append(runner.step([(sequence, np.array([token], np.int32))])[0])
        sequence.commit([token])
    return torch.stack(found)


def test_fp8_rows_change_the_logits_by_a_bounded_divergence() -> None:
    """Quantised rows are never held to token equality: the divergence from the raw rows is bounded, and not zero."""
    torch.manual_seed(3)
    net = tiny_model("deepseek_v4", head_dim=72, partial_rotary_factor=8 / 72, index_head_dim=32)
    ids = tokens(80, seed=4)
    raw = logits(net, Schema.from_hf_config(net.config), ids).log_softmax(-1)
    packed = logits(net, Schema.from_hf_config(net.config, kv_format="fp8"), ids).log_softmax(-1)
    divergence = (raw.exp() * (raw - packed)).sum(-1)
    assert 0 < divergence.mean() < 0.15


def test_fp8_tokens_do_not_depend_on_how_the_prompt_is_cut() -> None:
    """Attention sees the rows as they read back, in the step that writes them too: so chunks do not change a token.

    Matrix products of other shapes round their last bit otherwise, which now and then moves a value to the next fp8
    number: up to 0.004 in the logits. Rows seen unrounded in the step that writes them would change them by 0.4 and more.
    """
    net = tiny_model("deepseek_v4", head_dim=72, partial_rotary_factor=8 / 72, index_head_dim=32)
    schema, ids, found = Schema.from_hf_config(net.config, kv_format="fp8"), tokens(60, seed=5), []
    for chunk in (1, 7, 60):
        cache = KVCache(schema, num_blocks=20, max_requests=1, device="cpu", poison=True)
        runner, sequence = CompressedRunner(net, cache), cache.open(ids)
        for start in range(0, 60, chunk):
            last = runner.step([(sequence, ids[start : start + chunk])])
            sequence.commit(ids[start : start + chunk])
        found.append(last[0])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0.02)


def test_a_real_ratio_of_128_is_crossed() -> None:
    """The real window and ratios: 300 tokens in uneven pieces against full recomputation."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    net = tiny_model("deepseek_v4", compress_rates=rates, sliding_window=128)
    ids = tokens(300, seed=6)
    cache = KVCache(Schema.from_hf_config(net.config), num_blocks=9, max_requests=2, device="cpu", poison=True)
    assert cache.block_size == 128
    runner, sequence = CompressedRunner(net, cache), cache.open(ids)
    with torch.no_grad():
        expected = net(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0]
    done = 0
    for n in (100, 27, 1, 1, 126, 1, 1, 43):
        found = runner.step([(sequence, ids[done : done + n])])[0]
        sequence.commit(ids[done : done + n])
        done += n
        torch.testing.assert_close(found, expected[done - 1], rtol=1e-3, atol=1e-3)


def test_the_tiny_model_exercises_the_indexer() -> None:
    config = TINY["deepseek_v4"]()
    assert config.index_n_heads >= 32 and config.index_topk * 4 < 41
