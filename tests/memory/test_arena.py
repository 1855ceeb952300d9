"""Arena: both orders hold the same records, bit for bit; ids out of range raise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpagoda import KVCache
from kvpagoda.core.kernels.fill_rows import fill_rows
from kvpagoda.core.memory import arena as arena_module
from kvpagoda.core.memory import device_memory
from kvpagoda.core.memory.arena import Arena
from kvpagoda.errors import BadInput, NotOwned, SchemaError
from kvpagoda.layouts import named
from kvpagoda.schema import Attention, Field, Growth, Layer, RowLayout, Schema
from raises import raises
from records import put_records, records_of

DTYPES = ["float32", "bfloat16", "float16", "uint8", "int32", "float8_e4m3fn", "bool"]
FIELDS = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 4), st.lists(st.integers(1, 5), max_size=3), st.sampled_from(DTYPES[:-1])
    ),
    min_size=1,
    max_size=6,
)


def layout_of(specs):
    """Return the layout of one field for each (layer, count, shape, dtype)."""
    return RowLayout.build(
        (layer, Field(f"f{i}", count, tuple(shape), dtype)) for i, (layer, count, shape, dtype) in enumerate(specs)
    )


def arena(layout, rows, order, **kwargs):
    return Arena(layout, rows, device="cpu", order=order, **kwargs)


def fill_with_noise(memory, seed):
    """Fill every field of ``memory`` with random bytes; padding does not change."""
    rng = torch.Generator().manual_seed(seed)
    for place in memory.layout.places:
        view = memory.layer(place.layer)[place.field.name]
        noise = torch.randint(0, 256, (view.numel() * view.element_size(),), dtype=torch.uint8, generator=rng)
        view.copy_(noise.view(view.dtype).view(view.shape))


def codes(view):
    """Return a copy of ``view`` as a vector of bytes."""
    return view.contiguous().view(-1).view(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(FIELDS, st.integers(1, 6), st.booleans(), st.randoms(use_true_random=False))
def test_records_are_bit_exact_between_the_orders(specs, rows, packed, random):
    if packed:  # the widest elements first: then no field needs padding
        specs = sorted(specs, key=lambda spec: -getattr(torch, spec[3]).itemsize)
    layout = layout_of(specs)
    block, layer = arena(layout, rows, "block"), arena(layout, rows, "layer", packed=packed)
    assert layer.nbytes == rows * (layout.payload_nbytes if packed else layout.nbytes)
    fill_with_noise(block, random.randint(0, 1000))
    ids = torch.tensor(random.sample(range(rows), random.randint(0, rows)), dtype=torch.int32)
    targets = torch.tensor(random.sample(range(rows), len(ids)), dtype=torch.int64)
    records = records_of(block, ids)
    assert records.shape == (len(ids), layout.nbytes) and records.dtype == torch.uint8
    untouched = [i for i in range(rows) if i not in targets.tolist()]
    fill_with_noise(layer, 1)
    before = records_of(layer, untouched)
    put_records(layer, targets, records)
    assert torch.equal(records_of(layer, targets), records)
    assert torch.equal(records_of(layer, untouched), before)
    for place in layout.places:
        here, there = (memory.layer(place.layer)[place.field.name] for memory in (block, layer))
        assert here.shape == there.shape == (rows, place.field.count, *place.field.shape)
        assert torch.equal(codes(here[ids.long()]), codes(there[targets]))


@settings(max_examples=40, deadline=None)
@given(FIELDS, st.integers(1, 5), st.sampled_from(["block", "layer"]))
def test_fields_are_aligned_and_never_overlap(specs, rows, order):
    memory = arena(layout_of(specs), rows, order)
    owner = np.zeros(memory.nbytes, np.int32)
    base = memory.buffer.data_ptr()
    for place in memory.layout.places:
        view = memory.layer(place.layer)[place.field.name]
        assert (view.data_ptr() - base) % 16 == 0
        assert view[0].is_contiguous() and (order == "block" or view.is_contiguous())
        for row in view:
            start = row.data_ptr() - base
            owner[start : start + place.nbytes] += 1
    assert owner.max() <= 1 and owner.sum() == rows * memory.layout.payload_nbytes
    assert memory.nbytes == rows * memory.layout.nbytes


def test_new_memory_is_zero_and_reset_fills():
    layout = RowLayout.build([(0, Field("k", 2, (3,), "float16")), (1, Field("pos", 4, (), "int32", fill=-1))])
    for order in ("block", "layer"):
        memory = arena(layout, 5, order)
        assert not memory.buffer.any()
        memory.layer(0)["k"].fill_(7)
        memory.reset(2)
        memory.reset(torch.tensor([0, 4], dtype=torch.int32))
        memory.reset(np.array([4]))
        memory.reset([])
        assert memory.layer(1)["pos"][:, 0].tolist() == [-1, 0, -1, 0, -1]
        assert memory.layer(0)["k"][:, 1, 2].tolist() == [0, 7, 0, 7, 0]


def test_padding_stays_zero_in_records():
    layout = RowLayout.build([(0, Field("a", 1, (3,), "uint8")), (0, Field("b", 1, (5,), "uint8"))])
    for order in ("block", "layer"):
        memory = arena(layout, 2, order)
        fill_with_noise(memory, 0)
        records = records_of(memory, [0, 1])
        assert not records[:, 3:16].any() and not records[:, 21:].any()


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([3], NotOwned),
        ([-1], NotOwned),
        ([0, 2**40], NotOwned),
        ([0.5], BadInput),
        ([True], BadInput),
        ([[0]], BadInput),
    ],
)
def test_bad_row_ids_raise_before_anything_is_read_or_written(order, ids, error):
    memory = arena(RowLayout.build([(0, Field("a", 1, (4,), "int32"))]), 3, order)
    memory.buffer.fill_(5)
    with pytest.raises(error):
        memory.reset(torch.tensor(ids))
    assert bool((memory.buffer == 5).all())


def test_other_bad_input_raises():
    layout = RowLayout.build([(0, Field("a", 1, (4,), "int32"))])
    memory = arena(layout, 3, "layer")
    for bad_id in (3, -1, True):
        with pytest.raises(BadInput):
            memory.reset(bad_id)
    with pytest.raises(BadInput):
        arena(layout, 3, "diagonal")
    with pytest.raises(BadInput):
        arena(layout, -1, "layer")
    mixed = RowLayout.build([(0, Field("a", 1, (3,), "uint8")), (0, Field("b", 1, (4,), "int32"))])
    with raises(BadInput, needed=4, available=3):
        arena(mixed, 1, "layer", packed=True)
    assert not memory.buffer.any()


@pytest.mark.parametrize("order", ["block", "layer"])
def test_no_rows_and_no_fields(order):
    layout = RowLayout.build([(0, Field("a", 1, (4,), "int32"))])
    empty = arena(layout, 0, order)
    assert empty.nbytes == 0 and empty.layer(0)["a"].shape == (0, 1, 4) and empty.layer(9) == {}
    assert records_of(empty, []).shape == (0, 16)
    assert arena(RowLayout.build([]), 4, order).nbytes == 0


def test_proven_ids_are_not_looked_at():
    memory = arena(RowLayout.build([(0, Field("a", 1, (4,), "int32"))]), 3, "layer")
    assert memory.row_index(torch.tensor([7], dtype=torch.int32), is_proven=True).dtype == torch.int64


@pytest.mark.parametrize("order", ["block", "layer"])
def test_a_reset_writes_each_region_once(order, monkeypatch):
    specs = [("float32", float("nan")), ("int32", -1), ("bfloat16", 1.5), ("uint8", 0)] * 3
    layout = RowLayout.build((i // 4, Field(f"f{i}", 2, (3,), dtype, fill)) for i, (dtype, fill) in enumerate(specs))
    memory, writes, ids = arena(layout, 7, order), [], [5, 0, 3]
    monkeypatch.setattr(arena_module, "fill_rows", lambda *given: (writes.append(given), fill_rows(*given)))
    fill_with_noise(memory, 4)
    expected = {place: memory.layer(place.layer)[place.field.name].clone() for place in layout.places}
    memory.reset(ids)
    for place, view in expected.items():
        view[ids] = place.field.fill
        assert torch.equal(codes(memory.layer(place.layer)[place.field.name]), codes(view))
    assert len(writes) == len(memory.regions()) == (1 if order == "block" else 12)
    memory.poison(np.array(ids, np.int32))
    assert len(writes) == 2 * len(memory.regions())
    assert all((codes(memory.layer(place.layer)[place.field.name][ids]) == 255).all() for place in layout.places)


@pytest.mark.parametrize("poison", [False, True])
def test_sectors_are_cleared_as_one_by_one(poison, monkeypatch):
    layers = tuple(
        Layer(i, f"{i}", (Attention(1, 1, 4, "float32", Growth(window=n)),)) for i, n in enumerate((None, 8))
    )
    cache = KVCache(Schema(layers, "mixed"), "64KiB", block_size=4, device="cpu", poison=poison)
    memory, writes = cache.core.memory, []
    (buffer,), size = memory._buffers, cache.plan.sector_nbytes
    buffer.copy_(torch.arange(buffer.numel()) % 251)
    expected, sectors = buffer.clone(), np.array([7, 1, 2, 4], np.int32)
    for sector in sectors.tolist():
        expected[sector * size : (sector + 1) * size] = 255 if poison else 0
    monkeypatch.setattr(device_memory, "fill_rows", lambda *given: (writes.append(given), fill_rows(*given)))
    memory.clear_sectors(sectors)
    memory.clear_sectors(sectors[:0])
    assert torch.equal(buffer, expected) and len(writes) == 1


def test_blocks_that_several_calls_freed_are_poisoned_at_once(monkeypatch):
    layers = tuple(
        Layer(i, f"{i}", (Attention(1, 1, 4, "float32", Growth(window=n)),)) for i, n in enumerate((None, 8))
    )
    memory = KVCache(Schema(layers, "mixed"), num_blocks=20, block_size=4, device="cpu", poison=True).core.memory
    poisoned = [[], []]
    for arena, ids in zip(memory.arenas, poisoned):
        monkeypatch.setattr(arena, "poison", ids.append)
    for number, block in [(0, 3), (1, 2), (0, 5), (1, 4), (0, 1)]:
        memory.freed(number, np.array([block], np.int32))
    memory.poison_freed()
    memory.poison_freed()
    assert [[ids.tolist() for ids in one] for one in poisoned] == [[[3, 5, 1]], [[2, 4]]]


@pytest.mark.gpu
def test_records_are_the_same_bytes_on_the_gpu():
    layout = layout_of([(0, 2, (3,), "bfloat16"), (1, 1, (7,), "uint8"), (1, 1, (), "float32")])
    host, device = arena(layout, 6, None), Arena(layout, 6, order="layer")
    assert (host.order, device.order, device.buffer.is_cuda) == ("block", "layer", True)
    fill_with_noise(host, 3)
    put_records(device, [5, 1], records_of(host, [0, 2]))
    assert torch.equal(records_of(device, [5, 1]), records_of(host, [0, 2]))


@pytest.mark.parametrize("order", ["block", "layer"])
def test_one_view_shows_a_field_of_all_layers(order):
    fields = [Field("a", 2, (3,), "float32"), Field("b", 1, (5,), "bfloat16")]
    memory = arena(RowLayout.build((layer, field) for layer in (1, 4, 6) for field in fields), 4, order)
    fill_with_noise(memory, 0)
    for name in ("a", "b"):
        whole = memory.all_layers(name)
        assert whole.shape == (3, *memory.layer(1)[name].shape)
        for view, layer in zip(whole, (1, 4, 6)):
            assert torch.equal(codes(view), codes(memory.layer(layer)[name]))
    memory.all_layers("a")[2, 3] = 7
    assert (memory.layer(6)["a"][3] == 7).all() and not (memory.layer(6)["a"][:3] == 7).any()


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *(("vllm-flashinfer", "layer"), ("vllm-lbhnc", "layer"), ("vllm-lbnhc", "layer"), ("vllm-lhbnc", "layer")),
        *(("vllm-cross-layer", "block"), ("vllm-blhnc", "block"), ("vllm-blnhc", "block"), ("vllm-bhlnc", "block")),
        *(("trtllm", "block"), ("flashinfer-gqa-hnd", "layer"), ("kvpagoda", "block")),
    ],
)
@pytest.mark.parametrize("kernel_pages", [1, 2])
def test_every_element_is_where_the_layout_of_that_name_has_it(name, order, kernel_pages):
    heads, dims, size, blocks = 3, (8, 4), 4, 5
    laid = Schema(tuple(Layer(i, "full", (Attention(heads, *dims, "float16"),)) for i in range(3))).laid_out(name)
    plan = laid.plan(num_blocks=blocks, max_requests=1, block_size=size * kernel_pages, kernel_page=size)
    group = plan.groups[0]
    memory = Arena(group.layout, blocks, device="cpu", order=order)
    assert plan.order == order or name not in ("vllm-lhbnc", "vllm-bhlnc")
    wanted = named(
        name, layers=3, blocks=blocks * kernel_pages, page_size=size, heads=heads, head_dim=8, v_head_dim=4,
        dtype="float16",
    )  # fmt: skip
    assert memory.nbytes == wanted.nbytes
    for part in ("k", "v"):
        for layer in range(3):
            given = memory.layer(layer)[part]
            view = wanted.view(part, "B", "N", "H", {"k": "D", "v": "Dv"}[part], at={"L": layer})
            start = (given.data_ptr() - memory.buffer.data_ptr()) // 2
            assert (start, tuple(given.shape), given.stride()) == (view.offset // 2, view.shape, view.strides)


@pytest.mark.parametrize("name", ["vllm-lhbnc", "vllm-bhlnc"])
@pytest.mark.parametrize("kernel_page", [2, 4])
def test_records_of_separate_heads_are_complete_and_layers_do_not_overlap(name, kernel_page):
    laid = Schema(tuple(Layer(i, "full", (Attention(3, 8, 4, "float16"),)) for i in range(2))).laid_out(name)
    plan = laid.plan(num_blocks=5, max_requests=1, block_size=4, kernel_page=kernel_page)
    memories = [Arena(plan.groups[0].layout, 5, device="cpu", order=plan.order) for _ in range(2)]
    fill_with_noise(memories[0], 0)
    ids, targets = torch.tensor([4, 0, 2]), torch.tensor([1, 3, 4])
    put_records(memories[1], targets, records_of(memories[0], ids))
    for layer in range(2):
        taken = {byte for at, _ in memories[0].regions(layer) for byte in range(at.start, at.stop)}
        others = {byte for at, _ in memories[0].regions(1 - layer) for byte in range(at.start, at.stop)}
        assert len(taken) == 4 * 3 * 12 * 2 and not taken & others
        for part in "kv":
            here, there = (memory.layer(layer)[part] for memory in memories)
            pages = [memories[0].page_index(rows) for rows in (ids, targets)]
            assert torch.equal(codes(here[pages[0]]), codes(there[pages[1]])) and here[pages[0]].any()
    memories[1].poison(np.array([1, 3, 4], np.int32))
    assert memories[1].layer(1)["v"].isnan().sum() == 3 * 4 * 3 * 4


def test_an_order_that_a_layout_cannot_have_is_refused():
    laid = Schema((Layer(0, "full", (Attention(3, 8, 4, "float16"),)),))
    for name, order, needed in (("vllm-lhbnc", "block", "layer"), ("vllm-bhlnc", "layer", "block")):
        with raises(SchemaError, field="order", needed=needed, available=order):
            laid.laid_out(name).plan("1MiB", order=order)


@pytest.mark.parametrize("order", ["block", "layer"])
@pytest.mark.parametrize("length", [3, 20_000], ids=["short rows", "long rows"])
def test_copies_read_all_sources_before_they_write(order, length):
    layout = layout_of([(0, 1, (length,), "uint8"), (1, 2, (5,), "float32")])
    memory = arena(layout, 6, order)
    fill_with_noise(memory, 3)
    before, ids = records_of(memory, range(6)), np.array([[0, 1, 2], [1, 0, 5], [3, 4, 0]], np.int32)
    for sources, targets, wanted in (
        (ids[0], ids[1], [1, 0, 2, 3, 4, 2]),  # rows 0 and 1 are exchanged
        (ids[2][:1], ids[1][2:], [0, 1, 2, 3, 4, 3]),
    ):
        put_records(memory, range(6), before)
        memory.copy(sources, targets)
        assert torch.equal(records_of(memory, range(6)), before[wanted])
