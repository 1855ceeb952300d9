"""Answers requests one at a time, as they come: ``kvpagoda replay --json-lines``, for simulators in other languages.

line of JSON ──Lines──► Request ──TreeAnswers or SchemaAnswers──► line of JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvpagoda import KVCache
from kvpagoda.errors import BadInput
from kvpagoda.policies import EvictionPolicy
from kvpagoda.replay.batching import Batching
from kvpagoda.replay.own_policy import policy_from_text
from kvpagoda.replay.readers import Lines, Request, placed
from kvpagoda.replay.run import BLOCK_FIFO, BOUND, fresh, known_policy
from kvpagoda.replay.serving import Steps, TraceClock
from kvpagoda.replay.setup import Setup
from kvpagoda.replay.texts import Tokens, text_of
from kvpagoda.replay.trace import DEFAULT_BLOCK_SIZE, Trace, tokens_of_blocks
from kvpagoda.replay.tree_cache import TreeCache
from kvpagoda.schema import Schema
from kvpagoda.units import whole_number

Answer: TypeAlias = dict[str, Any]
STEP_TOKENS = 2048


def served_policy(text: str) -> str | EvictionPolicy:
    """Return the policy ``text``, a name or "FILE.py:CLASS". Raises BadInput, also for one that needs the whole trace."""
    policy = policy_from_text(text)
    if known_policy(policy) in (BOUND, BLOCK_FIFO):
        raise BadInput(
            f"{text} cannot answer requests as they come: it needs the whole trace or has no tree", needed=text
        )
    return fresh(policy)


class TreeAnswers:
    """Answers of a prefix tree of ``capacity`` blocks, as ``replay`` counts them. An id stands for ``tokens_per_id`` tokens
    if the request does not say. Raises BadInput."""

    def __init__(self, capacity: int, policy: str | EvictionPolicy = "lru", tokens_per_id: int | None = None) -> None:
        capacity = whole_number(capacity, "a capacity in blocks", at_least=1, below=2**30)
        self._cache = TreeCache(capacity, policy, width=2)
        self._per_id = tokens_per_id or DEFAULT_BLOCK_SIZE

    def __call__(self, request: Request) -> Answer:
        """Serve a request; return what it hit and what was evicted. O(blocks) array work."""
        ids, size = np.ascontiguousarray(request.block_ids), request.block_tokens
        hit, evicted = self._cache.request(ids.view(np.int32))  # two numbers name a block, whatever the ids are
        if isinstance(size, np.ndarray):
            hit_tokens = int(size[:hit].sum())
        else:
            each = tokens_of_blocks(request.input_length, len(ids), self._per_id if size is None else size)
            hit_tokens = int(each[:hit].sum())
        return {
            "prompt_tokens": request.input_length, "hit_tokens": hit_tokens, "blocks": len(ids),
            "hit_blocks": hit, "evicted_blocks": evicted, "cached_blocks": self._cache.num_cached,
        }  # fmt: skip


class SchemaAnswers:
    """Answers of a cache with the layers of ``schema``, without memory behind it, as ``serve`` counts them with one request
    at a time. ``settings``: other arguments of ``serve``. It keeps a number for each id that it has seen. Raises BadInput,
    NeverFits."""

    def __init__(self, schema: Schema, budget: int | str, tokens_per_id: int | None = None, **settings: Any) -> None:
        setup = Setup(schema, budget, tokens_per_id or DEFAULT_BLOCK_SIZE, **{"max_requests": 1, **settings})
        self._cache = setup.cache(None)
        self._waiting = _Waiting(self._cache, setup.tokens_per_id)
        self._steps = Steps(self._waiting, setup.step_tokens, TraceClock())

    def __call__(self, request: Request) -> Answer:
        """Serve a request; return what it hit, in all groups and in each, and what was evicted from each. If it is larger
        than the cache, ``fits`` is False, and nothing has changed."""
        before, reasons = self._cache.stats(), self._waiting.limited_by.copy()
        longest, size = self._cache.plan.longest_context, self._cache.block_size
        prompt = matched = hit = 0
        if longest is None or request.input_length + request.output_length <= longest:
            self._waiting.add(request)
            while self._steps.step():
                pass
            prompt, matched, hit = self._steps.each.pop()
        after = self._cache.stats()
        groups = {
            now.name: {"tokens": now.found_tokens - was.found_tokens, "evicted_blocks": now.evicted - was.evicted}
            for was, now in zip(before.groups, after.groups)
        }
        return {
            "prompt_tokens": request.input_length, "hit_tokens": hit, "blocks": -(-request.input_length // size),
            "hit_blocks": hit // size, "evicted_blocks": after.evicted_blocks - before.evicted_blocks,
            "cached_blocks": sum(group.held for group in after.groups), "fits": prompt > 0, "matched_tokens": matched,
            "limited_by": next(iter(self._waiting.limited_by - reasons), None),
            "evicted_checkpoints": after.evicted_checkpoints - before.evicted_checkpoints, "groups": groups,
        }  # fmt: skip


class _Waiting(Batching):
    """The one request that is served, and the numbers of the ids of all requests so far."""

    def __init__(self, cache: KVCache, tokens_per_id: int) -> None:
        super().__init__(cache, Trace.read(()), tokens_per_id)
        self._request: Request | None = None
        self._numbers: dict[int, int] = {}
        self._added = 0

    def add(self, request: Request) -> None:
        """Let ``request`` wait."""
        self._request = request
        self.waiting.append(self._added)
        self._added += 1

    def text(self, number: int) -> tuple[Tokens, int]:
        request, numbered = self._request, self._numbers.setdefault
        assert request is not None, "a request waits"
        ids = np.array([numbered(i, len(self._numbers)) for i in request.block_ids.tolist()], np.int32)
        size = request.block_tokens
        each = size.astype(np.int32) if isinstance(size, np.ndarray) else None
        one = Trace(
            "request", ids, np.array([0, len(ids)]), np.zeros(1), np.array([request.input_length]),
            np.array([request.output_length]), block_tokens=each,
        )  # fmt: skip
        return text_of(one, 0, size if isinstance(size, int) else self._per_id, own=number)


def answer_lines(
    lines: Iterable[str], answer: Callable[[Request], Answer], say: Callable[[Answer], None], *, strict: bool = False
) -> None:
    """Read ``lines`` of JSON, requests of any form with a request on a line; say an answer to each before the next is read.

    An answer is an object with ``line``, from 1, and ``request``, from 0, beside what ``answer`` returns. To a line without a
    request, such as a header, ``request`` is None. To a bad line ``error`` says what is wrong and ``field`` where; nothing
    has changed then. Empty lines have no answer. ``strict``: raise BadLine after the answer to a bad line."""
    read, number = Lines(), 0
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests = read(line)
        except (ValueError, OverflowError, RecursionError) as error:
            bad = placed(error, "-", at)
            say({"line": at, "error": str(bad), "field": bad.field})
            if strict:
                raise bad from None
            continue
        for request in requests:
            say({"line": at, "request": number, **answer(request)})
            number += 1
        if not requests:
            say({"line": at, "request": None})


def run(answer: Callable[[Request], Answer], source: Path, strict: bool) -> None:
    """Answer the lines of ``source`` ("-": standard input) on standard output until it ends or nobody reads the answers.
    Raises BadLine if ``strict``, OSError."""

    def say(said: Answer) -> None:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    with sys.stdin.buffer if str(source) == "-" else source.open("rb") as raw:
        lines = TextIOWrapper(raw, encoding="utf-8-sig", errors="replace")
        try:
            answer_lines(lines, answer, say, strict=strict)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
