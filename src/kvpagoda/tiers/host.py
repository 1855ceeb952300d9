"""A driver that keeps records in the memory of this process."""

from __future__ import annotations

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.memory.pages import pages
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.tiers.slots import SlotDriver
from kvpagoda.units import format_bytes, parse_bytes


class HostMemory:
    """The medium of ``host_driver``: slots of ordinary memory. The system provides a page when it is first written."""

    def __init__(self, buffer: RecordBuffer, nbytes: int) -> None:
        self.slot_nbytes = buffer.record_nbytes
        self.num_slots = nbytes // self.slot_nbytes
        if self.num_slots < 1:
            raise BadInput(f"{format_bytes(nbytes)} holds no record of {format_bytes(self.slot_nbytes)}; give it more")
        self._rows = buffer.rows
        self._slots = list(pages(self.num_slots * self.slot_nbytes).reshape(self.num_slots, self.slot_nbytes))

    def scan(self) -> list[tuple[bytes, int]]:
        return []

    def write(self, slot: int, row: int) -> bool:
        np.copyto(self._slots[slot], self._rows[row])
        return True

    def read(self, slot: int, row: int) -> bool:
        np.copyto(self._rows[row], self._slots[slot])
        return True

    def clear(self, slot: int) -> bool:
        return True

    def close(self) -> None:
        self._slots.clear()


def host_driver(buffer: RecordBuffer, nbytes: int | str) -> SlotDriver:
    """Return a driver that keeps records in at most ``nbytes`` of host memory and evicts the least recently used first.

    Raises BadInput if not even one record fits.
    """
    return SlotDriver(HostMemory(buffer, parse_bytes(nbytes)))
