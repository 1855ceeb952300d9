"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
import torch
import triton
from packed_cases import EVERY, IDS, heads_of
from parts_cases import CASES, parts_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.formats.dialects import dialect_of
from kvpagoda.formats.encoding import packed_row
from kvpagoda.kernels.packed_rows import Parts, append_constants, gather_constants
from kvpagoda.kernels.packed_rows_gpu import append_rows_kernel, gather_rows_kernel
from kvpagoda.layouts.packed import views

FORBIDDEN = r"div\.full", r"\.approx", r"\bfma\.", r"\.ftz", r"\.local\b", r"__local_depot"
KERNELS = {"append": (append_rows_kernel, "rows"), "gather": (gather_rows_kernel, "out")}


def packed(format, dialect):
    encoding, heads = packed_row(format, dialect), heads_of(format)
    packing = encoding.rules.packing
    pages = torch.empty(1, packing.page_stride(64, heads), dtype=torch.uint8)
    return Parts.of(views(pages, packing, 64, heads), encoding)


def ptx(name, parts, capability):
    kernel, rows = KERNELS[name]
    how = parts.rules, parts.grid
    constants = append_constants(*how) if name == "append" else gather_constants(*how, True)
    starts = dict(zip(("codes", "scales", "kept"), parts.starts))
    pointers = {rows: "*bf16" if name == "append" else "*i16", "slots": "*i32", **dict.fromkeys(starts, "*u8")}
    names = kernel.arg_names
    aligned = [rows, "slots", f"{rows}_stride", *(f"{one}_page" for one in starts)]
    aligned += [one for one, part in starts.items() if part.storage_offset() % 16 == 0]
    source = ASTSource(
        fn=kernel,
        signature={one: "constexpr" if one == "C" else pointers.get(one, "i32") for one in names},
        constexprs={(names.index("C"),): constants},
        attrs={(names.index(one),): [["tt.divisibility", 16]] for one in aligned},
    )
    options = {"num_warps": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def widest(text, access):
    """Bytes of the widest global load or store."""
    found = re.findall(rf"{access}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bu](\d+)", text)
    return max((int(many or 1) * int(bits) // 8 for many, bits in found), default=0)


def targets():
    """Hopper for all; Blackwell for one dialect of each format, and with ``-m slow`` for all."""
    formats = [format for format, _ in EVERY]
    for i, (one, id) in enumerate(zip(EVERY, IDS)):
        yield pytest.param(*one, 90, id=f"{id}-90")
        is_quick = formats.index(one[0]) == i
        yield pytest.param(*one, 100, id=f"{id}-100", marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("format", "dialect", "capability"), [*targets()])
def test_it_compiles_without_approximation_or_spills_and_moves_vectors(format, dialect, name, capability):
    text = ptx(name, packed(format, dialect), capability)
    for forbidden in FORBIDDEN:
        assert not re.search(forbidden, text), forbidden
    packing = dialect_of(format, dialect).packing
    elements = triton.next_power_of_2(packing.groups) * packing.group // 32  # of each lane
    numbers, codes = min(16, 2 * elements), min(16, elements * packing.code_bits // 8)
    read, written = (numbers, codes) if name == "append" else (codes, numbers)
    if packing.has_heads:  # cells of 68 or 40 bytes: nothing in them is aligned to more than 4
        read, written = min(read, 4), min(written, 4)
    assert widest(text, "ld") >= read and widest(text, "st") >= written


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_rows_in_arrays_of_their_own_compile_too(case, name):
    text = ptx(name, parts_of(*CASES[case])[0], 90)
    for forbidden in FORBIDDEN:
        assert not re.search(forbidden, text), forbidden
