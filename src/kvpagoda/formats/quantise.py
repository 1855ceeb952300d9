"""Quantise groups of numbers to codes and scales, and back, by the rule of a dialect.

This code defines the results; the kernels give the same bits. All arithmetic is float32, one IEEE operation per step,
so the bytes of a group depend only on that group, not on the device.

The scale of a group comes from its largest magnitude (amax), held as the integer bits of a float32. Their
maximum is exact, does not depend on the order of the elements, and sorts inf and NaN above every finite number. A group
that holds inf or NaN is *broken*. The rules of kvpagoda's own encodings:

    fp8         float32    amax / 448                               per row or group
    fp8_ue8m0   E8M0 byte  2^ceil(log2(max(amax, 1e-4) / 448))      DSV4
    mxfp4       E8M0 byte  2^ceil(log2(max(amax, 6 * 2^-126) / 6))
    nvfp4       E4M3 byte  e4m3(max(amax, 6 * 2^-9) / 6)

The rules of other engines (``dialects``) differ in the floor, in the value that is floored, and in the rounding.
"""

from __future__ import annotations

import math
import struct

import torch

from kvpagoda.formats import small_floats as floats
from kvpagoda.formats.dialects import Rule
from kvpagoda.formats.small_floats import E8M0_NAN, e4m3_above, e4m3_from_float32, e4m3_table, e8m0_table, look_up

Tensor = torch.Tensor

INFINITY_BITS = 0x7F800000


def quantise(x: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of float32 ``x`` ``[n, groups, group]``.

    Codes are uint8 ``[n, groups * group / codes_per_byte]``; codes of 4 bits are stored two per byte, the even element
    in the low nibble. Scales are ``[n, groups]``, float32 or uint8 as the rule stores them. If the rule refuses inf and
    NaN, the caller must have checked that there are none. O(elements).

    >>> codes, scales = quantise(torch.tensor([[[1.0, -2.0], [448.0, 0.5]]]), Rule("e4m3", "float32"))
    >>> codes.tolist(), [f"{s:.4f}" for s in scales[0].tolist()]
    ([[118, 254, 126, 48]], ['0.0045', '1.0000'])
    """
    if rule.subnormals == "unshifted":
        x = _unshifted(x)
    bits = amax_bits(x, rule.skips_nan)
    s, stored = scales_of(bits, rule)
    y = _scaled(x, bits, s, rule)
    if rule.non_finite == "marked":
        y.view(torch.int32).bitwise_and_(((bits - INFINITY_BITS) >> 31)[..., None])  # broken: all bits 0
        nan = torch.nan if rule.scale == "float32" else floats.E8M0_NAN if rule.scale == "e8m0" else 0x7F
        stored = stored.masked_fill(bits >= INFINITY_BITS, nan)
    elif rule.non_finite == "computed":
        _sign_nan(x, s, y)
    return _codes(y, rule).flatten(1), stored


def dequantise(codes: Tensor, scales: Tensor, rule: Rule) -> Tensor:
    """Return float32 ``[n, elements]``, code times scale, for codes and scales of ``quantise``. O(elements)."""
    if rule.codes == "e4m3":
        values = look_up(floats.e4m3_table(codes.device), codes)
    elif rule.codes == "int8":
        values = codes.view(torch.int8).to(torch.float32)
    else:
        pairs = floats.e2m1_pair_table if rule.codes == "e2m1" else floats.int4_pair_table
        values = look_up(pairs(codes.device), codes).flatten(1)
    if rule.scale != "float32":
        table = floats.e8m0_table if rule.scale == "e8m0" else floats.e4m3_table
        scales = look_up(table(codes.device), scales)
    groups = values.view(*scales.shape, values.shape[1] // scales.shape[1])
    return groups.mul_(scales[..., None]).view(values.shape)


def _scaled(x: Tensor, bits: Tensor, s: Tensor, rule: Rule) -> Tensor:
    """Return the elements in units of their scale ``s``: a new float32 tensor of ``x``'s shape."""
    if rule.by == "quotient":
        return x / s[..., None]
    if rule.by == "reciprocal":
        factor = torch.ones_like(s) / s
        if rule.zero_groups == "zero":
            factor.masked_fill_(s == 0, 0)
        y = x * factor[..., None]
        if rule.zero_groups == "apart":
            y = torch.where(
                (bits == 0)[..., None], x, y.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            )
        return y
    amax = bits.clamp(max=INFINITY_BITS).view(torch.float32).clamp(min=rule.floor)
    return x * (torch.full_like(amax, rule.top) / amax)[..., None]


def _sign_nan(x: Tensor, s: Tensor, y: Tensor) -> None:
    """Give every NaN in ``y`` the sign that x86 would give it, on every device.

    The sign is that of x where x is NaN, + where the scale is NaN, and - where 0 * inf or inf / inf produced it.
    """
    bits = torch.where(x.isnan(), x.view(torch.int32) >> 31 << 31, torch.where(s.isnan(), 0, -1 << 31)[..., None])
    y.view(torch.int32).copy_(torch.where(y.isnan(), bits | 0x7FC00000, y.view(torch.int32)))


def _codes(y: Tensor, rule: Rule) -> Tensor:
    """Return the codes of float32 ``y`` ``[..., k]``: uint8 ``[..., k]``, or ``[..., k / 2]`` for 4-bit codes."""
    if rule.codes == "e4m3":
        return floats.e4m3_from_float32(y)
    if rule.codes == "e2m1":
        codes = floats.e2m1_from_float32(floats.ties_towards_zero(y) if rule.ties == "down" else y)
        if rule.non_finite == "computed":
            codes = torch.where(y.isnan(), codes & 8, codes)  # NaN gives 0 or -0
        return floats.pack_nibbles(codes if rule.signed_zero else codes.masked_fill_(codes == 8, 0))
    low = -rule.top if rule.codes == "int4" else -rule.top - 1
    whole = floats.round_half_away(y) if rule.ties == "away" else y.round()
    codes = whole.clamp_(low, rule.top).to(torch.int8).view(torch.uint8)
    return floats.pack_nibbles(codes & 15) if rule.codes == "int4" else codes


def _unshifted(x: Tensor) -> Tensor:
    """Return ``x``, bfloat16 numbers as float32, with those below 2^-126 read as ``Rule.subnormals`` "unshifted"."""
    bits = x.view(torch.int32) >> 16
    mantissa = bits & 0x7F
    top = torch.frexp(mantissa.to(torch.float32)).exponent  # 0 for 0, else position of the leading bit, from 1
    moved = (mantissa << (8 - top)) & 0x7F
    return torch.where((bits & 0x7F80) == 0, (bits & ~0x7F | moved) << 16, x.view(torch.int32)).view(torch.float32)


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
