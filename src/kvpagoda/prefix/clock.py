"""The clock of a prefix tree: a count of uses, so that blocks and checkpoints can be compared by age."""

from __future__ import annotations


class Clock:
    """``now``: the number of uses so far. Nothing was used at time 0."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        """Count one more use and return its time."""
        self.now += 1
        return self.now
