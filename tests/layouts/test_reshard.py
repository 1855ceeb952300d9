"""Copies between layouts: equal to a walk over every element, for random layouts, ranks, pages and token slots."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from plain_layout import Content, Plain, made, random_content, random_plain

from kvpagoda.layouts import Layout, reshard

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "tp_spans.npz"
SLOW_SEEDS = 1_000_000


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
    return zlib.crc32(repr((part, indices, byte)).encode()) & 0xFF


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


def check_random(seed: int) -> None:
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
    plan.run(memories[0], moved)
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
def test_many_random_pairs() -> None:
    for seed in range(SLOW_SEEDS):
        check_random(seed)
