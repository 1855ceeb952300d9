"""The texts of sessions: of each the latest, so that a hint may name it by the session's id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.request import Request
from kvpagoda.hints.options import HintLimits


@dataclass(eq=False)
class Session:
    """Session ``name`` of a namespace. ``keys``: the latest text that ended, int32; None: none did. ``running``: its requests
    that have not ended."""

    namespace: bytes
    name: str
    keys: Ids | None = None
    running: set[Request] = field(default_factory=set)


class Sessions:
    """Sessions by namespace and id, the least recently used first. Of too many, or of too many tokens, the oldest are
    forgotten."""

    def __init__(self, limits: HintLimits) -> None:
        self._limits, self.num_tokens = limits, 0
        self._known: OrderedDict[tuple[bytes, str], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, namespace: bytes, name: str) -> Session | None:
        """Return the session, used now; None if it is not known."""
        session = self._known.get((namespace, name))
        if session is not None:
            self._known.move_to_end((namespace, name))
        return session

    def begin(self, namespace: bytes, name: str) -> Session:
        """Return the session; a new one if it is not known."""
        session = self.find(namespace, name)
        if session is None:
            session = self._known[namespace, name] = Session(namespace, name)
            self._forget_oldest()
        return session

    def ended(self, session: Session, request: Request) -> None:
        """Take the text of ``request``, which ended."""
        session.running.discard(request)
        if self._known.get((session.namespace, session.name)) is session:
            keys = request.keys(0, request.own_length).copy()
            self.num_tokens += len(keys) - (0 if session.keys is None else len(session.keys))
            session.keys = keys
            self._forget_oldest()

    def end(self, namespace: bytes, name: str) -> Session | None:
        """Forget the session, and return it; None if it is not known."""
        session = self._known.pop((namespace, name), None)
        if session is not None and session.keys is not None:
            self.num_tokens -= len(session.keys)
        return session

    def clear(self) -> None:
        """Forget all sessions."""
        self._known.clear()
        self.num_tokens = 0

    def _forget_oldest(self) -> None:
        limits = self._limits
        while self._known and (len(self._known) > limits.sessions or self.num_tokens > limits.session_tokens):
            self.end(*next(iter(self._known)))
