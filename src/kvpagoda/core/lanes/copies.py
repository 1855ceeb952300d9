"""Copies of long rows on a CPU, compiled by numba, with non-temporal stores that bypass the caches.

A normal store first reads its cache line, and the copied bytes evict other data from the caches. Non-temporal stores do
neither, so that copies of many blocks are faster than one memcpy per block. For a few blocks normal stores are better,
because the blocks are then still in a cache when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvpagoda.core.lanes.llvm import fetch

instruction: Callable[[Any], Any] = intrinsic
compiled: Callable[[Any], Any] = njit(cache=True, error_model="numpy")
LINE, LINES, AHEAD = 64, 4, 1024
"""Bytes of a cache line, lines that are copied at once, and the distance in bytes of the prefetch."""


@instruction
def _stream(typingctx: Any, source: Any, start: Any, target: Any, at: Any) -> Any:
    """Copy ``LINES`` cache lines of the flat uint8 array ``source`` from byte ``start`` to byte ``at`` of ``target``.

    A cache line must begin at byte ``at``.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        line, mark = ir.VectorType(ir.IntType(8), LINE), b.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        begin, end = (
            b.bitcast(b.gep(context.make_array(array)(context, b, args[n]).data, [args[n + 1]]), line.as_pointer())
            for n, array in ((0, source), (2, target))
        )
        for n in range(LINES):
            fetch(begin, b, AHEAD + n * LINE)
        places = [ir.Constant(ir.IntType(32), n) for n in range(LINES)]
        for place, loaded in [(place, b.load(b.gep(begin, [place]), align=1)) for place in places]:
            b.store(loaded, b.gep(end, [place]), align=LINE).set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(source, types.int64, target, types.int64), codegen


@instruction
def _settle(typingctx: Any) -> Any:
    """Insert a fence, so that no later store becomes visible before the non-temporal ones."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@compiled
def copy_spans(source: Any, target: Any, spans: Any, nbytes: int) -> None:
    """Copy ``nbytes`` bytes for each row of ``spans``.

    Args:
        source: a flat uint8 array.
        target: a flat uint8 array.
        spans: int64 ``[n, 2]``, first byte in ``source`` and first byte in ``target``.
        nbytes: of each span.
    """
    begin = target.ctypes.data
    for n in range(len(spans)):
        start, at = spans[n, 0], spans[n, 1]
        head = min(-(begin + at) % LINE, nbytes)
        end = head + (nbytes - head) // (LINE * LINES) * (LINE * LINES)
        for first in range(head, end, LINE * LINES):
            _stream(source, start + first, target, at + first)
        for byte in range(head):
            target[at + byte] = source[start + byte]
        for byte in range(end, nbytes):
            target[at + byte] = source[start + byte]
    _settle()
