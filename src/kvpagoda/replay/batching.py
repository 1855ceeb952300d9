"""Requests of a trace on one cache: which ones wait, how one is admitted, and how pieces of it are computed.

    waiting ──open_next──► AdmittedRequest ──extend, commit──► ... ──► close

``serving`` computes a piece of every running request in each step. ``worker`` gives steps a budget of tokens and a
duration."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from kvpagoda import Identity, KVCache, Limits, Retention, Sequence
from kvpagoda.errors import NeverFits, OutOfBlocks
from kvpagoda.replay.texts import Tokens, text_of
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema


def cache_for(
    trace: Trace | None,
    schema: Schema,
    budget: int | str,
    step_tokens: int,
    *,
    shared: bool = True,
    checkpoints: int | None = None,
    checkpoint_every: int = 0,
    checkpoint_format: str | None = None,
    watermark: float = 0.0,
    **settings: Any,
) -> KVCache:
    """Return a cache without memory for the layers of ``schema``, in which every request of ``trace`` may run that fits
    (None: every request that fits).

    ``shared``: one budget for all groups; else a fixed split. ``settings``: other arguments of ``KVCache``. Raises BadInput,
    NeverFits."""
    longest = None if trace is None else int((trace.input_lengths + trace.output_lengths).max(initial=1))
    return KVCache(
        replace(schema, vocab_size=None), budget, device="none", order=None if shared else "layer",
        retention=Retention(checkpoints, checkpoint_every, checkpoint_format=checkpoint_format),
        identity=Identity(weights="none: a trace"), limits=Limits(longest, step_tokens, watermark=watermark), **settings,
    )  # fmt: skip


class AdmittedRequest:
    """An admitted request: its ``sequence``, and its tokens ``text``, int32 ``[n]``, of which the first ``num_prompt`` are
    the prompt. ``number``: its number in the trace."""

    __slots__ = ("block_size", "ends_at", "num_prompt", "number", "order", "ready", "room", "sequence", "since", "text")

    def __init__(self, number: int, sequence: Sequence, text: Tokens, num_prompt: int, block_size: int) -> None:
        self.number, self.sequence, self.text, self.num_prompt = number, sequence, text, num_prompt
        self.block_size = block_size
        self.ready = self.order = self.since = self.ends_at = self.room = 0  # see ``worker``

    def extend(self, end: int) -> int:
        """Make room for the tokens up to ``end``, or, without blocks for that, up to the end of the current block.
        Return up to where there is room."""
        length = self.sequence.length
        try:
            self.sequence.extend(end - length)
        except OutOfBlocks:
            end = min(end, (length // self.block_size + 1) * self.block_size)
            self.sequence.extend(end - length)
        return end

    def commit(self, end: int) -> None:
        """Record that the tokens up to ``end`` are computed."""
        self.sequence.commit(self.text[self.sequence.length : end])


Piece = tuple[AdmittedRequest, int]
"""What a step computes of a request: the request, and where its piece ends."""


class Batching:
    """The waiting requests of one ``cache``, in their order, and what was found for those that were admitted.

    ``numbers``: of the requests of ``trace`` that wait. An id of the trace stands for ``tokens_per_id`` tokens."""

    def __init__(self, cache: KVCache, trace: Trace, tokens_per_id: int, numbers: Iterable[int] = ()) -> None:
        self.cache, self._trace, self._per_id = cache, trace, tokens_per_id
        self.waiting = deque(numbers)
        self.never_fit = self.prompt_tokens = self.matched = 0
        self.limited_by: Counter[str] = Counter()
        self._next: tuple[int, Tokens, int] = (-1, np.empty(0, np.int32), 0)

    def text(self, number: int) -> tuple[Tokens, int]:
        """Return the tokens of request ``number``, and how many of them are the prompt; see ``text_of``."""
        return text_of(self._trace, number, self._per_id)

    def next_text(self) -> tuple[int, Tokens, int]:
        """Return the number of the request that waits longest, and its ``text``."""
        number = self.waiting[0]
        if self._next[0] != number:
            self._next = (number, *self.text(number))
        return self._next

    def next_waits(self, pieces: list[Piece]) -> bool:
        """Return whether the request that waits longest is better opened in the next step: see ``KVCache.should_wait``. If so,
        shorten the ``pieces`` of this step to where it can start."""
        _, text, num_prompt = self.next_text()
        waits = self.cache.should_wait(text[:num_prompt])
        if waits:
            pieces[:] = [(request, self.piece(request, end - request.sequence.length)) for request, end in pieces]
        return waits

    def open_next(self) -> tuple[int, AdmittedRequest | None]:
        """Open the request that waits longest. Return its number, and None in place of it if it is larger than the
        cache. Raises RetryLater if there is no room now; the request then still waits."""
        number, text, num_prompt = self.next_text()
        try:
            sequence = self.cache.open(text[:num_prompt], capacity=0, reserve=len(text))
        except NeverFits:
            self.never_fit += 1
            self.waiting.popleft()
            return number, None
        self.prompt_tokens += num_prompt
        self.matched += sequence.match.num_tokens
        self.limited_by[sequence.match.limited_by] += 1
        self.waiting.popleft()
        return number, AdmittedRequest(number, sequence, text, num_prompt, self.cache.block_size)

    def piece(self, request: AdmittedRequest, limit: int) -> int:
        """Return where the next piece of a request ends: after ``limit`` tokens; of a prompt also where a checkpoint is due,
        and at its end."""
        length = request.sequence.length
        if length >= request.num_prompt:
            return length + limit
        due = int(self.cache.step_limit(request.sequence))
        return min(request.num_prompt, length + min(limit, due))
