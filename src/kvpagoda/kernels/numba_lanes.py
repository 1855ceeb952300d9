"""Numbers side by side as LLVM instructions, for loops that numba compiles. Left to itself LLVM makes vectors of long loops
alone; a group of 16 elements would be cast one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

I8, I16, I32, F16, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32)), ir.HalfType(), ir.FloatType())


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
        here = self.value.type.element if self.count else self.value.type
        if here == element:
            return self
        how = how or ("zext" if here.width < element.width else "trunc")
        return Lanes(self.b, getattr(self.b, how)(self.value, self._typed(element)))

    @property
    def bits(self) -> Lanes:
        """The bits of float32."""
        return self.to(I32, "bitcast")

    @property
    def floats(self) -> Lanes:
        """The float32 of these bits."""
        return self.to(F32, "bitcast")

    def taken(self, which: list[int], more: Lanes | None = None) -> Lanes:
        """Those at the places ``which``, of these and ``more`` behind them."""
        mask = ir.Constant(ir.VectorType(I32, len(which)), which)
        return Lanes(self.b, self.b.shuffle_vector(self.value, (more or self).value, mask))

    def cut(self, element: Any, count: int) -> Lanes:
        """The same bits as ``count`` integers of another width."""
        return Lanes(self.b, self.b.bitcast(self.value, ir.VectorType(element, count)))

    def without(self, places: int) -> Lanes:
        """Signed integers without their last ``places``."""
        return Lanes(self.b, self.b.ashr(self.value, self._other(places)))

    def any(self) -> Any:
        """Whether one of these conditions holds."""
        mask = self.b.bitcast(self.value, ir.IntType(self.count))
        return self.b.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))


def load(start: Any, b: Any, first: int, element: Any, count: int) -> Lanes:
    """``count`` elements of a width, from the ``first`` one behind a pointer."""
    at = b.gep(b.bitcast(start, element.as_pointer()), [ir.Constant(I32, first)])
    return Lanes(b, b.load(b.bitcast(at, ir.VectorType(element, count).as_pointer()), align=1))


def store(start: Any, first: int, made: Lanes) -> None:
    """Write ``made`` behind a pointer, as elements from the ``first`` one on."""
    at = made.b.gep(made.b.bitcast(start, made.value.type.element.as_pointer()), [ir.Constant(I32, first)])
    made.b.store(made.value, made.b.bitcast(at, made.value.type.as_pointer()), align=1)


def fetch(start: Any, b: Any, byte: int) -> None:
    """Ask for the memory so many bytes behind a pointer, ahead of its use, wherever that is."""
    at = b.gep(b.bitcast(start, I8.as_pointer()), [ir.Constant(I32, byte)])
    kind = ir.FunctionType(ir.VoidType(), (at.type, I32, I32, I32))
    prefetch = b.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    b.call(prefetch, [at, *(ir.Constant(I32, value) for value in (0, 3, 1))])  # to read, to keep, data
