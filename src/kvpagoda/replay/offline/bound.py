"""The most that any cache could find of a trace, with the layers of a model, in a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvpagoda.replay.offline.demand import Needs, Texts, demand_of, held_by_running
from kvpagoda.replay.offline.lives import one_at_a_time, served_here
from kvpagoda.replay.offline.prices import ROUNDS, bound
from kvpagoda.replay.readers import Source
from kvpagoda.replay.run import BOUND
from kvpagoda.replay.setup import Setup
from kvpagoda.replay.trace import Trace
from kvpagoda.schema import Schema
from kvpagoda.units import parse_bytes, whole_number


@dataclass(frozen=True)
class HitBound:
    """What is found of the prompts of one trace in a budget: here, and at most. The properties are shares, 0 to 1, of
    ``prompt_tokens``.

    Args:
        trace: its name.
        schema: its name.
        nbytes: the budget.
        requests: that were served.
        prompt_tokens: tokens of their prompts.
        served_tokens: what the cache of this library finds, with LRU.
        packed_tokens: the most that was seen to fit, which a better bound could come down to.
        bound_tokens: no cache finds more.
        unlimited_tokens: what a cache without limits finds in the same steps.
    """

    trace: str
    schema: str
    nbytes: int
    requests: int
    never_fit: int
    """Requests that are larger than the whole cache. They were not served, and their prompts do not count."""
    prompt_tokens: int
    served_tokens: int
    packed_tokens: float
    bound_tokens: float
    unlimited_tokens: float

    @property
    def served(self) -> float:
        """The share that the cache of this library finds."""
        return self._share(self.served_tokens)

    @property
    def packed(self) -> float:
        """The share that was seen to fit."""
        return self._share(self.packed_tokens)

    @property
    def bound(self) -> float:
        """The share above which no cache comes."""
        return self._share(self.bound_tokens)

    @property
    def hit_rate(self) -> float:
        """``bound``, by the name that it has in all results of replays."""
        return self.bound

    @property
    def unlimited(self) -> float:
        """The share that a cache without limits finds."""
        return self._share(self.unlimited_tokens)

    def _share(self, tokens: float) -> float:
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, and the bound as the hit rate of the policy ``opt``, for JSON."""
        return {"policy": BOUND, **asdict(self), "hit_rate": self.hit_rate}


def hit_bound(
    trace: Source | Trace,
    schema: Schema,
    budget: int | str,
    *,
    tokens_per_id: int = 512,
    max_requests: int = 64,
    step_tokens: int = 2048,
    batch_tokens: int | None = None,
    checkpoint_every: int = 0,
    rounds: int = ROUNDS,
    on_request: Callable[[int], None] | None = None,
) -> HitBound:
    """Return the most prompt tokens that any cache with these layers finds in a budget, if it knows the whole trace.

    With ``max_requests=1`` the bound is that of every cache that ends a request before it admits the next; else that of
    every cache that admits and ends the requests in the same steps as here, where after each step a request has as many
    tokens as here, or as many as it found. What the running requests hold is not room for others.

    The bound may lie above what is possible: it ignores that blocks are whole, that memory is cut into sectors, and how
    a copy of the states came to be where it is, lets a reuse be kept by a fraction, and counts nothing for rows that
    are optional or chunked (``Needs``). A cache that keeps its copies of states in a smaller format could find more.

    O(references) Python, O(reuses + steps) array work a round.

    Args:
        trace: see ``serve``, which is run with LRU to know the steps.
        schema: see ``serve``.
        budget: see ``serve``.
        tokens_per_id: see ``serve``.
        max_requests: see ``serve``.
        step_tokens: see ``serve``.
        batch_tokens: see ``serve``.
        checkpoint_every: see ``Retention``.
        rounds: of the search for a low bound; any number gives a bound.
        on_request: called with how far it is, in requests of the trace.

    Raises:
        BadInput: ``rounds`` is below 0, an argument that ``serve`` refuses, or a trace whose ids stand for different
            numbers of tokens.
        NeverFits: a request does not fit into the empty cache.

    Examples:
        >>> chain = {"timestamp": 0, "input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]}
        >>> other = {**chain, "hash_ids": [5, 6, 7, 8]}
        >>> found = hit_bound([chain, other] * 3, Schema.from_hf_config("qwen3-8b"), "450MiB", max_requests=1)
        >>> found.prompt_tokens, round(found.bound_tokens), round(found.unlimited_tokens)
        (12288, 4613, 8188)
    """
    setup = Setup(schema, budget, tokens_per_id, max_requests, step_tokens, checkpoint_every=checkpoint_every)
    rounds = whole_number(rounds, "rounds", at_least=0)
    columns, nbytes = Trace.read(trace), parse_bytes(budget)
    texts, needs = Texts(columns, setup.tokens_per_id), Needs.of(schema)
    tell, half = on_request or _nothing, len(columns) // 2
    cache = setup.cache(columns)
    ours = served_here(columns, setup, cache, lambda closed: tell(closed // 2), batch_tokens)
    cache.close()
    lives = one_at_a_time(columns, ours.is_served()) if setup.max_requests == 1 else ours
    room = np.maximum(1.0, nbytes - held_by_running(texts, lives, needs))
    most = bound(demand_of(texts, lives, needs), room, rounds, lambda number: tell(half + half * number // rounds))
    tell(len(columns))
    return HitBound(
        trace=columns.name,
        schema=schema.name,
        nbytes=nbytes,
        requests=len(columns),
        never_fit=len(columns) - int(ours.is_served().sum()),
        prompt_tokens=int(texts.prompts[ours.is_served()].sum()),
        served_tokens=int(ours.found.sum()),
        packed_tokens=max(most.packed, float(ours.found.sum())),
        bound_tokens=most.tokens,
        unlimited_tokens=most.unlimited,
    )


def _nothing(_requests: int) -> None:
    """Take the place of ``on_request`` where nobody asks."""
