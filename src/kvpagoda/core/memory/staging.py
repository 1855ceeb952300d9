"""Page-locked memory through which index arrays get to a GPU, so that the host waits for nothing.

    host      | slot 0 | slot 1 | slot 2 | ..     written in turn, and only after the event of its last use has passed
    device    | slot 0 | slot 1 | slot 2 | ..     a copy of what is sent; one kernel spreads it over other arrays

Copies and kernels run on the current stream. Where page-locked memory is refused, as in some containers, a copy from
ordinary memory has read its source when it returns, which may wait for the work of the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpagoda.core.kernels.spread import spread
from kvpagoda.core.memory.writes import Array, Writes

Tensor = torch.Tensor
NUM_SLOTS, SLOT_NBYTES, MOST_NBYTES, ROUND = 32, 64 << 10, 1 << 20, 512
"""Slots of a ring, bytes of a slot at first, and at most: what is larger has memory of its own for once. Bytes to which the
size of a copy is rounded."""
_log = logging.getLogger(__name__)


class StagedPart(NamedTuple):
    """The beginning of a slot: on the host, the same as numpy sees it (int64), and on the device (int32)."""

    host: Tensor
    array: Array
    device: Tensor


class Slot:
    """Memory for one copy on the host, ``host``, and on the device, uint8 ``[nbytes]`` each. ``event``: passed when both may
    be written again; None: they may be."""

    def __init__(self, host: Tensor, device: Tensor, event: Any = None) -> None:
        self.host, self.device, self.event, self.nbytes = host, device, event, len(host)
        self._parts: dict[int, StagedPart] = {}

    def part(self, nbytes: int) -> StagedPart:
        """Return its first ``nbytes`` or a few more. Steps are of similar sizes, so most parts are there already."""
        size = -(-nbytes // ROUND) * ROUND
        if size not in self._parts:
            host = self.host[:size]
            self._parts[size] = StagedPart(
                host.view(torch.int32), host.numpy().view(np.int64), self.device[:size].view(torch.int32)
            )
        return self._parts[size]


@lru_cache(maxsize=16)
def _tell(reason: str) -> None:
    """Log, once in a process, that page-locked memory is refused."""
    _log.warning("no page-locked memory (%s): each step waits for the work of the GPU before it", reason)


class Staging:
    """A ring of slots for a device, allocated when it is first used. It may be used by several threads.

    ``is_host``: whether the host and the device use the same memory, so that nothing need be copied.

    Args:
        device: to which values go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_host, self._is_locked = device, device.type == "cpu", device.type == "cuda"
        self._slots: list[Slot] = []
        self._next, self._lock = 0, RLock()

    def to_device(self, values: npt.NDArray[Any], dtype: npt.DTypeLike = None) -> Tensor:
        """Return a tensor with a copy of ``values``, of their shape, on the device.

        On a CPU it shares memory with ``values`` if they are contiguous and have this dtype.

        Args:
            values: on the host.
            dtype: of the result; None: that of ``values``.
        """
        if self.is_host:
            return torch.from_numpy(np.ascontiguousarray(values, dtype))
        found = np.dtype(values.dtype if dtype is None else dtype)
        nbytes = values.size * found.itemsize
        result = torch.empty(values.shape, dtype=getattr(torch, found.name), device=self.device)
        with self._lock:
            slot = self._take(nbytes)
            source = slot.host[:nbytes].view(result.dtype).view(result.shape)
            source.numpy()[...] = values
            self._run(slot, lambda: self._copy(source, result))
        return result

    def send(self, writes: Writes) -> None:
        """Write words on the device, in one copy and one launch. When this returns, they have been read.

        Args:
            writes: which words, and where.
        """
        with self._lock:
            nbytes, targets = writes.nbytes, writes.targets
            slot = self._take(nbytes)
            part = slot.part(nbytes)
            runs = writes.pack(part.array)

            def call() -> None:
                self._copy(part.host, part.device)
                spread(part.device, runs, targets)

            self._run(slot, call)

    def _take(self, nbytes: int) -> Slot:
        """Return the slot after the last one, with room for ``nbytes``, when the device needs it no more.

        Only if all slots are in use, this waits, for the oldest."""
        if nbytes > MOST_NBYTES:
            size = -(-nbytes // ROUND) * ROUND
            return Slot(self._allocate(size), self._on_device(size))  # torch keeps both until the copy is over
        if not self._slots:
            host, device = self._allocate(NUM_SLOTS * SLOT_NBYTES), self._on_device(NUM_SLOTS * SLOT_NBYTES)
            self._slots = [
                Slot(*both, self._event())
                for both in zip(host.view(NUM_SLOTS, SLOT_NBYTES), device.view(NUM_SLOTS, SLOT_NBYTES))
            ]
        number, self._next = self._next, (self._next + 1) % NUM_SLOTS
        slot = self._slots[number]
        if slot.event is not None and not slot.event.query():
            slot.event.synchronize()
        if slot.nbytes < nbytes:
            size = 1 << (nbytes - 1).bit_length()
            slot = self._slots[number] = Slot(self._allocate(size), self._on_device(size), slot.event)
        return slot

    def _allocate(self, nbytes: int) -> Tensor:
        """Return host memory, uint8 ``[nbytes]``, page-locked if that is possible."""
        if self._is_locked:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._is_locked = False
                _tell(str(error).partition("\n")[0])
        return torch.empty(nbytes, dtype=torch.uint8)

    def _on_device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _event(self) -> Any:
        """Return an event that was not recorded yet, which counts as passed; None where copies wait."""
        return torch.cuda.Event() if self._is_locked else None  # type: ignore[no-untyped-call]

    def _copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=self._is_locked)

    def _run(self, slot: Slot, call: Callable[[], None]) -> None:
        """Start the work ``call`` on the current stream, and let ``slot`` be in use until it is done."""
        try:
            call()
        finally:
            if slot.event is not None:
                slot.event.record(torch.cuda.current_stream(self.device))
