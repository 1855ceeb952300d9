"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

from math import gcd

import pytest
import torch
from packed_cases import EVERY, IDS, heads_of
from parts_cases import CASES, parts_of
from ptx import CASTS, check_arithmetic, count, ptx, widest

from kvpagoda.core.kernels.launch import ELEMENTS, OPTIONS
from kvpagoda.core.kernels.packed_rows import Form, constants_of
from kvpagoda.core.kernels.packed_rows_gpu import append_rows_kernel, gather_rows_kernel
from kvpagoda.formats.encoding import packed_row
from kvpagoda.layouts.packed import views

KERNELS = {"append": (append_rows_kernel, "rows"), "gather half": (gather_rows_kernel, "out")}
names = pytest.mark.parametrize("name", KERNELS)
SIZES = pytest.mark.parametrize("is_large", [False, True], ids=["few", "many"])


def packed(format, dialect=None, head_dim=None, heads=None):
    encoding, heads = packed_row(format, dialect, head_dim), heads or heads_of(format)
    packing = encoding.rules.packing
    pages = torch.empty(1, packing.page_stride(64, heads), dtype=torch.uint8)
    return Form.of(views(pages, packing, 64, heads), encoding)


def compiled(name, form, capability, is_large=True):
    kernel, rows = KERNELS[name]
    aligned = [rows, "slots", "memory", f"{rows}_stride"]
    aligned += [at for at in ("scales_at", "kept_at") if getattr(form, at) % 16 == 0]
    constants = {"C": constants_of(form, name, CASTS[capability], is_large)}
    return ptx(kernel, {rows: "*bf16", "slots": "*i32", "memory": "*u8"}, constants, aligned, capability)


def alignment(form):
    """Bytes that divide the place of every group of codes, and 16."""
    packing = form.rules.packing
    counts = (2, form.grid.page, form.grid.heads, form.grid.cells)
    steps = [step for step, many in zip(form.grid.codes, counts) if many > 1]
    return gcd(16, *steps, *([packing.group * packing.code_bits // 8] if packing.groups > 1 else []))


def check_widths(text, name, form, is_large):
    """Numbers move 16 bytes at a time; codes as many as a thread has of a group, and their places allow. No more: Triton
    once found a wrong alignment, and a GPU stops at misaligned vectors."""
    packing = form.rules.packing
    elements = min(ELEMENTS[packing.code_bits, is_large] // (32 * OPTIONS["num_warps"]), packing.group)
    codes = min(16, elements * packing.code_bits // 8, alignment(form))
    numbers, coded = ("ld", "st") if name == "append" else ("st", "ld")
    assert widest(text, numbers) == 16 and widest(text, coded) == max(codes, 4)


def targets():
    """Hopper for all; Blackwell for one dialect of each format, and with ``-m slow`` for all."""
    formats = [format for format, _ in EVERY]
    for i, (one, id) in enumerate(zip(EVERY, IDS)):
        yield pytest.param(*one, 90, id=f"{id}-90")
        is_quick = formats.index(one[0]) == i
        yield pytest.param(*one, 100, id=f"{id}-100", marks=() if is_quick else pytest.mark.slow)


@names
@SIZES
@pytest.mark.parametrize(("format", "dialect", "capability"), [*targets()])
def test_it_compiles_without_approximation_or_spills_and_moves_vectors(format, dialect, name, is_large, capability):
    form = packed(format, dialect)
    text = compiled(name, form, capability, is_large)
    check_arithmetic(text)
    check_widths(text, name, form, is_large)


@names
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("format", ["gqa_fp8_head", "gqa_nvfp4"])
def test_heads_move_as_wide_as_their_cells_allow(format, head_dim, heads, name):
    form = packed(format, None, head_dim, heads)
    text = compiled(name, form, 90)
    check_arithmetic(text)
    check_widths(text, name, form, True)


@names
@pytest.mark.parametrize("case", CASES)
def test_rows_in_arrays_of_their_own_compile_too(case, name):
    text = compiled(name, parts_of(*CASES[case])[0].form, 90)
    check_arithmetic(text)


def test_casts_are_the_hardwares_where_it_has_them():
    """Of 32 numbers of each thread two in one instruction; nothing else rounds."""
    form = packed("index_132")
    new, old = ({name: compiled(name, form, capability) for name in KERNELS} for capability in (90, 80))
    assert count(new["append"], "cvt.rn.satfinite.e4m3x2.f32") == count(new["gather half"], "cvt.rn.bf16x2.f32") == 16
    assert count(new["gather half"], "cvt.rn.f16x2.e4m3x2") == 16
    assert count(old["gather half"], "cvt.rn.bf16x2.f32") == 16
    assert not any(count(text, "e4m3") for text in old.values())
