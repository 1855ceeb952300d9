"""A device that works later: its memory is not the host's, and nothing is copied or launched before someone waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpagoda import KVCache
from kvpagoda.memory.device_memory import DeviceArrays
from kvpagoda.memory.staging import NUM_SLOTS, SLOT_NBYTES, Slot, Staging
from kvpagoda.memory.writes import Writes


class LateEvent:
    """As ``torch.cuda.Event``. ``waits``: how often the host had to wait for one."""

    waits = 0

    def __init__(self, stream: list[Callable[[], None]]) -> None:
        self._stream = stream
        self._passed = True

    def record(self, _: Any = None) -> None:
        self._passed = False
        self._stream.append(lambda: setattr(self, "_passed", True))

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        LateEvent.waits += not self._passed
        while not self._passed:
            self._stream.pop(0)()


class LateStaging(Staging):
    """The ring, whose copies and launches wait in ``stream``."""

    def __init__(self, stream: list[Callable[[], None]]) -> None:
        super().__init__(torch.device("cpu"))
        self._stream = stream

    def _event(self) -> LateEvent:
        return LateEvent(self._stream)

    def _run(self, slot: Slot, call: Callable[[], None]) -> None:
        self._stream.append(call)
        if slot.event is not None:
            slot.event.record()


class LateArrays(DeviceArrays):
    """Counts what goes to the device: ``sent`` has the bytes of each upload, which one spread follows; ``flattened`` counts
    the launches that build ``kv_indices``."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.stream: list[Callable[[], None]] = []
        self.is_host, self.staging = False, LateStaging(self.stream)
        self.sent: list[int] = []
        self.flattened = 0

    def send(self, writes: Writes) -> None:
        self.sent.append(writes.nbytes)
        super().send(writes)

    def flatten(self, *arguments: Any) -> None:
        self.flattened += 1
        self.stream.append(lambda: DeviceArrays.flatten(self, *arguments))

    def wait(self) -> None:
        """Do all that was launched."""
        while self.stream:
            self.stream.pop(0)()


def late(cache: KVCache) -> LateArrays:
    """Let the batches of ``cache`` that are made from now on have their arrays on a late device; return it."""
    arrays = LateArrays()
    cache.core.memory.arrays = arrays
    cache._step_buffers.arrays = arrays
    return arrays


__all__ = ["NUM_SLOTS", "SLOT_NBYTES", "LateArrays", "LateEvent", "late"]
