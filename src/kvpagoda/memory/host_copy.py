"""Rows of an arena out to a table of host memory and back, whatever the widths of the two.

    row of the arena wider than a row of the table      | piece 0 | piece 1 | rest      |      so many table rows for each
    narrower                                            | row 0 | row 1 | row 2 | unused |      so many of them in each

The bytes of a row are its record, block-major, whatever the order of the arena is. Bit for bit; padding is copied or left as
it is. One copy where the arena is block-major, else one for each of its regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.kernels.copy_rows import copy_rows
from kvpagoda.memory.arena import Arena, Tensor
from kvpagoda.units import table_rows

Ids = npt.NDArray[np.integer[Any]]


def copy_to_host(arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int]) -> None:
    """Copy rows ``ids`` of ``arena`` to the rows ``rows`` of ``table``, uint8 ``[M, width]`` on the host, in that order.

    ``rows``: as many as ``table_rows`` says. Waits until the bytes are there. The ids are the caller's to have proven.
    """
    start_copy(arena, ids, table, rows, is_out=True)
    _wait(arena)


def copy_from_host(arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int]) -> None:
    """Copy back what ``copy_to_host`` copied: from ``rows`` of ``table`` to the rows ``ids`` of ``arena``."""
    start_copy(arena, ids, table, rows, is_out=False)
    _wait(arena)


def start_copy(
    arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int], *, is_out: bool, layer: int | None = None
) -> None:
    """Copy out, or back, what ``layer`` keeps, or all layers do; on CUDA the bytes are there when the current stream is."""
    n, width = len(ids), arena.layout.nbytes
    assert len(rows) == table_rows(n, width, table.shape[1]), "rows of the table"
    if not n or not width:
        return
    pieces = [*_pieces(width, table.shape[1], np.asarray(ids, np.int64), np.asarray(rows, np.int64))]
    for inside, memory in arena.regions(layer):
        for piece, outside, some, others in pieces:
            begin, end = max(inside.start, piece.start), min(inside.stop, piece.stop)
            if begin < end:
                at = outside + begin - piece.start
                ours = memory[:, begin - inside.start : end - inside.start], some
                theirs = table[:, at : at + end - begin], others
                (source, sources), (target, targets) = (ours, theirs) if is_out else (theirs, ours)
                copy_rows(source, target, torch.from_numpy(np.stack((sources, targets), axis=1)))


def _wait(arena: Arena) -> None:
    if arena.device.type == "cuda":
        torch.cuda.current_stream(arena.device).synchronize()


def _pieces(width: int, table_width: int, index: Ids, rows: Ids) -> Iterator[tuple[slice, int, Ids, Ids]]:
    """(bytes of a record, where they begin in a table row, records, table rows) of everything that moves, a few strided
    copies."""
    if width > table_width:
        each = -(-width // table_width)
        for piece in range(each):
            begin = piece * table_width
            yield slice(begin, min(begin + table_width, width)), 0, index, rows[piece::each]
    else:
        each = table_width // width
        for place in range(min(each, len(index))):
            some = index[place::each]
            yield slice(0, width), place * width, some, rows[: len(some)]
