"""How the next token is chosen from the logits. numpy only, one token of one answer at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 takes the largest logit; above, tokens are drawn: from the ``top_k`` likeliest (and their equals),
    and of those from the fewest that hold ``top_p`` of the probability.

    Answer ``i`` of a request draws from a stream of its own, seeded with ``seed + i``: it does not depend on what runs
    beside it. Without a seed each is different every time. Raises BadInput for values that make no sense.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0 and 0 < self.top_p <= 1):
            raise BadInput(f"need temperature >= 0 and 0 < top_p <= 1, got {self.temperature} and {self.top_p}")
        if (self.top_k is not None and self.top_k < 1) or (self.seed is not None and self.seed < 0):
            raise BadInput(f"need top_k >= 1 and seed >= 0, or None, got {self.top_k} and {self.seed}")

    def stream(self, number: int) -> np.random.Generator:
        """The random numbers of answer ``number`` of a request; one is used for each token."""
        return np.random.default_rng(None if self.seed is None else self.seed + number)

    def draw(self, logits: npt.NDArray[Any], stream: np.random.Generator) -> int:
        """A token for ``logits`` ``[vocab]``, at a temperature above 0. O(vocab), O(vocab log vocab) with ``top_p``."""
        weights = np.exp((logits - logits.max()).astype(np.float64) / self.temperature)
        if self.top_k is not None and self.top_k < len(weights):
            weights[weights < np.partition(weights, -self.top_k)[-self.top_k]] = 0
        if self.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            held = np.cumsum(weights[order])
            weights[order[1:][held[:-1] >= self.top_p * held[-1]]] = 0
        held = np.cumsum(weights)
        return int(np.searchsorted(held, stream.random() * held[-1], side="right"))


GREEDY = Sampling()
