"""Run in a process without TRITON_INTERPRET (``test_triton.py`` does): compile for GPUs that are not here."""

import pytest
from ptx import CASTS, check_arithmetic, count, ptx, widest

from kvpagoda.core.kernels.scaled_rows import constants_of
from kvpagoda.core.kernels.scaled_rows_gpu import append_scaled_kernel, gather_scaled_kernel

PAGE, HEADS = 64, 8
CODES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def compiled(how, name, capability, head_dim=128, is_hnd=False, is_large=True, is_factor=True):
    kernel, rows = (append_scaled_kernel, "rows") if how == "append" else (gather_scaled_kernel, "out")
    row, head = (head_dim, PAGE * head_dim) if is_hnd else (HEADS * head_dim, head_dim)
    strides = PAGE * HEADS * head_dim, row, head, 1
    shape, casts = (PAGE, HEADS, head_dim), CASTS[capability]
    constants = {"C": constants_of(how, name, is_factor, shape, strides, head_dim, casts, is_large)}
    pointers = {rows: "*bf16", "slots": "*i32", "field": "*u8"}
    return ptx(kernel, pointers, constants, [*pointers, f"{rows}_stride"], capability, scale="fp32")


@pytest.mark.parametrize("is_hnd", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CODES)
def test_rows_move_16_bytes_at_a_time_and_the_hardware_casts(name, head_dim, is_hnd):
    append, gather = (compiled(how, name, 90, head_dim, is_hnd) for how in ("append", "gather half"))
    for text in (append, gather):
        check_arithmetic(text)
        assert widest(text, "ld") == widest(text, "st") == 16
    assert count(append, f"cvt.rn.satfinite.{CODES[name]}x2.f32") == count(gather, "cvt.rn.bf16x2.f32") == 16
    assert not count(append, "div.")


@pytest.mark.parametrize("how", ["append", "gather half", "gather"])
@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize("name", CODES)
def test_it_compiles_for_other_architectures_few_rows_and_a_division(name, capability, how):
    text = compiled(how, name, capability, is_large=False, is_factor=False)
    check_arithmetic(text)
    assert count(text, "div.rn.f32") == (8 if how == "append" else 0)
    assert bool(count(text, f"{CODES[name]}x2")) == (capability == 100 and (how == "append" or name == "fp8_e4m3"))
