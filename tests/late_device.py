"""Devices whose memory is not the host's, so that what was not sent is seen: one that works at once, and one that works
later, when someone waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpagoda.core.batch.batch import Batch
from kvpagoda.core.batch.step_buffers import StepBuffers
from kvpagoda.core.memory.device_memory import DeviceArrays
from kvpagoda.core.memory.staging import Slot, Staging
from kvpagoda.core.memory.writes import Writes

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


Expected = dict[str, tuple[torch.Tensor, torch.Tensor | slice]]


def on_the_host(batch: Batch, names: tuple[str, ...] = ARRAYS) -> Expected:
    """Return what the same step has in new buffers of the host: name -> (array, which of its cells are defined)."""
    host = Batch(
        batch.core, StepBuffers(DeviceArrays(torch.device("cpu"))), batch._schema, batch._requests, batch.rows, batch.before,
        batch._named,
    )  # fmt: skip
    found: Expected = {}
    for name, wanted in read(host, names).items():
        found[name] = wanted, slice(None)
    for group in batch.core.groups:
        table, indices = f"block_table of {group.name}", f"kv_indices of {group.name}"
        if table in found:  # cells after a row's end are undefined
            wanted, end = found[table][0], torch.from_numpy(host.arrays(group)._pages.end)
            found[table] = wanted, torch.arange(wanted.shape[1]) < end[:, None]
        if indices in found:  # with fixed shapes, cells after the last row are undefined
            found[indices] = found[indices][0], slice(int(host.arrays(group)._pages.starts[-1]))
    return found


def compare(got: dict[str, torch.Tensor], expected: Expected) -> None:
    """Compare arrays with those of the host, bit for bit."""
    for name, (wanted, defined) in expected.items():
        one = got[name].cpu()
        assert one.dtype == wanted.dtype and one.shape == wanted.shape, name
        assert one[defined].equal(wanted[defined]), name


def assert_as_on_the_host(batch: Batch, found: dict[str, Any], names: tuple[str, ...] = ARRAYS) -> None:
    """Compare ``found``, of ``batch``, with the arrays of the host."""
    compare(found, on_the_host(batch, names))
