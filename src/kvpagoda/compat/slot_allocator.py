"""An allocator of slots, one contiguous part of a cache for each request; the lowest free slot comes first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import SupportsIndex

import numpy as np

from kvpagoda.blocks.ids import IdSet
from kvpagoda.errors import CheckFailed, NotOwned
from kvpagoda.units import whole_number


class SlotAllocator:
    """Allocates slots ``0 .. max_slots - 1``, the lowest free one first. Needs no torch.

    Every ``alloc`` of slot ``i`` increments ``version(i)``, so that a reference from before can be detected as stale.
    All calls except ``check`` cost the same at 1,000 slots as at 1,000,000: O(log of the slots that were freed again);
    ``alloc`` also takes one step for each ``occupy`` since.

        slots   0 ..                                  next ..            max_slots
                in use, or freed again: in a heap     free, or taken by ``occupy``

    >>> slots = SlotAllocator(3)
    >>> slots.alloc(), slots.alloc()
    (0, 1)
    >>> seen = slots.version(0)
    >>> slots.free(0)
    >>> slots.alloc(), slots.version(0) == seen         # allocated again since
    (0, False)
    >>> slots.occupy(2)                                 # takes slot 2; its version stays
    >>> slots.alloc()
    -1
    """

    def __init__(self, max_slots: int) -> None:
        self.max_slots = self.free_count = whole_number(max_slots, "the number of slots")
        self._held = IdSet(self.max_slots, 0, "slots")
        self._versions = [0] * self.max_slots
        self._next, self._freed = 0, list[int]()
        self._is_freed = bytearray(self.max_slots)  # whether the slot is in the heap; no slot is in it twice

    def alloc(self) -> int:
        """Take the lowest free slot and increment its version. Returns -1 when all slots are in use."""
        while self._freed or self._next < self.max_slots:
            if self._freed:
                slot = heappop(self._freed)
                self._is_freed[slot] = False
            else:
                slot, self._next = self._next, self._next + 1
            if not self._held.flags[slot]:  # otherwise ``occupy`` took it meanwhile
                self.occupy(slot)
                self._versions[slot] += 1
                return slot
        return -1

    def occupy(self, i: SupportsIndex) -> None:
        """Take the free slot ``i``; its version does not change. Raises NotOwned if it is in use or out of range."""
        slot = self._held.in_range(i)
        if self._held.flags[slot]:
            raise NotOwned(f"slot {slot} is already held")
        self._held.flags[slot] = True
        self.free_count -= 1

    def free(self, i: SupportsIndex) -> None:
        """Free slot ``i``; its version does not change. Raises NotOwned if it is free already or out of range."""
        slot = self._held.in_range(i)
        if not self._held.flags[slot]:
            raise NotOwned(f"slot {slot} is not held: freed twice, or never handed out")
        self._held.flags[slot] = False
        self.free_count += 1
        if slot < self._next and not self._is_freed[slot]:
            heappush(self._freed, slot)
            self._is_freed[slot] = True

    def is_free(self, i: SupportsIndex) -> bool:
        """Return whether slot ``i`` is free. Raises NotOwned if it is out of range."""
        return not self._held.flags[self._held.in_range(i)]

    def version(self, i: SupportsIndex) -> int:
        """Return how often ``alloc`` has handed out slot ``i``. Raises NotOwned if it is out of range."""
        return self._versions[self._held.in_range(i)]

    def check(self) -> None:
        """Prove that ``alloc`` finds every free slot and counts them right. Raises CheckFailed. O(max_slots)."""
        free = np.flatnonzero(~self._held.flags).tolist()
        lost = [slot for slot in free if slot < self._next and not self._is_freed[slot]]
        listed = [slot for slot, is_freed in enumerate(self._is_freed) if is_freed]
        if lost or sorted(self._freed) != listed or len(free) != self.free_count:
            raise CheckFailed(f"free slots that alloc does not find, or a wrong count: {lost[:16]}")
