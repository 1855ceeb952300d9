"""How much hints may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.errors import BadInput
from kvpagoda.units import real_number, whole_number


@dataclass(frozen=True)
class HintLimits:
    """The limits of the hints of one cache. What is beyond one of them is clipped or rejected, with the figures.

    Args:
        seconds: the longest promise.
        tenant_share: the share, 0 to 1, that one namespace may have of the blocks that may be promised
            (``Retention.pin_share`` of the cache), of ``promises``, ``sessions`` and ``session_tokens``.
        tenant_tokens: the most tokens that are promised to one namespace; None: no other limit.
        promises: promises at once.
        sessions: sessions at once; of more, those that were used longest ago are forgotten.
        session_tokens: tokens of all their texts, four bytes each in host memory.
        actions: in one envelope.
        nbytes: of an envelope of JSON.
        news: outcomes that wait for ``Hints.ended``; of more, the oldest are dropped and counted.

    Raises:
        BadInput: ``tenant_share`` is not 0 to 1, or another limit is negative or no number.
    """

    seconds: float = 3600.0
    tenant_share: float = 1.0
    tenant_tokens: int | None = None
    promises: int = 4096
    sessions: int = 4096
    session_tokens: int = 1 << 24
    actions: int = 64
    nbytes: int = 1 << 20
    news: int = 65_536

    def __post_init__(self) -> None:
        if real_number(self.tenant_share, "tenant_share") > 1:
            raise BadInput(f"tenant_share is a share, 0 to 1, got {self.tenant_share}")
        real_number(self.seconds, "seconds of the longest promise")
        if self.tenant_tokens is not None:
            object.__setattr__(self, "tenant_tokens", whole_number(self.tenant_tokens, "tenant_tokens"))
        for name in ("promises", "sessions", "session_tokens", "actions", "nbytes", "news"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name))
