"""Casts between float32 and the small formats FP8 E4M3, FP4 E2M1 and E8M0.

E4M3 has 1 sign, 4 exponent and 3 mantissa bits, no infinity, and NaN = 0x7F. E2M1 has a sign and one of 0, 0.5, 1, 1.5,
2, 3, 4, 6. E8M0 is a power-of-two scale byte.

The casts are integer arithmetic on the bits of a float32, so they give the same byte on every device and torch version.
Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) 1.0, sections 5.3.3 and 5.4.
"""

from __future__ import annotations

from functools import lru_cache

import torch

Tensor = torch.Tensor

E8M0_NAN = 0xFF
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The value of each of the eight positive codes."""


def e4m3_from_float32(x: Tensor) -> Tensor:
    """Return the nearest E4M3 codes, uint8 ``[...]``, of float32 ``x`` ``[...]``.

    Ties go to even, magnitudes above 448 (also inf) to 448, NaN to NaN.

    >>> e4m3_from_float32(torch.tensor([0.0, 1.0, -1.0, 448.0, 1e9])).tolist()
    [0, 56, 184, 126, 126]
    """
    return _codes(x, drop=20, normal=121, top=0x7E, has_nan=True)


def e2m1_from_float32(x: Tensor) -> Tensor:
    """Return the nearest E2M1 codes, uint8 ``[...]``, one per byte, of float32 ``x`` ``[...]``.

    Ties go to even, magnitudes above 6 (also inf) to 6. E2M1 has no NaN: NaN gives 6 with its sign, like the hardware's
    ``cvt.rn.satfinite``; callers mark it in the scale.

    >>> e2m1_from_float32(torch.tensor([0.0, 0.5, 1.0, -6.0, 100.0])).tolist()
    [0, 1, 2, 15, 7]
    """
    return _codes(x, drop=22, normal=127, top=7, has_nan=False)


def _codes(x: Tensor, drop: int, normal: int, top: int, has_nan: bool) -> Tensor:
    """Return the codes, uint8 ``[...]``, of float32 ``x`` in a format with ``23 - drop`` mantissa bits.

    ``normal``: exponent byte, in float32, of the format's least normal number. ``top``: code of its largest number.
    ``has_nan``: the code above ``top`` is NaN.

        below the least normal    add 2^(normal - 127 + drop), whose last bit is the subnormal step: the addition rounds
        from there                drop mantissa bits, with the carry of ties to even, and change the exponent's bias

    At the least normal number both give the same code. So each is computed for the magnitude clamped to its side, and
    the two are added: torch on the CPU runs integer steps in place ten times faster than ``where``.
    """
    bits = x.contiguous().view(torch.int32)
    a = bits & 0x7FFFFFFF
    high = a.clamp(min=normal << 23)
    half = (1 << drop - 1) - 1
    code = high.bitwise_right_shift(drop).bitwise_and_(1).add_(high).sub_((normal - 1 << 23) - half)
    code.bitwise_right_shift_(drop).clamp_(max=top)
    if has_nan:
        code.sub_((0x7F800000 - a).bitwise_right_shift_(31))
    step = normal + drop << 23
    low = a.clamp_(max=normal << 23).view(torch.float32).add_(2.0 ** (normal - 127 + drop)).view(torch.int32)
    code.add_(low.sub_(step + (1 << 23 - drop)))
    width = top.bit_length()
    return code.bitwise_or_(bits.bitwise_right_shift(31 - width).bitwise_and_(1 << width)).to(torch.uint8)


def e4m3_above(x: Tensor) -> Tensor:
    """Return the least E4M3 codes, uint8 ``[...]``, that are not below float32 ``x`` ``[...]``, which is not negative.

    The code is at most that of 448; NaN gives NaN.

    >>> e4m3_above(torch.tensor([0.0, 1.0, 1.01, 1e9])).tolist()
    [0, 56, 57, 126]
    """
    codes = e4m3_from_float32(x)
    below = (look_up(e4m3_table(x.device), codes) < x) & (codes < 0x7E)
    return codes + below


def ties_towards_zero(x: Tensor) -> Tensor:
    """Return float32 ``x`` ``[...]`` moved one step towards zero, so that E2M1 ties round to the smaller magnitude.

    No other number changes its code, because many float32 lie between a code of E2M1 and the next midpoint. Zeros, inf
    and NaN stay.

    >>> e2m1_from_float32(ties_towards_zero(torch.tensor([0.75, 1.75, 3.5, 2.5, 6.0]))).tolist()
    [1, 3, 5, 4, 7]
    """
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    return (bits - ((magnitude > 0) & (magnitude < 0x7F800000)).to(torch.int32)).view(torch.float32)


def round_half_away(x: Tensor) -> Tensor:
    """Return float32 ``x`` ``[...]`` rounded to whole numbers, halves away from zero.

    >>> round_half_away(torch.tensor([0.5, -0.5, 1.49, -2.5])).tolist()
    [1.0, -1.0, 1.0, -3.0]
    """
    return (x.abs() + 0.5).floor().copysign(x)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return bytes ``[..., k]`` of uint8 ``codes`` ``[..., 2k]`` below 16; even indices are the low nibbles.

    >>> pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist() == [0x21, 0x43]
    True
    """
    return codes[..., 0::2] | codes[..., 1::2] << 4


@lru_cache(maxsize=64)
def e4m3_table(device: torch.device) -> Tensor:
    """Return float32 ``[256]``: the value of every E4M3 code. The result is shared: do not write to it."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).to(device)


@lru_cache(maxsize=64)
def e8m0_table(device: torch.device) -> Tensor:
    """Return float32 ``[256]``: 2^(byte - 127), NaN for 0xFF. The result is shared: do not write to it."""
    return torch.tensor([*(2.0**exponent for exponent in range(-127, 128)), torch.nan], device=device)


@lru_cache(maxsize=64)
def e2m1_pair_table(device: torch.device) -> Tensor:
    """Return float32 ``[256, 2]``: the two E2M1 values of every byte, low nibble first. Shared: do not write to it."""
    values = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    return torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)], device=device)


@lru_cache(maxsize=64)
def int4_pair_table(device: torch.device) -> Tensor:
    """Return float32 ``[256, 2]``: the two int4 values of every byte, low nibble first. Shared: do not write to it."""
    values = [*range(8), *range(-8, 0)]
    return torch.tensor([[float(values[byte & 15]), float(values[byte >> 4])] for byte in range(256)], device=device)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return ``table[codes]``, shape ``[..., *table.shape[1:]]``, of uint8 ``codes``. On the CPU faster than a cast.

    >>> codes = torch.tensor([0, 56, 126], dtype=torch.uint8)
    >>> look_up(e4m3_table(codes.device), codes).tolist()
    [0.0, 1.0, 448.0]
    """
    picked = table.index_select(0, codes.reshape(-1).to(torch.int32))
    return picked.view(*codes.shape, *table.shape[1:])
