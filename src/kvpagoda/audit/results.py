"""What an audit has seen: judged requests, counters that cannot be right, and what they say together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvpagoda.audit.probes import CROWDS, KINDS
from kvpagoda.audit.prompts import Ask, Case
from kvpagoda.audit.server import Answers, ServerAnswer
from kvpagoda.audit.verdict import Noise, evidence, is_sure

_LEAST_JUDGED, _LEAST_PAIRS = 12, 3
_LOUD = 1.0
"""Noise in nats over which nothing can be judged."""


@dataclass(eq=False)
class Trial:
    """A judged request.

    Args:
        case: the case it belongs to.
        number: which of its requests it is.
        ask: the request.
        answers: those of the steps before it.
        answer: its own.
        key: names its prompt.
        twins: the answers of cold runs.
        distance: how far it is from the nearer of the two twins, or from the one.
        at: at which token.
        is_wrong: whether both twins say that it is wrong; None: there is no cold twin.
        whose: of which other prompt the answer is, if it is known.
    """

    case: Case
    number: int
    ask: Ask
    answers: Answers
    answer: ServerAnswer
    key: str
    twins: list[ServerAnswer] = field(init=False, default_factory=list)
    distance: float = field(init=False, default=0.0)
    at: int = field(init=False, default=0)
    is_wrong: bool | None = field(init=False, default=None)
    whose: str = field(init=False, default="")


@dataclass(eq=False)
class Miscount:
    """A request for which more tokens were said to be cached than can be. ``who``: a key of ``findings.WHO``."""

    who: str
    case: Case
    number: int
    ask: Ask
    answers: Answers
    answer: ServerAnswer

    @property
    def most(self) -> int:
        """The most tokens that can be cached."""
        return self.answer.num_prompt if self.who == "longer" else self.answer.common or 0


@dataclass
class Results:
    """What an audit has seen.

    Attributes:
        noise: of cold runs.
        trials: the judged requests.
        miscounts: those whose counter cannot be right.
        notes: what could not be known or tried, and why.
        skipped: probe -> why it was not made.
        num_counted: requests whose counter was looked at.
        is_partial: whether it was interrupted, or the server went away.
        lost: why the server does not answer any more; empty: it does.
    """

    noise: Noise = field(init=False, default_factory=Noise)
    trials: list[Trial] = field(init=False, default_factory=list)
    miscounts: list[Miscount] = field(init=False, default_factory=list)
    notes: list[str] = field(init=False, default_factory=list)
    skipped: dict[str, str] = field(init=False, default_factory=dict)
    num_counted: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)
    is_partial: bool = field(init=False, default=False)
    lost: str = field(init=False, default="")

    def of_kind(self, *kinds: str) -> list[Trial]:
        """Return the trials of ``kinds`` that have a verdict."""
        return [trial for trial in self.trials if trial.is_wrong is not None and trial.ask.kind in kinds]

    def counts(self, *kinds: str) -> tuple[list[float], int]:
        """Return the distances of independent trials of ``kinds`` that were wrong, and how many were right. All that are wrong
        for one prompt count as one, the least, unless others of the same prompt were right."""
        by_prompt = defaultdict[str, list[Trial]](list)
        for trial in self.of_kind(*kinds):
            by_prompt[trial.key].append(trial)
        wrong, num_right = list[float](), 0
        for each in by_prompt.values():
            bad = [trial.distance for trial in each if trial.is_wrong]
            wrong += bad if len(bad) < len(each) else [min(bad)]
            num_right += len(each) - len(bad)
        return wrong, num_right

    def noise_of(self, *kinds: str) -> Noise:
        """Return the noise of answers to requests of ``kinds``."""
        return self.noise.of_crowds if set(kinds) <= CROWDS else self.noise

    def is_sure(self, *kinds: str) -> bool:
        """Return whether the trials of ``kinds`` mean a fault."""
        return is_sure(*self.counts(*kinds), self.noise_of(*kinds))

    def evidence(self, *kinds: str) -> float:
        """Return how many times likelier the trials of ``kinds`` are with a fault than without."""
        return evidence(*self.counts(*kinds), self.noise_of(*kinds))

    def why_not(self) -> str:
        """Return why nothing can be said; empty if something can."""
        if self.lost:
            return self.lost
        judged = len(self.of_kind(*KINDS))
        hits = sum(bool(trial.answer.cached) for trial in self.of_kind(*KINDS))
        if judged and self.noise.by_tokens and not any(trial.answer.text for trial in self.of_kind(*KINDS)):
            return "its answers have neither text nor log-probabilities"
        if len(self.noise.same) < _LEAST_PAIRS or judged < _LEAST_JUDGED:
            what = f"only {judged} answers could be compared with a cold run, and {len(self.noise.same)} pairs of cold runs"
            return what if self.is_partial else f"{what}; raise --max-requests"
        if self.noise.by_tokens and self.noise.chance > 0.3:
            return "there are no log-probabilities, and cold runs of one prompt give different tokens"
        if not self.noise.by_tokens and self.noise.limit > _LOUD:
            return f"cold runs of one prompt differ by up to {self.noise.most:.2g} nats, as much as wrong rows would"
        if self.num_counted and not hits:
            return "nothing was found cached; is prefix caching on?"
        return ""
