"""The caches of a simulation as a router knows them: from their events alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpagoda.events.event_log import EventLog
from kvpagoda.replay.fleet import simulation
from kvpagoda.replay.texts import text_of


class FollowedCaches:
    """``routing.OwnCaches`` in the slow way: every event is encoded, sent, decoded, and read by a ``Follower``."""

    def __init__(self, trace: Any, caches: Any, tokens_per_id: int) -> None:
        from kvpagoda.events.follower import Follower
        from kvpagoda.events.stream import EventStream

        self._trace, self._per_id = trace, tokens_per_id
        self._streams = [EventStream(cache.core.observers.find(EventLog), keep=1) for cache in caches]
        self._followers = [Follower() for _ in caches]
        for stream, follower in zip(self._streams, self._followers):
            for message in stream.replay(0):
                follower.feed(*message)

    def cached(self, number: int) -> list[int]:
        text, num_prompt = text_of(self._trace, number, self._per_id)
        found = list[int]()
        for stream, follower in zip(self._streams, self._followers):
            message = stream.drain()
            if message is not None:
                follower.feed(*message)
            found.append(follower.resumable(text[:num_prompt]).resumable)
        return found


def watch(monkeypatch: pytest.MonkeyPatch, told: Callable[[list[int], list[int]], None]) -> None:
    """Call ``told`` at each choice with what the caches have and with what their followers know."""
    made = simulation.OwnCaches

    class Both:
        def __init__(self, *given: Any) -> None:
            self.own, self.followed = made(*given), FollowedCaches(*given)

        def cached(self, number: int) -> list[int]:
            own, followed = self.own.cached(number), self.followed.cached(number)
            told(own, followed)
            return own

    monkeypatch.setattr(simulation, "OwnCaches", Both)
    monkeypatch.setattr(simulation, "Untold", EventLog)
