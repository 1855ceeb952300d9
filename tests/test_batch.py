"""What an engine needs for a step: views of memory without a step, index arrays of fixed shape, rows written to the
slots that ``slot_mapping`` names, and commits of the drafts that were accepted."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from kvpagoda import Batch, KVCache, LayerView, Limits, Schema
from kvpagoda.core.batch.batch import GroupArrays
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.formats.dialects import DIALECTS
from kvpagoda.schema import Attention, Compressed, Encoding, Growth, Latent, Layer, LayerKind, Recurrent, Rows
from late_device import Late
from raises import raises

FULL = Attention(2, 4, 4, "float32")
WINDOW = Attention(2, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("recurrent", (3,), "float32"),))
ARRAYS = ("block_table", "cache_seqlens", "slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_start")


def cache_of(*kinds: LayerKind, **arguments: Any) -> KVCache:
    layers = tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds))
    usual = {"budget": "256KiB", "max_requests": 8, "block_size": 4, "device": "cpu"}
    return KVCache(Schema(layers, "test", vocab_size=100), **{**usual, **arguments})


def prefilled(cache: KVCache, length: int, first: int) -> Any:
    """Return a sequence whose prompt, ``length`` tokens counted up from ``first``, is committed."""
    sequence = cache.open([(first + i) % 100 for i in range(length)])
    sequence.commit([(first + i) % 100 for i in range(sequence.length, length)])
    return sequence


def test_memory_of_every_layer_without_a_step() -> None:
    cache = cache_of(FULL, WINDOW, STATE)
    before = [cache.layer(i)[name] for i, name in ((0, "k"), (1, "v"), (2, "recurrent"))]
    sequence = prefilled(cache, 9, 0)
    batch = cache.batch([sequence], [1]) if sequence.extend(1) is None else None
    assert batch is not None
    after = [batch.layer(i)[name] for i, name in ((0, "k"), (1, "v"), (2, "recurrent"))]
    assert [one.data_ptr() for one in before] == [one.data_ptr() for one in after]
    assert [one.shape for one in before] == [one.shape for one in after]
    view = cache.layer(0)
    assert view.step is None and view.blocks is not None and view.state is None
    with raises(BadInput, needed=0):
        _ = view.block_table
    with raises(BadInput, needed=3, available=[0, 1, 2]):
        cache.layer(3)
    with raises(BadInput, field="a layer's index", needed=True, available=0):
        cache.layer(True)


@pytest.mark.parametrize("encoding", [Encoding(), Encoding("fp8")], ids=["raw", "fp8"])
def test_write_does_what_slot_mapping_says(encoding: Encoding) -> None:
    cache = cache_of(Attention(2, 8, 8, "bfloat16", encoding=encoding), WINDOW)
    one, two = prefilled(cache, 6, 0), prefilled(cache, 9, 50)
    for sequence in (one, two):
        sequence.extend(3)
    view = cache.batch([one, two], [3, 2], pad_to=3).layer(0)
    k, v = torch.randn(2, 6, 2, 8).bfloat16().unbind()
    view.write(k=k, v=v.view(6, 2, 8))
    slots = view.slot_mapping.long()[:5]
    for name, rows in (("k", k), ("v", v)):
        found = view.blocks.read(name, (slots // 4, slots % 4))
        assert torch.equal(found, view.blocks.stored(name, rows[:5]))
    again = torch.randn(2, 3, 2, 8).bfloat16()  # rows of the batch and their tokens as two axes
    view.write(k=again, v=again)
    assert torch.equal(view.blocks.read("k", (slots // 4, slots % 4)), view.blocks.stored("k", again.view(6, 2, 8)[:5]))


def test_write_joins_what_is_packed_in_one_row() -> None:
    packed = Encoding("gqa_int8_head", dialect="vllm", head_dim=64)
    cache = cache_of(Attention(2, 64, 64, "bfloat16", encoding=packed), budget="1MiB")
    sequence = prefilled(cache, 6, 0)
    sequence.extend(3)
    view = cache.batch([sequence], [3]).layer(0)
    k, v = torch.randn(2, 3, 2, 64).bfloat16().unbind()
    view.write(k=k, v=v)
    slots = view.slot_mapping.long()
    kv = torch.stack((k, v), dim=1)
    found = view.blocks.read("kv", (slots // 4, slots % 4))
    assert torch.equal(found, view.blocks.stored("kv", kv)) and (found - kv).abs().max() < 0.05
    name = next(
        name
        for name in DIALECTS
        for dialect in DIALECTS[name]
        if Encoding(name, dialect=dialect).rules.packing.width == 576
    )
    latents = cache_of(
        Latent(512, 64, "bfloat16", encoding=Encoding(name, dialect=next(iter(DIALECTS[name])))), budget="1MiB"
    )
    sequence = latents.open(range(3))
    view = latents.batch([sequence], [3]).layer(0)
    latent, k_rope = torch.randn(3, 1, 512).bfloat16(), torch.randn(3, 1, 64).bfloat16()
    view.write(latent=latent, k_rope=k_rope)
    slots = view.slot_mapping.long()
    found = view.blocks.read("latent", (slots // 4, slots % 4))
    assert torch.equal(found, view.blocks.stored("latent", torch.cat((latent, k_rope), dim=-1)))
    assert (found - torch.cat((latent, k_rope), dim=-1)).abs().max() < 0.3


def test_write_takes_a_single_head_without_its_axis() -> None:
    packed = Encoding("v32_656", dialect="flashmla")
    for kind, given in (
        (Latent(512, 64, "bfloat16"), {"latent": 512, "k_rope": 64}),
        (Latent(512, 64, "bfloat16", encoding=packed), {"latent": 512, "k_rope": 64}),
        (Latent(512, 64, "bfloat16", encoding=packed), {"latent": 576}),
        (Attention(1, 64, 64, "bfloat16"), {"k": 64, "v": 64}),
        (
            Attention(1, 64, 64, "bfloat16", encoding=Encoding("gqa_int8_head", dialect="vllm", head_dim=64)),
            {"k": 64, "v": 64},
        ),
    ):
        cache = cache_of(kind, budget="1MiB")
        sequence = cache.open(range(3))
        view = cache.batch([sequence], [3]).layer(0)
        rows = {name: torch.randn(3, 1, width).bfloat16() for name, width in given.items()}
        index = (view.slot_mapping.long() // 4, view.slot_mapping.long() % 4)
        view.write(**rows)
        wanted = {name: view.blocks.read(name, index) for name in view.blocks.rows}
        for name in view.blocks.fields:
            view[name].zero_()
        view.write(**{name: one[:, 0] for name, one in rows.items()})
        assert all(torch.equal(view.blocks.read(name, index), one) and one.any() for name, one in wanted.items())
    with raises(BadInput, needed=[3, 1, 576], available="latent [3, 1, 576], k_rope [3, 1, 64]"):
        cache = cache_of(Latent(512, 64, "bfloat16", encoding=packed), budget="1MiB")
        view = cache.batch([cache.open(range(3))], [3]).layer(0)
        view.write(latent=torch.ones(3, 1, 576).bfloat16(), k_rope=torch.ones(3, 1, 64).bfloat16())
    plain = cache_of(Latent(512, 64, "bfloat16"), budget="1MiB")
    with raises(BadInput, needed=["k_rope", "latent"], available=["latent"]):
        plain.batch([plain.open(range(3))], [3]).layer(0).write(latent=torch.ones(3, 512).bfloat16())


def test_write_refuses_before_it_writes() -> None:
    cache = cache_of(FULL, STATE, Compressed(16, 8, "float32", 4), block_size=8)
    sequence = prefilled(cache, 9, 0)
    sequence.extend(2)
    batch = cache.batch([sequence], [2])
    view, good = batch.layer(0), torch.ones(2, 2, 4)
    before = view["k"].view(torch.int32).clone()
    for rows, figures in [
        ({"k": good, "q": good}, {"needed": "q", "available": ("k", "v")}),
        (
            {"k": good, "v": torch.ones(3, 2, 4)},
            {"needed": [2, 2, 4], "available": "k [2, 2, 4], v [3, 2, 4]"},
        ),
        ({"k": good, "v": torch.ones(2, 4, 2)}, {"needed": [2, 2, 4], "available": "k [2, 2, 4], v [2, 4, 2]"}),
        ({"k": good}, {"needed": ["k", "v"], "available": ["k"]}),
        ({"v": good}, {"needed": ["k", "v"], "available": ["v"]}),
    ]:
        with raises(BadInput, **figures):
            view.write(**rows)
    assert view["k"].view(torch.int32).equal(before)
    with raises(BadInput, needed="layer 1 (Recurrent)"):
        batch.layer(1).write(recurrent=torch.ones(2, 3))
    name = next(iter(batch.layer(2).blocks.rows))
    with raises(BadInput, needed="entries", available=("entries",)):
        batch.layer(2).write(**{name: torch.ones(2, 16)})
    with raises(BadInput, needed=0):
        cache.layer(0).write(k=good)
    sequence.close()
    with raises(StaleHandle, needed="batch", available="over"):
        view.write(k=good)


def test_what_needs_memory_says_that_there_is_none() -> None:
    cache = cache_of(FULL, device="none")
    sequence = prefilled(cache, 3, 0)
    view = cache.batch([sequence], [1], 1).layer(0)
    calls = {
        "field 'k'": lambda: view["k"],
        "tensor of 'k'": lambda: view.tensor("k"),
        "tensors for kernel 'fa2'": lambda: view.kernel_tensor("fa2"),
        "rows to write": lambda: view.write(k=None),
    }
    for what, call in calls.items():
        with raises(BadInput, needed=what, available="layer 0 (Attention)"):
            call()


def test_padded_rows_are_written_to_block_0() -> None:
    cache = cache_of(FULL, device="none")
    batch = cache.batch([prefilled(cache, 3, 0)], [1], pad_to=3)
    assert batch.step.request_slots[1:].tolist() == [-1, -1]
    assert batch.layer(0).slot_mapping[1:].tolist() == [0, 0] < batch.layer(0).slot_mapping[:1].tolist()
    assert batch.layer(0).cache_seqlens.tolist() == [4, 0, 0] and batch.step.request_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("copied", [False, True], ids=["shared memory", "a late device"])
@pytest.mark.parametrize("width", [1, 3])
def test_fixed_shapes(width: int, copied: bool) -> None:
    """Shapes and addresses are the same in every step, whichever sequences are in it; the valid part of each array has
    the values of a fresh batch."""
    cache = cache_of(FULL, WINDOW, STATE)
    graph = cache.persistent_batch(num_rows=4, tokens_per_row=width)
    if copied:
        graph._buffers.arrays = Late()
    columns, seen, members = -(-cache.max_context // 4), set(), []
    for step in range(30):
        if step % 9 == 0:
            members.append(prefilled(cache, 5 + step, 10 * step))
            graph.add(members[-1])
        if step == 20:
            graph.remove(members[0])
            members.pop(0).close()
        batch = graph.extend()
        shown = {name: getattr(batch.layer(i), name) for i in (0, 1) for name in ARRAYS}
        shown |= {name: getattr(batch, name) for name in ("qo_indptr", "positions", "state_indices")}
        shown |= {name: getattr(batch.step, name) for name in ("request_ids", "request_slots", "state_rows")}
        if isinstance(graph._buffers.arrays, Late):
            graph._buffers.arrays.wait()
        seen.add(tuple((name, *one.shape, one.data_ptr()) for name, one in shown.items()))
        assert shown["block_table"].shape == (4, columns) and shown["kv_indices"].shape == (4 * columns,)
        assert len(shown["slot_mapping"]) == len(shown["positions"]) == 4 * width
        assert batch.qo_indptr.tolist() == [0, width, 2 * width, 3 * width, 4 * width]
        order = list(graph.sequences)
        for i in (0, 1):
            view, fresh = batch.layer(i), cache.batch(order, [width] * len(order)).layer(i)
            n, total = len(order), len(fresh.kv_indices)
            for name in ("cache_seqlens", "kv_last_page_len", "kv_start"):
                assert getattr(view, name).tolist() == [*getattr(fresh, name).tolist(), *[0] * (4 - n)]
            assert view.slot_mapping.tolist() == [*fresh.slot_mapping.tolist(), *[0] * ((4 - n) * width)]
            assert view.kv_indices[:total].equal(fresh.kv_indices) and int(view.kv_indptr[-1]) == total
            most = fresh.block_table.shape[1]
            for row, length in enumerate(fresh.cache_seqlens.tolist()):
                assert view.block_table[row, : -(-length // 4)].equal(fresh.block_table[row, :most][: -(-length // 4)])
        graph.commit([1] * len(order))
    assert len(seen) == 1
    with raises(BadInput, needed=width + 1, available=width):
        graph.extend(width + 1)
    with raises(BadInput, field="tokens_per_row", needed=0, available=1):
        cache.persistent_batch(num_rows=4, tokens_per_row=0)


def test_a_prompt_that_is_cached_up_to_its_last_token_joins_a_persistent_batch() -> None:
    cache = cache_of(FULL)
    text = list(range(17))
    with cache.open(text) as first:
        first.commit(text)
    again, other = cache.open(text), prefilled(cache, 5, 50)
    assert again.cached_tokens == 16
    running = cache.persistent_batch([again, other])
    batch = running.extend()
    assert batch.positions.tolist() == [16, 5]
    with raises(BadInput, needed=3, available=16):
        running.commit([3, 60])
    assert (again.length, other.length) == (16, 5)
    running.commit([16, 60])
    assert again.tokens.tolist() == text and other.tokens[-1] == 60
    running.extend()
    running.commit([70, 61])
    assert again.tokens.tolist() == [*text, 70]
    cache.check()


def test_accepted_drafts_are_committed_for_all_rows_at_once() -> None:
    """Commits of accepted drafts for all rows at once leave the same texts and cache as commits of single sequences."""
    random = np.random.default_rng(0)
    together, alone = (cache_of(FULL, WINDOW) for _ in range(2))
    members = [prefilled(together, 3 + i, 20 * i) for i in range(4)]
    others = [prefilled(alone, 3 + i, 20 * i) for i in range(4)]
    running = together.persistent_batch(members, num_rows=5, tokens_per_row=6)
    for _ in range(25):
        counts = random.integers(0, 7, 4)
        tokens = [random.integers(0, 100, n).astype(np.int32) for n in counts]
        running.extend()
        running.commit(np.concatenate(tokens), counts)
        for other, accepted in zip(others, tokens):
            other.extend(6)
            other.commit(accepted)
        for member, other in zip(members, others):
            assert member.tokens.tolist() == other.tokens.tolist()
        together.check()
    for member, other in zip(members, others):
        text = [*member.tokens.tolist(), 1]
        assert together.lookup(text).resumable == alone.lookup(text).resumable >= other.length - other.length % 4 - 4


def test_commit_checks_its_counts_first() -> None:
    cache = cache_of(FULL)
    running = cache.persistent_batch([prefilled(cache, 4, 0), prefilled(cache, 4, 50)])
    running.extend(3)
    for tokens, counts, figures in [
        ([1, 2, 3], [1, 1], {"needed": 2, "available": 3}), ([1], [1], {"needed": 2, "available": [1]}),
        ([1, 2], [1.0, 1.0], {"needed": 2, "available": [1.0, 1.0]}),
        ([1], [2, -1], {"needed": 2, "available": [2, -1]}),
        ([1] * 6, [5, 1], {"needed": 6, "available": 6}),
    ]:  # fmt: skip
        with raises(BadInput, **figures):
            running.commit(tokens, counts)
    assert [one.length for one in running.sequences] == [4, 4]
    running.commit([], [0, 0])
    running.commit([7, 8, 9], [0, 3])
    assert [one.length for one in running.sequences] == [4, 7]


def test_flat_indices_past_int32_need_rows_of_int64() -> None:
    schema = Schema((Layer(0, "full", (FULL,)),), "test", vocab_size=100)
    size = 2**19
    cache = KVCache(
        schema,
        num_blocks=4_200,
        block_size=size,
        max_requests=3,
        limits=Limits(max_context=2_060 * size),
        device="none",
    )
    for token in (1, 2):
        cache.open([token]).extend(2_060 * size)
    view = cache.batch([cache.open([3])], [1]).layer(0)
    first = int(view.block_table[0, 0]) * size
    assert first >= 2**31
    with raises(BadInput, needed=2202533887, available=np.dtype("int32")):
        view.flat_indices(np.array([[3, -1]], np.int32))
    assert view.flat_indices(np.array([[3, -1]])).tolist() == [[first + 3, -1]]


def test_help_lists_the_index_arrays() -> None:
    told = inspect.getdoc(Batch) or ""
    for number, name in enumerate(("qo_indptr", "positions", "state_indices", "state_writes"), 1):
        assert f"{number}  {name} " in told
    for number, name in enumerate(ARRAYS, 8):
        assert f"{number}  {name} " in told
        assert inspect.getdoc(getattr(LayerView, name)) == inspect.getdoc(getattr(GroupArrays, name))


def test_rows_with_a_gradient_are_written_without_their_graph():
    """Otherwise the memory of the pool would keep the graph of every step."""
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    cache = KVCache(Schema.from_hf_config(config), "64KiB", device="cpu", dtype="float32")
    sequence = cache.open([1, 2, 3])
    layer = cache.batch([sequence], [3]).layer(0)
    rows = torch.ones(3, 1, 8, requires_grad=True)
    layer.write(k=2 * rows, v=3 * rows)
    at, parts = (
        (layer.slot_mapping // cache.block_size, layer.slot_mapping % cache.block_size),
        [*layer.blocks.fields.values()],
    )
    assert not any(part.requires_grad for part in parts)
    assert all((layer.blocks.read(name, at) == value).all() for name, value in (("k", 2), ("v", 3)))
