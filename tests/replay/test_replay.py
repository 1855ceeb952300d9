"""Replays against the published figures, row by row, and against the model written out word for word."""

from __future__ import annotations

import csv
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_cache import naive_replay
from test_reuse_distances import trace_of

from kvpagoda.errors import BadInput
from kvpagoda.replay import POLICIES, Reuse, Trace, hit_rate_curve, lru_hits, replay, synthetic
from raises import raises

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
QUICK = (1_827, 182_790)
"""Capacities at which the default run has every policy; ``policies/test_policies.py`` has the tree with 18,279 blocks."""


def is_quick(policy: str, capacity: int) -> bool:
    return policy in ("lru", "opt") or capacity in QUICK or (policy == "fifo" and capacity != 9_139)


def rows() -> list[object]:
    if not TRACES.is_dir():
        return [pytest.param("", "", 0, 0, 0, 0, marks=pytest.mark.skip(reason="../shared/traces is not there"))]
    with (TRACES / "expected_hits.csv").open() as file:
        table = [(trace, policy, *map(int, counts)) for trace, policy, *counts in list(csv.reader(file))[1:]]
    return [
        pytest.param(*row, marks=() if is_quick(*row[1:3]) else pytest.mark.slow, id=f"{row[0]}-{row[1]}-{row[2]}")
        for row in table
    ]


@pytest.fixture(scope="module")
def published() -> dict[str, Trace]:
    return {}


@pytest.mark.parametrize(("name", "policy", "capacity", "refs", "hits", "evictions"), rows())
def test_the_published_figures(
    published: dict[str, Trace], name: str, policy: str, capacity: int, refs: int, hits: int, evictions: int
) -> None:
    if name not in published:
        published[name] = Trace.read(TRACES / f"{name}.jsonl.gz")
    found = replay(published[name], capacity_blocks=capacity, policy=policy)
    assert (found.block_refs, found.block_hits, found.evictions) == (refs, hits, evictions)
    assert found.requests == len(published[name])


CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


@given(CHAINS, st.integers(1, 12), st.sampled_from(["lru", "fifo", "lfu", "lfuda", "block-fifo", "opt"]))
@settings(max_examples=400, deadline=None)
def test_the_model_word_for_word(chains: list[list[int]], capacity: int, policy: str) -> None:
    found = replay(trace_of(chains), capacity_blocks=capacity, policy=policy)
    assert (found.block_hits, found.evictions) == naive_replay(chains, capacity, policy)


@given(CHAINS, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_no_policy_beats_the_bound(chains: list[list[int]], capacity: int) -> None:
    trace = trace_of(chains)
    bound = replay(trace, capacity_blocks=capacity, policy="opt")
    for policy in POLICIES:
        found = replay(trace, capacity_blocks=capacity, policy=policy)
        assert found.block_hits <= bound.block_hits, policy
        assert found.block_refs == sum(map(len, chains)) and found.requests == len(chains)


def test_s3fifo_finds_a_victim_when_every_leaf_is_in_its_small_queue() -> None:
    """Small shorter than its share, main without a leaf: to go round main only would never end."""
    chains = [[*range(29), 90, 91], [*range(31)], [*range(10), 92]]
    found = replay(trace_of(chains), capacity_blocks=30, policy="s3fifo")
    assert found.block_refs == 73 and found.evictions == found.block_refs - found.block_hits - 30 - 2


def test_on_a_workload_no_policy_beats_the_bound_and_lru_agrees_with_the_distances() -> None:
    trace = synthetic(400, seed=5)
    reuse = Reuse.of(trace)
    capacities = [trace.num_distinct // 50, trace.num_distinct // 8, trace.num_distinct]
    found = {(r.capacity_blocks, r.policy): r for r in hit_rate_curve(trace, capacities, POLICIES)}
    assert len(found) == len(capacities) * len(POLICIES)
    for capacity, expected in zip(capacities, lru_hits(reuse, capacities)):
        assert found[capacity, "lru"].block_hits == expected
        assert all(found[capacity, p].block_hits <= found[capacity, "opt"].block_hits for p in POLICIES)
    for policy in POLICIES:  # a cache that holds everything
        assert found[trace.num_distinct, policy].evictions == 0
        assert found[trace.num_distinct, policy].block_hits == trace.num_refs - trace.num_distinct


def test_a_path_an_iterable_and_a_trace_give_the_same(tmp_path: Path) -> None:
    chains = [[1, 2, 3], [1, 2], [4], [1, 2, 3]]
    records = [{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": chain} for chain in chains]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    a, b, c, d = (replay(t, capacity_blocks=3) for t in (path, str(path), iter(records), Trace.read(records)))
    assert (
        a == b
        and c == d == replay(records, 3, "lru")
        and a.block_hits == c.block_hits == 4
        and a.evictions == c.evictions == 2
    )
    assert (c.requests, c.block_refs, c.policy, c.hit_rate) == (4, 9, "lru", 4 / 9)
    assert json.loads(json.dumps(c.to_dict())) == {
        "trace": "records", "policy": "lru", "capacity_blocks": 3, "requests": 4, "block_refs": 9, "block_hits": 4,
        "evictions": 2, "token_refs": 41, "token_hits": 20, "warm_up_requests": 0, "full_after": 1,
        "hit_rate": 4 / 9, "token_hit_rate": 20 / 41,
    }  # fmt: skip


@given(CHAINS, st.integers(1, 12), st.sampled_from(["lru", "block-fifo", "opt", "sieve"]), st.floats(0, 0.99))
@settings(max_examples=200, deadline=None)
def test_what_is_warm_up_is_not_counted(chains: list[list[int]], capacity: int, policy: str, share: float) -> None:
    trace, first = trace_of(chains), int(len(chains) * share)
    whole, rest = (replay(trace, capacity_blocks=capacity, policy=policy, warm_up=w) for w in (0.0, share))
    assert rest.hits.tolist() == whole.hits.tolist() and rest.requests == len(chains) - first == len(chains[first:])
    assert (rest.block_hits, rest.block_refs) == (whole.hits[first:].sum(), sum(map(len, chains[first:])))
    before = replay(trace_of(chains[:first]), capacity_blocks=capacity, policy=policy) if first else None
    assert rest.evictions == whole.evictions - (before.evictions if before else 0) or policy == "opt"
    full = [
        i
        for i in range(1, first + 1)
        if replay(trace_of(chains[:i]), capacity_blocks=capacity, policy=policy).full_after
    ]
    assert policy == "opt" or (whole.full_after == full[0] if full else (whole.full_after or first + 1) > first)


@given(CHAINS, st.sampled_from(["lru", "opt", "block-fifo", "s3fifo"]))
@settings(max_examples=100, deadline=None)
def test_a_curve_is_what_single_replays_say(chains: list[list[int]], policy: str) -> None:
    trace, capacities = trace_of(chains), [1, 2, 3, 5, 9]
    curve = hit_rate_curve(trace, capacities, [policy, "lru"], warm_up=0.25)
    alone = [
        replay(trace, capacity_blocks=size, policy=name, warm_up=0.25)
        for size in capacities
        for name in (policy, "lru")
    ]
    assert curve == alone and [c.hits.tolist() for c in curve] == [a.hits.tolist() for a in alone]


def test_a_curve_in_several_processes_is_the_same() -> None:
    trace, told = synthetic(120, seed=3), []
    arguments = ([50, 500], ["lru", "arc", "fifo"])
    curve = hit_rate_curve(trace, *arguments, jobs=2, on_progress=lambda done, note: told.append(done))
    assert curve == hit_rate_curve(trace, *arguments) and told == [1, 2, 3, 4, 5, 6]


KVCACHE_AI = {  # capacity: tokens hit by fifo, lru, optimal
    439: (1_968_215, 2_093_143, 8_990_525), 878: (4_094_199, 4_467_780, 12_595_509),
    2196: (8_433_238, 8_734_499, 18_960_360), 4392: (13_503_805, 14_363_087, 24_340_068),
    8784: (19_423_427, 20_659_737, 29_567_880), 20_000: (26_385_426, 28_338_548, 31_535_563),
}  # fmt: skip
"""What kvcache-simulator 0.1.3 (PyPI) says of the Mooncake synthetic trace: 512-token blocks, the first half a warm-up. Below
374 blocks, the longest chain, its lru ends with one block less than there is room for, since it evicts what it inserted."""


@pytest.mark.skipif(not TRACES.is_dir(), reason="../shared/traces is not there")
def test_the_curves_of_the_kvcache_ai_simulator() -> None:
    trace = Trace.read(TRACES / "mooncake_synthetic.jsonl.gz")
    found = hit_rate_curve(trace, list(KVCACHE_AI), ["block-fifo", "lru", "opt"], warm_up=0.5)
    assert all(one.full_after is not None and one.full_after <= one.warm_up_requests == 1996 for one in found)
    hits = [one.token_hits for one in found]
    assert {size: tuple(hits[3 * i : 3 * i + 3]) for i, size in enumerate(KVCACHE_AI)} == KVCACHE_AI


def test_a_trace_without_requests_hits_nothing() -> None:
    found = replay([], capacity_blocks=5)
    assert (found.requests, found.block_refs, found.hit_rate, found.evictions) == (0, 0, 0.0, 0)


def test_bad_arguments_are_told_before_anything_runs(tmp_path: Path) -> None:
    with raises(BadInput, needed="mru", available=ANY):
        replay(tmp_path / "nowhere", capacity_blocks=5, policy="mru")
    with raises(BadInput, needed="mru", available=ANY):
        hit_rate_curve([], [5], ["lru", "mru"])
    for capacity in (0, -1, 1.5, True, "5"):
        with raises(BadInput, field="a capacity in blocks", needed=capacity, available=1):
            replay([], capacity_blocks=capacity)  # type: ignore[arg-type]
    for share in (-0.1, 1, float("nan"), True, "half"):
        with raises(BadInput, needed=share):
            replay([], capacity_blocks=1, warm_up=share)  # type: ignore[arg-type]
    with raises(BadInput, field="jobs", needed=0, available=1):
        hit_rate_curve([], [5], ["lru"], jobs=0)
    with raises(BadInput, needed=str(tmp_path / "nowhere")):
        replay(tmp_path / "nowhere", capacity_blocks=5)
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,5\n")
    with raises(BadInput, needed="blocks"):
        replay(tmp_path / "a.csv", capacity_blocks=5)


def test_progress_reaches_the_end() -> None:
    told: list[int] = []
    replay(synthetic(300), capacity_blocks=100, on_request=told.append)
    assert told == sorted(told) and told[-1] == 300


def test_a_replay_needs_numpy_alone() -> None:
    code = (
        "import sys; from kvpagoda.replay import replay, synthetic; replay(synthetic(5), capacity_blocks=9);"
        "assert not {'torch', 'rich', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_examples_run() -> None:
    tried = doctest.testmod(importlib.import_module("kvpagoda.replay.run"))
    assert tried.attempted and not tried.failed
