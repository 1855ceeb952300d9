"""``append_rows`` and ``gather_rows`` compiled for the CPU by numba: the bytes of the reference.

Each function below makes loops for the constants of ``packed_rows``, which numba compiles into them and keeps on disk. A row
in which a scale is 0, inf or NaN, or too small to divide by, takes the slow way, element by element; there are hardly any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from kvpagoda.kernels.numba_casts import (
    INFINITY_BITS,
    bfloat16_code,
    e2m1_down,
    e2m1_even,
    e2m1_number,
    e4m3_code,
    e4m3_number,
    float_bits,
    from_bits,
    magnitude,
    peek,
    poke,
    whole_int4_even,
    whole_int8_away,
    widen,
)

compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")


def _scale_of(c: dict[str, Any]) -> Any:
    """``scale_of`` for the constants ``c``: the scale of one group, whatever its amax."""
    is_e4m3, in_float, in_e8m0 = c["CODES"] == "e4m3", c["SCALE"] == "float32", c["SCALE"] == "e8m0"
    floor, floors_scale, scale_up, top = c["FLOOR"], c["FLOORS_SCALE"], c["SCALE_UP"], np.float32(c["TOP"])
    power_of_two, (carry, less) = c["POWER_OF_TWO"], (0x1FFFFF, 8) if is_e4m3 else (0x3FFFFF, 2)

    @compiled
    def scale_of(amax: Any) -> Any:
        """int64 bits of amax -> (s, what is stored)."""
        broken = amax >= INFINITY_BITS
        if power_of_two:
            byte = ((min(max(amax, 1 if floors_scale else floor), INFINITY_BITS) + carry) >> 23) - less
            if floors_scale:
                byte = max(byte, (floor + 0x7FFFFF) >> 23)
            byte = max(byte, 0)
            bits = amax if broken else byte << 23 if byte else 0x00400000
            return from_bits(np.int32(bits)), (0xFF if broken else byte) if in_e8m0 else bits
        s = from_bits(np.int32(amax if floors_scale else max(amax, floor))) / top
        bits = np.int64(float_bits(s))
        if floors_scale:
            bits = max(bits, floor)
        if in_float:
            return from_bits(np.int32(bits)), bits
        code = np.int64(e4m3_code(from_bits(np.int32(bits)))) if bits <= INFINITY_BITS else 0x7F
        if scale_up and code < 0x7E and float_bits(e4m3_number(np.uint8(code))) < bits:
            code += 1
        return e4m3_number(np.uint8(code)), code

    return scale_of


def _scale_finder(c: dict[str, Any]) -> Any:
    """``find_scales`` for the constants ``c``: a scale from each amax, and what is stored of it."""
    is_e4m3, in_float, in_e8m0 = c["CODES"] == "e4m3", c["SCALE"] == "float32", c["SCALE"] == "e8m0"
    groups, marks, by_product, power_of_two = (
        c["GROUPS"],
        c["MARKS"],
        c["RECIPROCAL"] or c["POWER_OF_TWO"],
        c["POWER_OF_TWO"],
    )
    floor, floors_scale, scale_up, top = c["FLOOR"], c["FLOORS_SCALE"], c["SCALE_UP"], np.float32(c["TOP"])
    carry, less = (0x1FFFFF, 8) if is_e4m3 else (0x3FFFFF, 2)
    mark = 0x7FC00000 if in_float else 0xFF if in_e8m0 else 0x7F
    least_bits, least_byte = (1, (floor + 0x7FFFFF) >> 23) if floors_scale else (floor, 0)
    least_scale, scale_of = floor if floors_scale else 0, _scale_of(c)

    @compiled
    def find_scales(amaxes: Any, sizes: Any, factors: Any, stored: Any) -> Any:
        """The scale of each group, what its elements are multiplied with or divided by, and what is stored; the number of
        groups that take the slow way."""
        widest = np.uint16(0)
        for g in range(groups):
            widest = max(widest, peek(amaxes, g))
        num_slow = np.int64(0)
        if widest >= 0x7F80:
            for g in range(groups):
                amax = np.int64(amaxes[g]) << 16
                sizes[g], stored[g] = scale_of(amax)
                if marks and amax >= INFINITY_BITS:
                    stored[g] = mark
            return groups
        for g in range(groups):
            amax = np.int32(np.int64(peek(amaxes, g)) << 16)
            if power_of_two:
                byte = ((max(amax, least_bits) + carry) >> 23) - less
                byte = max(byte, least_byte)
                s, inverse = from_bits(np.int32(byte << 23)), from_bits(np.int32((254 - byte) << 23))
                kept_scale = byte if in_e8m0 else byte << 23
            else:
                s = from_bits(np.int32(amax if floors_scale else max(amax, floor))) / top
                s = from_bits(np.int32(max(np.int64(float_bits(s)), least_scale)))
                kept_scale = np.int64(float_bits(s))
                if not in_float:
                    code = e4m3_code(s)
                    if scale_up:
                        code += np.uint8((e4m3_number(code) < s) & (code < 0x7E))
                    kept_scale, s = np.int64(code), e4m3_number(code)
                inverse = np.float32(1) / s
                num_slow += 1 - np.int64((s > 0) & (inverse < np.inf))
            poke(sizes, g, s)
            poke(factors, g, inverse if by_product else s)
            poke(stored, g, np.int64(kept_scale))
        return num_slow

    return find_scales


def _group_encoder(c: dict[str, Any]) -> tuple[Any, Any]:
    """``encode_group`` and ``encode_slow_group`` for the constants ``c``: the codes of one group."""
    group, marks, apart, signed_zero = c["GROUP"], c["MARKS"], c["APART"], c["SIGNED_ZERO"]
    is_e4m3, is_e2m1, is_int8 = (c["CODES"] == name for name in ("e4m3", "e2m1", "int8"))
    by_product = c["RECIPROCAL"] or c["POWER_OF_TWO"]
    code_nbytes = group if is_e4m3 or is_int8 else group // 2
    e2m1 = e2m1_down if c["TIES"] == "down" else e2m1_even

    @compiled
    def code_of(y: Any) -> Any:
        """float32 in units of its scale, no NaN -> uint8."""
        if is_e4m3:
            return e4m3_code(y)
        if is_e2m1:
            code = e2m1(y)
            return code if signed_zero or code != 8 else np.uint8(0)
        return whole_int8_away(y) if is_int8 else whole_int4_even(y)

    @compiled
    def slow_code_of(x: Any, s: Any, amax: Any) -> Any:
        """The same of x where its scale is 0, inf, NaN or too small to divide by."""
        y = x * (np.float32(1) / s) if by_product else x / s
        if marks and amax >= INFINITY_BITS:
            return np.uint8(0)
        if apart:
            y = x if amax == 0 else np.float32(np.inf) if y != y else y
        if y != y:
            negative = float_bits(x) < 0 if x != x else s == s
            return np.uint8((0x80 if is_e4m3 else 8) * negative + (0x7F if is_e4m3 else 0))
        return code_of(y)

    @compiled
    def encode_group(rows: Any, start: int, pages: Any, at: int, factor: Any, count: int) -> None:
        """``count`` bytes of codes; ``factor``: what elements are multiplied with or divided by."""
        if code_nbytes == group:
            for e in range(count):
                x = widen(peek(rows, start + e))
                poke(pages, at + e, code_of(x * factor if by_product else x / factor))
        else:
            for e in range(count):
                low, high = widen(peek(rows, start + 2 * e)), widen(peek(rows, start + 2 * e + 1))
                low, high = (low * factor, high * factor) if by_product else (low / factor, high / factor)
                poke(pages, at + e, np.uint8(code_of(low) | code_of(high) << 4))

    @compiled
    def encode_slow_group(rows: Any, start: int, pages: Any, at: int, s: Any, amax: Any) -> None:
        for e in range(code_nbytes):
            code = slow_code_of(widen(rows[start + e * (group // code_nbytes)]), s, amax)
            if code_nbytes < group:
                code |= slow_code_of(widen(rows[start + 2 * e + 1]), s, amax) << 4
            pages[at + e] = code

    return encode_group, encode_slow_group


@compiled
def _amax_of(rows: Any, start: int, count: int, skips_nan: bool) -> Any:
    """Bits of the largest magnitude of ``count`` bfloat16, as uint16."""
    widest = np.uint16(0)
    for e in range(count):
        size = magnitude(peek(rows, start + e))
        if skips_nan:
            size = size if size <= 0x7F80 else np.uint16(0)
        widest = max(widest, size)
    return widest


@lru_cache(maxsize=256)
def append_function(**c: Any) -> Any:
    """The compiled loop for the constants of ``packed_rows.append_constants``.

    It takes (rows, pages: flat uint16 and uint8 arrays, the same pages as uint16 and int32, slots, number of slots, stride of
    the rows in elements and of the pages in bytes, GROUP once more: loops whose length LLVM knows are unrolled, not
    vectorised).
    """
    page_size, heads, cells, group, groups = c["PAGE"], c["HEADS"], c["CELLS"], c["GROUP"], c["GROUPS"]
    lanes, pad, kept, kept_nbytes = c["LANES"], c["SCALE_PAD"], c["KEPT"], c["KEPT_NBYTES"]
    head_stride, cell_stride, data_row, scales_row = c["HEAD_STRIDE"], c["CELL_STRIDE"], c["DATA_ROW"], c["SCALES_ROW"]
    codes_at, scales_at, kept_at = c["CODES_AT"], c["SCALES_AT"], c["KEPT_AT"]
    code_nbytes = group if c["CODES"] in ("e4m3", "int8") else group // 2
    in_float, skips_nan = c["SCALE"] == "float32", c["SKIPS_NAN"]
    find_scales, (encode_group, encode_slow_group) = _scale_finder(c), _group_encoder(c)

    @compiled
    def append(
        rows: Any, pages: Any, pages16: Any, pages32: Any, slots: Any, num_slots: int, row: int, page: int, count: int
    ) -> None:
        amaxes, stored = np.empty(groups, np.uint16), np.empty(groups, np.int64)
        sizes, factors = np.empty(groups, np.float32), np.empty(groups, np.float32)
        for i in range(len(slots)):
            slot = np.int64(slots[i])
            if slot < 0 or slot >= num_slots:
                continue
            for vector in range(heads * cells):
                cell, head = vector // heads, vector % heads
                start = i * row + vector * (groups * group + kept)
                base = slot // page_size * page + head * head_stride + cell * cell_stride
                data, scales = base + slot % page_size * data_row, base + slot % page_size * scales_row + scales_at
                for g in range(groups):
                    amaxes[g] = _amax_of(rows, start + g * group, count, skips_nan)
                num_slow = find_scales(amaxes, sizes, factors, stored)
                for g in range(groups):
                    at, from_ = data + codes_at + g * code_nbytes, start + g * group
                    if num_slow == 0 and not skips_nan:  # else the amax does not say whether there is a NaN
                        encode_group(rows, from_, pages, at, factors[g], count * code_nbytes // group)
                    else:
                        encode_slow_group(rows, from_, pages, at, sizes[g], np.int64(amaxes[g]) << 16)
                for g in range(groups):
                    if in_float:
                        pages32[(scales >> 2) + g] = stored[g]
                    else:
                        pages[scales + g % lanes * (groups // lanes) + g // lanes] = stored[g]
                for e in range(pad):
                    pages[scales + groups + e] = 0
                for e in range(kept):
                    bits = peek(rows, start + groups * group + e)
                    if kept_nbytes == 2:
                        poke(pages16, ((data + kept_at) >> 1) + e, bits)
                    else:
                        x = widen(bits)
                        nan = np.uint8(0xFF if float_bits(x) < 0 else 0x7F)
                        poke(pages, data + kept_at + e, e4m3_code(x) if x == x else nan)

    return append


def _group_decoder(c: dict[str, Any]) -> Any:
    """``decode_group`` for the constants ``c``: the numbers of one group."""
    half = c["HALF"]
    is_e4m3, is_e2m1, is_int8 = (c["CODES"] == name for name in ("e4m3", "e2m1", "int8"))

    @compiled
    def put(out: Any, at: int, x: Any) -> None:
        poke(out, at, bfloat16_code(x) if half else x)

    @compiled
    def decode_group(pages: Any, at: int, out: Any, start: int, s: Any, count: int) -> None:
        """``count`` bytes of codes."""
        for e in range(count):
            byte = peek(pages, at + e)
            if is_e4m3:
                put(out, start + e, e4m3_number(byte) * s)
            elif is_int8:
                put(out, start + e, np.float32(np.int8(byte)) * s)
            elif is_e2m1:
                put(out, start + 2 * e, e2m1_number(np.uint8(byte & 15)) * s)
                put(out, start + 2 * e + 1, e2m1_number(np.uint8(byte >> 4)) * s)
            else:
                put(out, start + 2 * e, np.float32(np.int8(np.uint8(byte << 4)) >> 4) * s)
                put(out, start + 2 * e + 1, np.float32(np.int8(byte) >> 4) * s)

    return decode_group


@lru_cache(maxsize=256)
def gather_function(**c: Any) -> Any:
    """The compiled loop for the constants of ``packed_rows.gather_constants``: takes (out: a flat array, uint16 or float32,
    and the rest as the other one)."""
    page_size, heads, cells, group, groups = c["PAGE"], c["HEADS"], c["CELLS"], c["GROUP"], c["GROUPS"]
    lanes, kept, kept_nbytes, half = c["LANES"], c["KEPT"], c["KEPT_NBYTES"], c["HALF"]
    head_stride, cell_stride, data_row, scales_row = c["HEAD_STRIDE"], c["CELL_STRIDE"], c["DATA_ROW"], c["SCALES_ROW"]
    codes_at, scales_at, kept_at = c["CODES_AT"], c["SCALES_AT"], c["KEPT_AT"]
    in_float, in_e8m0 = c["SCALE"] == "float32", c["SCALE"] == "e8m0"
    code_nbytes = group if c["CODES"] in ("e4m3", "int8") else group // 2
    width, decode_group = heads * cells * (groups * group + kept), _group_decoder(c)

    @compiled
    def scale_at(pages: Any, pages32: Any, scales: int, g: int) -> Any:
        if in_float:
            return from_bits(pages32[(scales >> 2) + g])
        byte = pages[scales + g % lanes * (groups // lanes) + g // lanes]
        if in_e8m0:
            bits = 0x7FC00000 if byte == 0xFF else np.int64(byte) << 23 if byte else 0x00400000
            return from_bits(np.int32(bits))
        return e4m3_number(byte)

    @compiled
    def gather(
        out: Any, pages: Any, pages16: Any, pages32: Any, slots: Any, num_slots: int, row: int, page: int, count: int
    ) -> None:
        for i in range(len(slots)):
            slot = np.int64(slots[i])
            if slot < 0 or slot >= num_slots:
                out[i * row : i * row + width] = 0
                continue
            for vector in range(heads * cells):
                cell, head = vector // heads, vector % heads
                start = i * row + vector * (groups * group + kept)
                base = slot // page_size * page + head * head_stride + cell * cell_stride
                data, scales = base + slot % page_size * data_row, base + slot % page_size * scales_row + scales_at
                for g in range(groups):
                    s = scale_at(pages, pages32, scales, g)
                    at = data + codes_at + g * code_nbytes
                    decode_group(pages, at, out, start + g * group, s, count * code_nbytes // group)
                for e in range(kept):
                    at = start + groups * group + e
                    if kept_nbytes == 1:
                        x = e4m3_number(peek(pages, data + kept_at + e))
                        poke(out, at, bfloat16_code(x) if half else x)
                    elif half:
                        poke(out, at, peek(pages16, ((data + kept_at) >> 1) + e))
                    else:
                        poke(out, at, widen(peek(pages16, ((data + kept_at) >> 1) + e)))

    return gather
