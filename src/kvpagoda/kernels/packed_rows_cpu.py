"""``append_rows`` and ``gather_rows`` compiled for the CPU by numba: the bytes of the reference.

A loop is compiled once for each rule and size of group, and kept on disk, by the date of this file: it must be written anew
where ``numba_lanes`` changes. Where the parts of a row lie it is told in each call. A row in which a scale is 0, inf or NaN,
or too small to divide by, takes the slow way, element by element; there are hardly any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kvpagoda.kernels.numba_lanes import (
    INFINITY_BITS,
    amax,
    bits_of,
    cast,
    e2m1,
    e2m1_down,
    e4m3,
    fetch,
    find_scales,
    float_of,
    int4,
    int8,
    of_e4m3,
    widened,
)

compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")
inlined: Callable[[Any], Any] = njit(error_model="numpy", forceinline=True)
CODES = ("e4m3", "e2m1", "int8", "int4")
AHEAD = 8
"""Rows from one that is worked on to one that is asked for."""
LANES = 16
"""The most elements that are cast side by side."""


class Parts(NamedTuple):
    """Where the parts of a row lie: what ``packed_rows`` calls the same in capitals. ``rows`` elements from row to row,
    ``pages`` bytes from page to page, ``slots`` of them in all."""

    page: int
    heads: int
    cells: int
    groups: int
    lanes: int
    scale_pad: int
    head_stride: int
    cell_stride: int
    data_row: int
    scales_row: int
    codes_at: int
    scales_at: int
    kept_at: int
    rows: int
    pages: int
    slots: int


class Rule(NamedTuple):
    """How scales and codes are made: what ``packed_rows`` calls the same in capitals, as numba takes it. ``codes``: an index
    of ``CODES``, those of 4 bits odd."""

    codes: int
    in_float: bool
    in_e8m0: bool
    by_product: bool
    ties_down: bool
    top: float
    floor: int
    floors_scale: bool
    power_of_two: bool
    scale_up: bool
    signed_zero: bool
    apart: bool
    marks: bool
    skips_nan: bool


def rule_of(c: dict[str, Any]) -> Rule:
    """The rule among the constants of ``packed_rows.append_constants``."""
    scale, by_product = c["SCALE"], c["RECIPROCAL"] or c["POWER_OF_TWO"]
    given = CODES.index(c["CODES"]), scale == "float32", scale == "e8m0", by_product, c["TIES"] == "down"
    return Rule(*given, *(c[name.upper()] for name in Rule._fields[len(given) :]))


@inlined
def _vectors(p: Any, width: int) -> Any:
    """int64 ``[cells * heads]`` each: the element of a row where a vector of ``width`` begins, and the byte of its page; and
    ``[groups]``: which of the one-byte scales of a vector is that of a group."""
    elements, at = np.empty(p.cells * p.heads, np.int64), np.empty(p.cells * p.heads, np.int64)
    for vector in range(p.cells * p.heads):
        elements[vector] = vector * width
        at[vector] = vector // p.heads * p.cell_stride + vector % p.heads * p.head_stride
    scales = np.arange(p.groups)
    return elements, at, scales % p.lanes * (p.groups // p.lanes) + scales // p.lanes


@inlined
def _fetch(pages: Any, p: Any, at: Any, slot: Any) -> None:
    """Ask for the memory of the row in ``slot``, whatever number that is, ahead of its use: rows lie anywhere, and each would
    be waited for longer than it is worked on. ``at``: see ``_vectors``."""
    page, within = slot // p.page * p.pages, slot % p.page
    for head in range(p.heads):
        fetch(pages, page + at[head] + within * p.scales_row + p.scales_at)
        for line in range(0, p.data_row, 64):
            fetch(pages, page + at[head] + within * p.data_row + line)


@inlined
def _broken_scale(size: Any, r: Any) -> Any:
    """(s, what is stored) of a group with inf or NaN; ``size``: int64 bits of its amax."""
    if r.in_float or r.in_e8m0:
        return float_of(np.int32(size)), 0xFF if r.in_e8m0 else 0x7FC00000 if r.marks else size
    code = 0x7F if r.marks or size > INFINITY_BITS else 0x7E
    return of_e4m3(np.uint8(code)), code


@inlined
def _code_of(y: Any, r: Any) -> Any:
    """float32 in units of its scale, no NaN -> uint8."""
    if r.codes == 0:
        return e4m3(y)
    if r.codes == 1:
        code = e2m1_down(y) if r.ties_down else e2m1(y)
        return code if r.signed_zero or code != 8 else np.uint8(0)
    return int8(y) if r.codes == 2 else int4(y)


@inlined
def _slow_code_of(x: Any, factor: Any, size: Any, r: Any) -> Any:
    """The same of x in a group with a scale of 0, inf or NaN, or too small to divide by; ``size``: bits of its amax."""
    y = x * factor if r.by_product else x / factor
    if r.marks and size >= INFINITY_BITS:
        return np.uint8(0)
    if r.apart:
        y = x if size == 0 else np.float32(np.inf) if y != y else y
    if y != y:
        negative = bits_of(x) < 0 if x != x else factor == factor
        return np.uint8((0x80 if r.codes == 0 else 8) * negative + (0x7F if r.codes == 0 else 0))
    return _code_of(y, r)


@compiled
def _skip_nan(rows: Any, start: int, group: int, groups: int, sizes: Any) -> None:
    """The amax of each group without what is NaN."""
    for g in range(groups):
        sizes[g] = 0
        for e in range(start + g * group, start + (g + 1) * group):
            size = rows[e] & 0x7FFF
            sizes[g] = max(sizes[g], size if size <= 0x7F80 else 0)


@compiled
def _encode_slowly(
    rows: Any, start: int, pages: Any, at: int, group: int, groups: int, sizes: Any, factors: Any, stored: Any, r: Any
) -> None:
    """Codes of a row, element by element, and the scales of groups with inf or NaN."""
    for g in range(groups):
        size, factor = np.int64(sizes[g]) << 16, factors[g]
        if size >= INFINITY_BITS:
            s, stored[g] = _broken_scale(size, r)
            factor = np.float32(1) / s if r.by_product else s
        for e in range(g * group, (g + 1) * group):
            code = _slow_code_of(widened(rows[start + e]), factor, size, r)
            if r.codes % 2 == 0:
                pages[at + e] = code
            elif e % 2 == 0:
                pages[at + e // 2] = code
            else:
                pages[at + e // 2] |= code << 4


def _words(rule: Rule) -> tuple[str, str]:
    """How ``numba_lanes`` is told to encode by ``rule``, and to find scales."""
    codes = {"down": rule.ties_down, "unsigned": not rule.signed_zero, "divided": not rule.by_product}
    scale = {"float32": rule.in_float, "e8m0": rule.in_e8m0, "e4m3": not rule.in_float and not rule.in_e8m0}
    scale |= {"power": rule.power_of_two, "up": rule.scale_up, "divided": not rule.by_product}
    found = (" ".join(word for word, is_so in one.items() if is_so) for one in (codes, scale))
    return f"encode {CODES[rule.codes]} {next(found)}", next(found)


@lru_cache(maxsize=256)
def append_function(rule: Rule, group: int, groups: int, kept: int, kept_nbytes: int) -> Any:
    """The compiled loop for rows of ``groups`` groups of ``group`` elements, and ``kept`` without codes, of so many bytes.

    It takes (rows, pages: flat uint16 and uint8 arrays; the same pages as uint16 and int32; slots, ``Parts``, ``rule``).
    """
    reach, side, kept_side = min(group, 128), min(group, LANES), math.gcd(kept, LANES) or 1
    encode, scale = _words(rule)
    floor, least = (int(rule.power_of_two), rule.floor) if rule.floors_scale else (rule.floor, 0)
    padded, width, per_byte = 1 << (groups - 1).bit_length(), groups * group + kept, 1 + rule.codes % 2
    top, in_float, skips_nan = rule.top, rule.in_float, rule.skips_nan

    @compiled
    def append(rows: Any, pages: Any, pages16: Any, pages32: Any, slots: Any, p: Any, r: Any) -> None:
        sizes, stored, factors = (
            np.full(padded, 0x3F80, np.uint16),
            np.empty(padded, np.int32),
            np.empty(padded, np.float32),
        )
        elements, bytes_, scale_at = _vectors(p, width)
        for i in range(len(slots)):
            slot = np.int64(slots[i])
            if slot < 0 or slot >= p.slots:
                continue
            page, within = slot // p.page * p.pages, slot % p.page
            for vector in range(len(elements)):
                start, base, widest = i * p.rows + elements[vector], page + bytes_[vector], np.uint16(0)
                data, footer = base + within * p.data_row, base + within * p.scales_row + p.scales_at
                for g in range(groups):
                    size = amax(rows, start + g * group, reach)
                    for e in range(reach, group, reach):
                        size = max(size, amax(rows, start + g * group + e, reach))
                    sizes[g], widest = size, max(widest, size)
                if widest >= 0x7F80 and skips_nan:
                    _skip_nan(rows, start, group, groups, sizes)
                worst = find_scales(sizes, factors, stored, floor, least, top, padded, scale)
                if widest >= 0x7F80 or worst >= INFINITY_BITS:
                    _encode_slowly(rows, start, pages, data + p.codes_at, group, groups, sizes, factors, stored, r)
                else:
                    for g in range(groups):
                        for e in range(g * group, (g + 1) * group, side):
                            cast(rows, start + e, pages, data + p.codes_at + e // per_byte, factors[g], side, encode)
                for g in range(groups):
                    if in_float:
                        pages32[(footer >> 2) + g] = stored[g]
                    else:
                        pages[footer + scale_at[g]] = stored[g]
                for e in range(p.scale_pad):
                    pages[footer + groups + e] = 0
                for e in range(0, kept, kept_side):
                    from_, at = start + groups * group + e, data + p.kept_at + e * kept_nbytes
                    if kept_nbytes == 2:
                        cast(rows, from_, pages16, at >> 1, np.float32(1), kept_side, "copy")
                    else:
                        cast(rows, from_, pages, at, np.float32(1), kept_side, "e4m3")

    return append


@lru_cache(maxsize=256)
def gather_function(codes: str, scale: str, half: bool, group: int, groups: int, kept: int, kept_nbytes: int) -> Any:
    """The compiled loop that reads what ``append_function`` writes: takes (out: a flat array, uint16 or float32, and the rest
    as the other one, but no rule). ``scale``: what scales are stored as; ``half``: to bfloat16."""
    side, kept_side = min(group, LANES), math.gcd(kept, LANES) or 1
    in_float, in_e8m0, per_byte = scale == "float32", scale == "e8m0", 1 + CODES.index(codes) % 2
    decode, side_nbytes, width = f"decode {codes}{' half' if half else ''}", side // per_byte, groups * group + kept
    read = ("copy" if half else "widen") if kept_nbytes == 2 else "decode e4m3 half" if half else "decode e4m3"

    @compiled
    def gather(out: Any, pages: Any, pages16: Any, pages32: Any, slots: Any, p: Any) -> None:
        elements, bytes_, scale_at = _vectors(p, width)
        for i in range(len(slots)):
            slot = np.int64(slots[i])
            if slot < 0 or slot >= p.slots:
                out[i * p.rows : i * p.rows + len(elements) * width] = 0
                continue
            page, within = slot // p.page * p.pages, slot % p.page
            _fetch(pages, p, bytes_, np.int64(slots[min(i + AHEAD, len(slots) - 1)]))
            for vector in range(len(elements)):
                start, base = i * p.rows + elements[vector], page + bytes_[vector]
                data, footer = base + within * p.data_row, base + within * p.scales_row + p.scales_at
                for g in range(groups):
                    if in_float:
                        s = float_of(pages32[(footer >> 2) + g])
                    else:
                        byte = pages[footer + scale_at[g]]
                        bits = 0x7FC00000 if byte == 0xFF else np.int64(byte) << 23 if byte else 0x00400000
                        s = float_of(np.int32(bits)) if in_e8m0 else of_e4m3(byte)
                    for e in range(g * group, (g + 1) * group, side):
                        cast(pages, data + p.codes_at + e // per_byte, out, start + e, s, side_nbytes, decode)
                for e in range(0, kept, kept_side):
                    at, to = data + p.kept_at + e * kept_nbytes, start + groups * group + e
                    if kept_nbytes == 2:
                        cast(pages16, at >> 1, out, to, np.float32(1), kept_side, read)
                    else:
                        cast(pages, at, out, to, np.float32(1), kept_side, read)

    return gather
