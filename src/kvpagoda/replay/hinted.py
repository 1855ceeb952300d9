"""What hints would be worth: a trace replayed by a cache that is told what its application knows at each moment.

An application knows, when a request ends, to which session it belongs, whether a tool runs now (then the next request
comes without a user) or the user's turn has come, and whether the session is over. It knows how long its tools took so
far. It does not know when the next request comes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpagoda.cache.options import Limits, Retention
from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.hints import HintLimits, Hints
from kvpagoda.kv_cache import KVCache
from kvpagoda.replay.readers import Source
from kvpagoda.replay.run import ReplayResult, readable
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Attention, Layer, Schema
from kvpagoda.units import whole_number

QUANTILE = 0.75
"""A promise lasts as long as this share of the tools took so far."""
_FEW = 32  # tools that were seen before their times are relied on
_GUESS = 30.0  # seconds of a promise until then
_ONE = Schema((Layer(0, "full", (Attention(1, 1, 1, "float16"),)),), "one kind of block")


class ToolTimes:
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
        if len(self._seen) < _FEW:
            return _GUESS
        return max(self._seen[int(QUANTILE * len(self._seen))], 1e-3)


def replay_hints(
    trace: Source | Trace, capacity_blocks: int, *, on_request: Callable[[int], None] | None = None
) -> ReplayResult:
    """Replay a trace, whose sessions are known, with LRU and hints. A block of the trace is one block of the cache.

    While a tool runs, the text of its session is retained for the usual time of a tool; when it is the user's turn,
    nothing is promised; when a session ends, its blocks are evicted. Promises leave room for the largest request, so that
    none is taken back. Requests run one after another, and the clock is that of their arrivals. Raises BadInput for a
    trace without sessions, and NeverFits for a request that is larger than the capacity.
    """
    columns, capacity = readable(trace), whole_number(capacity_blocks, "a capacity in blocks", at_least=1)
    if columns.sessions is None or columns.calls_tool is None:
        raise BadInput(
            f"{columns.name} does not say which requests belong to one session; hints need a trace that does"
        )
    blocks, sessions, tools = columns.blocks, columns.sessions, columns.calls_tool
    now, times, hits = _Now(), ToolTimes(), np.zeros(len(columns), np.int64)
    longest = int(np.diff(columns.starts).max(initial=1))
    if longest + 1 > capacity:
        raise NeverFits(
            f"a request of {longest} blocks and one more does not fit in {capacity}",
            needed=longest + 1,
            available=capacity,
        )
    limits = HintLimits(seconds=float(1 << 40), promises=1 << 20, sessions=1 << 20, session_tokens=1 << 40)
    cache = KVCache(
        _ONE, num_blocks=capacity, block_size=1, max_requests=1, device="none", hints=Hints(now, limits),
        retention=Retention(pin_share=1 - (longest + 1) / capacity), limits=Limits(capacity, capacity),
    )  # fmt: skip
    last = {session: number for number, session in enumerate(sessions.tolist())}
    for number in range(len(columns)):
        session, now.seconds = int(sessions[number]), max(now.seconds, float(columns.arrivals[number]))
        times.began(session, now.seconds)
        chain = blocks[columns.starts[number] : columns.starts[number + 1]]
        name = str(session)
        actions = [_act("kv.session", session_id=name, event="continue")]
        if tools[number] and number != last[session]:
            actions.append(_act("kv.retain", seconds=times.usual))
            times.called(session, now.seconds)
        text = np.append(chain, np.int32(2**31 - 2 - number % 2**20))  # the token that is computed in any case
        sequence = cache.open(text, hints={"message_id": name, "actions": actions})
        hits[number] = sequence.cached_tokens
        sequence.commit(text[sequence.length : -1])
        sequence.close()
        if number == last[session]:
            cache.apply(
                {"message_id": name, "actions": [_act("kv.session", session_id=name, event="end", discard=True)]}
            )
        if on_request is not None and number % 256 == 0:
            on_request(number)
        cache.hints.ended()
    inserted = np.cumsum(np.diff(columns.starts) - hits)
    return ReplayResult(
        columns.name, "lru, hints", capacity, len(columns), columns.num_refs, int(hits.sum()), cache.stats().evicted_blocks,
        int(columns.input_lengths.sum()), int(columns.tokens_of(hits).sum()), hits=hits, inserted=inserted,
    )  # fmt: skip


class _Now:
    """The clock of the trace."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _act(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}
