"""A set of small whole numbers that knows its smallest member: a tree of bit words."""

from __future__ import annotations

_SHIFT = 8
_BITS = 1 << _SHIFT


class LowestFirst:
    """Members out of ``0 .. size - 1``; all are in at the start.

    Level 0 has one bit for each number, in words of 256 bits; every level above has one bit for each word below that is
    not zero; the top level is one word.

        1,000,000 numbers:  top | 16 words in use | 3,907 words

    ``add``, ``remove`` and ``lowest`` touch one word a level: O(log size) with base 256, two levels at 1,000 numbers
    and three at 1,000,000.
    """

    def __init__(self, size: int) -> None:
        self._levels: list[list[int]] = []
        while True:
            full, rest = divmod(size, _BITS)
            self._levels.append([(1 << _BITS) - 1] * full + ([(1 << rest) - 1] if rest or not full else []))
            size = len(self._levels[-1])
            if size == 1:
                break

    def add(self, i: int) -> None:
        """Put ``i`` in; nothing happens if it is in."""
        for words in self._levels:
            word = i >> _SHIFT
            before = words[word]
            words[word] = before | 1 << (i & _BITS - 1)
            if before:
                return
            i = word

    def remove(self, i: int) -> None:
        """Take ``i`` out; nothing happens if it is out."""
        for words in self._levels:
            word = i >> _SHIFT
            words[word] &= ~(1 << (i & _BITS - 1))
            if words[word]:
                return
            i = word

    def lowest(self) -> int:
        """The smallest member, or -1 for an empty set."""
        i = 0
        for words in reversed(self._levels):
            word = words[i]
            if not word:
                return -1
            i = i << _SHIFT | (word & -word).bit_length() - 1
        return i

    def members(self) -> list[int]:
        """All members, ascending. O(size); also proves that the levels agree, with AssertionError if not."""
        for below, above in zip(self._levels, self._levels[1:]):
            for i, word in enumerate(below):
                assert bool(word) == bool(above[i >> _SHIFT] >> (i & _BITS - 1) & 1), f"word {i} and the bit above it"
        found = []
        for i, word in enumerate(self._levels[0]):
            while word:
                low = word & -word
                found.append(i << _SHIFT | low.bit_length() - 1)
                word ^= low
        return found
