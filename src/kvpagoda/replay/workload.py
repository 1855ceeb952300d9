"""A seeded generator of synthetic workloads: chats of many turns, agents, and shared prompts.

Sessions begin as a Poisson process, one every ``2`` s on average. Each is, by ``shares``, one of:

    chat    a system prompt (8 of 200 to 2,000 tokens, Zipf 1), then turns: geometric, 5 on average. A message is
            lognormal (median 100, sigma 1), a reply lognormal (median 250, sigma 0.8); between turns 60 s, exponential.
    agent   tools and instructions (4 of 4,000 to 12,000 tokens, Zipf 1), then steps: geometric, 25 on average. A tool's
            result is lognormal (median 600, sigma 1.2), a call lognormal (median 150, sigma 0.7); between steps 6 s,
            exponential. One step in 30 folds the history into a summary of 800 tokens after the instructions.
    shared  one question (lognormal, median 60, sigma 0.7) after one of 64 documents (lognormal, median 6,000, sigma
            0.8; Zipf 1.1); reply as in a chat. One request.

A prompt is the whole session before it: all messages and all answers. Only whole blocks have ids, because only they can
be shared; the block in which two texts diverge belongs to one text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice
from typing import TypeAlias

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.replay.readers import Request
from kvpagoda.replay.trace import Trace

KINDS = ("chat", "agent", "shared")
BETWEEN_SESSIONS = 2.0  # seconds
SUMMARY, LONGEST = 800, 120_000  # tokens
Random: TypeAlias = "np.random.Generator"
Drawn: TypeAlias = tuple[float, float]


class WorkloadText:
    """A text: its length in tokens and the ids of its whole blocks. ``fresh`` yields ids for new blocks."""

    def __init__(self, fresh: Iterator[int], block_size: int, ids: Sequence[int] = (), length: int = 0) -> None:
        self.fresh, self.block_size, self.ids, self.length = fresh, block_size, list(ids), length

    def grown(self, tokens: int) -> WorkloadText:
        """Return this text with ``tokens`` new tokens appended."""
        longer = WorkloadText(self.fresh, self.block_size, self.ids, self.length + tokens)
        longer.ids += islice(self.fresh, longer.length // self.block_size - len(self.ids))
        return longer

    def asked(self, arrival: float, output_length: int) -> Request:
        """Return the request that has this text as its prompt. ``arrival``: seconds."""
        return Request(arrival, self.length, output_length, np.array(self.ids, np.int64), self.block_size)


def workload(seed: int = 0, block_size: int = 64, shares: Sequence[float] = (0.4, 0.2, 0.4)) -> Iterator[Request]:
    """Yield requests without end, in the order of their arrivals. The same arguments give the same requests.

    Args:
        seed: of the random numbers.
        block_size: tokens per block.
        shares: weights of chats, agents and shared prompts among the sessions.

    Raises:
        BadInput: an argument out of range, at the first request.
    """
    weights = np.asarray(shares, np.float64)
    if block_size < 1 or seed < 0:
        raise BadInput(f"need block_size >= 1 and seed >= 0, got {block_size} and {seed}")
    if weights.shape != (3,) or not (np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0):
        raise BadInput(f"shares must be three weights, for {', '.join(KINDS)}, and not all 0, got {list(shares)}")
    rng = np.random.default_rng(seed)
    empty = WorkloadText(count(), block_size)
    systems = [empty.grown(int(n)) for n in rng.integers(200, 2_000, 8)]
    tools = [empty.grown(int(n)) for n in rng.integers(4_000, 12_000, 4)]
    documents = [empty.grown(_tokens(rng, 6_000, 0.8)) for _ in range(64)]
    kinds = ((_chat, systems, 1.0), (_agent, tools, 1.0), (_shared, documents, 1.1))
    waiting: list[tuple[float, int, Request, Iterator[Request]]] = []  # the next request of every open session

    def wait(number: int, session: Iterator[Request]) -> None:
        request = next(session, None)
        if request is not None:
            heappush(waiting, (request.arrival, number, request, session))

    begins = 0.0
    for number in count():
        begins += rng.exponential(BETWEEN_SESSIONS)
        while waiting and waiting[0][0] <= begins:
            _, serial, request, session = heappop(waiting)
            yield request
            wait(serial, session)
        make, texts, exponent = kinds[rng.choice(3, p=weights / weights.sum())]
        own = np.random.default_rng([seed, number])
        wait(number, make(own, begins, texts[_zipf(own, len(texts), exponent)]))


def synthetic(num_requests: int = 2_000, seed: int = 0, block_size: int = 64) -> Trace:
    """Return the first requests of ``workload`` as a Trace.

    Args:
        num_requests: how many.
        seed: see ``workload``.
        block_size: see ``workload``.

    Raises:
        BadInput: ``num_requests`` or ``block_size`` is below 1, or ``seed`` below 0.
    """
    return replace(Trace.read(workload(seed, block_size), limit=num_requests), name=f"synthetic workload, seed {seed}")


def _session(
    rng: Random,
    time: float,
    first: WorkloadText,
    turns: int,
    pause: float,
    asked: Drawn,
    answered: Drawn,
    folds: float = 0.0,
) -> Iterator[Request]:
    """Yield the requests of one session: after the text ``first`` about ``turns`` turns, each with tokens ``asked`` and
    ``answered`` (median and sigma), ``pause`` seconds apart. In a share ``folds`` of the turns, and in those whose text
    is too long, a summary replaces the turns before."""
    text = first
    for _ in range(int(rng.geometric(1 / turns))):
        if folds and (rng.random() < folds or text.length > LONGEST):
            text = first.grown(SUMMARY)
        text = text.grown(_tokens(rng, *asked))
        answer = _tokens(rng, *answered)
        yield text.asked(time, answer)
        text = text.grown(answer)
        time += rng.exponential(pause)


_chat = partial(_session, turns=5, pause=60.0, asked=(100, 1.0), answered=(250, 0.8))
_agent = partial(_session, turns=25, pause=6.0, asked=(600, 1.2), answered=(150, 0.7), folds=1 / 30)


def _shared(rng: Random, time: float, document: WorkloadText) -> Iterator[Request]:
    yield document.grown(_tokens(rng, 60, 0.7)).asked(time, _tokens(rng, 250, 0.8))


def _tokens(rng: Random, median: float, sigma: float) -> int:
    return 1 + int(min(rng.lognormal(np.log(median), sigma), 50_000))


def _zipf(rng: Random, n: int, exponent: float) -> int:
    weights = 1 / np.arange(1, n + 1) ** exponent
    return int(rng.choice(n, p=weights / weights.sum()))
