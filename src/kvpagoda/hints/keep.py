"""What a promise is asked for."""

from __future__ import annotations

from typing import NamedTuple

from kvpagoda.hints.envelope import Payload
from kvpagoda.hints.outcome import Outcome


class Keep(NamedTuple):
    """A promise that is asked for. ``end``: its last token (None: the end of the text). ``seconds``: None: until it is
    released. ``answer``: what is asked for the answer of a request (None: the same)."""

    asked: Outcome
    end: int | None
    priority: int
    seconds: float | None
    answer: Keep | None = None

    @classmethod
    def of(cls, asked: Outcome, payload: Payload, priority: int, seconds: float | None) -> Keep:
        """Return what ``payload`` asks for; ``priority`` and ``seconds`` where it does not say. Raises BadInput."""
        _, end = payload.span()
        own = cls(asked, end, payload.priority(priority), payload.seconds(seconds))
        if "answer" not in payload:
            return own
        return own._replace(answer=cls.of(asked, payload.part("answer"), own.priority, own.seconds))
