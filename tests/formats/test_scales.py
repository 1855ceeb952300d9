"""The scale rules against exact arithmetic, over every bfloat16 amax and the float32 neighbours of each boundary."""

import numpy as np
import pytest
import torch
from exact_floats import E4M3, every_bf16, nearest_even

from kvpagoda.formats.dialects import Rule
from kvpagoda.formats.encoding import INLINE
from kvpagoda.formats.quantise import amax_bits, scales_of


def amaxes():
    """Every finite non-negative bfloat16, and boundary mantissas (1.5, 1.75, 1) of every exponent +- one float32 ulp."""
    bf16 = every_bf16().numpy()
    edges = np.array([np.ldexp(m, e) for e in range(-126, 127) for m in (1.0, 1.5, 1.75)], np.float32)
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    return np.concatenate([bf16[np.isfinite(bf16) & ~np.signbit(bf16)], near])


def bits_of(amax):
    return torch.from_numpy(amax).view(torch.int32)


@pytest.mark.parametrize("floor_on", ["amax", "scale"])
@pytest.mark.parametrize("codes", ["e4m3", "e2m1"])
@pytest.mark.parametrize("floor", [1e-4, 6 * 2.0**-110])
def test_a_power_of_two_is_the_least_that_holds_amax(codes, floor, floor_on):
    rule, amax = Rule(codes, "e8m0", floor=floor, floor_on=floor_on), amaxes()
    s, stored = scales_of(bits_of(amax), rule)
    np.testing.assert_array_equal(s.numpy(), np.ldexp(1.0, stored.numpy().astype(int) - 127))
    a, least = amax.astype(np.float64), float(np.float32(floor))
    wanted = np.maximum(a, least) / rule.top if floor_on == "amax" else np.maximum(a / rule.top, floor)
    assert np.all(s.numpy() >= wanted) and np.all(s.numpy() / 2.0 < wanted)
    as_float, same = scales_of(bits_of(amax), Rule(codes, "float32", floor, floor_on, power_of_two=True))
    assert same is as_float and torch.equal(as_float, s)


def test_e4m3_scale_of_fp4_is_amax_over_six_and_never_zero():
    amax = amaxes()
    quotient = np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6)
    s, stored = scales_of(bits_of(amax), INLINE["nvfp4"])
    np.testing.assert_array_equal(stored.numpy(), nearest_even(quotient, E4M3, 0x80))
    np.testing.assert_array_equal(s.numpy(), E4M3[stored.numpy()])
    assert stored.min() == 1 and stored.max() == 0x7E


def test_e4m3_scale_rounded_up_is_the_least_that_is_not_below():
    amax = amaxes()
    s, _ = scales_of(bits_of(amax), Rule("e2m1", "e4m3", floor=2.0**-9, floor_on="scale", scale_up=True))
    quotient = np.maximum(amax / np.float32(6), np.float32(2.0**-9))
    np.testing.assert_array_equal(s.numpy(), E4M3[np.searchsorted(E4M3, quotient).clip(max=0x7E)])


@pytest.mark.parametrize("floor_on", ["amax", "scale"])
def test_float32_scales_are_single_ieee_divisions(floor_on):
    amax, floor = amaxes(), np.float32(1e-10)
    s, stored = scales_of(bits_of(amax), Rule("e4m3", "float32", 1e-10, floor_on))
    top = np.float32(448)
    wanted = np.maximum(amax, floor) / top if floor_on == "amax" else np.maximum(amax / top, floor)
    np.testing.assert_array_equal(s.numpy(), wanted)
    assert stored is s


def test_broken_groups():
    x = torch.ones(4, 8)
    x[0, 3], x[1, 0], x[2, 7] = torch.nan, torch.inf, -torch.inf
    bits = amax_bits(x)
    s, stored = scales_of(bits, INLINE["fp8_ue8m0"])
    assert s.isfinite().tolist() == [False] * 3 + [True] and stored.tolist() == [0xFF] * 3 + [127 - 8]
    assert amax_bits(x, skips_nan=True).view(torch.float32).tolist() == [1.0, torch.inf, torch.inf, 1.0]
