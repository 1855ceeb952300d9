"""Copies between layouts: equal to a walk over every element, for random layouts, ranks, pages and token slots."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from plain_layout import Content, Plain, made, random_content, random_plain

from kvpagoda.errors import BadInput, LayoutError
from kvpagoda.layouts import Layout, copying, named, reshard
from raises import raises

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "tp_spans.npz"


def ranges_of(content: Content, tp: int, pp: int) -> list[dict[str, range]]:
    """What each rank holds, stage by stage."""
    found = []
    for stage in range(pp):
        for rank in range(tp):
            held = {axis: range(size) for axis, size in content.sizes.items()}
            short, longer = divmod(content.sizes["L"], pp)
            first = stage * short + min(stage, longer)
            held["L"] = range(first, first + short + (stage < longer))
            if "H" in held:
                heads = content.sizes["H"]
                first, count = rank * heads // tp, max(1, heads // tp)
                held["H"] = range(first, first + count)
            found.append(held)
    return found


def random_side(rng: random.Random, content: Content) -> tuple[list[Plain], list[Layout]]:
    heads = content.sizes.get("H", 1)
    tp = rng.choice([ways for ways in (1, 1, 2, 4) if heads % ways == 0 or ways % heads == 0])
    pp = rng.randint(1, min(2, content.sizes["L"]))
    plains, layouts = [], []
    for held in ranges_of(content, tp, pp):
        plain, page = random_plain(rng, content, held)
        plains.append(plain)
        layouts.append(made(plain, content, page))
    return plains, layouts


def value_of(part: str, indices: tuple[int, ...], byte: int) -> int:
    return hash((ord(part), indices, byte)) & 0xFF


def with_token(
    content: Content, part: str, indices: tuple[int, ...], slots: list[int] | None
) -> tuple[int, ...] | None:
    """The indices with the token in place of its slot; None for a slot that is not among ``slots``."""
    at = content.parts[part][1].index("T")
    if slots is None:
        return indices
    if indices[at] not in slots:
        return None
    return (*indices[:at], slots.index(indices[at]), *indices[at + 1 :])


def check_random(seed: int, threads: int = 1) -> None:
    rng = random.Random(seed)
    contents = [random_content(rng)]
    tokens, slots = contents[0].sizes["T"], [None, None]
    contents.append(Content({**contents[0].sizes}, contents[0].parts, contents[0].pieces))
    if rng.random() < 0.3:
        for side in (0, 1):
            contents[side].sizes["T"] += rng.randint(0, 3)
            slots[side] = rng.sample(range(contents[side].sizes["T"]), tokens)
    sides = [random_side(rng, content) for content in contents]
    memories = []
    for (plains, layouts), content, given, other in zip(sides, contents, slots, (0xAA, 0x55)):
        wanted = []
        for plain, layout in zip(plains, layouts):
            memory = np.full(layout.nbytes, other, np.uint8)
            for at, (part, indices, byte) in plain.bytes().items():
                indices = with_token(content, part, indices, given)
                if indices is not None:
                    memory[at] = value_of(part, indices, byte)
            assert plain.end == layout.nbytes
            wanted.append(memory)
        memories.append(wanted)
    plan = reshard(sides[0][1], sides[1][1], source_slots=slots[0], target_slots=slots[1])
    moved = [np.full(len(memory), 0x55, np.uint8) for memory in memories[1]]
    plan.run(memories[0], moved, threads)
    for found, wanted in zip(moved, memories[1]):
        assert np.array_equal(found, wanted), seed
    by_spans = [np.full(len(memory), 0x55, np.uint8) for memory in memories[1]]
    for (source, target), spans in plan.by_rank.items():
        for begin, put, nbytes in spans.tolist():
            by_spans[target][put : put + nbytes] = memories[0][source][begin : begin + nbytes]
        ends = spans[:-1] + spans[:-1, 2:]
        assert np.all(spans[1:, 0] >= ends[:, 0]) and not np.any(np.all(ends[:, :2] == spans[1:, :2], axis=1)), seed
    for found, wanted in zip(by_spans, memories[1]):
        assert np.array_equal(found, wanted), seed


def test_random_pairs_move_what_a_walk_over_every_element_moves() -> None:
    for seed in range(400):
        check_random(seed)


def test_threads_share_what_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here everything is long."""
    for name in ("ALONE", "SHARED", "GATHERED"):
        monkeypatch.setattr(copying, name, 1)
    for seed in range(100):
        check_random(seed, threads=3)


def test_tokens_that_lie_anywhere_move_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pool, dense = Layout.of("B L N k[D]:uint16", B=50, L=2, N=3, D=5), Layout.of("L T k[D]:uint16", L=2, T=40, D=5)
    source = rng.integers(0, 256, pool.nbytes).astype(np.uint8)
    for gathered in (1, 64, 1 << 18):
        monkeypatch.setattr(copying, "GATHERED", gathered)
        slots, moved = rng.permutation(150)[:40], np.zeros(dense.nbytes, np.uint8)
        reshard(pool, dense, source_slots=slots).run(source, moved)
        rows = source.view(np.uint16).reshape(50, 2, 3, 5)[slots // 3, :, slots % 3].transpose(1, 0, 2)
        assert np.array_equal(moved.view(np.uint16).reshape(2, 40, 5), rows)


PAIR = Layout.of("B N k[D]:uint8", B=2, N=4, D=8), Layout.of("N B k[D]:uint8", B=2, N=4, D=8)
"""Two layouts of 64 bytes."""


@pytest.mark.parametrize(
    ("sources", "targets", "figures"),
    [
        (np.zeros(63, np.uint8), np.zeros(64, np.uint8), {"field": "source", "needed": 64, "available": 63}),
        (np.zeros(64, np.uint8), bytes(64), {"needed": "writeable memory", "available": 0}),
        (np.zeros(64, np.uint8), [np.zeros(64, np.uint8)] * 2, {"field": "target", "needed": 1}),
        (
            np.zeros((8, 16), np.uint8)[:, ::2],
            np.zeros(64, np.uint8),
            {"field": "source", "needed": 0, "available": "pieces"},
        ),
        (None, np.zeros(64, np.uint8), {"field": "source", "needed": 0}),
    ],
)
def test_memory_that_cannot_be_is_refused_before_anything_moves(
    sources: object, targets: object, figures: dict[str, Any]
) -> None:
    with raises(BadInput, **figures):
        reshard(*PAIR).run(sources, targets)


def test_memory_that_overlaps_is_refused() -> None:
    memory = np.arange(100, dtype=np.uint8)
    with raises(BadInput, needed="memory of its own", available=0):
        reshard(*PAIR).run(memory[:64], memory[30:94])
    rank = np.zeros(32, np.uint8)
    latent = Layout.of("T k[D]:uint8", T=4, D=8)
    with raises(BadInput, needed="memory of its own", available=1):
        reshard(latent, latent.split(tp=2)).run(memory[:32].copy(), [rank, rank])
    assert np.array_equal(memory, np.arange(100))


def test_memory_may_be_a_tensor_or_a_buffer() -> None:
    torch = pytest.importorskip("torch")
    source = np.arange(64, dtype=np.uint8)
    wanted = source.reshape(2, 4, 8).transpose(1, 0, 2).ravel()
    tensor, buffer = torch.zeros(32, dtype=torch.int16), bytearray(64)
    plan = reshard(*PAIR)
    plan.run(torch.from_numpy(source), tensor)
    plan.run(source, [buffer])
    half, given = torch.zeros(8, 4, dtype=torch.bfloat16), torch.from_numpy(source).view(torch.bfloat16)
    plan.run(given, half)
    assert np.array_equal(half.view(torch.uint8).numpy().ravel(), wanted)
    for wrong in (half.t(), torch.zeros(64, dtype=torch.uint8, device="meta")):
        with raises(BadInput, field="target", needed=0):
            plan.run(source, wrong)
    assert np.array_equal(tensor.numpy().view(np.uint8), wanted) and bytes(buffer) == wanted.tobytes()


def test_what_is_not_of_one_content_is_refused() -> None:
    sizes = dict(L=2, T=8, H=4, D=8)
    layout = Layout.of("L T H k[D]:uint8", **sizes)
    others = [
        (Layout.of("L T H v[D]:uint8", **sizes), ["k", "v"], None),
        (Layout.of("L T H k[D]:int8", **sizes), "k", None),
        (Layout.of("L T H k[E]:uint8", L=2, T=8, H=4, E=8), "k", None),
        (layout.resized(L=3), "k", None),
        (layout.resized(T=9), "k", None),
        (replace(layout, format="dsv4_584"), "dsv4_584", "raw"),
    ]
    for other, needed, available in others:
        with raises(LayoutError, rule="content", needed=needed, available=available):
            reshard(layout, other)
    with raises(BadInput, needed="str"):
        reshard(layout, "vllm")  # type: ignore[arg-type]


def test_ranks_that_do_not_add_up_are_refused() -> None:
    layout = Layout.of("L T H k[D]:uint8", L=2, T=8, H=4, D=8)
    ranks = layout.split(tp=2)
    with raises(LayoutError, needed=512, available=128, rule="shards") as raised:
        reshard(layout.split(tp=4)[:1], layout)
    assert raised.value.rule == "shards"
    with raises(LayoutError, needed="k", rule="shards"):
        reshard([layout, ranks[0]], layout)
    assert {*reshard(ranks[1:], ranks[1:]).by_rank} == {(0, 0)}


@pytest.mark.parametrize("slots", [[0, 8], [-1, 2], [1, 1], [[1]], [0.5], []])
def test_slots_that_cannot_be_are_refused(slots: list[object]) -> None:
    with raises(BadInput, field="source_slots", needed=ANY, available=ANY):
        reshard(*PAIR, source_slots=slots)


def test_what_all_ranks_hold_comes_from_different_ones() -> None:
    latent = Layout.of("L T k[D]:uint8", L=1, T=4, D=8)
    assert [*reshard(latent.split(tp=4), latent.split(tp=8)).by_rank] == [(rank // 2, rank) for rank in range(8)]
    assert [*reshard(latent.split(tp=8), latent.split(tp=2)).by_rank] == [(0, 0), (4, 1)]


def test_bytes_that_are_no_content_move_where_both_sides_have_them() -> None:
    """A row with a spare byte stays one span; where the other side has none, it is left as it was."""
    row = "B (N k[D]:uint8 | N (s[G]:uint8 | pad:uint8))"
    layout = Layout.of(row, B=3, N=4, D=8, G=3)
    assert reshard(layout, layout.resized()).spans.tolist() == [[0, 0, layout.nbytes]]
    other = Layout.of("B N (k[D]:uint8 | s[G]:uint8)", B=3, N=4, D=8, G=3)
    assert reshard(other, layout).nbytes == other.nbytes == layout.payload_nbytes
    wider = Layout.of(row.replace("pad:", "pad[2]:"), B=3, N=4, D=8, G=3)
    for several in ([layout, other], [layout, wider], [other, layout], [layout, layout]):
        moved = reshard(layout, several)
        alike = several == [layout, layout]
        assert moved.nbytes == 2 * (layout.nbytes if alike else layout.payload_nbytes)


def test_transfers_are_bounded_slices_at_addresses() -> None:
    plan = reshard(Layout.of("B@12 k[D]:uint8", B=3, D=10), Layout.of("B k[D]:uint8", B=3, D=10))
    begins, puts, nbytes = plan.transfers((0, 0), 1000, 5000, most=4)
    assert begins.tolist() == [1000, 1004, 1008, 1012, 1016, 1020, 1024, 1028, 1032]
    assert puts.tolist() == [5000, 5004, 5008, 5010, 5014, 5018, 5020, 5024, 5028] and nbytes.tolist() == [4, 4, 2] * 3
    assert [one.tolist() for one in plan.transfers((0, 0), 0, 0)] == [[0, 12, 24], [0, 10, 20], [10, 10, 10]]
    with raises(BadInput, field="most", needed=0, available=1):
        plan.transfers((0, 0), 0, 0, most=0)
    with raises(BadInput, needed=(0, 1), available=(1, 1)):
        plan.transfers((0, 1), 0, 0)
    with raises(BadInput, field="threads", needed=0, available=1):
        plan.run(bytes(36), bytearray(30), threads=0)


def test_transfers_between_lists_of_tensors() -> None:
    """K and V lists of one tensor a layer, to one tensor a layer of packed cells."""
    source, target = named("sglang-mha", layers=3, tokens=32), named("vllm-lbnhc", layers=3, tokens=32)
    content = np.random.default_rng(0).integers(0, 256, source.nbytes).astype(np.uint8)
    wanted = np.zeros(target.nbytes, np.uint8)
    plan = reshard(source, target)
    plan.run(content, wanted)
    memory, gap = np.zeros(2 * source.nbytes + 100_000, np.uint8), 1_000
    tensors = [gap + number * (source.nbytes // 6 + gap) for number in (3, 0, 5, 1, 4, 2)]
    layers = [source.nbytes + 20_000 + number * (target.nbytes // 3 + gap) for number in (2, 0, 1)]
    for address, part in zip(tensors, np.split(content, 6)):
        memory[address : address + len(part)] = part
    transfers = plan.transfers((0, 0), tensors, layers, most=1 << 16)
    for begin, put, nbytes in zip(*(one.tolist() for one in transfers)):
        memory[put : put + nbytes] = memory[begin : begin + nbytes]
    for address, part in zip(layers, np.split(wanted, 3)):
        assert np.array_equal(memory[address : address + len(part)], part)
    assert np.array_equal(reshard(source, source).transfers((0, 0), tensors, 0)[2], [source.nbytes // 6] * 6)
    with raises(BadInput, needed=393216, available=7):
        plan.transfers((0, 0), 0, [0] * 7)


@pytest.fixture(scope="module")
def vectors() -> dict[str, np.ndarray]:
    if not VECTORS.exists():
        pytest.skip(f"no vectors at {VECTORS}")
    return dict(np.load(VECTORS))


def states(rows: int, nbytes: int, total: list[int]) -> Layout:
    """A convolution state: every part cut for itself, ``nbytes`` bytes a channel and row, rows outermost."""
    parts = " | ".join(f"p{i}[C{i},E]:uint8" for i in range(len(total)))
    sizes = {f"C{i}": size for i, size in enumerate(total)}
    return Layout.of(f"R ({parts})", R=rows, E=nbytes, pieces=sizes, **sizes)


def by_byte(spans: np.ndarray) -> dict[int, int]:
    return {begin + i: put + i for begin, put, nbytes in spans.tolist() for i in range(nbytes)}


def test_convolution_states_are_cut_part_by_part_as_sglang_does(vectors: dict[str, np.ndarray]) -> None:
    cases, wanted = vectors["sglang_cases"], vectors["sglang_spans"].astype(np.int64)
    assert len(cases) > 200
    for number, case in enumerate(cases.tolist()):
        source_bytes, _, source_dim, _, rows, ways, target_ways, target, source, *parts = case
        dims = [part for part in parts if part] or [source_dim * ways]
        layout = states(rows, source_bytes // source_dim // rows, dims)
        spans = reshard(layout.split(ways), layout.split(target_ways)).by_rank[source, target]
        assert by_byte(spans) == by_byte(wanted[wanted[:, 0] == number, 1:]), case
        assert len(spans) <= (wanted[:, 0] == number).sum()


def test_remote_convolution_pages_are_read_as_vllm_does(vectors: dict[str, np.ndarray]) -> None:
    """A positive ratio: the target has so many times more ranks than the source; negative: fewer."""
    for number, (rows, itemsize, ratio, rank, *local) in enumerate(vectors["vllm_conv_cases"].tolist()):
        dims = [dim for dim in local if dim]
        wanted = vectors["vllm_conv_spans"]
        wanted = wanted[wanted[:, 0] == number, 1:].astype(np.int64)
        total = [dim * max(ratio, 1) for dim in dims]
        layout = states(1, rows * itemsize, total)
        sources, targets = (1, ratio) if ratio > 0 else (-ratio, 1)
        plan = reshard(layout.split(sources), layout.split(targets))
        found = plan.by_rank[0, rank] if ratio > 0 else plan.by_rank[rank, 0]
        assert by_byte(found[:, [0, 0, 2]]) == by_byte(wanted[:, [0, 0, 1]]), number


def test_ranks_hold_the_heads_that_vllm_gives_them(vectors: dict[str, np.ndarray]) -> None:
    for heads, ways, rank, first, count in vectors["gqa_heads"].tolist():
        axis = Layout.of("H k:uint8", H=heads).split(ways)[rank].axis("H")
        assert (axis.first, axis.size) == (first, count)


def test_heads_are_found_in_a_remote_page_where_vllm_finds_them(vectors: dict[str, np.ndarray]) -> None:
    for heads, local_ways, remote_ways, rank, offset in vectors["vllm_head_offset"].tolist():
        layout = Layout.of("H k:uint8", H=heads)
        plan = reshard(layout.split(remote_ways), layout.split(local_ways))
        source = next(source for source, target in plan.by_rank if target == rank)
        held = layout.split(local_ways)[rank].axis("H").size
        assert plan.by_rank[source, rank][0, 0] == offset * held, (heads, local_ways, remote_ways, rank)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1_000_000, 50_000))
def test_many_random_pairs(first: int) -> None:
    for seed in range(first, first + 50_000):
        check_random(seed)


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("vllm-int8-head", "gqa_int8_head"),
        ("vllm-fp8-head", "gqa_fp8_head"),
        ("vllm-nvfp4", "gqa_nvfp4"),
        ("kvpagoda-int4", "gqa_int4_group"),
    ],
)
def test_scales_go_with_their_heads(layout: str, format: str) -> None:
    """Pages of 4 heads are divided over 2 ranks: each rank has the pages of its heads, packed anew, byte for byte."""
    torch = pytest.importorskip("torch")
    from kvpagoda.layouts import pack

    sizes = dict(layers=1, page_size=16, head_dim=64, heads=4)
    rows = torch.randn(2, 16, 2, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()  # K or V, head
    whole = pack(rows.flatten(2), format, page_size=16).numpy().ravel()
    source, targets = named(layout, tokens=32, **sizes), named(layout, tokens=32, **sizes).split(tp=2)
    memories = [np.zeros(target.nbytes, np.uint8) for target in targets]
    reshard(source, targets).run([whole], memories)
    for rank, memory in enumerate(memories):
        mine = rows[:, :, :, 2 * rank : 2 * rank + 2].flatten(2).contiguous()
        assert np.array_equal(memory, pack(mine, format, page_size=16).numpy().ravel())
    back = np.zeros_like(whole)
    reshard(targets, source).run(memories, [back])
    assert np.array_equal(back, whole)
