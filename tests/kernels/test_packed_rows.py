"""``append_rows`` and ``gather_rows``: the reference against ``pack``, what they refuse, and what a launch may not do."""

from typing import Any
from unittest.mock import ANY

import pytest
import torch
from packed_cases import EVERY, IDS, PAGE, SLOTS, expected, heads_of, pool, rows_for, rows_with_odd_ones
from torch.utils._python_dispatch import TorchDispatchMode

from kvpagoda.core.kernels import packed_rows
from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.packed_rows import append_rows, gather_rows
from kvpagoda.errors import BadInput
from kvpagoda.formats.dialects import dialect_of
from kvpagoda.layouts import unpack
from raises import raises

every = pytest.mark.parametrize(("format", "dialect"), EVERY, ids=IDS)


@every
@pytest.mark.parametrize(("dtype", "how"), [(torch.int32, "reference"), (torch.int64, "")], ids=str)
def test_append_writes_the_bytes_of_pack_and_no_others(format, dialect, dtype, how, monkeypatch):
    """The reference, and what is used where nobody chooses: loops that take long to compile, so for one kind of slots."""
    if how:
        monkeypatch.setenv(VARIABLE, how)
    rows, pages = rows_for(format), pool(format, dialect)
    append_rows(rows, torch.tensor(SLOTS, dtype=dtype), pages, format, page_size=PAGE, dialect=dialect)
    assert torch.equal(pages, expected(format, dialect))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_reads_what_unpack_reads_and_zeros_elsewhere(format, dialect, dtype):
    pages = expected(format, dialect, tuple(range(10)))
    slots = torch.tensor([9, -1, 3, 3, 12, 0], dtype=torch.int32)
    payload = pages[:, : dialect_of(format, dialect).packing.payload_nbytes(PAGE, heads_of(format))]
    whole = unpack(payload, format, page_size=PAGE, dialect=dialect, dtype=dtype).flatten(0, 1)
    out = torch.full((len(slots), whole.shape[1] + 8), 7.0, dtype=dtype)
    gather_rows(pages, slots, out[:, :-8], format, page_size=PAGE, dialect=dialect)
    wanted = whole[slots.clamp(0, 11)]
    wanted[[1, 4]] = 0
    assert torch.equal(out[:, :-8].nan_to_num(3.0), wanted.nan_to_num(3.0)) and (out[:, -8:] == 7).all()


@every
def test_a_row_that_pack_refuses_is_marked(format, dialect):
    rows, pages = rows_for(format, wide=False), pool(format, dialect)
    rows[3, 1] = torch.nan
    append_rows(rows, torch.tensor(SLOTS), pages, format, page_size=PAGE, dialect=dialect)
    out = torch.zeros(len(SLOTS), rows.shape[1])
    gather_rows(pages, torch.tensor(SLOTS, dtype=torch.int32), out, format, page_size=PAGE, dialect=dialect)
    assert out[3, 1].isnan() and not out[[0, 2, 5, 6, 8]].isnan().any()


class NoOperations(TorchDispatchMode):
    """Fails on every torch operation that could allocate, copy or read: all but views."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "view" in function._schema.name or function.is_view, f"{function} ran"
        return function(*args, **(kwargs or {}))


@every
def test_a_launch_allocates_nothing_reads_nothing_and_is_the_same_each_time(format, dialect, monkeypatch):
    """What a CUDA graph demands: under the guard nothing but the launch happens, and replays differ in contents only."""
    pytest.importorskip("triton")
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, **constants):
                kept = [(a.data_ptr(), a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args]
                launches.append((grid, kept, constants))

            return launch

    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(packed_rows, "append_rows_kernel", Kernel())
    monkeypatch.setattr(packed_rows, "gather_rows_kernel", Kernel())
    rows, pages, slots = rows_for(format), pool(format, dialect), torch.tensor(SLOTS, dtype=torch.int32)
    out = torch.empty_like(rows)

    def step():
        append_rows(rows, slots, pages, format, page_size=PAGE, dialect=dialect)
        gather_rows(pages, slots, out, format, page_size=PAGE, dialect=dialect)

    step()  # tables are built once
    for live in range(3):
        slots[: live + 1] = live
        with NoOperations():
            step()
    assert launches[0::2] == [launches[0]] * 4 and launches[1::2] == [launches[1]] * 4


@pytest.mark.parametrize(
    ("spoil", "figures"),
    [
        (lambda a: a.update(rows=a["rows"].float()), {"field": "rows", "needed": torch.float32}),
        (lambda a: a.update(rows=a["rows"][:, :500]), {"field": "rows", "needed": ANY, "available": ANY}),
        (lambda a: a.update(rows=a["rows"].repeat(1, 2)), {"field": "rows", "needed": ANY, "available": ANY}),
        (lambda a: a.update(slots=a["slots"].short()), {"field": "slots", "needed": [10], "available": torch.int16}),
        (lambda a: a.update(slots=a["slots"][:3]), {"field": "slots", "needed": [3], "available": torch.int64}),
        (lambda a: a.update(pages=a["pages"].int()), {"field": "pages", "needed": 2336, "available": [2912]}),
        (lambda a: a.update(pages=a["pages"][:, :100]), {"field": "pages", "needed": 2336, "available": [100]}),
        (lambda a: a.update(pages=torch.zeros(3, 2338, dtype=torch.uint8)), {"needed": (2338, 1), "available": 4}),
        (lambda a: a.update(rows=a["rows"].t().contiguous().t()), {"needed": (2912, 10), "available": 4}),
        (lambda a: a.update(rows=a["rows"].to("meta")), {"field": "device"}),
        (lambda a: a.update(format="dsv5"), {"needed": "dsv5", "available": ANY}),
        (lambda a: a.update(page_size=0), {"field": "rows", "needed": [512], "available": [0, 512]}),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(spoil, figures: dict[str, Any]):
    rows, pages = rows_for("dsv4_584"), pool("dsv4_584", "vllm")
    arguments = dict(rows=rows, slots=torch.tensor(SLOTS), pages=pages, format="dsv4_584", page_size=PAGE)
    spoil(arguments)
    with raises(BadInput, **figures):
        append_rows(**arguments)
    assert (pages == 0xA5).all()


@pytest.mark.parametrize("head_dim", [2, 6])
def test_a_launch_refuses_heads_whose_scales_would_be_misaligned(head_dim, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(VARIABLE, "triton")
    rows, slots = torch.ones(1, 2 * head_dim).bfloat16(), torch.zeros(1, dtype=torch.int32)
    pages = torch.full((1, 64), 0xA5, dtype=torch.uint8)
    with raises(BadInput, needed=head_dim, available=4):
        append_rows(rows, slots, pages, "gqa_int8_head", page_size=1, head_dim=head_dim)
    assert (pages == 0xA5).all()


def test_gather_refuses_other_dtypes_and_nothing_is_nothing():
    pages, none = pool("dsv4_584", "vllm"), torch.zeros(0, dtype=torch.int32)
    with raises(BadInput, field="out", needed=torch.float16):
        gather_rows(pages, none, torch.zeros(0, 512, dtype=torch.float16), "dsv4_584", page_size=PAGE)
    append_rows(torch.zeros(0, 512, dtype=torch.bfloat16), none, pages, "dsv4_584", page_size=PAGE)
    gather_rows(pages, none, torch.zeros(0, 512), "dsv4_584", page_size=PAGE)
    assert (pages == 0xA5).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestDevice:
    """The bytes on a GPU, whose casts the kernels use, are those of the CPU: of few rows and of many."""

    @every
    @pytest.mark.parametrize("is_large", [False, True])
    def test_every_bfloat16_and_odd_rows_are_written_as_on_the_cpu(self, format, dialect, is_large, monkeypatch):
        pytest.importorskip("triton")
        monkeypatch.setattr(packed_rows, "LARGE", 0 if is_large else 1 << 60)
        odd = rows_with_odd_ones(format)
        numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
        numbers = torch.cat([numbers, numbers[: -len(numbers) % odd.shape[1]]]).view(-1, odd.shape[1])
        rows = torch.cat([odd, numbers])
        slots = torch.randperm(len(rows) + 5, generator=torch.Generator().manual_seed(0))[: len(rows)]
        slots[::7] = -1
        wanted = pool(format, dialect, pages=-(-(len(rows) + 5) // PAGE))
        given = wanted.cuda()
        append_rows(rows, slots, wanted, format, page_size=PAGE, dialect=dialect)
        append_rows(rows.cuda(), slots.cuda(), given, format, page_size=PAGE, dialect=dialect)
        assert torch.equal(given.cpu(), wanted)

    @every
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("is_large", [False, True])
    def test_every_code_is_read_as_on_the_cpu(self, format, dialect, dtype, is_large, monkeypatch):
        pytest.importorskip("triton")
        monkeypatch.setattr(packed_rows, "LARGE", 0 if is_large else 1 << 60)
        generator, pages = torch.Generator().manual_seed(3), pool(format, dialect, pages=40)
        pages[:] = torch.randint(0, 256, pages.shape, dtype=torch.uint8, generator=generator)
        slots = torch.randint(-3, 40 * PAGE + 3, (300,), generator=generator)
        wanted = torch.zeros(300, dialect_of(format, dialect).packing.width * heads_of(format), dtype=dtype)
        given = wanted.cuda()
        gather_rows(pages, slots, wanted, format, page_size=PAGE, dialect=dialect)
        gather_rows(pages.cuda(), slots.cuda(), given, format, page_size=PAGE, dialect=dialect)
        assert torch.equal(given.cpu().isnan(), wanted.isnan())
        assert torch.equal(given.cpu().nan_to_num(3.0), wanted.nan_to_num(3.0))
