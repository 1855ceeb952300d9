"""Casts of small floats (``formats/small_floats.py``) as LLVM instructions on 32-bit integers, for loops that numba compiles.

numba itself widens such integers to 64 bits, and its loops then fill no vector register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

instruction: Callable[[Any], Any] = intrinsic
I16, I32, F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
INFINITY_BITS = 0x7F800000


def _int(value: int) -> Any:
    return ir.Constant(I32, value)


def _magnitude(b: Any, a: Any, drop: int, normal: int, top: int) -> Any:
    """i32 bits of |x| -> code without its sign: see ``formats/small_floats.py``."""
    big = ir.Constant(F32, 2.0 ** (normal - 127 + drop))
    step = b.fadd(b.bitcast(a, F32), big)
    low = b.sub(b.bitcast(step, I32), _int(normal + drop << 23))
    even = b.and_(b.lshr(a, _int(drop)), _int(1))
    high = b.add(b.sub(a, _int((normal - 1 << 23) - ((1 << drop - 1) - 1))), even)
    high = b.ashr(high, _int(drop))
    high = b.select(b.icmp_signed("<", high, _int(top)), high, _int(top))
    return b.select(b.icmp_signed("<", a, _int(normal << 23)), low, high)


@instruction
def widen(typingctx: Any, x: Any) -> Any:
    """uint16 bits of a bfloat16 -> float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(b.shl(b.zext(args[0], I32), _int(16)), F32)

    return types.float32(types.uint16), codegen


@instruction
def magnitude(typingctx: Any, x: Any) -> Any:
    """uint16 bits of a bfloat16 -> those of its magnitude."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.and_(args[0], ir.Constant(I16, 0x7FFF))

    return types.uint16(types.uint16), codegen


@instruction
def float_bits(typingctx: Any, x: Any) -> Any:
    """float32 -> its bits."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


@instruction
def from_bits(typingctx: Any, x: Any) -> Any:
    """Bits -> float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@instruction
def e4m3_code(typingctx: Any, x: Any) -> Any:
    """float32, no NaN -> uint8."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], I32)
        code = _magnitude(b, b.and_(bits, _int(0x7FFFFFFF)), 20, 121, 0x7E)
        return b.trunc(b.or_(code, b.and_(b.lshr(bits, _int(24)), _int(0x80))), ir.IntType(8))

    return types.uint8(types.float32), codegen


def _e2m1(ties_down: bool) -> Any:
    @instruction
    def e2m1_code(typingctx: Any, x: Any) -> Any:
        """float32, no NaN -> uint8 below 16."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            bits = b.bitcast(args[0], I32)
            a = b.and_(bits, _int(0x7FFFFFFF))
            if ties_down:
                moves = b.and_(b.icmp_signed(">", a, _int(0)), b.icmp_signed("<", a, _int(INFINITY_BITS)))
                a = b.sub(a, b.zext(moves, I32))
            code = _magnitude(b, a, 22, 127, 7)
            return b.trunc(b.or_(code, b.and_(b.lshr(bits, _int(28)), _int(8))), ir.IntType(8))

        return types.uint8(types.float32), codegen

    return e2m1_code


e2m1_even, e2m1_down = _e2m1(False), _e2m1(True)


@instruction
def e4m3_number(typingctx: Any, code: Any) -> Any:
    """uint8 -> float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code = b.zext(args[0], I32)
        a = b.and_(code, _int(0x7F))
        small = b.bitcast(b.fmul(b.sitofp(a, F32), ir.Constant(F32, 2.0**-9)), I32)
        bits = b.select(b.icmp_signed("<", a, _int(8)), small, b.add(b.shl(a, _int(20)), _int(120 << 23)))
        bits = b.select(b.icmp_signed("==", a, _int(0x7F)), _int(0x7FC00000), bits)
        return b.bitcast(b.or_(bits, b.shl(b.and_(code, _int(0x80)), _int(24))), F32)

    return types.float32(types.uint8), codegen


@instruction
def e2m1_number(typingctx: Any, code: Any) -> Any:
    """uint8 below 16 -> float32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        code = b.zext(args[0], I32)
        a = b.and_(code, _int(7))
        normal = b.add(b.shl(a, _int(22)), _int(126 << 23))
        bits = b.select(b.icmp_signed("<", a, _int(2)), b.mul(a, _int(0x3F000000)), normal)
        return b.bitcast(b.or_(bits, b.shl(b.and_(code, _int(8)), _int(28))), F32)

    return types.float32(types.uint8), codegen


@instruction
def bfloat16_code(typingctx: Any, x: Any) -> Any:
    """float32 -> uint16 bits of the nearest bfloat16, ties to even; NaN to NaN."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], I32)
        odd = b.and_(b.lshr(bits, _int(16)), _int(1))
        rounded = b.lshr(b.add(b.add(bits, _int(0x7FFF)), odd), _int(16))
        nan = b.icmp_signed(">", b.and_(bits, _int(0x7FFFFFFF)), _int(INFINITY_BITS))
        return b.trunc(b.select(nan, _int(0x7FC0), rounded), I16)

    return types.uint16(types.float32), codegen


@instruction
def peek(typingctx: Any, array: Any, index: Any) -> Any:
    """``array[index]`` of a flat array, whose index is not looked at: numba's own would count negative ones from the end."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        return b.load(b.gep(data, [args[1]]))

    return array.dtype(array, types.int64), codegen


@instruction
def poke(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """``array[index] = value`` likewise."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        b.store(args[2], b.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


def _whole(most: int, least: int, away: bool) -> Any:
    @instruction
    def whole(typingctx: Any, x: Any) -> Any:
        """float32, no NaN -> uint8 of the nearest whole number from ``least`` to ``most``."""

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            bits = b.bitcast(args[0], I32)
            size = b.bitcast(b.and_(bits, _int(0x7FFFFFFF)), F32)
            if away:
                size = b.fadd(size, ir.Constant(F32, 0.5))
            else:
                size = b.fsub(b.fadd(size, ir.Constant(F32, 2.0**23)), ir.Constant(F32, 2.0**23))
            size = b.fptosi(size, I32)
            negative = b.icmp_signed("<", bits, _int(0))
            limit = b.select(negative, _int(-least), _int(most))
            size = b.select(b.icmp_signed("<", size, limit), size, limit)
            code = b.select(negative, b.neg(size), size)
            return b.trunc(b.and_(code, _int(0xF if most == 7 else 0xFF)), ir.IntType(8))

        return types.uint8(types.float32), codegen

    return whole


whole_int8_away, whole_int4_even = _whole(127, -128, True), _whole(7, -7, False)
