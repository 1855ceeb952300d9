"""A memory in which each row says which text it belongs to: the oracle of every adapter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_random = np.random.default_rng(0xADA9)
_TOKENS = _random.integers(0, 2**64, 65536, np.uint64)
_PLACES = _random.integers(0, 2**63, 65536, np.uint64) * np.uint64(2) + np.uint64(1)

Ints = npt.NDArray[np.int64]


def marks_of(tokens: list[int]) -> npt.NDArray[np.uint64]:
    """uint64 ``[n]``: for each token a number that depends on all tokens up to it and on their places."""
    own = _TOKENS[np.asarray(tokens, np.int64)] * _PLACES[: len(tokens)]
    return np.cumsum(own, dtype=np.uint64)


def next_token(tokens: list[int], vocabulary: int) -> int:
    """What the pretended model says after ``tokens``: always the same after the same text."""
    return int(marks_of(tokens)[-1] >> np.uint64(32)) % vocabulary


class Rows:
    """One row a token, of ``num_rows``; rows nobody wrote hold 0."""

    def __init__(self, num_rows: int) -> None:
        self.rows = np.zeros(num_rows, np.uint64)

    def write(self, tokens: list[int], places: Ints, start: int, end: int) -> None:
        """Compute tokens ``start .. end - 1`` of a text whose token ``i`` lies in row ``places[i]``."""
        self.rows[places[start:end]] = marks_of(tokens)[start:end]

    def prove(self, tokens: list[int], places: Ints, end: int, who: object) -> None:
        """The first ``end`` rows are those of exactly this text."""
        wrong = np.flatnonzero(self.rows[places[:end]] != marks_of(tokens[:end]))
        assert not len(wrong), f"{who}: rows of positions {wrong[:8].tolist()} of {end} are another text's"


Kind = tuple[str, int]
"""What a group keeps of a text: ("full", 0), ("window", tokens), ("chunk", tokens), ("state", 0), or ("state", blocks) where
a state takes several blocks, one after the other, and is named by the first."""
_SALTS = _random.integers(0, 2**64, 16, np.uint64)


class GroupRows:
    """Blocks of ``size`` rows that several groups share, as engines with one pool have them. A state is one row of its block.

    ``tables[g]`` of a text: its blocks of group ``g``, 0 where it has none.
    """

    def __init__(self, kinds: list[Kind], num_blocks: int, size: int) -> None:
        self.kinds, self.size, self.rows = kinds, size, np.zeros((num_blocks, size), np.uint64)

    def prove(
        self,
        tokens: list[int],
        tables: list[list[int]],
        reader: int,
        end: int,
        who: object,
        *,
        states_only: bool = False,
    ) -> None:
        """Of rows before ``end``, those that the token at ``reader`` reads are of exactly this text, in every group."""
        marks = marks_of(tokens)
        for group, (kind, span) in enumerate(self.kinds):
            if states_only and kind != "state":
                continue
            if kind == "state":
                at = np.arange(end - 1, end) if end else np.arange(0)
            else:
                first = {"full": 0, "window": max(0, reader - span + 1), "chunk": reader // max(1, span) * span}[kind]
                at = np.arange(min(first, end), end)
            found = self.rows[self._places(group, tables, at)]
            wrong = at[found != marks[at] + _SALTS[group]]
            assert not len(wrong), f"{who}: {kind}, rows of positions {wrong[:8].tolist()} of {end} are another text's"
            if kind == "state" and span and end:
                whole = self._state(group, tables, end - 1)
                assert (whole == whole[0, 0]).all(), f"{who}: another text lies in the state after {end} tokens"

    def write(self, tokens: list[int], tables: list[list[int]], start: int, end: int) -> None:
        """Compute tokens ``start .. end - 1``."""
        marks = marks_of(tokens)
        for group, (kind, span) in enumerate(self.kinds):
            at = np.arange(end - 1 if kind == "state" else start, end)
            self.rows[self._places(group, tables, at)] = marks[at] + _SALTS[group]
            if kind == "state" and span:
                self._state(group, tables, end - 1)[:] = marks[end - 1 : end] + _SALTS[group]

    def _state(self, group: int, tables: list[list[int]], at: int) -> npt.NDArray[np.uint64]:
        """Return all rows of the state after position ``at``."""
        first = tables[group][at // self.size]
        rows = self.rows[first : first + self.kinds[group][1]]
        assert len(rows) == self.kinds[group][1], f"a state at block {first} ends behind {len(self.rows)} blocks"
        return rows

    def _places(self, group: int, tables: list[list[int]], at: Ints) -> tuple[Ints, Ints]:
        blocks = np.array(tables[group], np.int64)[at // self.size]
        assert blocks.all(), f"group {group} has no blocks for positions {at[blocks == 0][:8].tolist()}"
        return blocks, at % self.size * (self.kinds[group][0] != "state")
