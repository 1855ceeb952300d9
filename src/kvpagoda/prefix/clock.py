"""The time of a prefix tree: a count of uses, so that blocks and checkpoints can be compared by age."""

from __future__ import annotations


class Clock:
    """``now``: how many uses there were; nothing was used at 0."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        """The time of one more use."""
        self.now += 1
        return self.now
