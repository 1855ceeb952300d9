"""``append_scaled`` and ``gather_scaled``: the loop against the reference, over every bfloat16 and code, in every page."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvpagoda.core.kernels import scaled_rows
from kvpagoda.core.kernels.dispatch import HAS_NUMBA, VARIABLE
from kvpagoda.core.kernels.scaled_rows import append_scaled, gather_scaled
from kvpagoda.formats.encoding import TENSOR, Encoding

PAGE, HEADS, DIM = 16, 2, 40
NAMES = list(TENSOR)
SCALES = [1.0, 0.0217, 2.0**-40, 1e-37]
FORMS: dict[str, Callable[[torch.dtype, int], torch.Tensor]] = {
    "NHD": lambda dtype, pages: torch.zeros(pages, PAGE, HEADS, DIM, dtype=dtype),
    "HND": lambda dtype, pages: torch.zeros(pages, HEADS, PAGE, DIM, dtype=dtype).transpose(1, 2),
    "K and V in one page": lambda dtype, pages: torch.zeros(pages, PAGE, HEADS, 2 * DIM, dtype=dtype)[..., DIM:],
    "small heads": lambda dtype, pages: torch.zeros(pages, PAGE, HEADS, DIM * 2, dtype=dtype)[..., ::2],
}
"""Page layouts as fields ``[pages, rows, heads, dim]``. The last is not contiguous in a head: the reference takes it."""
each = pytest.mark.parametrize("name", NAMES)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def every_bf16(pages: int) -> torch.Tensor:
    """All 65,536 bfloat16, in an order that puts NaN into some rows alone."""
    rows = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    return torch.cat([rows, rows[: pages * PAGE * HEADS * DIM - len(rows)]]).view(-1, HEADS, DIM)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@each
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", FORMS)
def test_append_writes_the_bytes_of_the_reference(
    name: str, scale: float, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, encoding = 52, Encoding(name, scale=scale)
    rows, slots = every_bf16(pages), torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(0))
    made = []
    for how, chosen in (("reference", slots), ("numba", slots), ("numba", (slots - pages * PAGE).int())):
        monkeypatch.setenv(VARIABLE, how)
        field = FORMS[form](getattr(torch, TENSOR[name][0]), pages)
        append_scaled(rows, chosen, field, encoding)
        made.append(bits(field))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@each
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gather_gives_the_numbers_of_the_reference(
    name: str, scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, slots = Encoding(name, scale=scale), torch.tensor([3, 0, -1, 3, *range(40), 47])
    for form in FORMS:
        field = FORMS[form](getattr(torch, TENSOR[name][0]), 3)
        codes = torch.arange(3 * PAGE * HEADS * DIM) % 256
        field.view(torch.uint8).copy_(codes.to(torch.uint8).view(field.shape))
        made = []
        for how in ("reference", "numba"):
            monkeypatch.setenv(VARIABLE, how)
            out = torch.zeros(len(slots), HEADS, DIM, dtype=dtype)
            gather_scaled(field, slots, out, encoding)
            made.append(out)
        assert torch.equal(bits(made[0]), bits(made[1]))
        assert made[0].isnan().any(), "codes of NaN were among them"


@each
@pytest.mark.parametrize("how", ["reference", "numba"] if HAS_NUMBA else ["reference"])
def test_a_slot_out_of_range_is_an_error(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, how)
    field = torch.zeros(2, PAGE, HEADS, DIM, dtype=getattr(torch, TENSOR[name][0]))
    rows = torch.ones(2, HEADS, DIM, dtype=torch.bfloat16)
    for slot in (2 * PAGE, -2 * PAGE - 1):
        with pytest.raises(IndexError):
            append_scaled(rows, torch.tensor([1, slot]), field, Encoding(name))
        with pytest.raises(IndexError):
            gather_scaled(field, torch.tensor([1, slot]), rows, Encoding(name))


@each
def test_nothing_to_do(name: str) -> None:
    field = torch.zeros(2, PAGE, HEADS, DIM, dtype=getattr(torch, TENSOR[name][0]))
    rows = torch.ones(0, HEADS, DIM, dtype=torch.bfloat16)
    append_scaled(rows, torch.empty(0, dtype=torch.int64), field, Encoding(name))
    gather_scaled(field, torch.empty(0, dtype=torch.int64), rows, Encoding(name))


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@each
def test_large_rows_that_bypass_the_caches_have_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 4 MiB at once, of heads that fill cache lines, are stored past them."""
    rows = torch.randn(4500, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots, encoding, made = torch.randperm(75 * 64), Encoding(name, scale=0.02), []
    for how in ("reference", "numba"):
        monkeypatch.setenv(VARIABLE, how)
        field = torch.zeros(75, 64, 8, 128, dtype=getattr(torch, TENSOR[name][0]))
        append_scaled(rows, slots[:4500], field, encoding)
        out = torch.empty_like(rows)
        gather_scaled(field, slots[:4500], out, encoding)
        made.append((bits(field), bits(out)))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestDevice:
    """The bytes and numbers on a GPU, whose casts the kernels use, are those of the CPU: of few rows and of many."""

    @each
    @pytest.mark.parametrize("scale", [*SCALES, 2.0**-140])
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("is_large", [False, True])
    def test_every_bfloat16_is_written_and_every_code_read_as_on_the_cpu(
        self, name: str, scale: float, form: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr(scaled_rows, "LARGE", 0 if is_large else 1 << 60)
        pages, encoding, made = 52, Encoding(name, scale=scale), []
        rows, slots = every_bf16(pages), torch.randperm(pages * PAGE, generator=torch.Generator().manual_seed(0))
        for device in ("cpu", "cuda"):
            with torch.device(device):
                field = FORMS[form](getattr(torch, TENSOR[name][0]), pages)
            append_scaled(rows.to(device), slots.to(device), field, encoding)
            outs = [torch.zeros(rows.shape, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32)]
            for out in outs:
                gather_scaled(field, slots.to(device), out, encoding)
            made.append((bits(field).cpu(), *(bits(out.nan_to_num(3.0)).cpu() for out in outs)))
        assert all(map(torch.equal, *made))
