"""Build SIMD instructions of LLVM for loops that numba compiles.

LLVM itself vectorises only long loops; it would cast a group of 16 elements one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

I8, I16, I32, F16, F32 = (*(ir.IntType(bits) for bits in (8, 16, 32)), ir.HalfType(), ir.FloatType())


def _operator(name: str, of_floats: str = "") -> Callable[[Lanes, Any], Lanes]:
    """Return a method that adds LLVM instruction ``name``, or ``of_floats`` for float32 lanes."""
    return lambda self, other: self._with(of_floats if of_floats and self.is_float else name, other)


class Lanes:
    """The value of an LLVM vector, or of a single number. Each operator adds an instruction that computes a new value.

    ``b``: the LLVM builder of the function. ``count``: lanes of the vector; 0 for a single number.
    """

    def __init__(self, b: Any, value: Any) -> None:
        self.b, self.value = b, value
        self.count = value.type.count if isinstance(value.type, ir.VectorType) else 0
        self.is_float = (value.type.element if self.count else value.type) == F32

    def _typed(self, element: Any) -> Any:
        """Return the LLVM type of as many lanes of type ``element``."""
        return ir.VectorType(element, self.count) if self.count else element

    def _other(self, other: Any) -> Any:
        """Return an operand as an LLVM value: that of Lanes, or a constant in every lane."""
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.count if self.count else other)

    def _with(self, name: str, other: Any) -> Lanes:
        """Return the result of LLVM instruction ``name`` with ``other``."""
        return Lanes(self.b, getattr(self.b, name)(self.value, self._other(other)))

    __add__, __sub__, __mul__ = _operator("add", "fadd"), _operator("sub", "fsub"), _operator("mul", "fmul")
    __and__, __or__, __xor__, __truediv__ = _operator("and_"), _operator("or_"), _operator("xor"), _operator("fdiv")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")

    def __lt__(self, other: Any) -> Lanes:
        return Lanes(self.b, self.b.icmp_signed("<", self.value, self._other(other)))

    def where(self, yes: Lanes, no: Any) -> Lanes:
        """Return ``yes`` in lanes where this condition holds, else ``no``."""
        return Lanes(self.b, self.b.select(self.value, yes.value, yes._other(no)))

    def most(self, other: Any) -> Lanes:
        """Return the larger of each lane and ``other``, as signed integers."""
        return Lanes(self.b, self.b.select((self < other).value, self._other(other), self.value))

    def least(self, other: Any) -> Lanes:
        """Return the smaller of each lane and ``other``, as signed integers."""
        return Lanes(self.b, self.b.select((self < other).value, self.value, self._other(other)))

    def constant(self, number: Any) -> Lanes:
        """Return ``number`` in as many lanes of the same type."""
        return Lanes(self.b, self._other(number))

    def to(self, element: Any, how: str = "") -> Lanes:
        """Return the lanes as ``element``: integers truncated or zero-extended, or converted by instruction ``how``."""
        own = self.value.type.element if self.count else self.value.type
        if own == element:
            return self
        how = how or ("zext" if own.width < element.width else "trunc")
        return Lanes(self.b, getattr(self.b, how)(self.value, self._typed(element)))

    @property
    def bits(self) -> Lanes:
        """The bits of float32 lanes, as int32."""
        return self.to(I32, "bitcast")

    @property
    def floats(self) -> Lanes:
        """The float32 numbers whose bits these int32 lanes are."""
        return self.to(F32, "bitcast")

    def taken(self, which: list[int], more: Lanes | None = None) -> Lanes:
        """Return the lanes with indices ``which`` of these lanes followed by those of ``more``."""
        mask = ir.Constant(ir.VectorType(I32, len(which)), which)
        return Lanes(self.b, self.b.shuffle_vector(self.value, (more or self).value, mask))

    def cut(self, element: Any, count: int) -> Lanes:
        """Return the same bits as ``count`` integers of type ``element``."""
        return Lanes(self.b, self.b.bitcast(self.value, ir.VectorType(element, count)))

    def without(self, places: int) -> Lanes:
        """Return signed integers shifted right by ``places`` bits."""
        return Lanes(self.b, self.b.ashr(self.value, self._other(places)))

    def any(self) -> Any:
        """Return whether the condition holds in at least one lane."""
        mask = self.b.bitcast(self.value, ir.IntType(self.count))
        return self.b.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))


def load(start: Any, b: Any, first: int, element: Any, count: int) -> Lanes:
    """Load ``count`` elements of type ``element`` at index ``first`` of pointer ``start``; no alignment is needed."""
    at = b.gep(b.bitcast(start, element.as_pointer()), [ir.Constant(I32, first)])
    return Lanes(b, b.load(b.bitcast(at, ir.VectorType(element, count).as_pointer()), align=1))


def store(start: Any, first: int, made: Lanes, streams: bool = False) -> None:
    """Store the lanes of ``made`` at index ``first`` of the pointer ``start``. No alignment is needed.

    ``streams``: store past the caches. The lanes then fill cache lines, the first of which begins there.
    """
    at = made.b.gep(made.b.bitcast(start, made.value.type.element.as_pointer()), [ir.Constant(I32, first)])
    at = made.b.bitcast(at, made.value.type.as_pointer())
    if not streams:
        made.b.store(made.value, at, align=1)
        return
    mark = made.b.module.add_metadata([ir.Constant(I32, 1)])
    made.b.store(made.value, at, align=64).set_metadata("nontemporal", mark)


def fetch(start: Any, b: Any, byte: int, near: int = 3) -> None:
    """Prefetch the memory ``byte`` bytes after the pointer ``start``. The address need not be valid.

    ``near``: 3 to the nearest cache, 2 to the second."""
    at = b.gep(b.bitcast(start, I8.as_pointer()), [ir.Constant(I32, byte)])
    kind = ir.FunctionType(ir.VoidType(), (at.type, I32, I32, I32))
    prefetch = b.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    b.call(prefetch, [at, *(ir.Constant(I32, value) for value in (0, near, 1))])  # to read, to keep, data
