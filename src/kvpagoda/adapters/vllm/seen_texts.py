"""Which beginnings of texts were asked for before, also those whose blocks were evicted since."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any


class SeenTexts:
    """Hashes of blocks, each of which names the whole text up to its end.

    ``most``: how many hashes a generation has; the last and the present one are kept, so a text that is asked for again
    stays known.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._now: dict[Any, None] = {}
        self._before: dict[Any, None] = {}

    def add(self, hashes: Many[Any]) -> None:
        """Note a text with the block hashes ``hashes``. O(blocks)."""
        if len(self._now) + len(hashes) > self._most:
            self._before, self._now = self._now, {}
        self._now.update(dict.fromkeys(hashes))

    def num_known(self, hashes: Many[Any], begin: int) -> int:
        """Return how many leading blocks of a text were seen before, of which ``begin`` are known to be. O(blocks)."""
        now, before, end = self._now, self._before, begin
        while end < len(hashes) and (hashes[end] in now or hashes[end] in before):
            end += 1
        return end

    def clear(self) -> None:
        """Forget all texts."""
        self._now, self._before = {}, {}
