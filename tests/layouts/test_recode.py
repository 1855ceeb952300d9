"""A copy to another dialect: equal to unpacking and packing, whatever else differs; refused before anything moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvpagoda.errors import BadInput, LayoutError
from kvpagoda.layouts import Layout, named, reshard
from kvpagoda.layouts.axes import Axis
from kvpagoda.layouts.named import table

torch = pytest.importorskip("torch")
from kvpagoda.formats.dialects import dialect_of  # noqa: E402
from kvpagoda.layouts import pack, unpack  # noqa: E402
from raises import raises  # noqa: E402

TOKENS, LAYERS = 70, 2
PAIRS = [
    ("dsv4_584", 512, ("flashmla-dsv4", "flashmla", 64), ("vllm-dsv4", "vllm", 32)),
    ("v32_656", 576, ("flashmla-v32", "flashmla", 64), ("vllm-v32", "vllm", 32)),
    ("v32_656", 576, ("flashmla-v32", "flashmla", 64), ("sglang-dsa", "sglang_raw", None)),
    ("v41_528", 512, ("sglang-v41", "sglang_footer", 16), ("vllm-v41", "vllm_rows", 64)),
    ("index_132", 128, ("deepgemm-indexer", "deepgemm", 64), ("vllm-indexer", "pow2_emulated", 32)),
    ("index_68", 128, ("deepgemm-indexer-fp4", "deepgemm", 64), ("sglang-indexer-fp4", "sglang_rne", 64)),
]


def rows_of(width: int) -> torch.Tensor:
    """bfloat16 ``[layers, tokens, width]`` of many magnitudes; some below every floor."""
    generator = torch.Generator().manual_seed(0)
    scale = 2 ** torch.linspace(-18, 6, TOKENS).reshape(1, TOKENS, 1)
    return (torch.randn(LAYERS, TOKENS, width, generator=generator) * scale).to(torch.bfloat16)


def page_of(layout: Layout, page_size: int) -> Layout:
    """The same content in pages as ``pack`` gives them."""
    page = f"L B {table()['pages'][layout.format][layout.dialect]}"
    return Layout(page, layout.axes, page_size, format=layout.format, dialect=layout.dialect)


def filled(layout: Layout, rows: torch.Tensor) -> np.ndarray:
    """The memory of a whole layout that holds these rows: packed in pages of one row, then moved."""
    packed = pack(rows.reshape(-1, 1, rows.shape[-1]), layout.format, page_size=1, dialect=layout.dialect)
    moved = np.zeros(layout.nbytes, np.uint8)
    reshard(page_of(layout, 1), layout).run(packed.numpy().ravel(), moved)
    return moved


@pytest.mark.parametrize(("format", "dialect"), [(f, d) for f, pages in table()["pages"].items() for d in pages])
def test_the_pages_that_are_known_are_those_that_pack_gives(format: str, dialect: str) -> None:
    width = dialect_of(format).packing.width
    axes = (Axis("L", 1, 1), Axis("T", 64, 64))
    layout = Layout(f"L B {table()['pages'][format][dialect]}", axes, 1, format=format, dialect=dialect)
    rows = rows_of(width)[:1, :64]
    packed = pack(rows.reshape(4, 16, width), format, page_size=16, dialect=dialect).numpy()
    assert packed.size == layout.nbytes and np.array_equal(filled(page_of(layout, 16), rows), packed.ravel())


@pytest.mark.parametrize(("format", "width", "one", "other"), PAIRS)
@pytest.mark.parametrize("forth", [True, False])
def test_rows_are_encoded_anew(format: str, width: int, one: tuple, other: tuple, forth: bool) -> None:  # type: ignore[type-arg]
    layouts = [
        named(name, dialect=dialect, layers=LAYERS, tokens=TOKENS, **({} if page is None else {"page_size": page}))
        for name, dialect, page in ((one, other) if forth else (other, one))
    ]
    rows = rows_of(width)
    source, target = filled(layouts[0], rows), np.zeros(layouts[1].nbytes, np.uint8)
    plan = reshard(*layouts)
    assert f"{format} from dialect {layouts[0].dialect!r} to {layouts[1].dialect!r}" in str(plan)
    plan.run(source, target)
    page = pack(rows.reshape(-1, 1, width), format, page_size=1, dialect=layouts[0].dialect)
    back = unpack(page, format, page_size=1, dialect=layouts[0].dialect, dtype=torch.bfloat16)
    wanted = filled(layouts[1], back.view(LAYERS, TOKENS, width))
    assert np.array_equal(target, wanted)
    plain = np.zeros_like(target)
    if layouts[0].places[0].dtype == layouts[1].places[0].dtype:
        for begin, put, nbytes in plan.spans.tolist():  # type: ignore[union-attr]
            plain[put : put + nbytes] = source[begin : begin + nbytes]
        assert not np.array_equal(plain, wanted), "the dialects give these rows the same bytes: nothing was tested"


def test_ranks_and_slots_are_encoded_anew() -> None:
    pool = named("flashmla-dsv4", layers=LAYERS, blocks=4, page_size=64)
    request = named("vllm-dsv4", layers=LAYERS, tokens=TOKENS, page_size=16)
    slots = np.random.default_rng(0).permutation(256)[:TOKENS]
    rows = rows_of(512)
    whole = torch.zeros(LAYERS, 256, 512, dtype=torch.bfloat16)
    whole[:, slots] = rows
    memory = filled(pool, whole)
    sources = pool.split(tp=2, pp=2)
    memories = np.split(memory, 2)
    moved = [np.zeros(rank.nbytes, np.uint8) for rank in request.split(tp=2)]
    plan = reshard(sources, request.split(tp=2), source_slots=slots)
    plan.run([memories[0], memories[0], memories[1], memories[1]], moved)
    plain = np.zeros(request.nbytes, np.uint8)
    reshard(pool, request, source_slots=slots).run(memory, plain)
    assert np.array_equal(moved[0], plain) and np.array_equal(moved[1], plain) and plain.any()


def test_the_same_numbers_in_another_order_are_only_moved() -> None:
    for name, nbytes in (("sglang-v41", 528), ("sglang-v41-fp4", 288)):
        plan = reshard(named(name, tokens=TOKENS), named(f"{name}-inline", tokens=TOKENS))
        assert plan.recode is None and plan.nbytes == TOKENS * nbytes


def test_rows_that_the_other_dialect_cannot_hold_are_refused_before_anything_moved() -> None:
    one, other = (
        named(name, dialect=name.split("-")[0], tokens=64, page_size=64) for name in ("flashmla-dsv4", "vllm-dsv4")
    )
    rows = torch.ones(1, 64, 512, dtype=torch.bfloat16)
    rows[0, 3, 5] = float("inf")
    source, target = filled(one, rows), np.full(other.nbytes, 7, np.uint8)
    with raises(BadInput, field="dsv4_584 in the dialect vllm has no bytes for inf and NaN", needed=(0, 3, 0)):
        reshard(one, other).run(source, target)
    assert (target == 7).all()


def test_a_dialect_without_a_codec_is_refused() -> None:
    unknown = replace(named("vllm-v32"), dialect="fast")
    with raises(LayoutError, needed="fast", rule="dialect") as raised:
        reshard(unknown, named("flashmla-v32"))
    assert raised.value.rule == "dialect"
    ranks = named("flashmla-dsv4"), named("flashmla-dsv4", dialect="vllm")
    with raises(LayoutError, needed="flashmla", available="vllm", rule="dialect"):
        reshard(ranks, ranks[0])
