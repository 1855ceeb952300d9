"""An allocator of slots, one contiguous part of a cache for each request; the lowest free slot comes first."""

from __future__ import annotations

from typing import SupportsIndex

from kvpagoda.errors import CheckFailed, NotOwned
from kvpagoda.units import whole_number

_BITS = 64  # of a word


class SlotAllocator:
    """Allocates slots ``0 .. max_slots - 1``, the lowest free one first. Needs no torch.

    Every ``alloc`` of slot ``i`` increments ``version(i)``, so that a reference from before can be detected as stale.
    All calls except ``check`` are O(log64 max_slots), 4 steps for a million slots. Free slots are bits of words, and so
    are the words that have any, level by level:

        words      ... | 0b0100 | 0b0000 | 0b0001 | ...     bit i of word w: slot 64 * w + i is free
        above      ... 1        0        1 ...              bit w: word w is not 0

    Args:
        max_slots: how many.

    Examples:
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
        self._versions = [0] * self.max_slots
        self._levels: list[list[int]] = []  # the words of slots first
        count = self.max_slots
        while not self._levels or count > 1:
            whole, rest = divmod(count, _BITS)
            self._levels.append([(1 << _BITS) - 1] * whole + [(1 << rest) - 1] * (rest > 0))
            count = len(self._levels[-1])

    def alloc(self) -> int:
        """Take the lowest free slot and increment its version.

        Returns:
            -1 when all slots are in use.
        """
        if not self.free_count:
            return -1
        slot = 0
        for words in reversed(self._levels):
            lowest = words[slot] & -words[slot]
            slot = slot * _BITS + lowest.bit_length() - 1
        self.occupy(slot)
        self._versions[slot] += 1
        return slot

    def occupy(self, i: SupportsIndex) -> None:
        """Take a free slot; its version does not change.

        Args:
            i: the slot.

        Raises:
            NotOwned: it is in use or out of range.
        """
        if not self.is_free(i):
            raise NotOwned(f"slot {i} is already held", needed=i, available="held")
        self.free_count -= 1
        at = int(i)
        for words in self._levels:
            at, bit = divmod(at, _BITS)
            words[at] -= 1 << bit
            if words[at]:
                break

    def free(self, i: SupportsIndex) -> None:
        """Free a slot; its version does not change.

        Args:
            i: the slot.

        Raises:
            NotOwned: it is free already or out of range.
        """
        if self.is_free(i):
            raise NotOwned(f"slot {i} is not held: freed twice, or never handed out", needed=i, available="free")
        self.free_count += 1
        at = int(i)
        for words in self._levels:
            at, bit = divmod(at, _BITS)
            words[at] += 1 << bit
            if words[at] != 1 << bit:
                break

    def is_free(self, i: SupportsIndex) -> bool:
        """Return whether a slot is free.

        Args:
            i: the slot.

        Raises:
            NotOwned: it is out of range.
        """
        word, bit = divmod(self._in_range(i), _BITS)
        return bool(self._levels[0][word] >> bit & 1)

    def version(self, i: SupportsIndex) -> int:
        """Return how often ``alloc`` has handed out a slot.

        Args:
            i: the slot.

        Raises:
            NotOwned: it is out of range.
        """
        return self._versions[self._in_range(i)]

    def check(self) -> None:
        """Prove that ``alloc`` finds every free slot and counts them right. O(max_slots).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        free = sum(word.bit_count() for word in self._levels[0])
        if free != self.free_count:
            text = f"{free} slots are free, {self.free_count} are counted"
            raise CheckFailed(text, needed=self.free_count, available=free)
        for words, above in zip(self._levels, self._levels[1:]):
            lost = [at for at, word in enumerate(words) if bool(word) != bool(above[at // _BITS] >> at % _BITS & 1)]
            if lost:
                text = f"words {lost[:16]} of {len(words)}: the level above does not know their free slots"
                raise CheckFailed(text, needed=len(words), available=lost[:16])

    def _in_range(self, i: SupportsIndex) -> int:
        return whole_number(i, "a slot", error=NotOwned, below=self.max_slots)
