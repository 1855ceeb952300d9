"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import pytest
from ptx import CASTS, check_arithmetic, count, ptx, widest

from kvpagoda.core.kernels.append_swa import append_swa_kernel, ring_constants

POINTERS = {
    "kv": "*bf16", "slots": "*i32", "positions": "*i32",
    "fp8": "*u8", "rope": "*bf16", "inv_scale": "*fp32", "pos": "*i32", "head": "*i32",
}  # fmt: skip


def compiled(capability, is_aligned=True, scan=0, is_large=True):
    """For rings of 128 rows."""
    pools = 448, 64, 128, (128 * 448, 448), (128, 1), (128 * 64, 64)
    constants = {"HAS_HEAD": True, "SCAN": scan, "C": ring_constants(*pools, CASTS[capability], is_large)}
    return ptx(append_swa_kernel, POINTERS, constants, [*POINTERS, "kv_stride"] if is_aligned else [], capability)


@pytest.mark.parametrize(("is_aligned", "scan"), [(True, 0), (False, 0), (True, 512)])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_arithmetic_is_ieee_and_nothing_spills(capability, is_aligned, scan):
    text = compiled(capability, is_aligned, scan, is_large=False)
    check_arithmetic(text)
    assert not is_aligned or widest(text, "st") == 8


@pytest.mark.parametrize("capability", [90, 100])
def test_rows_move_in_vectors(capability):
    """8 rows of 448 numbers, each of 512 lanes, over 128 threads: 32 numbers each."""
    text = compiled(capability)
    assert widest(text, "ld") == widest(text, "st") == 16
    assert count(text, "cvt.rn.satfinite.e4m3x2.f32") == 16
