"""Casts between float32 and small floats in Triton kernels, by integers or by the hardware: the reference's bytes.

By integers they are those of ``formats/small_floats.py``, on the bits of a float32, on every device. Magnitudes are int32
bits without the sign. The hardware casts two numbers in one instruction. ``CASTS`` says what a kernel may leave to it: 0
nothing (the interpreter, old or other GPUs), 80 casts to bfloat16, 89 those from and to float8 too. There

    to bfloat16       cvt.rn.bf16x2.f32            nearest, ties to even, subnormals too
    to float8         cvt.rn.satfinite.e4m3x2.f32  the same, inf and what is too large to the largest; NaN to +NaN
    from float8       cvt.rn.f16x2.e4m3x2          exact, as is from float16 to float32

(PTX ISA 8.1, cvt), which is the reference but for the sign of NaN: kernels put it back where NaN can come.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kvpagoda.core.kernels.dispatch import is_interpreting, jit, tl


@lru_cache(maxsize=64)
def casts(device: torch.device) -> int:
    """Return which casts of ``device`` kernels may use: 0, 80 or 89; see the file."""
    if device.type != "cuda" or torch.version.hip is not None or is_interpreting():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 89 if (major, minor) >= (8, 9) else 80 if major >= 8 else 0


@jit()
def _magnitude(a, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> code without its sign, of a format with ``MANTISSA`` bits: nearest, ties to even; NaN as ``TOP``.

    ``NORMAL``: exponent byte, in float32, of the format's least normal number; ``TOP``: float32 bits of its largest.
    Of x in [2^e, 2^(e+1)) the steps of the format are 2^(e - MANTISSA), the last bit of 2^(e + 23 - MANTISSA): so adding that
    rounds. Numbers below the least normal have its steps. A carry into the next power of two is the next code as well.
    """
    a = tl.minimum(a, TOP)
    power = tl.maximum(a, NORMAL << 23) & 0x7F800000
    rounder = power + ((23 - MANTISSA) << 23)
    steps = (a.to(tl.float32, bitcast=True) + rounder.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - rounder
    return steps + (power >> (23 - MANTISSA)) - (NORMAL << MANTISSA)


@jit()
def e4m3_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E4M3 code without its sign: nearest, ties to even, magnitudes above 448 to 448."""
    return _magnitude(a, 3, 121, 0x43E00000)


@jit()
def e5m2_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E5M2 code without its sign: nearest, ties to even, magnitudes above 57344 to 57344."""
    return _magnitude(a, 2, 113, 0x47600000)


@jit()
def e2m1_magnitude(a):  # type: ignore[no-untyped-def]
    """int32 bits of |x| -> E2M1 code without its sign: nearest, ties to even, magnitudes above 6 to 6."""
    return _magnitude(a, 1, 127, 0x40C00000)


@jit()
def float8_codes(y, CODES: tl.constexpr, CASTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> int32 codes of ``CODES``, "e4m3" or "e5m2", saturated; the code of NaN is undefined."""
    if CASTS >= 89:
        if CODES == "e4m3":
            code = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            code = y.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bits = y.to(tl.int32, bitcast=True)
        a = bits & 0x7FFFFFFF
        code = (e4m3_magnitude(a) if CODES == "e4m3" else e5m2_magnitude(a)) | ((bits >> 24) & 0x80)
    return code


@jit()
def float8_values(byte, CODES: tl.constexpr, CASTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint8 codes of ``CODES``, "e4m3" or "e5m2" -> float32."""
    if CODES == "e5m2":  # the upper half of a float16
        value = (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif CASTS >= 89:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = e4m3_value(byte.to(tl.int32))
    return value


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
def bfloat16_bits(x, CASTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> int16 bits of the nearest bfloat16, ties to even; NaN to a NaN."""
    if CASTS >= 80:
        rounded = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, near).to(tl.int16)
    return rounded
