"""Copies between rows of an arena and rows of a host table, whatever the widths of the two.

    arena row wider than a table row     | piece 0 | piece 1 | rest      |      several table rows for each arena row
    arena row not wider                  | row 0 | row 1 | row 2 | unused |      several arena rows in each table row

The bytes of an arena row are its record in block-major order, whatever the order of the arena is. Data is copied bit
for bit; padding may be copied or not. One copy if the arena is block-major, otherwise one copy for each of its regions.
Or layer by layer (``LayerwiseCopy``), so that a forward pass can start before all layers are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.kernels.copy_rows import copy_rows
from kvpagoda.memory.arena import Arena, Tensor
from kvpagoda.units import table_rows

Ids = npt.NDArray[np.integer[Any]]
Part = tuple[Ids, Tensor, Sequence[int]]


def copy_to_host(arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int], layer: int | None = None) -> None:
    """Copy rows ``ids`` of ``arena`` to ``rows`` of ``table``, uint8 ``[M, width]`` on the host, in their order; of all
    layers (None), or the bytes of ``layer``.

    ``rows``: as many as ``table_rows`` returns. Waits until the bytes are there. The caller has validated the ids.
    """
    start_copy(arena, ids, table, rows, is_out=True, layer=layer)
    _wait(arena)


def copy_from_host(arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int]) -> None:
    """Copy ``rows`` of ``table``, as ``copy_to_host`` wrote them, back to rows ``ids`` of ``arena``. Waits like it."""
    start_copy(arena, ids, table, rows, is_out=False)
    _wait(arena)


def start_copy(
    arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int], *, is_out: bool, layer: int | None = None
) -> None:
    """Copy the data of ``layer``, or of all layers (None), out to the table or back.

    On CUDA the copy runs on the current stream and this does not wait for it.
    """
    n, width = len(ids), arena.layout.nbytes
    assert len(rows) == table_rows(n, width, table.shape[1]), "rows of the table"
    if not n or not width:
        return
    pieces = [*_pieces(width, table.shape[1], np.asarray(ids, np.int64), np.asarray(rows, np.int64))]
    for inside, memory in arena.regions(layer):
        for piece, outside, arena_rows, host_rows in pieces:
            begin, end = max(inside.start, piece.start), min(inside.stop, piece.stop)
            if begin < end:
                offset = outside + begin - piece.start
                device = memory[:, begin - inside.start : end - inside.start], arena_rows
                host = table[:, offset : offset + end - begin], host_rows
                (source, sources), (target, targets) = (device, host) if is_out else (host, device)
                copy_rows(source, target, torch.from_numpy(np.stack((sources, targets), axis=1)))


def _wait(arena: Arena) -> None:
    """Wait for the current stream of a GPU arena."""
    if arena.device.type == "cuda":
        torch.cuda.current_stream(arena.device).synchronize()


def _pieces(width: int, table_width: int, index: Ids, rows: Ids) -> Iterator[tuple[slice, int, Ids, Ids]]:
    """Yield the strided copies to make: (byte range of a record, its start in a table row, arena rows, table rows)."""
    if width > table_width:
        num_pieces = -(-width // table_width)
        for piece in range(num_pieces):
            begin = piece * table_width
            yield slice(begin, min(begin + table_width, width)), 0, index, rows[piece::num_pieces]
    else:
        per_row = table_width // width
        for place in range(min(per_row, len(index))):
            arena_rows = index[place::per_row]
            yield slice(0, width), place * width, arena_rows, rows[: len(arena_rows)]


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for copies beside the current stream; None on the CPU."""
    stream: type[torch.cuda.Stream] = torch.cuda.Stream
    return stream(device) if device.type == "cuda" else None


class LayerwiseCopy:
    """A running copy of ``parts`` from host memory to rows of ``arena``, one layer after the other.

    ``parts``: (rows of the arena, table of host memory uint8 ``[M, layout.nbytes]``, its rows). On the CPU a layer is
    copied when ``wait`` requests it. On CUDA all layers are copied on ``stream``, in their order, and ``wait`` makes
    the current stream wait for one of them. ``done`` is called once, when the tables are not needed any more.
    """

    def __init__(
        self, arena: Arena, parts: Sequence[Part], done: Callable[[], None], stream: torch.cuda.Stream | None = None
    ) -> None:
        self.arena, self._parts, self._stream = arena, parts, stream
        self._done: Callable[[], None] | None = done
        layers = [page.layer for page in arena.layout.pages]
        self._waiting: dict[int, torch.cuda.Event | None] = dict.fromkeys(layers)  # layers that are not copied yet
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(arena.device))
            with torch.cuda.stream(stream):
                for layer in self._waiting:
                    self._copy(layer)
                    self._waiting[layer] = stream.record_event()

    @property
    def is_done(self) -> bool:
        """Whether every layer is copied, or the current stream waits for it."""
        return not self._waiting

    def wait(self, layer: int) -> None:
        """Make sure that later reads of ``layer``, on this thread and stream, find it copied. May be repeated."""
        if layer in self._waiting:
            if (event := self._waiting[layer]) is None:
                self._copy(layer)
            else:
                torch.cuda.current_stream(self.arena.device).wait_event(event)
            del self._waiting[layer]
        if not self._waiting:
            self.cancel()

    def cancel(self) -> None:
        """End the copy: no further layer is needed. May be repeated."""
        self._waiting.clear()
        if self._done is not None:
            if self._stream is not None:
                self._stream.synchronize()  # ``done`` may give the host memory to another user
            done, self._done = self._done, None
            done()

    def finish(self) -> None:
        """Wait for all layers, as ``wait`` does."""
        for layer in [*self._waiting]:
            self.wait(layer)
        self.cancel()

    def _copy(self, layer: int) -> None:
        for ids, table, rows in self._parts:
            start_copy(self.arena, ids, table, rows, is_out=False, layer=layer)
