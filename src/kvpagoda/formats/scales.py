"""The scale of a group of elements: from its largest magnitude, held as the integer bits of a float32.

Integer maxima are exact, do not depend on order, and put inf and NaN above every finite number. A group that holds
either is *broken*: its codes are 0 and its scale is the NaN of its format, so that every element decodes to NaN.

    fp8         float32    amax / 448                              NaN
    fp8_ue8m0   E8M0 byte  2^ceil(log2(max(amax, 1e-4) / 448))      0xFF
    mxfp4       E8M0 byte  2^ceil(log2(max(amax, 6 * 2^-126) / 6))  0xFF
    nvfp4       E4M3 byte  e4m3(max(amax, 6 * 2^-9) / 6)           0x7F
"""

from __future__ import annotations

import torch

from kvpagoda.formats.small_floats import E2M1_MAX, E4M3_MAX, E8M0_NAN, e4m3_from_float32

Tensor = torch.Tensor

INFINITY_BITS = 0x7F800000
FP8_FLOOR = 1e-10
"""Least amax of the per-entry form: keeps 448 / amax finite."""


def amax_bits(x: Tensor) -> Tensor:
    """float32 ``[..., group]`` -> int32 ``[...]``: bits of the largest magnitude; at least INFINITY_BITS if broken."""
    return (x.view(torch.int32) & 0x7FFFFFFF).amax(-1)


def fp8_scales(bits: Tensor) -> tuple[Tensor, Tensor]:
    """int32 ``[...]`` from ``amax_bits`` -> (scale, inverse scale), float32 ``[...]``; NaN for a broken group.

    scale = 448 / amax and inverse = amax / 448, each one IEEE division. Both operands are tensors because torch turns
    a division with a Python number into a multiplication by its reciprocal, which rounds twice.
    """
    amax = bits.clamp(max=INFINITY_BITS).view(torch.float32).clamp(min=FP8_FLOOR)
    top = torch.full_like(amax, E4M3_MAX)
    broken = bits >= INFINITY_BITS
    return (top / amax).masked_fill_(broken, torch.nan), (amax / top).masked_fill_(broken, torch.nan)


def e8m0_for_e4m3(bits: Tensor) -> Tensor:
    """int32 ``[...]`` -> uint8 ``[...]``: exponent + 127 of the least power of two s with max(amax, 1e-4) <= 448 s.

    448 = 1.75 * 2^8, so the exponent is amax's own less 8, and one more when amax's mantissa is above 1.75.

    >>> e8m0_for_e4m3(amax_bits(torch.tensor([[1.0, -448.0], [449.0, 0.0]]))).tolist()
    [127, 128]
    """
    return _e8m0(bits, 0x38D1B717, 0x1FFFFF, 8)


def e8m0_for_e2m1(bits: Tensor) -> Tensor:
    """int32 ``[...]`` -> uint8 ``[...]``: exponent + 127 of the least power of two s with max(amax, 6 * 2^-126) <= 6 s.

    6 = 1.5 * 2^2, so the exponent is amax's own less 2, and one more when amax's mantissa is above 1.5.
    """
    return _e8m0(bits, 0x01C00000, 0x3FFFFF, 2)


def _e8m0(bits: Tensor, floor: int, carry: int, less: int) -> Tensor:
    """The exponent byte of amax, taken to be at least ``floor``, ``less`` so much; one more where the mantissa and ``carry``
    overflow."""
    byte = ((bits.clamp(floor, INFINITY_BITS) + carry) >> 23) - less
    return byte.masked_fill_(bits >= INFINITY_BITS, E8M0_NAN).to(torch.uint8)


def e4m3_for_e2m1(bits: Tensor) -> Tensor:
    """int32 ``[...]`` -> uint8 ``[...]``: e4m3(max(amax, 6 * 2^-9) / 6), never 0; NaN for a broken group.

    The block scale of NVFP4 (NVIDIA cuDNN, "block scaling": one E4M3 scale for 16 elements) with the tensor-wide
    second scale taken as 1. Groups with amax above 448 * 6 = 2688 saturate.
    """
    amax = bits.clamp(max=INFINITY_BITS).view(torch.float32).clamp(min=E2M1_MAX * 2.0**-9)
    scale = amax / torch.full_like(amax, E2M1_MAX)
    return e4m3_from_float32(scale.masked_fill_(bits >= INFINITY_BITS, torch.nan))
