"""Slots: one contiguous place for each request, the lowest free one first."""

from __future__ import annotations

from typing import SupportsIndex

from kvpagoda.blocks.free_list import FreeList
from kvpagoda.compat.lowest_free import LowestFirst
from kvpagoda.errors import CheckFailed


class SlotAllocator:
    """Slots ``0 .. max_slots - 1``. A face of ``FreeList`` that hands out the lowest free slot; no torch.

    ``version(i)`` goes up by one with every ``alloc`` of slot ``i``, so that a reference kept from before is seen to be
    stale. Every call but ``check`` costs the same at 1,000 slots as at 1,000,000 (O(log n), base 256).

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
        self._lowest = LowestFirst(self._slots.num_ids)

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
        slot = self._lowest.lowest()
        if slot >= 0:
            self._slots.acquire_id(slot, fresh=True)
            self._lowest.remove(slot)
        return slot

    def occupy(self, i: SupportsIndex) -> None:
        """Take the free slot ``i`` by name; its version stays. Raises NotOwned if it is in use or out of range."""
        self._lowest.remove(self._slots.acquire_id(i))

    def free(self, i: SupportsIndex) -> None:
        """Give slot ``i`` back; its version stays. Raises NotOwned if it is free or out of range."""
        self._lowest.add(self._slots.release_id(i))

    def is_free(self, i: SupportsIndex) -> bool:
        """Whether slot ``i`` is free. Raises NotOwned if out of range."""
        return not self._slots.is_held(i)

    def version(self, i: SupportsIndex) -> int:
        """How often ``alloc`` has handed out slot ``i``. Raises NotOwned if out of range."""
        self._slots.is_held(i)
        return int(self._slots.generation[i])

    def check(self) -> None:
        """Prove that every slot is free or in use, and that the index of the free ones agrees. O(max_slots)."""
        self._slots.check()
        free = self._slots.free_ids().tolist()
        if free != self._lowest.members():
            odd = sorted(set(free) ^ set(self._lowest.members()))
            raise CheckFailed(f"slots: the free list and the index of the lowest disagree about {odd[:16]}")
