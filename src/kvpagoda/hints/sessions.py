"""The texts of sessions: of each the latest, so that a hint may name it by the session's id."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpagoda.abc import RequestView
from kvpagoda.arrays import Ids
from kvpagoda.hints.options import HintLimits


@dataclass(eq=False)
class Session:
    """Session ``name`` of a namespace. ``keys``: the latest text that ended, int32; None: none did. ``running``: its requests
    that have not ended."""

    namespace: bytes
    name: str
    keys: Ids | None = None
    running: set[Any] = field(default_factory=set)


class Sessions:
    """Sessions by namespace and id, the least recently used first. Of too many, or of too many tokens, the oldest are
    forgotten: those of a namespace that has more than its share, then those of all."""

    def __init__(self, limits: HintLimits) -> None:
        self._limits, self.num_tokens = limits, 0
        self._known: OrderedDict[tuple[bytes, str], Session] = OrderedDict()
        self._of_tenant: dict[bytes, OrderedDict[str, Session]] = {}
        self._tokens_of: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def texts(self) -> Iterator[Ids]:
        """Yield the text of every session that has one."""
        return (session.keys for session in self._known.values() if session.keys is not None)

    def find(self, namespace: bytes, name: str) -> Session | None:
        """Return the session, used now; None if it is not known."""
        session = self._known.get((namespace, name))
        if session is not None:
            self._known.move_to_end((namespace, name))
            self._of_tenant[namespace].move_to_end(name)
        return session

    def begin(self, namespace: bytes, name: str) -> Session:
        """Return the session; a new one if it is not known."""
        session = self.find(namespace, name)
        if session is None:
            session = self._known[namespace, name] = Session(namespace, name)
            self._of_tenant.setdefault(namespace, OrderedDict())[name] = session
            self._forget_oldest(namespace)
        return session

    def ended(self, session: Session, request: RequestView) -> None:
        """Take the text of ``request``, which ended."""
        session.running.discard(request)
        if self._known.get((session.namespace, session.name)) is session:
            keys = request.keys(0, request.length).copy()
            more = len(keys) - (0 if session.keys is None else len(session.keys))
            self.num_tokens += more
            self._tokens_of[session.namespace] += more
            session.keys = keys
            self._forget_oldest(session.namespace)

    def end(self, namespace: bytes, name: str) -> Session | None:
        """Forget the session, and return it; None if it is not known."""
        session = self._known.pop((namespace, name), None)
        if session is not None:
            count = 0 if session.keys is None else len(session.keys)
            self.num_tokens -= count
            self._tokens_of[namespace] -= count
            del self._of_tenant[namespace][name]
            if not self._of_tenant[namespace]:
                del self._of_tenant[namespace], self._tokens_of[namespace]
        return session

    def clear(self) -> None:
        """Forget all sessions."""
        self._known.clear()
        self._of_tenant.clear()
        self._tokens_of.clear()
        self.num_tokens = 0

    def _forget_oldest(self, namespace: bytes) -> None:
        """Forget sessions as long as those of ``namespace``, or all, are too many or have too many tokens."""
        limits, own = self._limits, self._of_tenant[namespace]
        most, most_tokens = (int(limits.tenant_share * all_of) for all_of in (limits.sessions, limits.session_tokens))
        while own and (len(own) > most or self._tokens_of[namespace] > most_tokens):
            self.end(namespace, next(iter(own)))
        while self._known and (len(self._known) > limits.sessions or self.num_tokens > limits.session_tokens):
            self.end(*next(iter(self._known)))
