"""Slots: one contiguous place for each request, the lowest free one first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import SupportsIndex

from kvpagoda.blocks.free_list import FreeList
from kvpagoda.errors import CheckFailed


class SlotAllocator:
    """Slots ``0 .. max_slots - 1``. A face of ``FreeList`` that hands out the lowest free slot; no torch.

    ``version(i)`` goes up by one with every ``alloc`` of slot ``i``, so that a reference kept from before is seen to be
    stale. Calls but ``check`` cost the same at 1,000 slots as at 1,000,000: O(log of the slots that were freed again), and
    ``alloc`` a step for each ``occupy`` since.

        slots   0 ..                                  next ..            max_slots
                in use, or freed again: in a heap     free, or occupied by name

    >>> slots = SlotAllocator(3)
    >>> slots.alloc(), slots.alloc()
    (0, 1)
    >>> seen = slots.version(0)
    >>> slots.free(0)
    >>> slots.alloc(), slots.version(0) == seen         # somebody else has it now
    (0, False)
    >>> slots.occupy(2)                                 # by name; its version stays
    >>> slots.alloc()
    -1
    """

    def __init__(self, max_slots: int) -> None:
        self._slots = FreeList(max_slots, what="slots")
        self._next, self._freed = 0, list[int]()
        self._is_freed = bytearray(self._slots.num_ids)  # whether a slot is in the heap: no slot is twice

    @property
    def max_slots(self) -> int:
        """Slots there are."""
        return self._slots.num_ids

    @property
    def free_count(self) -> int:
        """Slots that are free."""
        return self._slots.num_free

    def alloc(self) -> int:
        """Take the lowest free slot and bump its version. Returns -1 when all are in use."""
        while self._freed or self._next < self.max_slots:
            if self._freed:
                slot = heappop(self._freed)
                self._is_freed[slot] = False
            else:
                slot, self._next = self._next, self._next + 1
            if not self._slots.is_held(slot):  # else it was occupied meanwhile
                return self._slots.acquire_id(slot, fresh=True)
        return -1

    def occupy(self, i: SupportsIndex) -> None:
        """Take the free slot ``i`` by name; its version stays. Raises NotOwned if it is in use or out of range."""
        self._slots.acquire_id(i)

    def free(self, i: SupportsIndex) -> None:
        """Give slot ``i`` back; its version stays. Raises NotOwned if it is free or out of range."""
        slot = self._slots.release_id(i)
        if slot < self._next and not self._is_freed[slot]:
            heappush(self._freed, slot)
            self._is_freed[slot] = True

    def is_free(self, i: SupportsIndex) -> bool:
        """Whether slot ``i`` is free. Raises NotOwned if out of range."""
        return not self._slots.is_held(i)

    def version(self, i: SupportsIndex) -> int:
        """How often ``alloc`` has handed out slot ``i``. Raises NotOwned if out of range."""
        self._slots.is_held(i)
        return int(self._slots.generation[i])

    def check(self) -> None:
        """Prove that every slot is free or in use, and that ``alloc`` finds those that are free. O(max_slots)."""
        self._slots.check()
        lost = [slot for slot in self._slots.free_ids().tolist() if slot < self._next and not self._is_freed[slot]]
        if lost or sorted(self._freed) != [slot for slot, is_freed in enumerate(self._is_freed) if is_freed]:
            raise CheckFailed(f"slots that are free, and that alloc does not find: {lost[:16]}")
