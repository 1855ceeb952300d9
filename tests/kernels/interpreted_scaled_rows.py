"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernels on CPU tensors."""

import pytest
import torch
from programs import SIZES, interpret, quiet, sized

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.scaled_rows import _divisor, append_scaled, gather_scaled
from kvpagoda.core.kernels.scaled_rows_gpu import append_scaled_kernel
from kvpagoda.formats.encoding import TENSOR, Encoding

PAGE, HEADS, DIM = 16, 2, 40
SCALES = [1.0, 0.0217, 2.0**-40, 1e-37, 2.0**-140]
"""The inverse of the last is infinite, so that numbers are divided by it."""
FORMS = {
    "NHD": lambda pages: torch.zeros(pages, PAGE, HEADS, DIM, dtype=torch.uint8),
    "HND": lambda pages: torch.zeros(pages, HEADS, PAGE, DIM, dtype=torch.uint8).transpose(1, 2),
    "K and V in one page": lambda pages: torch.zeros(pages, PAGE, HEADS, 2 * DIM, dtype=torch.uint8)[..., DIM:],
    "every second element": lambda pages: torch.zeros(pages, PAGE, HEADS, DIM * 2, dtype=torch.uint8)[..., ::2],
}
"""Page layouts as fields ``[pages, rows, heads, dim]``. The last is not contiguous in a head: the reference takes it."""
each = pytest.mark.parametrize("name", TENSOR)
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    with quiet():
        yield interpret(monkeypatch, append_scaled_kernel)


def field_of(name, form, pages):
    return FORMS[form](pages).view(getattr(torch, TENSOR[name][0]))


def every_bf16(pages):
    """All 65,536 bfloat16 as rows, then some again."""
    rows = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    return torch.cat([rows, rows[: pages * PAGE * HEADS * DIM - len(rows)]]).view(-1, HEADS, DIM)


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@each
@pytest.mark.parametrize("scale", SCALES)
def test_every_bfloat16_gets_the_code_of_the_reference(name, scale, monkeypatch):
    sized(monkeypatch, True)
    pages, encoding, made = 52, Encoding(name, scale=scale), []
    rows, slots = every_bf16(pages), torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(0))
    for how in ("triton", "reference"):
        monkeypatch.setenv(VARIABLE, how)
        field = field_of(name, "NHD", pages)
        append_scaled(rows, slots, field, encoding)
        made.append(bits(field))
    assert torch.equal(*made), "NaN and its sign too"


@each
@forms
@SIZES
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_in_every_layout_of_pages(name, form, is_large, dtype, ran, monkeypatch):
    sized(monkeypatch, is_large)
    encoding, made = Encoding(name, scale=0.3), []
    rows = every_bf16(52)[:: 52 * PAGE // 11][:11]
    rows = torch.stack([rows, rows], 1)[:, 0]  # strided
    slots = torch.tensor([3, 47, -1 - 8, 0, 17, -46, 30, 31, 32, 33, 16], dtype=dtype)
    for how in ("triton", "reference"):
        monkeypatch.setenv(VARIABLE, how)
        field = field_of(name, form, 3)
        append_scaled(rows, slots, field, encoding)
        outs = [torch.full((11, HEADS, DIM + 1), 7.0, dtype=to)[..., :DIM] for to in (torch.bfloat16, torch.float32)]
        for out in outs:
            gather_scaled(field, slots, out, encoding)
        made.append((bits(field), *(bits(out.nan_to_num(3.0)) for out in outs), *(out.isnan() for out in outs)))
    assert all(map(torch.equal, *made))
    assert bool(ran) == (form != "every second element")


@each
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32], ids=str)
def test_every_code_is_read_as_the_reference_reads_it(name, to, monkeypatch):
    encoding, made = Encoding(name, scale=0.0217), []
    field = field_of(name, "NHD", 3)
    field.view(torch.uint8).copy_((torch.arange(field.numel()) % 256).to(torch.uint8).view(field.shape))
    for how in ("triton", "reference"):
        monkeypatch.setenv(VARIABLE, how)
        out = torch.zeros(20, HEADS, DIM, dtype=to)
        gather_scaled(field, torch.arange(20), out, encoding)
        made.append((bits(out.nan_to_num(3.0)), out.isnan()))
    assert all(map(torch.equal, *made)) and made[0][1].any()


@each
def test_slots_out_of_range_are_padding(name):
    field, out = field_of(name, "NHD", 2), torch.ones(3, HEADS, DIM)
    slots = torch.tensor([2 * PAGE, -2 * PAGE - 1, 1 << 40])
    append_scaled(torch.ones(3, HEADS, DIM, dtype=torch.bfloat16), slots, field, Encoding(name))
    assert not field.view(torch.uint8).any()
    gather_scaled(field, slots, out, Encoding(name))
    assert not out.any()


@each
def test_a_division_is_a_product_where_every_code_stays_the_same(name):
    assert _divisor(Encoding(name, scale=0.25)) == (4.0, True)
    assert _divisor(Encoding(name, scale=2.0**-140)) == (2.0**-140, False)
