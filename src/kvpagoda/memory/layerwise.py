"""Blocks that come back from host memory layer after layer, so that a forward pass begins before all layers are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvpagoda.memory.arena import Arena, Tensor
from kvpagoda.memory.host_copy import Ids, start_copy

Part = tuple[Ids, Tensor, Sequence[int]]


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies beside the current one; None on the CPU."""
    stream: type[torch.cuda.Stream] = torch.cuda.Stream
    return stream(device) if device.type == "cuda" else None


class LayerwiseCopy:
    """Rows of ``arena`` that are being filled from ``parts``: (rows of the arena, table uint8 ``[M, layout.nbytes]`` of host
    memory, its rows).

    On the CPU a layer is copied when ``wait`` asks for it; on CUDA all layers are copied on ``stream``, in their order, and
    ``wait`` makes the current stream wait for one. ``done`` is called once, when the tables are not needed any more.
    """

    def __init__(
        self, arena: Arena, parts: Sequence[Part], done: Callable[[], None], stream: torch.cuda.Stream | None = None
    ) -> None:
        self.arena, self._parts, self._stream = arena, parts, stream
        self._done: Callable[[], None] | None = done
        layers = [page.layer for page in arena.layout.pages]
        self._waiting: dict[int, torch.cuda.Event | None] = dict.fromkeys(layers)  # that are not in yet
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(arena.device))
            with torch.cuda.stream(stream):
                for layer in self._waiting:
                    self._copy(layer)
                    self._waiting[layer] = stream.record_event()

    @property
    def is_done(self) -> bool:
        """Whether every layer is in, or waited for."""
        return not self._waiting

    def wait(self, layer: int) -> None:
        """Whoever reads ``layer`` from now on, on this thread and stream, finds it filled. Does no harm twice."""
        if layer in self._waiting:
            if (event := self._waiting[layer]) is None:
                self._copy(layer)
            else:
                torch.cuda.current_stream(self.arena.device).wait_event(event)
            del self._waiting[layer]
        if not self._waiting:
            self.cancel()

    def cancel(self) -> None:
        """No further layer is wanted. Does no harm twice."""
        self._waiting.clear()
        if self._done is not None:
            if self._stream is not None:
                self._stream.synchronize()  # the host memory goes to others
            done, self._done = self._done, None
            done()

    def finish(self) -> None:
        """Wait for all layers."""
        for layer in [*self._waiting]:
            self.wait(layer)
        self.cancel()

    def _copy(self, layer: int) -> None:
        for ids, table, rows in self._parts:
            start_copy(self.arena, ids, table, rows, is_out=False, layer=layer)
