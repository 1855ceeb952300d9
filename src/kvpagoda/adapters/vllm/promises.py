"""Hints in vLLM: the texts that requests asked to keep, by the ``kv_hints`` that vLLM carries on a request.

vLLM tells a scheduler of hints with a request alone, so ``kv.retain`` and ``kv.pin`` are about that request, from its end
on; ``kv.session`` lets the next request of a session replace what it was promised before, and ``kv.release`` ends a
promise. A promise holds blocks as a request does. When a request lacks blocks, promises end first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Any

from kvpagoda.errors import BadInput, KVPagodaError
from kvpagoda.hints import HintLimits, Outcome, read_envelope
from kvpagoda.hints.envelope import Payload, is_known
from kvpagoda.hints.keep import Keep


@dataclass(eq=False)
class PoolPromise:
    """Blocks that are held, in the order of their positions. ``tenant``: the cache salt of the request that asked."""

    keep: Keep
    outcome: Outcome
    tenant: str | None
    session: str | None
    blocks: list[Any]


class PoolPromises:
    """The promises in ``pool``, a block pool of vLLM: at most ``share`` of its blocks.

    ``clock``: seconds. ``limits``: see ``HintLimits``; those on sessions and tenants have no meaning here. ``size``: of a
    block that is held, in ids of the pool; None: 1.
    """

    def __init__(
        self,
        pool: Any,
        share: float,
        clock: Callable[[], float] = monotonic,
        limits: HintLimits | None = None,
        size: Callable[[Any], int] | None = None,
    ) -> None:
        self._pool, self._clock, self._limits = pool, clock, HintLimits() if limits is None else limits
        self._most, self._size = int(share * pool.num_gpu_blocks), size
        self.num_blocks = 0  #: of all promises, each for itself
        self._held: dict[int, PoolPromise] = {}
        self._by_end: list[tuple[float, int]] = []
        self._numbers = count()
        self._asked: dict[str, tuple[list[Keep], str | None]] = {}  # request -> promises for its end, its session
        self._news: deque[Outcome] = deque(maxlen=self._limits.news)

    def ended(self) -> list[Outcome]:
        """Return what became of deferred actions and of promises since the last call, in order."""
        self.expire()
        news = list(self._news)
        self._news.clear()
        return news

    def began(self, request: Any) -> None:
        """Take the hints of ``request``, which has its first blocks. What is not done is told at once."""
        try:
            message, actions = read_envelope(request.kv_hints, self._limits.actions, self._limits.nbytes)
        except KVPagodaError as error:
            self._news.append(Outcome("", "", "", "rejected", str(error)))
            return
        keeps: list[Keep] = []
        session: str | None = None
        for action in actions:
            asked = Outcome(message, action.action_id, action.action_type, "accepted")
            try:
                if (wrong := is_known(action)) is not None:
                    self._news.append(asked.now("unknown", wrong))
                elif action.action_type in ("kv.retain", "kv.pin"):
                    keeps.append(Keep.of(asked, Payload(action.payload), self._limits.seconds))
                elif action.action_type == "kv.release":
                    payload = Payload(action.payload)
                    self._released(asked, request, payload.text("promise"), payload.text("session_id"))
                elif action.action_type == "kv.session":
                    payload = Payload(action.payload)
                    name = payload.text("session_id")
                    if payload.one_of("event", ("begin", "continue", "end")) == "end":
                        self._released(asked, request, None, name)
                    else:
                        session = name
                else:
                    self._news.append(asked.now("rejected", "vLLM's scheduler does not do this; KVCache does"))
            except BadInput as error:
                self._news.append(asked.now("rejected", str(error)))
        if keeps or session is not None:
            self._asked[request.request_id] = keeps, session

    def at_end(self, request: Any, blocks_of: Callable[[int], list[Any]]) -> None:
        """Give the promises that ``request``, which ends, asked for. ``blocks_of(n)``: the blocks from which its first n
        tokens can be resumed, in the order of their positions."""
        keeps, session = self._asked.pop(request.request_id, ((), None))
        if session is not None:
            self._release(request, None, session, "replaced")
        for keep in keeps:
            for part in keep.parts(request.num_prompt_tokens):
                self._grant(part, request, blocks_of, session)

    def expire(self) -> None:
        """End the promises whose time is over."""
        while self._by_end and self._by_end[0][0] <= self._clock():
            self._end(heappop(self._by_end)[1], "expired")

    def drop_lowest_promise(self) -> bool:
        """End the promise of the lowest priority for a request that lacks blocks; return whether there was one."""
        if not self._held:
            return False
        lowest = min(self._held, key=lambda number: (self._held[number].keep.priority, number))
        self._end(lowest, "taken")
        return True

    def clear(self) -> None:
        """End all promises."""
        for number in [*self._held]:
            self._end(number, "released")

    def _grant(self, keep: Keep, request: Any, blocks_of: Callable[[int], list[Any]], session: str | None) -> None:
        wanted = min(request.num_computed_tokens, request.num_tokens)
        wanted = wanted if keep.end is None else min(wanted, keep.end)
        blocks = [block for block in blocks_of(wanted) if not block.is_null] if keep.priority else []
        if not blocks:
            reason = "nothing of it is cached" if keep.priority else "priority 0: no promise"
            self._news.append(keep.asked.now("missing" if keep.priority else "accepted", reason, wanted=wanted))
            return
        size = self._num_ids(blocks)
        if self.num_blocks + size > self._most or len(self._held) >= self._limits.promises:
            reason = f"{size} blocks beside {self.num_blocks} promised ones pass {self._most}"
            self._news.append(keep.asked.now("rejected", reason, wanted=wanted))
            return
        number, until, status = next(self._numbers), None, "accepted"
        if keep.seconds is not None:
            until = self._clock() + min(keep.seconds, self._limits.seconds)
            status = "clipped" if keep.seconds > self._limits.seconds else status
            heappush(self._by_end, (until, number))
            if len(self._by_end) > 2 * len(self._held) + 64:  # most have ended before their time
                self._by_end = [end for end in self._by_end if end[1] in self._held or end[1] == number]
                heapify(self._by_end)
        self._pool.touch(blocks)
        outcome = keep.asked.now(status, f"{size} blocks", wanted=wanted, tokens=wanted, until=until)
        self._held[number] = PoolPromise(keep, outcome, request.cache_salt, session, blocks)
        self.num_blocks += size
        self._news.append(outcome)

    def _released(self, asked: Outcome, request: Any, action: str | None, session: str | None) -> None:
        if not self._release(request, action, session, "released"):
            self._news.append(asked.now("missing", "no such promise"))

    def _release(self, request: Any, action: str | None, session: str | None, status: str) -> int:
        """End the promises of the tenant of ``request`` that an ``action``, or else a ``session``, asked for; return how
        many."""
        found = [
            number
            for number, one in self._held.items()
            if one.tenant == request.cache_salt
            and (
                one.outcome.action_id == action
                if action is not None
                else session is not None and one.session == session
            )
        ]
        for number in found:
            self._end(number, status)
        return len(found)

    def _end(self, number: int, status: str) -> None:
        promise = self._held.pop(number, None)
        if promise is not None:
            self.num_blocks -= self._num_ids(promise.blocks)
            self._pool.free_blocks(reversed(promise.blocks))
            self._news.append(promise.outcome.now(status))

    def _num_ids(self, blocks: list[Any]) -> int:
        return len(blocks) if self._size is None else sum(map(self._size, blocks))
