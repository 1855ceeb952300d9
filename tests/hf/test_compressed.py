"""DeepSeek-V4 layers through the handle: the cache holds what transformers' own cache holds, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvpagoda import Retention
from kvpagoda.hf.cache_name import cache_name_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_generator import greedy  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from kvpagoda.compat.layer_handle import LayerCacheHandle  # noqa: E402
from kvpagoda.core.cache.sequence import Sequence  # noqa: E402
from kvpagoda.core.kv_cache import KVCache  # noqa: E402
from kvpagoda.errors import BadInput  # noqa: E402
from kvpagoda.hf import Generator  # noqa: E402
from kvpagoda.hf.compressed import ROPE_KINDS, CompressedRunner, attention  # noqa: E402
from kvpagoda.schema import Schema  # noqa: E402
from models import TINY, VOCAB, tiny_config, tiny_model  # noqa: E402
from raises import raises  # noqa: E402


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
            net(input_ids=step, use_cache=True, **{cache_name_of(net): own})
            batch = cache.batch([sequence], [n])
            embedded, positions = net.model.embed_tokens(step), batch.positions.long()[None]
            turns = {k: net.model.rotary_emb(embedded, position_ids=positions, layer_type=k) for k in ROPE_KINDS}
            for i, layer in enumerate(net.model.layers):
                hidden, expected = seen[i]
                out = attention(layer.self_attn, hidden, turns, LayerCacheHandle.of(batch.layer(i)))
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
    handle = LayerCacheHandle.of(view)
    kind = handle.kind
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


def test_rotations_that_look_for_the_furthest_position() -> None:
    """Also in steps that close no window, where there is none."""
    rope = {
        kind: {**own, "rope_type": "dynamic", "factor": 2.0}
        for kind, own in tiny_config("deepseek_v4").rope_parameters.items()
    }
    model, prompts = tiny_model("deepseek_v4", rope_parameters=rope), [[3, 4], [5, 6, 7, 8, 9] * 4]
    generator = Generator(model, num_blocks=20, max_requests=2, prefill_chunk=3, poison=True)
    assert generator.generate(prompts, 5) == [greedy(model, prompt, 5) for prompt in prompts]


def test_the_tiny_model_exercises_the_indexer() -> None:
    config = TINY["deepseek_v4"]()
    assert config.index_n_heads >= 32 and config.index_topk * 4 < 41


WIDTH = 5
"""Draft tokens of one verify step below: more than a ratio of 4, so that a step closes windows that are taken back."""


def small(kv_format: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model for a row format, and what its schema is read with."""
    if kv_format == "raw":
        return model(), {}
    return fp8_model(), {"kv_format": kv_format}


@functools.cache
def fp8_model() -> Any:
    return tiny_model("deepseek_v4", head_dim=72, partial_rotary_factor=8 / 72, index_head_dim=32)


def opened(
    net: Any, ids: np.ndarray, checkpoint_every: int = 0, **arguments: Any
) -> tuple[KVCache, CompressedRunner, Sequence]:
    schema, sizes = Schema.from_hf_config(net.config, **arguments), {"num_blocks": 40, "max_requests": 4}
    cache = KVCache(schema, **sizes, device="cpu", poison=True, retention=Retention(checkpoint_every=checkpoint_every))
    return cache, CompressedRunner(net, cache), cache.open(ids, reserve=len(ids) + WIDTH + 1)


def go(runner: CompressedRunner, sequence: Sequence, ids: Any) -> torch.Tensor:
    """One step of ``ids``, committed: the logits after its last token."""
    ids = np.asarray(ids, np.int32)
    sequence.extend(len(ids))
    found = runner.step([(sequence, ids)])[0]
    sequence.commit(ids)
    return found


def readable(cache: KVCache, sequence: Sequence) -> dict[tuple[int, str], torch.Tensor]:
    """Everything of ``sequence`` that a later step may read, by (layer, what), wherever the rings keep it."""
    sequence.extend(1)
    batch, length, found = cache.batch([sequence], [1]), sequence.length, {}
    slot = int(batch.state_indices[0])
    for index in range(len(cache.schema.layers)):
        handle = LayerCacheHandle.of(batch.layer(index))
        kind, state = handle.kind, handle.state

        def rows(name: str, first: int, state: Any = state, index: int = index) -> None:
            for field, part in zip(("", "_2", "_3"), state.parts(name)):
                found[index, name + field] = part[slot, torch.arange(max(0, first), length) % part.shape[1]].clone()

        rows("swa", length - kind.window + 1)
        rows("swa_pos", length - kind.window + 1)
        found[index, "swa_head"] = state["swa_head"][slot].clone()
        if not kind.ratio:
            continue
        windows = torch.arange(length // kind.ratio)[None]
        found[index, "entries"] = handle.read_entries(windows)
        prefixes = ("",) if kind.index_dim is None else ("", "idx_")
        if kind.index_dim is not None:
            found[index, "indexer_keys"] = handle.read_indexer_keys(windows)
        for prefix in prefixes:
            closed = length // kind.ratio * kind.ratio
            for stream in ("ka", "za", "kb", "zb") if kind.overlap else ("ka", "za"):
                rows(f"{prefix}tail_{stream}", closed)
            for stream in ("k", "z") if kind.overlap and closed else ():
                ring = state[f"{prefix}overlap_{stream}"]
                at = torch.arange(closed - kind.ratio, closed) % ring.shape[1]
                found[index, f"{prefix}overlap_{stream}"] = ring[slot, at].clone()
    return found


def equal(found: dict[tuple[int, str], torch.Tensor], expected: dict[tuple[int, str], torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for place, rows in expected.items():
        assert not rows.is_floating_point() or not rows.isnan().any(), place
        assert torch.equal(found[place], rows), place


@functools.cache
def never_wrong(kv_format: str, length: int) -> tuple[np.ndarray, list[torch.Tensor], list[Any]]:
    """A text computed token by token: logits, and what is readable, after each token."""
    net, schema = small(kv_format)
    ids = tokens(length, seed=8)
    cache, runner, sequence = opened(net, ids[:1], **schema)
    logits, rows = [], []
    for token in ids:
        logits.append(go(runner, sequence, [token]))
        rows.append(readable(cache, sequence))
    return ids, logits, rows


@pytest.mark.parametrize(
    ("kv_format", "wrong"), [("raw", (1,)), ("raw", (4, 3)), ("raw", (WIDTH,)), ("fp8", (2,)), ("fp8", (3, WIDTH))]
)
def test_rejected_tokens_leave_no_trace_at_any_position(kv_format: str, wrong: tuple[int, ...]) -> None:
    """At every phase of windows, ratios, rings and blocks: wrong tokens are computed, committed and taken back, again and
    again, and all that later steps read stays bit for bit that of a run that never saw them, its logits too."""
    ids, logits, rows = never_wrong(kv_format, 36)
    net, schema = small(kv_format)
    cache, runner, sequence = opened(net, ids[:1], verify_width=WIDTH, **schema)
    for position, token in enumerate(ids):
        assert torch.equal(go(runner, sequence, [token]), logits[position])
        equal(readable(cache, sequence), rows[position])
        for turn, n in enumerate(wrong):
            go(runner, sequence, (ids[position] + 1 + turn + np.arange(n)) % VOCAB)
            sequence.rewind(n)
            assert sequence.length == position + 1
        cache.check()


def test_right_tokens_may_be_taken_back_too_and_computed_again() -> None:
    """Rewinds of rewinds, down to the deepest that the rings allow: from there the same logits follow."""
    ids, logits, _ = never_wrong("raw", 36)
    cache, runner, sequence = opened(model(), ids[:1], verify_width=WIDTH)
    rng, written = np.random.default_rng(4), 0
    while written < 26:
        n = min(int(rng.integers(3, 6)), 36 - sequence.length)
        for token in ids[sequence.length : sequence.length + n]:
            assert torch.equal(go(runner, sequence, [token]), logits[sequence.length - 1])
        written = max(written, sequence.length)
        furthest = max(0, written - WIDTH)
        sequence.rewind(int(rng.integers(0, sequence.length - furthest + 1)))
        if sequence.length > 0 and sequence.length == furthest:
            with raises(BadInput, needed=1, available=0):
                sequence.rewind(1)
        cache.check()


@pytest.mark.parametrize("width", [0, 3])
def test_a_rewind_too_far_changes_nothing(width: int) -> None:
    ids = tokens(37, seed=9)
    cache, runner, sequence = opened(model(), ids, verify_width=width)
    go(runner, sequence, ids[:32]), go(runner, sequence, ids[32:])
    arenas = [arena.buffer.clone() for arena in cache.core.memory.arenas]
    table = cache.core.groups[0].table.cells.copy()
    with raises(BadInput, needed=width + 1, available=width):
        sequence.rewind(width + 1)
    assert sequence.length == 37 and sequence.tokens.tolist() == ids.tolist()
    assert np.array_equal(table, cache.core.groups[0].table.cells)
    for buffer, before in zip([arena.buffer for arena in cache.core.memory.arenas], arenas):
        assert torch.equal(buffer, before)
    sequence.rewind(width)
    cache.check()


def test_drafts_that_were_written_but_never_committed_count() -> None:
    ids, logits, _ = never_wrong("raw", 36)
    _, runner, sequence = opened(model(), ids[:1], verify_width=WIDTH)
    for token in ids[:20]:
        go(runner, sequence, [token])
    sequence.extend(1 + WIDTH)
    runner.step([(sequence, np.append(ids[20], np.full(WIDTH, 7, np.int32)))])
    sequence.commit(ids[20:21])  # the drafts are rejected by not being committed
    with raises(BadInput, needed=1, available=0):
        sequence.rewind(1)
    for position in range(21, 36):
        torch.testing.assert_close(go(runner, sequence, ids[position : position + 1]), logits[position])


def test_the_real_ratio_and_window_of_128_can_be_taken_back_across() -> None:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    net = tiny_model("deepseek_v4", compress_rates=rates, sliding_window=128)
    ids, runs = tokens(264, seed=10), []
    for width in (0, WIDTH):
        cache, runner, sequence = opened(net, ids[:1], verify_width=width)
        found = []
        for start, stop in ((0, 122), (134, 250)):
            go(runner, sequence, ids[start:stop])
            for token in ids[stop : {122: 134, 250: 264}[stop]]:
                if width:
                    go(runner, sequence, (token + np.arange(1, 1 + width)) % VOCAB)
                    sequence.rewind(width)
                found.append(go(runner, sequence, [token]))
        runs.append((torch.stack(found), readable(cache, sequence)))
    assert torch.equal(runs[0][0], runs[1][0])
    equal(runs[1][1], runs[0][1])


def test_checkpoints_stay_right_when_their_sequence_is_taken_back() -> None:
    """A checkpoint is a copy: one behind the point of return still serves its own text, and one made over stale ring
    rows serves as if they had never been there."""
    ids, logits, rows = never_wrong("raw", 36)
    cache, runner, sequence = opened(model(), ids[:33], verify_width=WIDTH)
    for token in ids[:32]:
        go(runner, sequence, [token])
    assert len(cache.core.prefix.tree.checkpoints.by_state) == 1
    sequence.rewind(4)
    for token in (ids[28:36] + 1) % VOCAB:
        go(runner, sequence, [token])
    sequence.close()
    with cache.open(ids) as again:
        assert again.cached_tokens == 32
        equal(readable(cache, again), rows[31])
        with raises(BadInput, needed=1, available=0):
            again.rewind(1)
        for position in range(32, 36):
            assert torch.equal(go(runner, again, ids[position : position + 1]), logits[position])
    cache, runner, sequence = opened(model(), ids[:1], verify_width=WIDTH)
    for token in ids[:15]:
        go(runner, sequence, [token])
    go(runner, sequence, [1, 2, 3, 4])
    sequence.rewind(4)
    go(runner, sequence, ids[15:16])
    sequence.close()
    with cache.open(ids) as again:
        assert again.cached_tokens == 16
        equal(readable(cache, again), rows[15])
        for position in range(16, 36):
            assert torch.equal(go(runner, again, ids[position : position + 1]), logits[position])
    cache.check()


@pytest.mark.parametrize("kv_format", ["raw", "fp8"])
def test_every_boundary_is_resumed_with_the_rows_that_were_there(kv_format: str) -> None:
    """A request resumes at block boundaries with a checkpoint and nowhere else: there every ring row, both compressors'
    overlap rows, entries and keys are those of the run that made them, and the next token computes the same."""
    ids, logits, rows = never_wrong(kv_format, 36)
    net, schema = small(kv_format)
    cache, runner, sequence = opened(net, ids, checkpoint_every=1, **schema)
    for token in ids:
        go(runner, sequence, [token])
    sequence.close()
    for prompt_length in range(1, 37):
        prompt = np.append(ids[:prompt_length], (ids[prompt_length % 36] + 1) % VOCAB)  # parts from the text here
        with cache.open(prompt) as again:
            at = prompt_length // 16 * 16
            assert again.cached_tokens == at and again.match.num_tokens == min(prompt_length, 32)
            assert again.match.limited_by == ("nothing" if again.match.num_tokens == at else "alignment")
            if prompt_length in (16, 17, 31, 32, 33):
                equal(readable(cache, again), rows[at - 1])
                if prompt_length > at:
                    assert torch.equal(go(runner, again, ids[at : at + 1]), logits[at])


def test_a_fork_goes_on_at_any_position_with_pending_rows() -> None:
    """Positions between boundaries are resumed by fork alone: tails of open windows go along with the state row."""
    ids, logits, rows = never_wrong("raw", 36)
    cache, runner, sequence = opened(model(), ids[:1], verify_width=WIDTH)
    for position in range(35):
        go(runner, sequence, ids[position : position + 1])
        with sequence.fork(reserve=position + 2 + WIDTH) as child:
            equal(readable(cache, child), rows[position])
            go(runner, child, np.full(WIDTH, 3, np.int32))
            child.rewind(WIDTH)
            assert torch.equal(go(runner, child, ids[position + 1 : position + 2]), logits[position + 1])
        equal(readable(cache, sequence), rows[position])
