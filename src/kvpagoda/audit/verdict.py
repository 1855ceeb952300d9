"""When two answers differ, by how much, and how sure it is that a cache is the cause.

The distance of two answers to one prompt: at each token, as long as the tokens before are the same, the root mean square of
the differences of log-probabilities over the likeliest tokens; the largest of these. The noise is what two cold runs differ
by, and what a cold run differs from the same text when its answer is part of the prompt, which a server computes in other
pieces. A judged answer is wrong if its distance from *two* cold twins is over ``RATIO`` times the largest noise, and over as
many steps of a grid on which its log-probabilities lie.

Whether wrong answers mean a fault is a sequential test. Without a fault at most ``CHANCE`` of the judged answers are wrong,
and distances fall off at least with their third power. The evidence is how many times likelier the results are if a share of
``SHARES`` is wrong, on average over these, and wrong by any distance up to ``_MOST``: a test martingale, so the chance
that it ever reaches 1 / ``ERROR`` without a fault is at most ``ERROR`` (Ville's inequality), however long and in whatever
order we look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from kvpagoda.audit.server import ServerAnswer

RATIO = 3.0
"""A distance counts if it is over this many times the largest noise."""
LEAST, MOST_ROUNDING = 1e-3, 0.25
"""The least distance that counts, in nats; and the most by which rounding makes answers differ, which is the least that counts
where no run could be computed in other pieces, and for answers that were computed beside others."""
CHANCE = 1e-3
"""The share of right answers that count as wrong, at most: noise of 3 times the largest of some 30 samples."""
SHARES = (0.9, 0.5, 0.2, 0.05, 0.02)
"""Shares of wrong answers that a fault may have."""
ERROR = 1e-4
"""The chance that a server without a fault is said to have a given one."""
_MOST, _FAR = 20.0, 1000.0
_STEPS, _PRINTED = 2.0 ** -np.arange(1, 10), 2e-5
"""The steps that are looked for, and how far what a server prints of a float32 is from it."""


def distance(one: ServerAnswer, other: ServerAnswer) -> tuple[float, int]:
    """Return how much two answers to one prompt differ, and at which token, from 1; 0 if they do not.

    Args:
        one: an answer.
        other: another one. Without log-probabilities in either the distance is 1 where texts differ.
    """
    if not one.tops or not other.tops:
        if one.text == other.text:
            return 0.0, 0
        same = next((i for i, (a, b) in enumerate(zip(one.text, other.text)) if a != b), 0)
        return 1.0, same + 1
    most, at = 0.0, 0
    for number, (left, right) in enumerate(zip(one.tops, other.tops), 1):
        found = _rms(left, right)
        if found > most:
            most, at = found, number
        if one.tokens[number - 1] != other.tokens[number - 1]:
            break
    return most, at


def _rms(left: Mapping[str, float], right: Mapping[str, float]) -> float:
    """Return the root mean square difference of log-probabilities. A token that one side does not show has there at most the
    least that it shows, so that it differs by as much at least."""
    least = {id(side): min(side.values(), default=0.0) for side in (left, right)}
    total, names = 0.0, left.keys() | right.keys()
    for name in names:
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            shown, floor = (b, least[id(left)]) if a is None else (a, least[id(right)])
            assert shown is not None
            differs = max(0.0, shown - floor)
        else:
            differs = abs(a - b)
        total += min(_MOST if math.isnan(differs) else differs, _MOST) ** 2
    return math.sqrt(total / max(1, len(names)))


def rounding_step(answer: ServerAnswer) -> float:
    """Return the step of which the log-probabilities at a token of ``answer`` differ by multiples, the median of its tokens:
    for logits between 4 and 8, 1/32 in bfloat16 and 1/256 in float16. 0 if they lie on no such grid, as in float32.

    Rounding moves a logit by a step or by none, so that runs often do not differ at all, and then by steps.

    Args:
        answer: an answer with the log-probabilities of at least four tokens at each place.
    """
    found = list[float]()
    for shown in answer.tops:
        values = np.fromiter(shown.values(), float)
        if len(values) < 4 or not np.isfinite(values).all():
            return 0.0
        differ = (values.max() - values)[:, None] / _STEPS
        is_multiple = (np.abs(differ - np.round(differ)) * _STEPS < _PRINTED).all(axis=0)
        found.append(float(_STEPS[is_multiple].max(initial=0.0)))
    return median(found or [0.0])


@dataclass
class Noise:
    """What cold runs of the same prompt differ by.

    Args:
        same: distances of runs that are computed in the same way.
        pieces: distances of runs that are computed in other pieces.
        beside: distances of a run alone from one beside others; used where there are no ``pieces``, and at most
            ``MOST_ROUNDING`` of it, as what is beside a run may spoil it.
        steps: of the log-probabilities of cold answers, see ``rounding_step``.
        by_tokens: whether there are no log-probabilities, so that only tokens are compared.
    """

    same: list[float] = field(default_factory=list)
    pieces: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    by_tokens: bool = False

    @property
    def most(self) -> float:
        """The largest distance."""
        rounding = min(max(self.beside, default=0.0), MOST_ROUNDING)
        return max(self.same + self.pieces + [rounding], default=0.0)

    @property
    def step(self) -> float:
        """The step of most cold answers; 0: none."""
        return median(self.steps or [0.0])

    @property
    def of_crowds(self) -> Noise:
        """The noise of answers that are computed beside others: what a step has beside a token changes how it rounds, now and
        then, and no answer in pieces shows by how much."""
        return replace(self, same=self.same + self.pieces, pieces=[])

    @property
    def limit(self) -> float:
        """The distance over which an answer counts as wrong."""
        if self.by_tokens:
            return 0.5
        return max(
            RATIO * self.most, min(RATIO * self.step, MOST_ROUNDING), LEAST if self.pieces else MOST_ROUNDING
        )  # fmt: skip

    @property
    def chance(self) -> float:
        """The share of right answers that are over the limit, at most."""
        if not self.by_tokens:
            return CHANCE
        samples = self.same + self.pieces + self.beside
        return (sum(one > 0 for one in samples) + 1) / (len(samples) + 2)


def evidence(wrong: Sequence[float], right: int, noise: Noise) -> float:
    """Return how many times likelier the results are with a fault than without.

    Args:
        wrong: the distances of independent answers that were wrong.
        right: how many answers were right.
        noise: of cold runs.
    """
    chance = noise.chance
    far = sum(math.log(_weight(one, noise)) for one in wrong)
    logs = [
        far + len(wrong) * math.log(share / chance) + right * math.log((1 - share) / (1 - chance))
        for share in SHARES
        if share > chance
    ]
    return sum(math.exp(min(log, 600.0)) for log in logs) / max(1, len(logs))


def _weight(distance: float, noise: Noise) -> float:
    """Return how many times likelier a wrong answer is so far off with a fault than without: log-uniform, against a tail that
    falls with the third power; at most ``_FAR``, so that what is known of the tail need not be better than that."""
    if noise.by_tokens:
        return 1.0
    times = max(1.0, distance / noise.limit)
    return min(_FAR, times**3 / (3 * math.log(max(math.e, _MOST / noise.limit))))


def is_sure(wrong: Sequence[float], right: int, noise: Noise) -> bool:
    """Return whether the results mean a fault: never one case, and the error is at most ``ERROR``."""
    return len(wrong) > 1 and evidence(wrong, right, noise) >= 1 / ERROR
