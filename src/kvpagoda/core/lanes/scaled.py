"""Rows with one scale for a whole tensor, written and read on a CPU in loops that numba compiles.

    bfloat16  ->  divided by the scale  ->  saturated  ->  8-bit codes                    write_run
    codes     ->  float32  ->  multiplied by the scale  ->  bfloat16 or float32           read_run

A row is a number of heads, which may lie apart in a page; the elements of a head are contiguous. Nothing depends on the
size of a row, so few loops are compiled. Rows with NaN are *odd*: the loops report them, and the reference processes them.
"""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvpagoda.core.lanes import llvm, vectors
from kvpagoda.core.lanes.copies import _settle
from kvpagoda.core.lanes.llvm import F32, I8, I16, Lanes, fetch, load, store
from kvpagoda.core.lanes.vectors import LOW_PLACES, _bits, _pair_numbers, _steps, _stored, _words

compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")
AHEAD = 4096
"""Elements that are prefetched ahead: the rows of a page are scattered, and waiting for one takes longer than casting it."""
NAN = 0x7F80
"""A bfloat16 whose bits without sign are above these is NaN."""


class Places(NamedTuple):
    """Where rows lie.

    Args:
        rows: elements from row to row of the numbers.
        numbers: elements from head to head of the numbers.
        heads: of a row.
        width: elements of a head.
        page: rows of a page.
        pages: bytes from page to page.
        steps: bytes from row to row.
        apart: bytes from head to head.
        slots: rows in all pages.
    """

    rows: int
    numbers: int
    heads: int
    width: int
    page: int
    pages: int
    steps: int
    apart: int
    slots: int


def _run_instruction(make: Callable[..., Any]) -> Any:
    """Return a numba intrinsic that casts a run of ``MANY`` elements with the instructions that ``make`` builds.

    Compiled code calls it with (numbers: flat array, index of the first; memory: flat uint8, first byte; factor: float32;
    constants in JSON); it returns whether an element is odd.
    """

    def typed(typingctx: Any, numbers: Any, first: Any, memory: Any, byte: Any, factor: Any, c: Any) -> Any:
        constants = SimpleNamespace(**json.loads(c.literal_value))

        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            begin, codes = (
                b.gep(context.make_array(array)(context, b, args[n]).data, [args[n + 1]])
                for n, array in ((0, numbers), (2, memory))
            )
            undefined = ir.Constant(ir.VectorType(F32, constants.MANY // 2), ir.Undefined)
            first_lane = b.insert_element(undefined, args[4], ir.Constant(llvm.I32, 0))
            return make(b, begin, codes, Lanes(b, first_lane).taken([0] * (constants.MANY // 2)), constants)

        return types.boolean(numbers, first, memory, byte, factor, c), codegen

    return intrinsic(prefer_literal=True)(typed)


@_run_instruction
def write_run(b: Any, numbers: Any, codes: Any, factor: Lanes, c: Any) -> Any:
    """Write the codes of ``MANY`` bfloat16; return whether one of them is NaN."""
    drop = LOW_PLACES[c.CODES][0]
    given = load(numbers, b, 0, I16, c.MANY)
    size = given & 0x7FFF
    pairs = size.cut(llvm.I32, c.MANY // 2)
    scaled = [x / factor for x in ((pairs << 16).floats, (pairs & -0x10000).floats)]
    octaves, steps = zip(*(_steps(x.bits.least(_bits(c.TOP)), c.CODES) for x in scaled))
    code = _words(steps) + (_words(octaves, high=True) >> drop - 16)
    store(codes, 0, _stored((code & 0x7F) | ((given >> 8) & 0x80), 8), c.STREAMS)
    return (size.constant(NAN) < size).any()


@_run_instruction
def read_run(b: Any, numbers: Any, codes: Any, factor: Lanes, c: Any) -> Any:
    """Read ``MANY`` codes as float32, or as the bits of bfloat16; return whether one of them is NaN."""
    pairs = load(codes, b, 0, I16, c.MANY // 2)
    store(numbers, 0, _pair_numbers(pairs, factor, c.CODES, c.HALF), c.STREAMS)
    size = (pairs & 0x7F7F).cut(I8, c.MANY)
    return (size.constant(LOW_PLACES[c.CODES][2]) < size).any()


def _ask(typingctx: Any, memory: Any, byte: Any) -> Any:
    """Prefetch byte ``byte`` of the flat uint8 array ``memory`` to the second cache: heads that are a power of two apart
    have few places in the first."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        fetch(b.gep(context.make_array(memory)(context, b, args[0]).data, [args[1]]), b, 0, near=2)
        return context.get_dummy_value()

    return types.void(memory, byte), codegen


ask: Any = intrinsic(_ask)


@compiled
def _start(slot: Any, p: Any) -> Any:
    """Return the first byte of the row in ``slot``; negative slots count from the end."""
    slot = np.int64(slot) + p.slots * (slot < 0)
    page = slot // p.page
    return page * p.pages + (slot - page * p.page) * p.steps


@lru_cache(maxsize=64)
def run_loop(constants: str) -> Any:
    """Return the compiled loop that writes rows, or reads them if ``constants`` has ``HALF``.

    Args:
        constants: JSON: ``CODES``, ``MANY`` (elements of a run, a power of two, at most the width), ``STREAMS``
            (whether to store past the caches; each run then begins and ends cache lines) and, to write, ``TOP``.

    Returns:
        A loop that takes (numbers: flat array, uint16 or float32; memory: flat uint8; int64 slots; float32 factor;
        ``Places``). It returns the indices of odd rows as int64, or [-1], having done nothing, if a slot is out of
        range. Negative slots count from the end.
    """
    c = json.loads(constants)
    run, many, streams = read_run if "HALF" in c else write_run, c["MANY"], c["STREAMS"]
    # numba looks up its disk cache by the date of this file and the values that the loop encloses
    source = zlib.crc32((inspect.getsource(llvm) + inspect.getsource(vectors)).encode())
    constants = json.dumps({**c, "SOURCE": source})

    def loop(numbers: Any, memory: Any, slots: Any, factor: Any, p: Any) -> Any:
        for i in range(len(slots)):
            if slots[i] < -p.slots or slots[i] >= p.slots:
                return np.full(1, -1, np.int64)
        odd, ahead = np.zeros(len(slots), np.bool_), max(1, AHEAD // (p.heads * p.width))
        for i in range(-ahead, len(slots)):
            following = _start(slots[i + ahead], p) if i + ahead < len(slots) else np.int64(-1)
            start, is_odd = _start(slots[i], p) if i >= 0 else np.int64(-1), False
            for head in range(p.heads):
                if following >= 0:
                    for line in range(following + head * p.apart, following + head * p.apart + p.width, 64):
                        ask(memory, line)
                if start < 0:
                    continue
                at, byte = i * p.rows + head * p.numbers, start + head * p.apart
                for first in range(0, p.width, many):
                    first = min(first, p.width - many)  # the last run may begin within the one before
                    is_odd |= run(numbers, at + first, memory, byte + first, factor, constants)
            if i >= 0:
                odd[i] = is_odd
        if streams:
            _settle()
        return np.flatnonzero(odd)

    # loops that several processes cached on disk are told apart only by name once one process has loaded them
    loop.__name__ = loop.__qualname__ = f"run_{blake2b(constants.encode(), digest_size=12).hexdigest()}"
    return compiled(loop)
