"""The bound for hybrid models: no cache in which every choice is tried finds more, nor does ours."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bound import peers
from benchmarks.checkpoints_at_rest import NEMOTRON_H_8B
from benchmarks.offline.demand import Needs, Texts, demand_of, held_by_running
from benchmarks.offline.prices import bound
from benchmarks.offline.schedule import Schedule, one_at_a_time, served_here
from benchmarks.one_budget import GEMMA3_27B, GPT_OSS_120B, QWEN3_NEXT_80B, schema_of
from benchmarks.timing import RESULTS

from kvpagoda.replay import Trace, synthetic

Objects = frozenset[tuple[str, int]]


def trace_of(chains: list[list[int]], own: list[int]) -> Trace:
    """Return a trace of ids of one token; request ``i`` has ``own[i]`` tokens of its own at the end of its prompt."""
    return Trace.read(
        [
            {"timestamp": 0, "input_length": len(chain) + more, "output_length": 1, "hash_ids": chain}
            for chain, more in zip(chains, own)
        ]
    )


class Tried:
    """The most tokens that any cache finds with ``capacity`` bytes, by trying every resume point of every request and every
    set of rows and copies to keep. Ids of ``texts`` have one token."""

    def __init__(self, texts: Texts, lengths: list[int], schedule: Schedule, needs: Needs, capacity: float) -> None:
        self.paths, self.lengths, self.needs, self.capacity = texts.paths, lengths, needs, capacity
        self.schedule = schedule
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
        rows = (self.schedule.number == i) & (self.schedule.step == step)
        return int(self.schedule.length[rows][0]) if rows.any() else 0

    def _best(self, step: int, cached: Objects, found: tuple[tuple[int, int], ...]) -> int:
        """Return the most tokens found from ``step`` on. ``cached``: what could lie in the memory when the step begins.
        ``found``: (request, tokens found) of those that run."""
        if step == self.schedule.num_steps:
            return 0
        fresh = np.flatnonzero(self.schedule.admitted == step).tolist()
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
            last = self.schedule.ended[i] == step
            upto = self.lengths[i] if last else max(depth, self._length(i, step + 1))
            path = self.path(i)
            made |= {(kind, node) for kind in self.sizes for node in path[depth:upto]} | self.read_at(i, depth)
        left = tuple((i, depth) for i, depth in now.items() if self.schedule.ended[i] > step)
        later = {node for i in np.flatnonzero(self.schedule.admitted > step) for node in self.paths[i].tolist()}
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


def random_schedule(rng: np.random.Generator, lengths: list[int]) -> Schedule:
    """Return a schedule in which requests overlap."""
    n = len(lengths)
    admitted = np.cumsum(rng.integers(0, 3, n))
    ended = admitted + rng.integers(0, 4, n)
    rows = []
    for i in range(n):
        steps = int(ended[i] - admitted[i])
        grown = np.sort(rng.integers(1, lengths[i], steps)) if lengths[i] > 1 else np.ones(steps, int)
        rows += [(int(admitted[i]) + 1 + k, i, int(grown[k])) for k in range(steps)]
    columns = np.array(sorted(rows), np.int64).reshape(-1, 3).T
    return Schedule(int(ended.max()) + 1, admitted, ended, *columns, np.zeros(n, np.int64))


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
        schedule = random_schedule(rng, lengths) if at_once else one_at_a_time(trace, np.ones(len(trace), bool))
        held = held_by_running(texts, schedule, needs)
        capacity = float(held.max() + rng.integers(1, 4))
        demand = demand_of(texts, schedule, needs)
        if bound(demand, capacity - held, rounds=60).tokens > bound(demand, capacity - held, rounds=0).tokens - 0.5:
            continue
        best = Tried(texts, lengths, schedule, needs, capacity).best(0, frozenset(), ())
        if best < 0:  # even without a hit the requests do not fit
            continue
        found = bound(demand, capacity - held, rounds=400)
        assert best <= found.tokens + 1e-6, (trace.ids, trace.starts, capacity)
        gaps.append(found.tokens - best)
    assert np.mean(gaps) < 1.5  # and it is near


def test_running_requests_hold_what_they_share_once() -> None:
    """Requests 0 and 1 run after 5 and 4 tokens, of which they have 2 in common; request 2 is just admitted."""
    trace = trace_of([[1, 2, 3], [1, 2, 4, 5], [7]], [2, 1, 1])
    texts, needs = Texts(trace, 1), Needs(100.0, ((3, 10.0),), 1.0)
    columns = np.array([(1, 0, 5), (2, 0, 5), (2, 1, 4)], np.int64).T
    schedule = Schedule(3, np.array([0, 1, 2]), np.array([2, 2, 2]), *columns, np.zeros(3, np.int64))
    assert held_by_running(texts, schedule, needs).tolist() == [
        0,
        5 * 100 + 3 * 10 + 1,
        (3 + 2 + 2) * 100 + (3 + 2) * 10 + 2,
    ]


def test_what_a_reuse_takes() -> None:
    """Request 0 runs longest. Request 2 has 2 tokens in common with 0 and 1 and one more with 0: all of them have to lie there
    from the step after the end of request 0 on. Request 3 has nothing in common with others."""
    trace = trace_of([[1, 2, 3], [1, 2], [1, 2, 3], [9]], [1, 1, 1, 1])
    texts, needs = Texts(trace, 1), Needs(100.0, ((2, 10.0),), 1.0)
    columns = np.array([(1, 0, 3), (1, 1, 2), (2, 0, 3), (3, 0, 4)], np.int64).T
    admitted, ended = np.array([0, 0, 5, 5]), np.array([3, 1, 5, 5])
    demand = demand_of(texts, Schedule(6, admitted, ended, *columns, np.zeros(4, np.int64)), needs)
    assert [demand.request.tolist(), demand.first.tolist(), demand.last.tolist()] == [[2], [4], [5]]
    assert demand.end.tolist() == [3] and demand.nbytes.tolist() == [3 * 100 + 2 * 10 + 1]


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize(
    ("config", "gib"), [(GEMMA3_27B, 3), (GPT_OSS_120B, 0.5), (QWEN3_NEXT_80B, 2), (NEMOTRON_H_8B, 2)]
)
def test_our_cache_finds_no_more_than_the_bound(config: dict[str, Any], gib: float, at_once: int) -> None:
    schema = schema_of(config)
    needs = Needs.of(schema)
    for seed, nbytes in enumerate((int(gib * 2**30), int(4 * gib * 2**30))):
        trace = synthetic(60, seed=seed)
        texts = Texts(trace, 64)
        ours = served_here(trace, schema, nbytes, tokens_per_id=64, at_once=at_once, step_tokens=512)
        tokens = []
        for schedule in (ours, one_at_a_time(trace, ours.is_served()))[: 1 + (at_once == 1)]:
            room = nbytes - held_by_running(texts, schedule, needs)
            assert room.min() > 0
            tokens.append(bound(demand_of(texts, schedule, needs), room, rounds=200).tokens)
        assert 0 < ours.found.sum() <= min(tokens)


def test_the_saved_rows_have_the_saved_hits_of_the_peers() -> None:
    saved = {row["case"]: row for row in json.loads((RESULTS / "bound.json").read_text())["rows"]}
    assert len(saved) == 24
    for row in saved.values():
        assert 0 < row["hit_percent"] <= row["bound_percent"] <= row["unlimited_percent"]
        if "64 at once" in row["case"]:
            assert peers(row["model"], row["budget"]).items() <= row.items()
