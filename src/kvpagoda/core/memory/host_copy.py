"""Copies between rows of an arena and rows of a host table, whatever the widths of the two.

    arena row wider than a table row     | piece 0 | piece 1 | rest      |      several table rows for each arena row
    arena row not wider                  | row 0 | row 1 | row 2 | unused |      several arena rows in each table row

The bytes of an arena row are its record in block-major order, whatever the order of the arena is. Data is copied bit
for bit; padding may be copied or not. Or layer by layer (``LayerwiseCopy``), so that a forward pass can start before all
layers are copied.

On a CPU there is one copy if the arena is block-major, otherwise one for each of its regions, and it is over when the call
returns. On a GPU ``HostCopies`` starts copies and waits for none:

    out    blocks ──one kernel──► stage on the device  ──side stream, few programs──► page-locked rows
           blocks free from here on: what is written to them later is later in the stream
    in     page-locked rows ──current stream, few programs──► blocks
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.core.kernels.copy_rows import FEW, Regions, copy_gathered, copy_regions, copy_rows
from kvpagoda.core.kernels.dispatch import backend
from kvpagoda.core.memory.arena import Arena, Region, Tensor
from kvpagoda.core.memory.page_locks import PageLocks
from kvpagoda.core.memory.staging import Staging
from kvpagoda.pages import Bytes
from kvpagoda.threads import submit
from kvpagoda.units import table_rows

Ids = npt.NDArray[np.integer[Any]]
Part = tuple[Ids, Bytes, Sequence[int]]
_STAGE_NBYTES = 64 << 20
"""Bytes that wait on the device, outside of the arenas, until the host has them; what is more is copied by the current
stream, whose later work then waits for the bus."""
_MOST_REGIONS = 64
_log = logging.getLogger(__name__)


def copy_to_host(arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int], layer: int | None = None) -> None:
    """Copy rows ``ids`` of ``arena`` to ``rows`` of ``table``, uint8 ``[M, width]`` on the host, in their order; of all
    layers (None), or the bytes of ``layer``.

    ``rows``: as many as ``table_rows`` returns. Waits until the bytes are there. The caller has validated the ids.
    """
    start_copy(arena, ids, table, rows, is_out=True, layer=layer)
    _wait(arena)


def copy_from_host(arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int], layer: int | None = None) -> None:
    """Copy ``rows`` of ``table``, as ``copy_to_host`` wrote them, back to rows ``ids`` of ``arena``. Waits like it."""
    start_copy(arena, ids, table, rows, is_out=False, layer=layer)
    _wait(arena)


def start_copy(
    arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int], *, is_out: bool, layer: int | None = None
) -> None:
    """Copy the data of ``layer``, or of all layers (None), out to the table or back.

    On CUDA the copy runs on the current stream and this does not wait for it.
    """
    width = arena.layout.nbytes
    assert len(rows) == table_rows(len(ids), width, table.shape[1]), "rows of the table"
    _copy(arena.regions(layer), width, ids, table, rows, is_out=is_out, copy=copy_rows)


def _copy(
    regions: Sequence[Region], width: int, ids: Ids, table: Tensor, rows: Sequence[int], *, is_out: bool,
    copy: Callable[[Tensor, Tensor, Tensor], None],
) -> None:  # fmt: skip
    """Copy ``regions`` of records of ``width`` bytes, rows ``ids``, by one call of ``copy`` each and for each piece."""
    if not len(ids) or not width:
        return
    pieces = [*_pieces(width, table.shape[1], np.asarray(ids, np.int64), np.asarray(rows, np.int64))]
    for inside, memory in regions:
        for piece, outside, arena_rows, host_rows in pieces:
            begin, end = max(inside.start, piece.start), min(inside.stop, piece.stop)
            if begin < end:
                offset = outside + begin - piece.start
                device = memory[:, begin - inside.start : end - inside.start], arena_rows
                host = table[:, offset : offset + end - begin], host_rows
                (source, sources), (target, targets) = (device, host) if is_out else (host, device)
                copy(source, target, torch.from_numpy(np.stack((sources, targets), axis=1)))


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


class Event(Protocol):
    """A point in a stream, as ``torch.cuda.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """The streams that ``HostCopies`` uses: the ``current`` one of the calling thread, and one ``side`` stream."""

    side: Any

    def current(self) -> Any: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which ``stream`` is the current one."""

    def event(self, stream: Any) -> Event:
        """Return an event after what ``stream`` was given until now."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what ``stream`` is given from now on wait for ``event``. The host goes on."""


class CudaStreams:
    """``Streams`` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.side = device, side_stream(device)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)


class HostCopies:
    """Copies between arenas on ``device`` and tables of host memory. On a CPU (without ``streams``) each is over when its
    call returns; on a GPU they are done in the order of the calls, whatever stream is current, and no call waits.

    ``locks``: what is page-locked of host memory; a kernel of our own reads and writes it there. The rest is copied through
    the processor, and waited for. ``staging``: the way of ids to the device. Used by one thread at a time; ``then`` by any."""

    def __init__(
        self, device: torch.device, locks: PageLocks | None = None, streams: Streams | None = None,
        staging: Staging | None = None,
    ) -> None:  # fmt: skip
        self._device, self._locks, self._streams = device, locks, streams
        self._to_device = (staging or Staging(device)).to_device
        self._last: Event | None = None  # after the latest copy
        self._staged: deque[tuple[Event, int]] = deque()  # bytes that wait on the device
        self._regions: WeakKeyDictionary[Arena, dict[Any, tuple[Regions, Event]]] = WeakKeyDictionary()
        self._drains: dict[Any, tuple[Regions, Event]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._starting = Lock()
        self.num_staged = self.num_direct = self.num_pageable = 0
        """Copies out through the stage, and by the current stream; and copies through the processor."""

    def out(self, arena: Arena, ids: Ids, table: Bytes, rows: Sequence[int], layer: int | None = None) -> None:
        """Copy as ``copy_to_host`` does. Blocks ``ids`` may be written from now on by what is later in the current stream;
        the host may read ``rows`` after ``wait``, or in ``then``."""
        streams = self._streams
        if streams is None:
            copy_to_host(arena, ids, torch.from_numpy(table), rows, layer)
            return
        current, width = streams.current(), arena.layout.nbytes
        for part, part_rows, is_reached in self._split(arena, ids, table, rows):
            if not is_reached:
                self._through_processor(arena, part, table, part_rows, is_out=True, layer=layer)
                continue
            stage = self._stage(len(part), width) if layer is None else None
            if stage is None:
                self._follow(current)
                self._move(arena, part, torch.from_numpy(table), part_rows, is_out=True, layer=layer, programs=FEW)
                self._last = streams.event(current)
                self.num_direct += 1
                continue
            self._move(arena, part, stage, range(len(part)), is_out=True)
            streams.wait(streams.side, streams.event(current))
            with streams.on(streams.side):
                self._follow(streams.side)
                self._drain(stage, torch.from_numpy(table), part_rows)
            if stage.device.type == "cuda":
                stage.record_stream(streams.side)
            self._last = streams.event(streams.side)
            self._staged.append((self._last, stage.numel()))
            self.num_staged += 1

    def into(self, arena: Arena, ids: Ids, table: Bytes, rows: Sequence[int], layer: int | None = None) -> None:
        """Copy as ``copy_from_host`` does; what is later in the current stream reads it. The host may write ``rows`` again
        after ``wait``, or in ``then``."""
        streams = self._streams
        if streams is None:
            copy_from_host(arena, ids, torch.from_numpy(table), rows, layer)
            return
        self._follow(current := streams.current())
        try:
            for part, part_rows, is_reached in self._split(arena, ids, table, rows):
                if is_reached:
                    self._move(arena, part, torch.from_numpy(table), part_rows, is_out=False, layer=layer, programs=FEW)
                else:
                    self._through_processor(arena, part, table, part_rows, is_out=False, layer=layer)
        finally:
            self._last = streams.event(current)  # a part may be on its way when the next one fails

    def warm_up(self, arena: Arena) -> None:
        """Compile what copies of ``arena`` to and from tables of its records launch on a GPU, by calls that move nothing."""
        width, nowhere = arena.layout.nbytes, np.array([-1])
        if self._streams is None or not width or backend(self._device.type) != "triton":
            return
        stage = torch.empty((1, width), dtype=torch.uint8, device=self._device)
        for layer in (None, *dict.fromkeys(page.layer for page in arena.layout.pages)):
            self._move(arena, nowhere, stage, nowhere, is_out=layer is None, layer=layer)
        self._drain(stage, stage, nowhere, nowhere)

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` once when the copies that were started are over: now, if they are; else in a thread, in the order of
        these calls. What it raises there is logged. Where the system starts no thread, this waits, and calls it."""
        thread, event = None, self._last
        if event is not None:
            with self._starting:
                if self._thread is None and not event.query():
                    self._thread = ThreadPoolExecutor(1, "kvpagoda-copies")
                thread = self._thread
        if event is None or thread is None:
            call()
            return

        def when_over() -> None:
            try:
                event.synchronize()
                call()
            except Exception:
                _log.exception("what follows a copy to or from the host failed")

        try:
            submit(thread, when_over)
        except RuntimeError:
            event.synchronize()
            call()

    def wait(self) -> None:
        """Wait until the copies that were started are over."""
        if self._last is not None:
            self._last.synchronize()

    def close(self) -> None:
        """Wait for the copies, and for what follows them."""
        self.wait()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)

    def layers(self, arena: Arena, parts: Sequence[Part], layers: Sequence[int]) -> dict[int, Event | None]:
        """Start to copy ``layers`` of ``parts`` back on the side stream, one after another; return the event after each. On a
        CPU nothing is copied, and there are none."""
        streams = self._streams
        if streams is None:
            return dict.fromkeys(layers)
        events: dict[int, Event | None] = {}
        streams.wait(streams.side, streams.event(streams.current()))
        try:
            with streams.on(streams.side):
                for layer in layers:
                    for part in parts:
                        self.into(arena, *part, layer)
                    events[layer] = self._last
        except BaseException:
            self.join()  # the blocks of what has begun may get another owner
            raise
        return events

    def join(self) -> None:
        """Let the current stream wait for the copies that were started."""
        if self._streams is not None:
            self._follow(self._streams.current())

    def after(self, event: Event | None) -> None:
        """Let the current stream wait for ``event``."""
        if self._streams is not None and event is not None:
            self._streams.wait(self._streams.current(), event)

    def _follow(self, stream: Any) -> None:
        """Let ``stream`` wait for the latest copy, which another one may do."""
        if self._last is not None and self._streams is not None:
            self._streams.wait(stream, self._last)

    def _stage(self, n: int, width: int) -> Tensor | None:
        """Return memory on the device for ``n`` blocks of ``width`` bytes; None if so much waits there, or it has none."""
        while self._staged and self._staged[0][0].query():
            self._staged.popleft()
        if n * width > _STAGE_NBYTES - sum(nbytes for _, nbytes in self._staged):
            return None
        try:
            return torch.empty((n, width), dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError:
            return None

    def _split(
        self, arena: Arena, ids: Ids, table: Bytes, rows: Sequence[int]
    ) -> Iterator[tuple[Ids, Sequence[int], bool]]:
        """Yield ``ids`` and ``rows``, and whether the device reaches these rows: in one part, or in two."""
        if not len(ids) or not arena.layout.nbytes:
            return
        index = np.asarray(rows, np.int64)
        reached = 0 if self._locks is None else self._locks.num_rows(table, int(index.max()))
        if int(index.max()) < reached or int(index.min()) >= reached:
            yield ids, rows, int(index.max()) < reached
            return
        if arena.layout.nbytes > table.shape[1]:
            each = index.reshape(len(ids), -1)
            are_reached = (each < reached).all(axis=1)
            for wanted in (True, False):
                if (are_reached == wanted).any():
                    yield np.asarray(ids)[are_reached == wanted], each[are_reached == wanted].ravel().tolist(), wanted
            return
        per_row, are_reached = table.shape[1] // arena.layout.nbytes, index < reached
        of_row = np.arange(len(ids)) // per_row
        for wanted in (True, False):
            chosen = are_reached == wanted
            yield np.asarray(ids)[chosen[of_row]], index[chosen].tolist(), wanted

    def _through_processor(
        self, arena: Arena, ids: Ids, table: Bytes, rows: Sequence[int], *, is_out: bool, layer: int | None
    ) -> None:
        """Copy rows that the device does not reach: gathered on one side, sent, and scattered on the other. Slices could begin
        in memory that is locked and end in memory that is not."""
        self.wait()  # the rows may have been within its reach
        _copy(
            arena.regions(layer),
            arena.layout.nbytes,
            ids,
            torch.from_numpy(table),
            rows,
            is_out=is_out,
            copy=copy_gathered,
        )
        self.num_pageable += 1

    def _move(
        self, arena: Arena, ids: Ids, table: Tensor, rows: Sequence[int] | Ids, *, is_out: bool,
        layer: int | None = None, programs: int = 0,
    ) -> None:  # fmt: skip
        """Copy rows ``ids`` of ``arena`` to or from ``table``, which the device reaches: one launch on the current stream."""
        width, streams = arena.layout.nbytes, self._streams
        if backend(self._device.type) != "triton" or streams is None:  # a CPU, in tests of the order
            _copy(arena.regions(layer), width, ids, table, [*rows], is_out=is_out, copy=copy_rows)
            return
        pairs = pairs_of(width, table.shape[1], np.asarray(ids, np.int64), np.asarray(rows, np.int64), is_out=is_out)
        known, key = self._regions.setdefault(arena, {}), (layer, _layout(table), len(pairs), is_out)
        self._launch(known, key, lambda: _places(arena, layer), width, table, pairs, is_out, programs)

    def _drain(self, stage: Tensor, table: Tensor, rows: Sequence[int] | Ids, records: Ids | None = None) -> None:
        """Copy the ``records`` (None: all) of ``stage``, uint8 ``[n, nbytes]``, to ``rows`` of ``table``, by few programs."""
        (n, width), index = stage.shape, np.asarray(rows, np.int64)
        records = np.arange(n) if records is None else records
        if backend(self._device.type) != "triton":
            _copy([(slice(0, width), stage)], width, records, table, index.tolist(), is_out=True, copy=copy_rows)
            return
        pairs = pairs_of(width, table.shape[1], records, index, is_out=True)
        place, key = (0, width, stage.data_ptr(), width), (stage.data_ptr(), width, _layout(table), len(pairs))
        self._launch(self._drains, key, lambda: np.array([place], np.int64), width, table, pairs, True, FEW)

    def _launch(
        self, known: dict[Any, tuple[Regions, Event]], key: Any, places: Callable[[], npt.NDArray[np.int64]], width: int,
        table: Tensor, pairs: npt.NDArray[np.int64], is_out: bool, programs: int,
    ) -> None:  # fmt: skip
        """Copy ``places()`` of records of ``width`` bytes to or from ``table``. Their regions stay on the device, in
        ``known``: arenas and tables live long, and the device's allocator gives stages of a size the same few addresses."""
        streams = self._streams
        assert streams is not None
        if (entry := known.get(key)) is None:
            regions, placed = Regions.of(
                _spans(places(), width, table, len(pairs), is_out=is_out), pairs, self._to_device
            )
            if len(known) >= _MOST_REGIONS:
                known.clear()
            known[key] = regions, streams.event(streams.current())
        else:
            regions, placed = entry[0], self._to_device(pairs)
            if not entry[1].query():
                streams.wait(streams.current(), entry[1])  # another stream may have uploaded them
        copy_regions(regions, placed, programs)


def _layout(table: Tensor) -> tuple[int, int, int]:
    return table.data_ptr(), table.stride(0), table.shape[1]


def _places(arena: Arena, layer: int | None) -> npt.NDArray[np.int64]:
    """Return the regions of ``arena``, int64 ``[n, 4]``: bytes begin and end of a record, address in row 0, and stride."""
    rows = [(span.start, span.stop, memory.data_ptr(), memory.stride(0)) for span, memory in arena.regions(layer)]
    return np.array(rows, np.int64).reshape(-1, 4)


def _spans(
    places: npt.NDArray[np.int64], width: int, table: Tensor, num_lists: int, *, is_out: bool
) -> npt.NDArray[np.int64]:
    """Return the copies of ``places`` to or from ``table`` as ``Regions.of`` takes them: list i of pairs is of piece i of a
    record, or of the i-th record in a table row."""
    table_width, number = table.shape[1], np.arange(num_lists)
    if width > table_width:
        first, last, outside = number * table_width, np.minimum((number + 1) * table_width, width), 0 * number
    else:
        first, last, outside = 0 * number, 0 * number + width, number * width
    begin, end = np.maximum(places[:, :1], first), np.minimum(places[:, 1:2], last)
    device = places[:, 2:3] + begin - places[:, :1]
    host = table.data_ptr() + outside + begin - first
    strides = np.broadcast_to(places[:, 3:4], begin.shape), np.full(begin.shape, table.stride(0))
    sides = (device, host, *strides) if is_out else (host, device, *strides[::-1])
    found = np.stack((*sides, end - begin, np.broadcast_to(number, begin.shape)), axis=-1).reshape(-1, 6)
    return found[found[:, 4] > 0]


def pairs_of(width: int, table_width: int, ids: Ids, rows: Ids, *, is_out: bool) -> npt.NDArray[np.int64]:
    """Return the (source, target) rows of each piece of a record, or of each record of a table row, int64
    ``[lists, n, 2]``; (-1, -1) where the last table row has fewer records."""
    if width == table_width:
        pairs = np.empty((1, len(ids), 2), np.int64)
        pairs[0, :, 0], pairs[0, :, 1] = (ids, rows) if is_out else (rows, ids)
        return pairs
    if width > table_width:
        hosts = rows.reshape(len(ids), -1).T
        blocks = np.broadcast_to(ids, hosts.shape)
    else:
        per_row = min(table_width // width, len(ids))
        padded = np.full(len(rows) * per_row, -1, np.int64)
        padded[: len(ids)] = ids
        blocks = padded.reshape(len(rows), per_row).T
        hosts = np.where(blocks < 0, -1, rows)
    return np.ascontiguousarray(np.stack((blocks, hosts) if is_out else (hosts, blocks), axis=-1))


class LayerwiseCopy:
    """A running copy of ``parts`` from host memory to rows of ``arena``, one layer after the other.

    ``parts``: (rows of the arena, table of host memory uint8 ``[M, layout.nbytes]``, its rows). On the CPU a layer is
    copied when ``wait`` requests it. On CUDA ``copies`` begins with all layers at once, in their order, and ``wait`` makes
    the current stream wait for one of them. ``done`` is called once, when the tables are not needed any more.
    """

    def __init__(self, arena: Arena, parts: Sequence[Part], done: Callable[[], None], copies: HostCopies) -> None:
        self.arena, self._parts, self._copies = arena, parts, copies
        self._done: Callable[[], None] | None = done
        layers = [*dict.fromkeys(page.layer for page in arena.layout.pages)]
        self._waiting = copies.layers(arena, parts, layers)  # layers that are not copied yet

    @property
    def is_done(self) -> bool:
        """Whether every layer is copied, or the current stream waits for it."""
        return not self._waiting

    def wait(self, layer: int) -> None:
        """Make sure that later reads of ``layer``, on this thread and stream, find it copied. May be repeated."""
        if layer in self._waiting:
            if (event := self._waiting[layer]) is None:
                for part in self._parts:
                    self._copies.into(self.arena, *part, layer)
            else:
                self._copies.after(event)
            del self._waiting[layer]
        if not self._waiting:
            self.cancel()

    def cancel(self) -> None:
        """End the copy: no further layer is needed. May be repeated."""
        if self._waiting:
            self._copies.join()  # its blocks may get another owner
            self._waiting.clear()
        if self._done is not None:
            done, self._done = self._done, None
            self._copies.then(done)  # ``done`` may give the host memory to another user

    def finish(self) -> None:
        """Wait for all layers, as ``wait`` does."""
        for layer in [*self._waiting]:
            self.wait(layer)
        self.cancel()
