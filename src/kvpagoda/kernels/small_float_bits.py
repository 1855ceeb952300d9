"""Casts between float32 and small floats for Triton kernels: those of ``formats/small_floats.py``.

They are integer arithmetic on the bits of a float32. Magnitudes are int32 bits without the sign. No cast rounds twice,
and none depends on the architecture.
"""

from __future__ import annotations

from kvpagoda.kernels.dispatch import jit, tl


@jit()
def e4m3_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E4M3 code without its sign: nearest, ties to even, magnitudes above 448 to 448."""
    subnormal = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = tl.minimum((a - 0x3BF80001 + ((a >> 20) & 1)) >> 20, 0x7E)
    return tl.where(a < 0x3C800000, subnormal, normal)


@jit()
def e2m1_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E2M1 code without its sign: nearest, ties to even, magnitudes above 6 to 6."""
    subnormal = (a.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    normal = tl.minimum((a - 0x3EE00001 + ((a >> 22) & 1)) >> 22, 7)
    return tl.where(a < 0x3F800000, subnormal, normal)


@jit()
def e4m3_value(code):  # type: ignore[no-untyped-def]
    """int32 E4M3 codes -> float32: the bits shifted to those of a float32, times 2^120, which is exact."""
    value = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
    return tl.where((code & 0x7F) == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit()
def e2m1_value(code):  # type: ignore[no-untyped-def]
    """int32 E2M1 codes -> float32: the bits shifted as in ``e4m3_value``, times 2^126."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@jit()
def e8m0_value(byte):  # type: ignore[no-untyped-def]
    """int32 exponent bytes -> float32 2^(byte - 127), NaN for 255."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit()
def bfloat16_bits(x):  # type: ignore[no-untyped-def]
    """float32 -> int32 bits of the nearest bfloat16, ties to even; NaN to NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
