"""Which beginnings of texts were asked for before, also those whose blocks were evicted since."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any


class Recent:
    """The hashes of blocks that were added lately, each of which names the whole text up to its end.

    ``most``: how many hashes a generation has; the last and the present one are kept, so what is added again stays.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._now: dict[Any, None] = {}
        self._before: dict[Any, None] = {}

    def add(self, hashes: Many[Any]) -> None:
        """Note ``hashes``. O(number)."""
        if len(self._now) + len(hashes) > self._most:
            self._before, self._now = self._now, {}
        self._now.update(dict.fromkeys(hashes))

    def which(self, hashes: Iterable[Any]) -> list[int]:
        """Return the indices of those among ``hashes`` that are known. O(number)."""
        now, before = self._now, self._before
        return [index for index, name in enumerate(hashes) if name in now or name in before]

    def num_known(self, hashes: Many[Any], begin: int) -> int:
        """Return how many leading ``hashes`` are known, of which ``begin`` are known to be. O(number)."""
        now, before, end = self._now, self._before, begin
        while end < len(hashes) and (hashes[end] in now or hashes[end] in before):
            end += 1
        return end

    def clear(self) -> None:
        """Forget all."""
        self._now, self._before = {}, {}
