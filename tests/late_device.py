"""Devices whose memory is not the host's, so that what was not sent is seen: one that works at once, and one that works
later, when someone waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvpagoda.batch.batch import Batch
from kvpagoda.batch.step_buffers import StepBuffers
from kvpagoda.memory.device_memory import DeviceArrays
from kvpagoda.memory.staging import Slot, Staging
from kvpagoda.memory.writes import Writes

Calls = list[Callable[[], None]]
ARRAYS = ("block_table", "cache_seqlens", "slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_start")


class Apart(DeviceArrays):
    """Index arrays in memory that the host does not write.

    ``sent``: the bytes of each upload, which one spread follows. ``flattened``: how many launches built ``kv_indices``."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self.is_host = self.staging.is_host = False
        self.sent: list[int] = []
        self.flattened = 0

    def send(self, writes: Writes) -> None:
        self.sent.append(writes.nbytes)
        super().send(writes)

    def flatten(self, *arguments: Any) -> None:
        self.flattened += 1
        super().flatten(*arguments)


class LateEvent:
    """As ``torch.cuda.Event``. ``waits``: of all events, how often the host had to wait."""

    waits = 0

    def __init__(self, stream: Calls) -> None:
        self._stream, self._passed = stream, True

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

    def __init__(self, stream: Calls) -> None:
        super().__init__(torch.device("cpu"))
        self._stream = stream

    def _event(self) -> LateEvent:
        return LateEvent(self._stream)

    def _run(self, slot: Slot, call: Callable[[], None]) -> None:
        self._stream.append(call)
        if slot.event is not None:
            slot.event.record()


class Late(Apart):
    """As ``Apart``, but of the arrays of a step nothing is copied or launched before ``wait`` or a full ring."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Calls = []
        self.staging = LateStaging(self.stream)

    def flatten(self, *arguments: Any) -> None:
        self.flattened += 1
        self.stream.append(lambda: DeviceArrays.flatten(self, *arguments))

    def wait(self) -> None:
        """Do all that was launched."""
        while self.stream:
            self.stream.pop(0)()


def read(batch: Batch, names: tuple[str, ...] = ARRAYS) -> dict[str, Any]:
    """Return the arrays of the step, and of each group those in ``names``, by their names."""
    step = batch.step
    found = {"qo_indptr": batch.qo_indptr, "positions": batch.positions, "state_indices": batch.state_indices}
    found |= {name: getattr(step, name) for name in ("request_slots", "request_ids", "state_rows")}
    for name in ("state_writes", "checkpoints"):
        if name in names:
            arrays = getattr(batch, name)
            found |= dict(zip((f"{name} {part}" for part in "abc"), arrays if name == "checkpoints" else [arrays]))
    for group in batch.core.groups:
        if not group.growth.is_state:
            found |= {f"{name} of {group.name}": getattr(batch.arrays(group), name) for name in names if name in ARRAYS}
    return found


def assert_as_on_the_host(batch: Batch, found: dict[str, Any], names: tuple[str, ...] = ARRAYS) -> None:
    """Compare ``found``, of ``batch``, with the arrays that the same step has in new buffers of the host, bit for bit."""
    host = Batch(
        batch.core, StepBuffers(DeviceArrays(torch.device("cpu"))), batch._schema, batch._requests, batch.rows, batch.before,
        batch._named,
    )  # fmt: skip
    for name, wanted in read(host, names).items():
        got = found[name].cpu()
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, name
        if name.startswith("block_table"):
            group = next(group for group in batch.core.groups if name == f"block_table of {group.name}")
            end = batch.arrays(group)._pages.end
            shown = torch.arange(got.shape[1]) < torch.from_numpy(end)[:, None]  # cells after a row's end are undefined
            got, wanted = got * shown, wanted * shown
        elif name.startswith("kv_indices"):  # with fixed shapes, cells after the last row are undefined
            total = int(read(host, ("kv_indptr",))[name.replace("kv_indices", "kv_indptr")][-1])
            got, wanted = got[:total], wanted[:total]
        assert got.equal(wanted), (name, np.flatnonzero((got != wanted).flatten().numpy())[:8].tolist())
