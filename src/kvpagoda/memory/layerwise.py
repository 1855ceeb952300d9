"""Layer-by-layer copies of blocks from host memory, so that a forward pass can start before all layers are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvpagoda.memory.arena import Arena, Tensor
from kvpagoda.memory.host_copy import Ids, start_copy

Part = tuple[Ids, Tensor, Sequence[int]]


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
