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
