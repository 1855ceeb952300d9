"""What a promise is asked for."""

from __future__ import annotations

from typing import NamedTuple

from kvpagoda.core.cache.outcome import Outcome
from kvpagoda.hints.envelope import DEFAULT_PRIORITY, MOST_PRIORITY, Payload


class Keep(NamedTuple):
    """A promise that is asked for. ``end``: its last token (None: the end of the text). ``seconds``: None: until it is
    released. ``answer``: what is asked for the answer of a request (None: the same)."""

    asked: Outcome
    end: int | None
    priority: int
    seconds: float | None
    answer: Keep | None = None

    @classmethod
    def of(cls, asked: Outcome, payload: Payload, most_seconds: float) -> Keep:
        """Return what ``payload`` asks for: of a ``kv.retain``, which ends after ``most_seconds`` if it does not say when, or
        of a ``kv.pin``, which does not end. Raises BadInput."""
        is_pin = asked.action_type == "kv.pin"
        default, seconds = (MOST_PRIORITY, None) if is_pin else (DEFAULT_PRIORITY, most_seconds)
        _, end = payload.span()
        own = cls(asked, end, payload.priority(default), payload.seconds(seconds))
        if "answer" not in payload:
            return own
        part = payload.part("answer")
        return own._replace(answer=cls(asked, None, part.priority(own.priority), part.seconds(own.seconds)))

    def parts(self, num_prompt: int | None) -> list[Keep]:
        """Return what is asked for a text whose prompt has ``num_prompt`` tokens (None: it has no answer), each without an
        ``answer``: first for the whole text, if that is asked for separately."""
        if self.answer is None or num_prompt is None:
            return [self._replace(answer=None)]
        end = num_prompt if self.end is None else min(self.end, num_prompt)
        own = self._replace(end=end, answer=None)
        return [self.answer, own] if self.answer.priority else [own]
