"""The bound by prices: no cache in which every choice is tried finds more."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from mixes import trace_of

from kvpagoda.replay import Trace
from kvpagoda.replay.offline.demand import Needs, Texts, demand_of, held_by_running
from kvpagoda.replay.offline.lives import Lives, one_at_a_time
from kvpagoda.replay.offline.prices import bound

Objects = frozenset[tuple[str, int]]


class Tried:
    """The most tokens that any cache finds with ``capacity`` bytes, by trying every resume point of every request and every
    set of rows and copies to keep. Ids of ``texts`` have one token."""

    def __init__(self, texts: Texts, lengths: list[int], lives: Lives, needs: Needs, capacity: float) -> None:
        self.paths, self.lengths, self.needs, self.capacity = texts.paths, lengths, needs, capacity
        self.lives = lives
        self.most_of = [min(len(path), int(prompt) - 1) for path, prompt in zip(texts.paths, texts.prompts)]
        self.sizes = {"full": needs.full, "state": needs.state}
        self.sizes |= {f"window {tokens}": nbytes for tokens, nbytes in needs.windows}
        self.best = cache(self._best)

    def read_at(self, i: int, depth: int) -> Objects:
        """Return what request ``i`` reads to go on after ``depth`` tokens, but for its states."""
        path = self.path(i)
        rows = {("full", node) for node in path[:depth]}
        for tokens, _ in self.needs.windows:
            rows |= {(f"window {tokens}", node) for node in path[max(0, depth - tokens) : depth]}
        return frozenset(rows)

    def path(self, i: int) -> list[int]:
        """Return the nodes of request ``i``, and numbers below 0 for the tokens that it alone has."""
        own = self.lengths[i] - len(self.paths[i])
        return [*self.paths[i].tolist(), *(-1 - 100 * i - k for k in range(own))]

    def _length(self, i: int, step: int) -> int:
        rows = (self.lives.number == i) & (self.lives.step == step)
        return int(self.lives.length[rows][0]) if rows.any() else 0

    def _best(self, step: int, cached: Objects, found: tuple[tuple[int, int], ...]) -> int:
        """Return the most tokens found from ``step`` on. ``cached``: what could lie in the memory when the step begins.
        ``found``: (request, tokens found) of those that run."""
        if step == self.lives.num_steps:
            return 0
        fresh = np.flatnonzero(self.lives.admitted == step).tolist()
        choices: list[list[tuple[int, int]]] = [[]]
        for i in fresh:
            depths = [0] + [
                depth
                for depth in range(1, self.most_of[i] + 1)
                if self.read_at(i, depth) | self._copy(i, depth) <= cached
            ]
            choices = [[*choice, (i, depth)] for choice in choices for depth in depths]
        return max(self._go_on(step, cached, dict(found), dict(choice)) for choice in choices)

    def _copy(self, i: int, depth: int) -> Objects:
        return frozenset({("state", self.path(i)[depth - 1])} if self.needs.state and depth else ())

    def _go_on(self, step: int, cached: Objects, running: dict[int, int], fresh: dict[int, int]) -> int:
        held: Objects = frozenset()
        for i, depth in running.items():
            held |= self.read_at(i, max(depth, self._length(i, step)))
        for i, depth in fresh.items():
            held |= self.read_at(i, depth) | self._copy(i, depth)
        room = self.capacity - self.needs.state * len(running) - self._nbytes(held)
        if room < 0:
            return -(10**6)
        made: set[tuple[str, int]] = set()
        now = running | fresh
        for i, depth in now.items():
            last = self.lives.ended[i] == step
            upto = self.lengths[i] if last else max(depth, self._length(i, step + 1))
            path = self.path(i)
            made |= {(kind, node) for kind in self.sizes for node in path[depth:upto]} | self.read_at(i, depth)
        left = tuple((i, depth) for i, depth in now.items() if self.lives.ended[i] > step)
        later = {node for i in np.flatnonzero(self.lives.admitted > step) for node in self.paths[i].tolist()}
        there = {object for object in cached - held if object[1] in later}
        best = max(
            self.best(step + 1, frozenset(one for one in kept | held | made if one[1] in later), left)
            for kept in self._kept(sorted(there), room)
        )
        return best + sum(fresh.values())

    def _nbytes(self, objects: Objects) -> float:
        return sum(self.sizes[kind] for kind, _ in objects)

    def _kept(self, objects: list[tuple[str, int]], room: float) -> list[Objects]:
        """Return the sets of ``objects`` that fit ``room``, of those that include one another the largest."""
        if self._nbytes(frozenset(objects)) <= room:
            return [frozenset(objects)]
        first, rest = objects[0], objects[1:]
        size = self.sizes[first[0]]
        without = [kept for kept in self._kept(rest, room) if room - self._nbytes(kept) < size]
        return without + ([kept | {first} for kept in self._kept(rest, room - size)] if size <= room else [])


def random_lives(rng: np.random.Generator, lengths: list[int]) -> Lives:
    """Return lives that overlap."""
    n = len(lengths)
    admitted = np.cumsum(rng.integers(0, 3, n))
    ended = admitted + rng.integers(0, 4, n)
    rows = []
    for i in range(n):
        steps = int(ended[i] - admitted[i])
        grown = np.sort(rng.integers(1, lengths[i], steps)) if lengths[i] > 1 else np.ones(steps, int)
        rows += [(int(admitted[i]) + 1 + k, i, int(grown[k])) for k in range(steps)]
    columns = np.array(sorted(rows), np.int64).reshape(-1, 3).T
    return Lives(int(ended.max()) + 1, admitted, ended, *columns, np.zeros(n, np.int64))


NEEDS = {
    "full": Needs(2.0),
    "window": Needs(1.0, ((1, 2.0),)),
    "windows": Needs(1.0, ((1, 1.0), (2, 1.5))),
    "states": Needs(1.0, (), 3.0),
    "states alone": Needs(0.0, (), 2.0),
    "all": Needs(1.0, ((2, 1.0),), 2.0),
}


def random_texts(rng: np.random.Generator, requests: int) -> tuple[Trace, list[int]]:
    chains = [[int(rng.integers(0, 4)), *rng.integers(0, 2, rng.integers(0, 3)).tolist()] for _ in range(requests)]
    trace = trace_of(chains, rng.integers(0, 2, requests).tolist())
    return trace, (trace.input_lengths + trace.output_lengths).tolist()


@pytest.mark.parametrize("kind", NEEDS)
@pytest.mark.parametrize("at_once", [False, True], ids=["one at a time", "several at once"])
def test_no_choice_beats_the_bound(kind: str, at_once: bool) -> None:
    """In mixes in which the bound is below what unlimited memory finds."""
    rng, needs, gaps = np.random.default_rng(7), NEEDS[kind], list[float]()
    while len(gaps) < 6:
        trace, lengths = random_texts(rng, int(rng.integers(5, 7)))
        texts = Texts(trace, 1)
        lives = random_lives(rng, lengths) if at_once else one_at_a_time(trace, np.ones(len(trace), bool))
        held = held_by_running(texts, lives, needs)
        capacity = float(held.max() + rng.integers(1, 4))
        demand = demand_of(texts, lives, needs)
        if bound(demand, capacity - held, rounds=60).tokens > bound(demand, capacity - held, rounds=0).tokens - 0.5:
            continue
        best = Tried(texts, lengths, lives, needs, capacity).best(0, frozenset(), ())
        if best < 0:  # even without a hit the requests do not fit
            continue
        found = bound(demand, capacity - held, rounds=400)
        assert best <= found.tokens + 1e-6, (trace.ids, trace.starts, capacity)
        gaps.append(found.tokens - best)
    assert np.mean(gaps) < 1.5  # and it is near


def test_a_search_without_rounds_gives_what_unlimited_memory_finds() -> None:
    """Fewer rounds give a higher bound, and none is below a choice that fits."""
    rng = np.random.default_rng(3)
    trace, _ = random_texts(rng, 40)
    texts, needs = Texts(trace, 1), NEEDS["all"]
    lives = one_at_a_time(trace, np.ones(len(trace), bool))
    room = np.full(lives.num_steps, 12.0)
    told = list[int]()
    none, few, many = (bound(demand_of(texts, lives, needs), room, rounds) for rounds in (0, 10, 300))
    assert many.tokens < few.tokens < none.tokens == none.unlimited == many.unlimited
    assert 0 < many.packed <= many.tokens
    bound(demand_of(texts, lives, needs), room, 3, told.append)
    assert told == [0, 1, 2]
