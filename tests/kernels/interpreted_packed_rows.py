"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernels on CPU tensors."""

import parts_cases
import pytest
import torch
from packed_cases import EVERY, IDS, PAGE, SLOTS, heads_of, pool, rows_for, rows_with_odd_ones
from programs import SIZES, interpret, quiet, sized

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.packed_rows import append_parts, append_rows, gather_parts, gather_rows
from kvpagoda.core.kernels.packed_rows_gpu import append_rows_kernel
from kvpagoda.formats.dialects import dialect_of

every = pytest.mark.parametrize(("format", "dialect"), EVERY, ids=IDS)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    with quiet():
        yield interpret(monkeypatch, append_rows_kernel)


@every
@SIZES
def test_append_writes_the_bytes_of_the_reference(format, dialect, is_large, ran, monkeypatch):
    sized(monkeypatch, is_large)
    rows = rows_with_odd_ones(format)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    for chunk in (rows[:10], rows[10:]):
        given, wanted = pool(format, dialect), pool(format, dialect)
        append_rows(chunk, slots, given, format, page_size=PAGE, dialect=dialect)
        with monkeypatch.context() as other:
            other.setenv(VARIABLE, "reference")
            append_rows(chunk, slots, wanted, format, page_size=PAGE, dialect=dialect)
        assert torch.equal(given, wanted), (given != wanted).nonzero()[:8]
    assert is_large or ran != sorted(ran), "programs ran in another order"


@every
@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_gives_the_numbers_of_the_reference(format, dialect, dtype, is_large, monkeypatch):
    sized(monkeypatch, is_large)
    packing = dialect_of(format, dialect).packing
    pages = pool(format, dialect)
    generator = torch.Generator().manual_seed(3)
    pages[:] = torch.randint(
        0, 256, pages.shape, dtype=torch.uint8, generator=generator
    )  # every code and scale there is
    slots = torch.tensor([0, -1, 11, 5, 5, 12, 3], dtype=torch.int64)
    given, wanted = torch.full((2, len(slots), packing.width * heads_of(format) + 4), 7, dtype=dtype)
    gather_rows(pages, slots, given[:, :-4], format, page_size=PAGE, dialect=dialect)
    monkeypatch.setenv(VARIABLE, "reference")
    gather_rows(pages, slots, wanted[:, :-4], format, page_size=PAGE, dialect=dialect)
    assert torch.equal(given.isnan(), wanted.isnan()), "NaN in the same places; its bits are the device's"
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(given.nan_to_num(3.0).view(bits), wanted.nan_to_num(3.0).view(bits))


@pytest.mark.parametrize("case", parts_cases.IDS)
def test_rows_in_arrays_of_their_own_are_those_of_the_reference(case, monkeypatch):
    encoding, dim = parts_cases.CASES[case]
    rows, slots = parts_cases.rows_of(dim), torch.tensor(SLOTS, dtype=torch.int32)

    def run():
        parts, memory = parts_cases.parts_of(encoding, dim)
        append_parts(rows, slots, parts)
        outs = [torch.full(rows.shape, 7, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        for out in outs:
            gather_parts(out, slots, parts)
        return memory, outs

    memory, outs = run()
    monkeypatch.setenv(VARIABLE, "reference")
    wanted, others = run()
    assert torch.equal(memory, wanted), (memory != wanted).nonzero()[:8]
    for out, other in zip(outs, others):
        assert torch.equal(out.nan_to_num(3.0), other.nan_to_num(3.0)) and torch.equal(out.isnan(), other.isnan())


def test_replay_writes_the_same_bytes_and_follows_its_buffers():
    rows, pages, slots = rows_for("dsv4_584"), pool("dsv4_584", "flashmla"), torch.tensor(SLOTS, dtype=torch.int32)
    append_rows(rows, slots, pages, "dsv4_584", page_size=PAGE)
    once = pages.clone()
    append_rows(rows, slots, pages, "dsv4_584", page_size=PAGE)
    assert torch.equal(pages, once)
    slots.fill_(-1)
    rows.fill_(3)
    append_rows(rows, slots, pages, "dsv4_584", page_size=PAGE)
    assert torch.equal(pages, once), "padded rows write nothing"


@pytest.mark.parametrize("format", ["gqa_int8_head", "gqa_fp8_head"])
def test_heads_whose_size_is_no_power_of_two_are_written_and_read(format, monkeypatch):
    how = {"page_size": PAGE, "head_dim": 12}
    rows = torch.randn(len(SLOTS), 2 * 2 * 12, generator=torch.Generator().manual_seed(5)).bfloat16()

    def run():
        pages, out = torch.full((3, 256), 0xA5, dtype=torch.uint8), torch.zeros(rows.shape)
        append_rows(rows, torch.tensor(SLOTS), pages, format, **how)
        gather_rows(pages, torch.tensor(SLOTS), out, format, **how)
        return pages, out

    given = run()
    monkeypatch.setenv(VARIABLE, "reference")
    assert all(map(torch.equal, given, run()))
