"""Chooses the next token from the logits: one token of one answer at a time, with numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. ``temperature`` 0 takes the token with the largest logit. Above 0 a token is drawn from
    the ``top_k`` likeliest tokens (and those equal to the last of them), reduced to the fewest that have ``top_p`` of
    the probability.

    Answer ``i`` of a request has its own random stream, seeded with ``seed + i``, so it does not depend on the other
    requests of a step. Without a seed each answer is different every time. Raises BadInput for invalid values.
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
        """Return the random stream of answer ``number`` of a request; ``draw`` uses one number for each token."""
        return np.random.default_rng(None if self.seed is None else self.seed + number)

    def draw(self, logits: npt.NDArray[Any], stream: np.random.Generator) -> int:
        """Draw a token from ``logits`` ``[vocab]``, at a temperature above 0. O(vocab), O(vocab log vocab) with
        ``top_p``."""
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
