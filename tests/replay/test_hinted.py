"""Hints are told from the past alone, and replayed with the memory that other policies have: with nothing told it is LRU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpagoda.errors import BadInput
from kvpagoda.replay import Request, Trace, replay
from kvpagoda.replay import hinted as module
from kvpagoda.replay.hinted import QUANTILE, Told, replay_hints, usual_times
from raises import raises


def agents(num_sessions: int = 12, turns: int = 8, seed: int = 0) -> Trace:
    """Return sessions that all begin with the same two blocks and grow by a few with each request; after three of four
    requests a tool runs for 1 to 9 seconds, else the user thinks for a long time. A few requests are of no session."""
    random = np.random.default_rng(seed)
    requests, new = [], iter(range(100, 10**6))
    for session in range(num_sessions):
        chain, at = [1, 2], float(random.uniform(0, 60))
        for turn in range(turns):
            chain += [next(new) for _ in range(int(random.integers(1, 6)))]
            tool = turn % 4 != 3
            requests.append(Request(at, 16 * len(chain), 1, np.array(chain), 16, session, tool))
            at += float(random.uniform(1, 9) if tool else random.uniform(60, 900))
        requests.append(Request(at, 48, 1, np.array([1, 2, next(new)]), 16))
    return Trace.read(sorted(requests, key=lambda one: one.arrival))


TRACE = agents()


def nothing(trace: Trace) -> Told:
    return Told(np.zeros(len(trace)), np.zeros(len(trace), np.bool_))


def everything(trace: Trace) -> Told:
    return Told(np.full(len(trace), 1e9), np.zeros(len(trace), np.bool_))


@pytest.mark.parametrize("capacity", [1, 3, 20, 60, 150, 10**4])
def test_with_nothing_told_it_is_lru(capacity: int) -> None:
    hinted, lru = replay_hints(TRACE, capacity, told=nothing), replay(TRACE, capacity, "lru")
    assert hinted.hits.tolist() == lru.hits.tolist()
    assert (hinted.block_hits, hinted.token_hits, hinted.evictions) == (lru.block_hits, lru.token_hits, lru.evictions)


@pytest.mark.parametrize("told", [usual_times, everything, nothing])
@pytest.mark.parametrize("capacity", [3, 40, 150])
def test_between_requests_at_most_the_capacity_is_cached(
    told: Callable[[Trace], Told], capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, promised, shrink = [], [], module._Cached.shrink

    def shrunk(self: Any) -> None:
        shrink(self)
        core = self._cache.core
        self._cache.check()
        kept.append(core.prefix.tree.num_cached)
        promised.append(core.prefix.num_pinned)

    monkeypatch.setattr(module._Cached, "shrink", shrunk)
    replay_hints(TRACE, capacity, told=told)
    assert max(kept) == capacity and len(kept) == len(TRACE)
    most = {"nothing": 0, "everything": capacity}.get(told.__name__)
    assert max(promised) == most if most is not None else 0 < max(promised) <= capacity


def test_what_is_told_depends_on_the_past_alone() -> None:
    whole = usual_times(TRACE)
    assert {0.0, 30.0} < {*whole.seconds.tolist()}
    for number in range(0, len(TRACE) - 1, 7):
        later = TRACE.arrivals.copy()
        later[number + 1 :] += np.linspace(1, 500, len(TRACE) - number - 1)
        changed = usual_times(replace(TRACE, arrivals=later))
        assert changed.seconds[: number + 1].tolist() == whole.seconds[: number + 1].tolist()
    assert usual_times(replace(TRACE, arrivals=later)).is_over.tolist() == whole.is_over.tolist()


def test_a_promise_lasts_as_long_as_tools_took_so_far() -> None:
    whole = usual_times(TRACE)
    assert TRACE.sessions is not None and TRACE.calls_tool is not None
    took, called = [], dict[int, float]()
    for number, (session, at) in enumerate(zip(TRACE.sessions.tolist(), TRACE.arrivals.tolist())):
        if session in called:
            took.append(at - called.pop(session))
        last = number == np.flatnonzero(TRACE.sessions == session)[-1]
        assert whole.is_over[number] == (last and session >= 0)
        if session < 0 or last or not TRACE.calls_tool[number]:
            assert whole.seconds[number] == 0
            continue
        called[session] = at
        assert whole.seconds[number] == (sorted(took)[int(QUANTILE * len(took))] if len(took) >= 32 else 30.0)


@pytest.mark.parametrize("capacity", [40, 80, 150])
def test_hints_find_more_than_lru_and_less_than_the_bound(capacity: int) -> None:
    hits = replay_hints(TRACE, capacity).block_hits
    assert replay(TRACE, capacity, "lru").block_hits < hits <= replay(TRACE, capacity, "opt").block_hits


def test_a_trace_without_sessions_is_refused() -> None:
    with raises(BadInput, needed="sessions"):
        replay_hints(replace(TRACE, sessions=None), 40)
    assert replay_hints([Request(0, 16, 1, np.array([1]), 16, 0, True)], 1).hits.tolist() == [0]
