"""What hints would be worth: a trace replayed by a cache that is told what its application knows at each moment.

An application knows, when a request ends, to which session it belongs, whether a tool runs now (then the next request
comes without a user) or the user's turn has come, and whether the session is over. It knows how long its tools took so
far. It does not know when the next request comes. ``usual_times`` says what is told, ``replay_hints`` replays it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.errors import BadInput
from kvpagoda.hints import HintLimits, Hints
from kvpagoda.probe import Probe
from kvpagoda.replay.readers import Source
from kvpagoda.replay.run import ReplayResult
from kvpagoda.replay.trace import Ints, Trace, readable
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.units import whole_number

QUANTILE = 0.75
"""A promise lasts as long as this share of the tools took so far."""
_FEW = 32  # tools that were seen before their times are relied on
_GUESS = 30.0  # seconds of a promise until then
_ONE = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "one kind of block")


class Told(NamedTuple):
    """What the cache is told when each request ends. ``seconds``, float64 ``[requests]``: how long to keep its text; 0:
    nothing is promised. ``is_over``, bool ``[requests]``: whether its session ends with it."""

    seconds: npt.NDArray[np.float64]
    is_over: npt.NDArray[np.bool_]


class _ToolTimes:
    """How long tools took so far: seconds between the request that called one and the next of its session."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._called: dict[int, float] = {}

    def began(self, session: int, at: float) -> None:
        """Note that the next request of ``session`` arrived: the tool that it waited for is done."""
        if (called := self._called.pop(session, None)) is not None:
            insort(self._seen, at - called)

    def called(self, session: int, at: float) -> None:
        """Note that ``session`` waits for a tool."""
        self._called[session] = at

    @property
    def usual(self) -> float:
        """Seconds after which three quarters of the tools were done."""
        return max(self._seen[int(QUANTILE * len(self._seen))], 1e-3) if len(self._seen) >= _FEW else _GUESS


def usual_times(trace: Trace) -> Told:
    """Return what the application of ``trace`` tells from what it knows at each moment: while a tool runs, the text of its
    session is retained for the time that tools usually took up to then; when it is the user's turn, nothing is promised.
    Raises BadInput for a trace without sessions."""
    if trace.sessions is None or trace.calls_tool is None:
        text = f"{trace.name} does not say which requests belong to one session; hints need a trace that does"
        raise BadInput(text, needed="sessions")
    last = {session: number for number, session in enumerate(trace.sessions.tolist()) if session >= 0}
    told, times = Told(np.zeros(len(trace)), np.zeros(len(trace), np.bool_)), _ToolTimes()
    told.is_over[[*last.values()]] = True
    moments = np.maximum.accumulate(trace.arrivals).tolist()
    for number, (session, at) in enumerate(zip(trace.sessions.tolist(), moments)):
        times.began(session, at)
        if session >= 0 and trace.calls_tool[number] and not told.is_over[number]:
            told.seconds[number] = times.usual
            times.called(session, at)
    return told


def replay_hints(
    trace: Source | Trace,
    capacity_blocks: int,
    *,
    told: Callable[[Trace], Told] = usual_times,
    on_request: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Replay a trace, whose sessions are known, with LRU and hints: those that ``told`` makes of the trace.

    As in ``replay``, a block of the trace is one block of the cache, a request is looked up and inserted, and then at most
    ``capacity_blocks`` blocks stay cached; a running request has memory beside these. Promises may have all of the
    capacity; what else is cached is evicted, the least recently used first. When a session ends, its blocks are evicted.
    Requests run one after another, and the clock is that of their arrivals. Raises BadInput for a trace without sessions.
    """
    columns, capacity = readable(trace), whole_number(capacity_blocks, "a capacity in blocks", at_least=1, below=2**31)
    seconds, is_over = told(columns)
    cached = _Cached(columns, capacity)
    hits: Ints = np.zeros(len(columns), np.int64)
    for number in range(len(columns)):
        hits[number] = cached.serve(number, float(seconds[number]))
        if is_over[number]:
            cached.end(number)
        cached.shrink()
        if on_request is not None and number % 256 == 0:
            on_request(number)
    inserted = np.cumsum(np.minimum(np.diff(columns.starts), capacity) - hits)
    evicted = int(inserted[-1:].sum()) - cached.num_blocks
    return ReplayResult(
        columns.name, "lru, hints", capacity, len(columns), columns.num_refs, int(hits.sum()), evicted,
        int(columns.input_lengths.sum()), int(columns.tokens_of(hits).sum()), hits=hits, inserted=inserted,
    )  # fmt: skip


class _Cached:
    """What is cached of ``trace`` between its requests: at most ``capacity`` blocks, promised ones included.

    The memory behind it has room for the largest request beside these, so no request takes a promise back."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._trace, self._capacity, self._now = trace, capacity, 0.0
        room = capacity + int(np.diff(trace.starts).max(initial=0)) + 2  # the padding block, and one token to compute
        limits = HintLimits(seconds=float(1 << 40), promises=1 << 20, sessions=1 << 20, session_tokens=1 << 40)
        self._cache = KVCache(
            _ONE, num_blocks=room, block_size=1, max_requests=1, device="none", hints=Hints(lambda: self._now, limits),
            retention=Retention(pin_share=capacity / room), limits=Limits(room, room),
        )  # fmt: skip
        self._probe = Probe(self._cache)

    def serve(self, number: int, seconds: float) -> int:
        """Run request ``number``, and promise to keep its text for ``seconds``; return how many of its blocks hit."""
        trace, actions = self._trace, []
        self._now = max(self._now, float(trace.arrivals[number]))
        if (session := self._session_of(number)) is not None:
            actions.append(_act("kv.session", session_id=session, event="continue"))
        if seconds:
            actions.append(_act("kv.retain", seconds=seconds))
        chain = trace.blocks[trace.starts[number] : trace.starts[number + 1]]
        text = np.append(chain, np.int32(2**31 - 2 - number % 2**20))  # the token that is computed in any case
        with self._cache.open(text, hints={"actions": actions}) as sequence:
            hit = sequence.cached_tokens
            sequence.commit(text[hit:-1])
        return hit

    def end(self, number: int) -> None:
        """End the session of request ``number``, and evict what only it used."""
        self._cache.apply(
            {"actions": [_act("kv.session", session_id=self._session_of(number), event="end", discard=True)]}
        )

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are cached."""
        return self._probe.num_cached

    def shrink(self) -> None:
        """Evict what passes the capacity."""
        self._cache.hints.ended()
        if (over := self.num_blocks - self._capacity) > 0:
            self._probe.evict(over)
        assert self.num_blocks <= self._capacity, "promises have at most the capacity"

    def _session_of(self, number: int) -> str | None:
        """Return the name of the session of request ``number``; None: the trace does not say."""
        sessions = self._trace.sessions
        return None if sessions is None or sessions[number] < 0 else str(int(sessions[number]))


def _act(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}
