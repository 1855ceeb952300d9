"""Groups of layers as vLLM's manager has them: which blocks one needs to resume a text, frees early, and keeps for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.units import ceil_div, whole_number

KINDS = ("full", "window", "chunk", "state")
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Group:
    """A group of layers with blocks of its own.

    Args:
        kind: full attention, a sliding window, chunks, or a recurrent state, which is kept where a computed chunk ends.
        size: tokens of a window or chunk; else 0.

    Raises:
        BadInput: an unknown ``kind``, or a ``size`` that it cannot have.
    """

    kind: Literal["full", "window", "chunk", "state"] = "full"
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind of group", self.kind, KINDS)
        least = {"window": 2, "chunk": 1}.get(self.kind, 0)
        whole_number(self.size, f"the size of a {self.kind} in tokens", least, below=2**31 if least else 1)

    @classmethod
    def from_text(cls, text: str) -> tuple[Group, ...]:
        """Return the groups that a text names.

        Args:
            text: such as "full+5*window:1024".

        Raises:
            BadInput: it is no such text, or a group in it cannot be.

        Examples:
            >>> Group.from_text("full+2*state")
            (Group(kind='full', size=0), Group(kind='state', size=0), Group(kind='state', size=0))
        """
        groups: list[Group] = []
        for part in text.split("+"):
            times, _, name = part.rpartition("*")
            kind, _, size = name.partition(":")
            if not (times or "1").isdecimal() or not (size or "0").isdecimal():
                raise BadInput(f"groups are like full+5*window:1024, got {text!r}")
            groups += [cls(kind, int(size or 0))] * int(times or 1)  # type: ignore[arg-type]
        return tuple(groups)

    def skipped(self, num_tokens: int) -> int:
        """Return how many leading tokens no later layer reads.

        Args:
            num_tokens: that are computed.
        """
        if self.kind == "full":
            return 0
        if self.kind == "chunk":
            return num_tokens // self.size * self.size
        return max(0, num_tokens - (self.size - 1 if self.kind == "window" else 1))

    def tail(self, block_size: int) -> int:
        """Return how many blocks before a place a window needs to resume there.

        Args:
            block_size: tokens of a block.
        """
        return ceil_div(self.size - 1, block_size)

    def find(self, is_cached: Marks, num_tokens: int, block_size: int) -> tuple[int, int]:
        """Return (first, end): the blocks that are needed to resume after block ``end``, the last such place. O(blocks).

        Args:
            is_cached: bool ``[num_tokens // block_size]``.
            num_tokens: the place is at or before it.
            block_size: tokens of a block.
        """
        num = num_tokens // block_size
        if self.kind == "state":
            cached = np.flatnonzero(is_cached[:num])
            return (int(cached[-1]), int(cached[-1]) + 1) if len(cached) else (0, 0)
        first = 0
        if self.kind == "chunk":
            first = self.skipped(num_tokens) // block_size
        elif self.kind == "window":
            need = self.tail(block_size)
            missing = np.concatenate((np.zeros(1, np.int64), np.cumsum(~is_cached[:num])))
            ends = np.flatnonzero(missing[need:] == missing[: max(0, num + 1 - need)])
            if len(ends):
                return int(ends[-1]), int(ends[-1]) + need
        gaps = np.flatnonzero(~is_cached[first:num])
        return first, int(gaps[0]) + first if len(gaps) else max(first, num)

    def kept(self, first: int, end: int, block_size: int, retention: int | None, places: tuple[int, ...]) -> Marks:
        """Return which blocks of a text can be found by others: bool ``[end - first]``.

        Of windows and states those that are needed to resume; all of the other kinds.

        Args:
            first: the first block.
            end: the block behind the last.
            block_size: tokens of a block.
            retention: resume at a multiple of so many tokens; 0: nowhere else; None: at every block.
            places: resume there, in tokens.
        """
        if self.kind in ("full", "chunk") or retention is None:
            return np.ones(end - first, np.bool_)
        need = self.tail(block_size) if self.kind == "window" else 1
        every = retention // block_size
        if retention and need >= every:
            return np.ones(end - first, np.bool_)
        index = np.arange(first, end)
        kept: Marks = index % every >= every - need if retention else np.zeros(end - first, np.bool_)
        for place in places:
            stop = place // block_size
            kept |= (index >= stop - need) & (index < stop)
        return kept

    def most(self, block_size: int, in_flight: int, longest: int) -> int:
        """Return how many blocks one request holds at most.

        Args:
            block_size: tokens of a block.
            in_flight: tokens that it computes in a step.
            longest: tokens of the longest request.
        """
        if self.kind == "window":
            return ceil_div(min(self.size - 1 + in_flight, longest), block_size) + 1
        if self.kind == "chunk":
            return ceil_div(min(self.size + in_flight, longest), block_size)
        return ceil_div(longest, block_size)
