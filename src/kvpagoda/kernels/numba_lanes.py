"""Casts of small floats (``formats/small_floats.py``) as LLVM instructions, for loops that numba compiles: of one number, or
of several side by side that are read, cast and written at once.

Left to itself LLVM makes vectors of long loops alone; a group of 16 elements would be cast one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

instruction: Callable[[Any], Any] = intrinsic
with_constants: Callable[[Any], Any] = intrinsic(prefer_literal=True)
I8, I16, I32, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
INFINITY_BITS = 0x7F800000


def _operator(name: str, of_floats: str = "") -> Callable[[Lanes, Any], Lanes]:
    return lambda self, other: self._with(of_floats if of_floats and self.is_float else name, other)


class Lanes:
    """Numbers side by side, or one, in the making: each operator adds an instruction. ``b`` is the builder of the function."""

    def __init__(self, b: Any, value: Any) -> None:
        self.b, self.value = b, value
        self.count = value.type.count if isinstance(value.type, ir.VectorType) else 0
        self.is_float = (value.type.element if self.count else value.type) == F32

    def _typed(self, element: Any) -> Any:
        return ir.VectorType(element, self.count) if self.count else element

    def _other(self, other: Any) -> Any:
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.count if self.count else other)

    def _with(self, name: str, other: Any) -> Lanes:
        return Lanes(self.b, getattr(self.b, name)(self.value, self._other(other)))

    __add__, __sub__, __mul__ = _operator("add", "fadd"), _operator("sub", "fsub"), _operator("mul", "fmul")
    __and__, __or__, __xor__, __truediv__ = _operator("and_"), _operator("or_"), _operator("xor"), _operator("fdiv")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")

    def __lt__(self, other: Any) -> Lanes:
        return Lanes(self.b, self.b.icmp_signed("<", self.value, self._other(other)))

    def where(self, yes: Lanes, no: Any) -> Lanes:
        """``yes`` where this condition holds, else ``no``."""
        return Lanes(self.b, self.b.select(self.value, yes.value, yes._other(no)))

    def most(self, other: Any) -> Lanes:
        """The larger of these and ``other``, as signed integers."""
        return Lanes(self.b, self.b.select((self < other).value, self._other(other), self.value))

    def least(self, other: Any) -> Lanes:
        """The smaller."""
        return Lanes(self.b, self.b.select((self < other).value, self.value, self._other(other)))

    def constant(self, number: Any) -> Lanes:
        """As many times ``number``."""
        return Lanes(self.b, self._other(number))

    def to(self, element: Any, how: str = "") -> Lanes:
        """Integers of another width (their low bits, or zeros before them), or what the instruction ``how`` makes of them."""
        bits = {I8: 8, I16: 16, I32: 32}
        here = self.value.type.element if self.count else self.value.type
        how = how or ("zext" if bits[here] < bits[element] else "trunc")
        return Lanes(self.b, getattr(self.b, how)(self.value, self._typed(element)))

    @property
    def bits(self) -> Lanes:
        """The bits of float32."""
        return self.to(I32, "bitcast")

    @property
    def floats(self) -> Lanes:
        """The float32 of these bits."""
        return self.to(F32, "bitcast")

    def taken(self, which: range) -> Lanes:
        """Those at the places ``which``."""
        mask = ir.Constant(ir.VectorType(I32, len(which)), [*which])
        return Lanes(self.b, self.b.shuffle_vector(self.value, self.value, mask))

    def cut(self, element: Any, count: int) -> Lanes:
        """The same bits as ``count`` integers of another width."""
        return Lanes(self.b, self.b.bitcast(self.value, ir.VectorType(element, count)))


def _magnitude(a: Lanes, drop: int, normal: int, top: int) -> Lanes:
    """Bits of |x| -> code without its sign: see ``formats/small_floats.py``."""
    low = (a.floats + 2.0 ** (normal - 127 + drop)).bits - (normal + drop << 23)
    high = (a - ((normal - 1 << 23) - ((1 << drop - 1) - 1)) + ((a >> drop) & 1)) >> drop
    return (a < normal << 23).where(low, high.least(top))


def widen(x: Lanes) -> Lanes:
    """uint16 bits of bfloat16 -> float32."""
    return (x.to(I32) << 16).floats


def e4m3_code(x: Lanes) -> Lanes:
    """float32 -> uint8; NaN to the largest, with its sign."""
    bits = x.bits
    return (_magnitude(bits & 0x7FFFFFFF, 20, 121, 0x7E) | ((bits >> 24) & 0x80)).to(I8)


def e4m3_of_bfloat16(x: Lanes) -> Lanes:
    """uint16 bits of bfloat16 -> uint8; NaN to NaN."""
    wide, sign = widen(x), (x >> 8).to(I8) & 0x80
    return ((wide.bits & 0x7FFFFFFF) < INFINITY_BITS + 1).where(e4m3_code(wide), sign | 0x7F)


def e2m1_code(x: Lanes, ties_down: bool, signed_zero: bool) -> Lanes:
    """float32, no NaN -> uint8 below 16."""
    bits = x.bits
    a = bits & 0x7FFFFFFF
    if ties_down:
        a = (((a - 1) & 0x7FFFFFFF) < INFINITY_BITS - 1).where(a - 1, a)  # of neither zero nor infinity
    code = _magnitude(a, 22, 127, 7)
    sign = (bits >> 28) & 8
    return (code | (sign if signed_zero else (code < 1).where(code, sign))).to(I8)


def whole_code(x: Lanes, most: int, least: int, away: bool) -> Lanes:
    """float32, no NaN -> uint8 of the nearest whole number from ``least`` to ``most``, two's complement."""
    bits = x.bits
    size = (bits & 0x7FFFFFFF).floats
    size = (size + 0.5 if away else size + 2.0**23 - 2.0**23).to(I32, "fptosi")
    limit = (bits >> 31) * (-least - most) + most
    size = size.least(limit)
    return ((bits < 0).where(size * -1, size) & (0xF if most == 7 else 0xFF)).to(I8)


def bfloat16_code(x: Lanes) -> Lanes:
    """float32 -> uint16 bits of the nearest bfloat16, ties to even; NaN to NaN."""
    bits = x.bits
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return ((bits & 0x7FFFFFFF) < INFINITY_BITS + 1).where(rounded, 0x7FC0).to(I16)


def e4m3_number(code: Lanes) -> Lanes:
    """uint8 -> float32."""
    code = code.to(I32)
    a = code & 0x7F
    bits = (a < 8).where((a.to(F32, "sitofp") * 2.0**-9).bits, (a << 20) + (120 << 23))
    return ((a < 0x7F).where(bits, 0x7FC00000) | ((code & 0x80) << 24)).floats


def e2m1_number(code: Lanes) -> Lanes:
    """uint8 below 16 -> float32."""
    code = code.to(I32)
    a = code & 7
    return ((a < 2).where(a * 0x3F000000, (a << 22) + (126 << 23)) | ((code & 8) << 28)).floats


def whole_number(code: Lanes, sign: int) -> Lanes:
    """uint8 of a whole number, two's complement, whose sign is the bit ``sign`` -> float32."""
    return ((code.to(I32) ^ sign) - sign).to(F32, "sitofp")


def _encoded(x: Lanes, factor: Lanes, codes: str) -> Lanes:
    """uint16 bits of bfloat16 -> their codes: ``"e4m3"``, ``"e2m1 down unsigned"``, ``"int8 divided"``, .."""
    kind, *rules = codes.split()
    y = widen(x) / factor if "divided" in rules else widen(x) * factor
    if kind == "e4m3":
        return e4m3_code(y)
    if kind == "int8":
        return whole_code(y, 127, -128, away=True)
    code = (
        e2m1_code(y, "down" in rules, "unsigned" not in rules) if kind == "e2m1" else whole_code(y, 7, -7, away=False)
    )
    pairs = code.cut(I16, code.count // 2)
    return (pairs | (pairs >> 4)).to(I8)


def _decoded(code: Lanes, factor: Lanes, codes: str) -> Lanes:
    """uint8 of codes, ``"e2m1"`` or ``"e2m1 half"`` -> float32, or uint16 bits of bfloat16."""
    kind, *rules = codes.split()
    if kind in ("e2m1", "int4"):
        pairs = code.to(I16)
        code = ((pairs | (pairs << 4)) & 0x0F0F).cut(I8, 2 * code.count)
    x = e4m3_number(code) if kind == "e4m3" else e2m1_number(code) if kind == "e2m1" else None
    x = whole_number(code, 0x80 if kind == "int8" else 8) if x is None else x
    return bfloat16_code(x * factor) if "half" in rules else x * factor


_CASTS: dict[str, Callable[[Lanes, Lanes, str], Lanes]] = {
    "encode": _encoded,
    "decode": _decoded,
    "copy": lambda x, factor, rules: x,
    "widen": lambda x, factor, rules: widen(x),
    "e4m3": lambda x, factor, rules: e4m3_of_bfloat16(x),
}


def _scales(size: Lanes, floor: Lanes, least: Lanes, top: Lanes, how: str) -> tuple[Lanes, Lanes, Lanes]:
    """Bits of finite amax -> (s, what elements are multiplied with or divided by, what is stored), as ``find_scales`` says."""
    words = how.split()
    if "power" in words:
        carry, less = (top.bits & 0x7FFFFF) ^ 0x7FFFFF, (top.bits >> 23) - 127
        byte = (((size.most(floor) + carry) >> 23) - less).most((least + 0x7FFFFF) >> 23)
        factor = (((byte ^ 0xFF) - 1) << 23).floats  # 2^127 / 2^byte
        return (byte << 23).floats, factor, byte if "e8m0" in words else byte << 23
    s = (size.most(floor).floats / top).bits.most(least).floats
    stored = s.bits
    if "e4m3" in words:
        code = e4m3_code(s)
        if "up" in words:
            code = (e4m3_number(code).bits < stored).where(code + 1, code).least(0x7E)
        s, stored = e4m3_number(code), code.to(I32)
    return s, s if "divided" in words else s.constant(1.0) / s, stored


def _largest(found: Lanes) -> Any:
    while found.count > 1:
        half = found.count // 2
        found = found.taken(range(half)).most(found.taken(range(half, 2 * half)))
    return found.b.extract_element(found.value, ir.Constant(I32, 0))


def _lanes(context: Any, b: Any, array: Any, data: Any, at: Any, count: int) -> Any:
    """A pointer to ``count`` elements of a flat ``array`` from ``at``, as one vector."""
    start = b.gep(context.make_array(array)(context, b, data).data, [at])
    return b.bitcast(start, ir.VectorType(start.type.pointee, count).as_pointer())


def _splat(b: Any, value: Any, count: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, count), ir.Undefined)
    one = b.insert_element(undefined, value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, count), [0] * count))


@with_constants
def cast(
    typingctx: Any, source: Any, start: Any, target: Any, at: Any, factor: Any, count: Any, how: Any
) -> Any:  # fmt: skip
    """``count`` elements of the flat array ``source`` from ``start`` -> ``target`` from ``at``, as ``how`` says: a word of
    ``_CASTS`` and its rules. ``factor``: a float32. ``count`` and ``how`` are constants; no index is looked at."""
    word, _, rules = how.literal_value.partition(" ")
    number = count.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        itemsize, wide = (
            source.dtype.bitwidth // 8,
            number * (2 if word == "decode" and rules[:4] in ("e2m1", "int4") else 1),
        )
        loaded = b.load(_lanes(context, b, source, args[0], args[1], number), align=itemsize)
        made = _CASTS[word](Lanes(b, loaded), Lanes(b, _splat(b, args[4], wide)), rules).value
        b.store(made, _lanes(context, b, target, args[2], args[3], made.type.count), align=target.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64, types.float32, count, how), codegen


@instruction
def fetch(typingctx: Any, array: Any, at: Any) -> Any:
    """Ask for the memory of the flat ``array`` at ``at``, which may lie outside of it, ahead of its use."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        start = b.gep(context.make_array(array)(context, b, args[0]).data, [args[1]])
        kind = ir.FunctionType(ir.VoidType(), (start.type, I32, I32, I32))
        prefetch = b.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        b.call(prefetch, [start, *(ir.Constant(I32, value) for value in (0, 3, 1))])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@with_constants
def amax(typingctx: Any, rows: Any, start: Any, count: Any) -> Any:
    """uint16 bits of the largest magnitude of ``count`` (a power of two) bfloat16 from ``start``."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        found = Lanes(b, b.load(_lanes(context, b, rows, args[0], args[1], count.literal_value), align=2)) & 0x7FFF
        return _largest(found)

    return types.uint16(rows, types.int64, count), codegen


@with_constants
def find_scales(
    typingctx: Any, sizes: Any, factors: Any, stored: Any, floor: Any, least: Any, top: Any, count: Any, how: Any
) -> Any:
    """From the amax of each of ``count`` groups (a power of two), uint16 ``sizes`` as ``amax`` gives them, all finite: what
    elements are multiplied with (or ``divided`` by), to float32 ``factors``, and what is stored of scales, to int32
    ``stored``. ``floor``, ``least``: bits of what amax and scales are at least; ``how``: how scales are stored, and ``power``
    (of two), ``up``, ``divided``. Returns int32: at least ``INFINITY_BITS`` where a scale is 0 or a factor infinite."""
    number = count.literal_value

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(ir.IntType(64), 0)
        loaded = b.load(_lanes(context, b, sizes, args[0], zero, number), align=2)
        given = [Lanes(b, _splat(b, value, number)) for value in args[3:6]]
        s, factor, kept = _scales(Lanes(b, loaded).to(I32) << 16, given[0], given[1], given[2], how.literal_value)
        b.store(factor.value, _lanes(context, b, factors, args[1], zero, number), align=4)
        b.store(kept.value, _lanes(context, b, stored, args[2], zero, number), align=4)
        return _largest((s.bits < 1).where(s.bits.constant(INFINITY_BITS), factor.bits))

    arguments = sizes, factors, stored, types.int32, types.int32, types.float32, count, how
    return types.int32(*arguments), codegen


def _of_one(make: Callable[[Lanes], Lanes], result: Any, argument: Any) -> Any:
    """The same cast of one number."""

    @instruction
    def of_one(typingctx: Any, x: Any) -> Any:
        return result(argument), lambda context, b, signature, args: make(Lanes(b, args[0])).value

    return of_one


bits_of = _of_one(lambda x: x.bits, types.int32, types.float32)
float_of = _of_one(lambda x: x.floats, types.float32, types.int32)
widened = _of_one(widen, types.float32, types.uint16)
e4m3 = _of_one(e4m3_code, types.uint8, types.float32)
of_e4m3 = _of_one(e4m3_number, types.float32, types.uint8)
e2m1 = _of_one(lambda x: e2m1_code(x, False, True), types.uint8, types.float32)
e2m1_down = _of_one(lambda x: e2m1_code(x, True, True), types.uint8, types.float32)
int8 = _of_one(lambda x: whole_code(x, 127, -128, away=True), types.uint8, types.float32)
int4 = _of_one(lambda x: whole_code(x, 7, -7, away=False), types.uint8, types.float32)
