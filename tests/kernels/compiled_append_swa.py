"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpagoda.kernels.append_swa import append_swa_kernel, ring_constants

POINTERS = {
    "kv": "*bf16", "slots": "*i32", "positions": "*i32",
    "fp8": "*u8", "rope": "*bf16", "inv_scale": "*fp32", "pos": "*i32", "head": "*i32",
}  # fmt: skip
CONSTANTS = {"HAS_HEAD": True, "SCAN": 0, "C": ring_constants(448, 64)}
VECTOR_STRIDES = ("kv_stride", "fp8_row", "fp8_ring", "rope_row", "rope_ring")


def ptx(capability, aligned, scan=0):
    constants = {**CONSTANTS, "SCAN": scan}
    names = append_swa_kernel.arg_names
    kinds = {name: "constexpr" if name in CONSTANTS else POINTERS.get(name, "i32") for name in names}
    divisible = [name for name in names if aligned and (name in POINTERS or name in VECTOR_STRIDES)]
    source = ASTSource(
        fn=append_swa_kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": 1, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(("aligned", "scan"), [(True, 0), (False, 0), (True, 512)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_arithmetic_is_ieee_and_nothing_spills(capability, aligned, scan):
    text = ptx(capability, aligned, scan)
    assert len(re.findall(r"\bdiv\.rn\.f32\b", text)) == 2
    for forbidden in (r"div\.full", r"\.approx", r"\bfma\b", r"\bfma\.", r"\.ftz", r"\.local\b", r"__local_depot"):
        assert not re.search(forbidden, text), forbidden


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_rows_move_in_vectors(capability):
    text = ptx(capability, aligned=True)
    assert len(re.findall(r"ld\.global\.v4\.b32", text)) == 2, "512 bfloat16 over 32 lanes: two of 16 bytes each"
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == 1, "512 codes over 32 lanes: one of 16 bytes each"
