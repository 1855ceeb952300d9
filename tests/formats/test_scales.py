"""The scale rules against exact arithmetic, over every bfloat16 amax and the float32 neighbours of each boundary."""

import numpy as np
import pytest
import torch
from exact_floats import E4M3, every_bf16, nearest_even

from kvpagoda.formats.scales import (
    FP8_FLOOR,
    amax_bits,
    e4m3_for_e2m1,
    e8m0_for_e2m1,
    e8m0_for_e4m3,
    fp8_scales,
)


def amaxes():
    """Every finite non-negative bfloat16, and boundary mantissas (1.5, 1.75, 1) of every exponent +- one float32 ulp."""
    bf16 = every_bf16().numpy()
    edges = np.array([np.ldexp(m, e) for e in range(-126, 127) for m in (1.0, 1.5, 1.75)], np.float32)
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    return np.concatenate([bf16[np.isfinite(bf16) & ~np.signbit(bf16)], near])


def bits_of(amax):
    return torch.from_numpy(amax).view(torch.int32)


@pytest.mark.parametrize(
    ("rule", "top", "floor"),
    [(e8m0_for_e4m3, 448.0, float(np.float32(1e-4))), (e8m0_for_e2m1, 6.0, 6 * 2.0**-126)],
    ids=["fp8", "fp4"],
)
def test_e8m0_is_the_least_power_of_two_that_holds_amax(rule, top, floor):
    amax = amaxes()
    exponent = rule(bits_of(amax)).numpy().astype(int) - 127
    a, s = np.maximum(amax.astype(np.float64), floor), np.ldexp(1.0, exponent)
    assert np.all(s * top >= a)
    assert np.all(s / 2 * top < a)


def test_e4m3_scale_of_fp4_is_amax_over_six_and_never_zero():
    amax = amaxes()
    quotient = np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6)
    codes = e4m3_for_e2m1(bits_of(amax)).numpy()
    np.testing.assert_array_equal(codes, nearest_even(quotient, E4M3, 0x80))
    assert codes.min() == 1 and codes.max() == 0x7E


def test_fp8_scales_are_single_ieee_divisions():
    amax = amaxes()
    scale, inverse = fp8_scales(bits_of(amax))
    a = np.maximum(amax, np.float32(FP8_FLOOR))
    np.testing.assert_array_equal(scale.numpy(), np.float32(448) / a)
    np.testing.assert_array_equal(inverse.numpy(), a / np.float32(448))


def test_broken_groups_have_a_nan_scale_in_every_format():
    x = torch.ones(4, 8)
    x[0, 3], x[1, 0], x[2, 7] = torch.nan, torch.inf, -torch.inf
    bits = amax_bits(x)
    assert [s.isnan().tolist() for s in fp8_scales(bits)] == [[True, True, True, False]] * 2
    assert e8m0_for_e4m3(bits).tolist() == [0xFF] * 3 + [127 - 8]
    assert e8m0_for_e2m1(bits).tolist() == [0xFF] * 3 + [127 - 2]
    assert e4m3_for_e2m1(bits).tolist() == [0x7F] * 3 + nearest_even(np.array([1 / 6]), E4M3, 0x80).tolist()
