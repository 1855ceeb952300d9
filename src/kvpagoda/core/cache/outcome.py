"""The answer to one action of a hint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

ANSWERS = ("accepted", "clipped", "deferred", "rejected", "missing", "unknown")
"""What an action is answered with at once; what was deferred is answered once more later."""
ENDS = ("expired", "taken", "replaced", "released")
"""How a promise ends."""


@dataclass(frozen=True)
class Outcome:
    """What became of one action, or of the promise that it was given.

    ``status``, at once:

    - ``accepted``: all that was asked for.
    - ``clipped``: a part of it; ``tokens``, ``nbytes`` and ``until`` say what.
    - ``deferred``: to the end of the request: then comes another outcome.
    - ``rejected``: not done, ``reason`` says why.
    - ``missing``: nothing of that text is cached, or nobody knows that session.
    - ``unknown``: no such action, or not in that version.

    and when a promise ends: ``expired``, ``taken`` (for a running request, or a promise of higher priority),
    ``replaced`` (by the next request of its session), ``released`` (by ``kv.release``, ``kv.session``, an
    invalidation).

    Args:
        message_id: of the envelope.
        action_id: of the action in it.
        action_type: such as ``kv.retain``.
        status: one of the above.
        reason: why it is not ``accepted``.
        wanted: tokens that were asked for.
        tokens: granted ones, whole blocks.
        nbytes: of what is kept for them, in all groups.
        until: on the clock of the hints, in seconds; None: no promise, or no end.
    """

    message_id: str
    action_id: str
    action_type: str
    status: str
    reason: str = ""
    wanted: int = 0
    tokens: int = 0
    nbytes: int = 0
    until: float | None = None

    def now(self, status: str, reason: str = "", **figures: Any) -> Outcome:
        """Return the outcome of the same action with another ``status``.

        Args:
            status: the new one.
            reason: why.
            **figures: other fields that change.
        """
        return replace(self, status=status, reason=reason, **figures)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)
