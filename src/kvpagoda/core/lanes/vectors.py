"""SIMD instructions (LLVM) that read, cast and write vectors of packed formats, for loops that numba compiles.

    bfloat16  ->  amax of each group  ->  scales, factors              write_scales
              ->  multiplied or divided by the factor  ->  codes       write_codes, one step later: no wait for scales

The casts are those of ``formats/small_floats.py``, for finite elements of groups with ordinary scales. Rows with other
elements or scales are *odd*: these functions report them, and the reference processes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvpagoda.core.lanes.llvm import F16, F32, I8, I16, I32, Lanes, fetch, load, store

SIDE = 32
"""Elements that are cast by one instruction."""
INFINITY_BITS, LEAST_BITS, LARGE_BITS = 0x7F800000, 0x00800000, 227 << 23
"""Bits of float32: of infinity, of the least normal number, and of 2^100."""
LOW_PLACES = {"e4m3": (20, 121, 0x7E), "e5m2": (21, 113, 0x7B), "e2m1": (22, 127, 7)}
"""Small float -> (float32 mantissa bits that it drops, exponent byte of its least normal number, its top code)."""
HALVES = {"e4m3": (7, 8), "e5m2": (8, 0), "e2m1": (9, 14)}
"""Small float -> (shift that makes its bits those of a float16, exponent of 2 by which that float16 is too small)."""
BYTES = "e4m3", "e5m2", "int8"
"""Codes of 8 bits; of other codes a byte holds two."""


def _steps(a: Lanes, codes: str) -> tuple[Lanes, Lanes]:
    """Bits of |x| -> (octave of each, as bits; bits whose last ones count the steps of x in that octave, ties to even).

    A power of two is added whose last bit is the step between codes near x, so that the addition rounds. Each octave
    has 2^(23 - drop) steps, as many as there are below the least normal number, whose exponent byte is ``normal``. The
    steps plus the octave without its last ``drop`` bits are the code without sign, plus a multiple of 256.
    """
    drop, normal, _ = LOW_PLACES[codes]
    octave = a.most(normal << 23) & INFINITY_BITS
    before = -(normal << 23 - drop) & 0xFF  # an even number, so that ties stay
    return octave, (a.floats + (octave + (drop << 23) + before).floats).bits


def _whole(x: Lanes, away: bool) -> Lanes:
    """Small float32 numbers -> the nearest integer in the low 16 bits, ties ``away`` from zero or to even."""
    if away:
        return (x + ((x.bits & -0x80000000) | 0x3F000000).floats).to(I32, "fptosi")
    return (x + 1.5 * 2.0**23).bits


def _words(pair: Sequence[Lanes], high: bool = False) -> Lanes:
    """Interleave the low (or ``high``) 16 bits of two vectors of int32: int16, twice the lanes of one vector."""
    first, second = (lanes.cut(I16, 2 * lanes.count) for lanes in pair)
    return first.taken([i // 2 * 2 + high + i % 2 * first.count for i in range(first.count)], second)


def _codes(given: Lanes, factor: Lanes, c: Any) -> Lanes:
    """bfloat16 as int16, and one factor for every two of them -> their codes as stored."""
    is_float, width = c.CODES in LOW_PLACES, 8 if c.CODES in BYTES else 4
    pairs = (given & 0x7FFF if is_float else given).cut(I32, given.count // 2)
    numbers = [(pairs << 16).floats, (pairs & -0x10000).floats]
    numbers = [x * factor if c.RECIPROCAL or c.INVERSE or c.POWER_OF_TWO else x / factor for x in numbers]
    if not is_float:
        return _stored(_words([_whole(y, c.TIES == "away") for y in numbers]), width)
    octaves, steps = zip(*(_steps(y.bits, c.CODES) for y in numbers))
    drop, normal, top = LOW_PLACES[c.CODES]
    code = _words(steps) + (_words(octaves, high=True) >> drop - 16)
    if c.SCALE == "e4m3":  # the rounded scale may be less than amax / top
        code = code.least((normal << 23 - drop) + 0xFF & -0x100 | top)
    return _stored(code | ((given >> 16 - width) & (1 << width - 1)), width)


def _is_nvfp4(c: Any) -> bool:
    """Whether codes of E2M1 are quotients by a scale of E4M3."""
    return c.CODES == "e2m1" and c.SCALE == "e4m3" and not (c.RECIPROCAL or c.INVERSE)


def _nvfp4_codes(given: Lanes, factor: Lanes, c: Any) -> Lanes:
    """bfloat16 as int16, and for every two of them 2^-14 / their E4M3 scale -> their E2M1 codes as stored.

    The bits of a float16 that is 2^14 times too small count the steps of E2M1: 512 are one step, below 1.0 as above it.
    Neither the product, where a quotient is meant, nor the rounding to float16 changes a code. A scale has at most 4
    significant bits and the middle between two codes 3, so the scaled middle is a bfloat16. An x that is equal to it gives
    that middle exactly, once rounded; any other x is away from it by 2^-8 of it, more than both errors.
    """
    pairs, codes = given.cut(I32, given.count // 2), []
    for x in ((pairs << 16).floats, (pairs & -0x10000).floats):
        half = (x * factor).to(F16, "fptrunc").to(I16, "bitcast")
        size = (half & 0x7FFF).least(7 << 9)
        codes.append(((size + 0xFF + ((size >> 9) & 1)) >> 9) | ((half >> 12) & 8))
    return (codes[0] | (codes[1] << 4)).to(I8)


def _e2m1_codes(given: Lanes, one: Lanes, c: Any) -> Lanes:
    """bfloat16 as int16, and the bits of the scale of each, a power of two -> their E2M1 codes as stored."""
    x, is_even = (given & 0x7FFF) - one, int(c.TIES == "even")  # 0 for a ratio of 1, and 128 for each octave
    least = (x + 0xFF).without(15) + (x + 0x3F + is_even).without(15) + 2  # 0, 1, 2 around 0.25 and 0.75
    steps = x + 0x9F + (((x >> 6) & 1) if is_even else 0)
    code, sign = steps.without(6).most(least), (given >> 12) & 8
    # without signed zeros: code + 7 reaches the sign bit (8) unless the code is 0
    return _stored(code | (sign if c.SIGNED_ZERO else sign & (code + 7)), 4)


def _stored(codes: Lanes, width: int) -> Lanes:
    """Codes of ``width`` bits in the low bits of int16 lanes -> bytes; the higher bits are ignored."""
    if width == 8:
        return codes.to(I8)
    pairs = codes.cut(I32, codes.count // 2)
    return ((pairs & 0xF) | ((pairs >> 12) & -16)).to(I8)


def _numbers(code: Lanes, codes: str) -> Lanes:
    """uint16 lanes with one code each, not NaN -> float32; small floats are too small by the factor of ``HALVES``.

    The bits of the code are shifted to those of a float16. The cast of a float16 is as fast for subnormal numbers as
    for normal ones.
    """
    sign = 0x80 if codes in BYTES else 8
    if codes not in HALVES:
        return ((code ^ sign) - sign).to(I32, "sext").to(F32, "sitofp")
    half = ((code & sign - 1) << HALVES[codes][0]) | ((code & sign) << (8 if sign == 0x80 else 12))
    return half.to(F16, "bitcast").to(F32, "fpext")


def _pair_numbers(pairs: Lanes, factor: Lanes, codes: str, half: bool) -> Lanes:
    """uint16 lanes with two codes each, the first in the low bits -> twice as many float32.

    ``half``: the bits of the nearest bfloat16 instead, ties to even.
    """
    width = 8 if codes in BYTES else 4
    first, second = (_numbers(code, codes) * factor for code in (pairs & (1 << width) - 1, pairs >> width))
    if half:
        return _words([x.bits + 0x7FFF + ((x.bits >> 16) & 1) for x in (first, second)], high=True)
    return first.taken([i // 2 + i % 2 * first.count for i in range(2 * first.count)], second)


def _halved(found: Lanes, width: int, more: Lanes | None = None) -> tuple[Lanes, int]:
    """Return (the larger of the first and last half of every ``width`` lanes, the new width).

    The halves are compared lane by lane. If ``width`` is odd, the middle lane is in both halves. The lanes are those of
    ``found``, followed by those of ``more``.
    """
    half, places = (width + 1) // 2, range(found.count * (2 if more else 1))
    first, last = [i for i in places if i % width < half], [i for i in places if i % width >= width - half]
    return found.taken(first, more).most(found.taken(last, more)), half


def _largest(load: Callable[[int, int], Lanes], groups: int, group: int, together: int) -> Lanes:
    """Return the largest element of each of ``groups`` groups; the last ones are repeated up to a power of two.

    ``load(first, count)`` loads elements. ``group``: elements of a group. ``together``: groups that are loaded at once.
    """

    def of(first: int, count: int) -> tuple[Lanes, int]:
        if count > together:
            (left, width), (right, _) = of(first, count // 2), of(first + count // 2, count // 2)
            return _halved(left, width, right) if width > 1 else (left.taken([*range(2 * left.count)], right), 1)
        found, width = load(min(first, groups - together) * group, together * group), group
        while found.count > SIDE:
            found, width = _halved(found, width)
        return found, width

    found, width = of(0, 1 << (groups - 1).bit_length())
    while width > 1:
        found, width = _halved(found, width)
    return found


def _bits(number: float) -> int:
    """Return the bits of ``number`` as a float32."""
    return int(np.float32(number).view(np.int32))


def _scales(size: Lanes, c: Any) -> tuple[Lanes, Lanes, Lanes]:
    """Bits of amax -> (s, factor to multiply or divide elements by, s as stored), as in ``formats.scales``."""
    floor, least = (int(c.POWER_OF_TWO), c.FLOOR) if c.FLOORS_SCALE else (c.FLOOR, 0)
    if c.POWER_OF_TWO:
        carry, less = _bits(c.TOP) & 0x7FFFFF ^ 0x7FFFFF, (_bits(c.TOP) >> 23) - 127
        byte = (((size.most(floor) + carry) >> 23) - less).most(least + 0x7FFFFF >> 23)
        factor = byte << 7 if c.CODES == "e2m1" else (((byte ^ 0xFF) - 1) << 23).floats  # or 2^127 / 2^byte
        return (byte << 23).floats, factor, byte if c.SCALE == "e8m0" else byte << 23
    amax = size.most(floor).floats
    s = amax / amax.constant(c.TOP)
    s = s.bits.most(least).floats if least else s
    stored = s.bits
    if c.SCALE == "e4m3":
        octave, steps = _steps(stored.least(_bits(448)), "e4m3")
        code = (steps + (octave >> LOW_PLACES["e4m3"][0])) & 0x7F
        if c.SCALE_UP:
            is_less = (_numbers(code.to(I16), "e4m3") * 2.0**8).bits < stored
            code = is_less.where(code + 1, code).least(0x7E)
        s, stored = _numbers(code.to(I16), "e4m3") * 2.0**8, code
    factor = s.constant(1.0) / s if c.RECIPROCAL else s.constant(c.TOP) / amax if c.INVERSE else s
    factor = s.constant(2.0**-14) / s if _is_nvfp4(c) else factor
    if c.ZERO_GROUPS == "apart":
        factor = (size < 1).where(s.constant(1.0), factor)
    elif c.ZERO_GROUPS == "zero":
        factor = (s.bits < 1).where(s.constant(0.0), factor)
    return s, factor, stored


def _with_most(widest: list[Lanes], pairs: Lanes) -> list[Lanes]:
    """Return [the largest e4m3 code per lane, without sign] of ``pairs`` and ``widest`` (that list so far, or [])."""
    found = (pairs & 0x7F7F).cut(I8, 2 * pairs.count)
    return [codes.most(found) for codes in widest] or [found]


def _vector_instruction(make: Callable[..., Any]) -> Any:
    """Return a numba intrinsic that processes ``TOGETHER`` vectors with the instructions that ``make`` builds.

    Compiled code calls it with (numbers: flat array, pages: flat uint8, factors: flat float32, places: int64
    ``[n, 5]``, index of the first place, constants in JSON); it returns a boolean. ``make`` takes (b, five pointers for
    each vector, constants).

    A place holds, for one vector, the first element of its numbers in ``numbers``, the first byte of its codes, scales
    and kept elements in ``pages``, and the index of its row. The pointers are those four, and one to the factors of its
    groups.
    """

    def typed(typingctx: Any, numbers: Any, pages: Any, factors: Any, places: Any, first: Any, c: Any) -> Any:
        constants = SimpleNamespace(**json.loads(c.literal_value))
        arguments = numbers, pages, factors, places, first, c

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            at, memory, scaled, table = (context.make_array(a)(context, b, v).data for a, v in zip(arguments[:4], args))

            def pointers(vector: int) -> list[Any]:
                place = b.add(args[4], ir.Constant(args[4].type, vector))
                row = b.gep(table, [b.mul(place, ir.Constant(place.type, 5))])
                starts = [b.load(b.gep(row, [ir.Constant(I32, part)])) for part in range(4)]
                starts.append(b.mul(place, ir.Constant(place.type, constants.GROUPS)))
                return [b.gep(base, [start]) for base, start in zip((at, memory, memory, memory, scaled), starts)]

            return make(b, [pointers(vector) for vector in range(constants.TOGETHER)], constants)

        return types.boolean(*arguments), codegen

    return intrinsic(prefer_literal=True)(typed)


@_vector_instruction
def write_scales(b: Any, vectors: list[list[Any]], c: Any) -> Any:
    """Write the scales of bfloat16 vectors, and the factors of their groups. Return whether a vector is odd.

    A vector is odd, and must be written again by the reference, if an element is larger than 2^100, inf or NaN, or if a
    scale is 0 or too small to divide by.
    """
    coded = c.GROUP * c.GROUPS

    def magnitudes(first: int, count: int) -> Lanes:
        return load(vectors[first // coded][0], b, first % coded, I16, count) & 0x7FFF

    size = _largest(magnitudes, len(vectors) * c.GROUPS, c.GROUP, math.gcd(c.GROUPS, max(1, SIDE // c.GROUP)))
    s, factor, stored = _scales(size.to(I32) << 16, c)
    is_odd = s.bits < (LEAST_BITS << 3 if c.POWER_OF_TWO else LEAST_BITS)
    if c.ZERO_GROUPS != "formula":
        nonzero = size if c.ZERO_GROUPS == "apart" else s.bits
        is_odd = is_odd & (nonzero.constant(0) < nonzero)
    found = (is_odd | (size.constant(LARGE_BITS >> 16) < size)).any()
    stored, each = stored.to(I8) if c.SCALE != "float32" else stored, c.GROUPS // c.LANES
    store(vectors[0][4], 0, factor)
    for number, (numbers, _, scales, _, _) in enumerate(vectors):
        lanes = [number * c.GROUPS + place % each * c.LANES + place // each for place in range(c.GROUPS)]
        store(scales, 0, stored.taken(lanes + [stored.count] * c.SCALE_PAD, stored.constant(0)))
        if c.KEPT and c.KEPT_NBYTES == 1:
            kept = load(numbers, b, coded, I16, c.KEPT) & 0x7FFF
            found = b.or_(found, (kept.constant(LARGE_BITS >> 16) < kept).any())
    return found


@_vector_instruction
def write_codes(b: Any, vectors: list[list[Any]], c: Any) -> Any:
    """Write the codes and the kept elements of vectors; ``write_scales`` must have written their factors."""
    coded = c.GROUP * c.GROUPS
    many, is_integer = math.gcd(coded, SIDE), c.CODES == "e2m1" and c.POWER_OF_TWO
    for numbers, codes, _, kept, factors in vectors:
        factor = load(factors, b, 0, I32 if is_integer else F32, c.GROUPS)
        factor, cast = (
            (factor.to(I16), _e2m1_codes) if is_integer else (factor, _nvfp4_codes if _is_nvfp4(c) else _codes)
        )
        for first in range(0, coded, many):
            mine = factor.taken([(first + i) // c.GROUP for i in range(0, many, 1 if is_integer else 2)])
            made = cast(load(numbers, b, first, I16, many), mine, c)
            store(codes, first * made.count // many, made)
        if c.KEPT:
            given = load(numbers, b, coded, I16, c.KEPT)
            rule = SimpleNamespace(CODES="e4m3", SCALE="e4m3", RECIPROCAL=True, INVERSE=False)
            one = given.cut(I32, c.KEPT // 2).constant(0x3F800000).floats
            store(kept, 0, given if c.KEPT_NBYTES == 2 else _codes(given, one, rule))
    return ir.Constant(ir.IntType(1), 0)


@_vector_instruction
def read_vectors(b: Any, vectors: list[list[Any]], c: Any) -> Any:
    """Read one vector as float32, or as uint16 bits of bfloat16. Return whether it is odd.

    A vector is odd, and must be read again by the reference, if a code or a scale is NaN, or a scale is larger than
    2^100.
    """
    ((numbers, codes, scales, kept, _),) = vectors
    if c.SCALE == "float32":
        bits = load(scales, b, 0, I32, c.GROUPS)
    else:
        groups = [min(group, c.GROUPS - 1) for group in range(1 << (c.GROUPS - 1).bit_length())]
        places = [group % c.LANES * (c.GROUPS // c.LANES) + group // c.LANES for group in groups]
        byte = load(scales, b, 0, I8, c.GROUPS + c.SCALE_PAD).taken(places).to(I32)
        if c.SCALE == "e8m0":
            bits = (byte < 1).where(byte.constant(0x00400000), byte << 23)
        else:
            bits = (_numbers(byte.to(I16), "e4m3") * 2.0**8).bits
            bits = bits | (((byte & 0x7F) < 0x7F).where(byte.constant(0), INFINITY_BITS))
    factor = bits.floats * 2.0 ** HALVES.get(c.CODES, (0, 0))[1]
    is_odd, coded = (bits.constant(LARGE_BITS) < (bits & 0x7FFFFFFF)).any(), c.GROUP * c.GROUPS // 2
    widest: list[Lanes] = []
    many = math.gcd(coded, SIDE // 2)
    for first in range(0, coded, many):
        pairs = load(codes, b, first, I16 if c.CODES in BYTES else I8, many).to(I16)
        mine = factor.taken([(first + i) * 2 // c.GROUP for i in range(many)])
        store(numbers, first * 2, _pair_numbers(pairs, mine, c.CODES, c.HALF))
        widest = _with_most(widest, pairs) if c.CODES == "e4m3" else widest
    many = math.gcd(c.KEPT // 2, SIDE // 2)
    for first in range(0, c.KEPT // 2, many):
        if c.KEPT_NBYTES == 2:
            pairs = load(kept, b, first * 2, I16, many * 2)
            made = pairs if c.HALF else (pairs.to(I32) << 16).floats
        else:
            pairs = load(kept, b, first, I16, many)
            made = _pair_numbers(pairs, factor.constant(2.0**8).taken([0] * many), "e4m3", c.HALF)
            widest = _with_most(widest, pairs)
        store(numbers, (coded + first) * 2, made)
    return b.or_(is_odd, (widest[0].constant(0x7E) < widest[0]).any()) if widest else is_odd


@_vector_instruction
def ask(b: Any, vectors: list[list[Any]], c: Any) -> Any:
    """Prefetch the memory of the first of these vectors: its bytes in pages and, for writing, its numbers."""
    coded = c.GROUP * c.GROUPS
    numbers, codes, scales, kept, _ = vectors[0]
    parts = [(codes, coded if c.CODES in BYTES else coded // 2), (scales, 1), (kept, c.KEPT * c.KEPT_NBYTES)]
    for begin, nbytes in parts if hasattr(c, "HALF") else [*parts, (numbers, 2 * (coded + c.KEPT))]:
        for byte in (*range(0, nbytes, 64), nbytes - 1)[:nbytes]:
            fetch(begin, b, byte)
    return ir.Constant(ir.IntType(1), 0)
