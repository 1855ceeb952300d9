"""Compute the scale of a group of elements from its largest magnitude (amax), held as the integer bits of a float32.

The maximum of the bits is exact, does not depend on the order of the elements, and sorts inf and NaN above every finite
number. A group that holds inf or NaN is *broken*. The rules of kvpagoda's own encodings:

    fp8         float32    amax / 448                               per row or group
    fp8_ue8m0   E8M0 byte  2^ceil(log2(max(amax, 1e-4) / 448))      DSV4
    mxfp4       E8M0 byte  2^ceil(log2(max(amax, 6 * 2^-126) / 6))
    nvfp4       E4M3 byte  e4m3(max(amax, 6 * 2^-9) / 6)

The rules of other engines (``layouts.dialects``) differ in the floor, in the value that is floored, and in the
rounding.
"""

from __future__ import annotations

import math
import struct

import torch

from kvpagoda.formats.rule import Rule
from kvpagoda.formats.small_floats import E8M0_NAN, e4m3_above, e4m3_from_float32, e4m3_table, e8m0_table, look_up

Tensor = torch.Tensor

INFINITY_BITS = 0x7F800000


def amax_bits(x: Tensor, skips_nan: bool = False) -> Tensor:
    """Return the bits of the largest magnitude of each group of float32 ``x`` ``[..., group]``, as int32 ``[...]``.

    A broken group gives at least ``INFINITY_BITS``. ``skips_nan``: NaN counts as zero.
    """
    bits = x.view(torch.int32) & 0x7FFFFFFF
    if skips_nan:
        bits.masked_fill_(bits > INFINITY_BITS, 0)
    return bits.amax(-1)


def scales_of(bits: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return (s, s as stored) for ``bits``, int32 ``[...]`` of ``amax_bits``.

    s is float32 ``[...]``, as stored float32 or uint8 ``[...]``. It is the factor that turns codes into elements. For a
    broken group it is inf or NaN if the rule's formula gives that, and its stored form is the NaN of its format (in a
    float32, inf stays inf).

    >>> rule = Rule("e4m3", "e8m0", floor=1e-4)
    >>> s, stored = scales_of(amax_bits(torch.tensor([[1.0, -448.0], [449.0, 0.0]])), rule)
    >>> s.tolist(), stored.tolist()
    ([1.0, 2.0], [127, 128])
    """
    if rule.has_power_of_two_scales:
        return _powers_of_two(bits, rule)
    amax = bits.view(torch.float32)
    if rule.floor_on == "amax":
        amax = amax.clamp(min=rule.floor)
    # Both operands are tensors: torch turns a division by a Python number into a product with its reciprocal, which rounds
    # twice.
    s = amax / torch.full_like(amax, rule.top)
    if rule.floor_on == "scale":
        s = s.clamp(min=rule.floor)
    if rule.scale == "float32":
        return s, s
    stored = e4m3_above(s) if rule.scale_up else e4m3_from_float32(s)
    return look_up(e4m3_table(s.device), stored), stored


def _powers_of_two(bits: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the least power of two s with amax <= top * s, at least the rule's floor, and s as stored.

    In integers: with top = m * 2^k, the exponent of s is that of amax less k, plus one if amax's mantissa is above m.
    """
    top, floor = _float32_bits(rule.top), _float32_bits(rule.floor)
    carry, less = 0x7FFFFF - (top & 0x7FFFFF), (top >> 23) - 127
    amax = bits.clamp(floor if rule.floor_on == "amax" else 1, INFINITY_BITS)
    byte = ((amax + carry) >> 23) - less
    if rule.floor_on == "scale":
        byte.clamp_(min=127 + math.ceil(math.log2(rule.floor)))
    byte.clamp_(min=0)
    s = look_up(e8m0_table(bits.device), byte.clamp(max=254).to(torch.uint8))
    broken = bits >= INFINITY_BITS
    s = torch.where(broken, bits.view(torch.float32), s)
    if rule.scale == "float32":
        return s, s
    return s, byte.masked_fill_(broken, E8M0_NAN).to(torch.uint8)


def _float32_bits(number: float) -> int:
    """Return the bits of ``number`` rounded to a float32, as an int."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits
