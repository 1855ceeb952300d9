"""SGLang's profile of one memory for blocks and states: by hand, and beside the installed engine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest
from judges import SGLANG
from letters import trace

from raises import raises

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import oracle
from benchmarks.peers import Process

from kvpagoda.errors import BadInput
from kvpagoda.replay import Group, Schedule, replay
from kvpagoda.replay.engines import edge_unified
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import serve_with
from kvpagoda.replay.engines.edge_states import StateLRU
from kvpagoda.replay.engines.edge_unified import OneMemory, UnifiedLRU, shared
from kvpagoda.replay.engines.pool import divided

STATE = Group.from_text("full+state")
one_memory = partial(replay, engine=SGLANG, block_size=64, groups=STATE, unified_memory=True)


def test_the_memory_is_what_would_be_divided() -> None:
    """11 blocks and 10 slots of one block each; what begins it holds nothing."""
    pool = divided(SGLANG, STATE, 64, 21, unified=True)
    assert (pool.num_blocks, pool.num_apart, pool.shared) == (11, 9, OneMemory(20, 1, 1, 20))
    assert shared(1_000, 100, 30) == OneMemory(1_000 - 120, 100, 30, 32)  # a block does not fit into three slots


def test_texts_take_what_states_do_not_need() -> None:
    """Of 15 blocks for both, 7 hold texts otherwise, and of the rest 3 are the slots of a request."""
    texts = ("abcde", "fg", "abcdex")
    apart = replay(trace(*texts, size=64), 15, engine=SGLANG, block_size=64, groups=STATE)
    assert (apart.per_request // 64).tolist() == [0, 0, 0]
    assert (one_memory(trace(*texts, size=64), 15).per_request // 64).tolist() == [0, 0, 5]


@pytest.mark.parametrize(
    ("engine", "groups"),
    [("vllm-0.33", "full+state"), (SGLANG, "full"), (SGLANG, "full+window:128"), ("kvpagoda", "full")],
)
def test_what_has_no_one_memory(engine: str, groups: str) -> None:
    with raises(BadInput, needed=engine, available=ANY):
        replay(trace("ab"), 20, engine=engine, groups=Group.from_text(groups), unified_memory=True)


class Checked(UnifiedLRU):
    """Counts all bytes and states in every step."""

    def find(self, request: int, known: int) -> int:
        peeked, hit = self.peek(request), super().find(request, known)
        assert peeked == hit or known > self.chains.prompts[request]
        return hit

    def step_starts(self) -> None:
        super().step_starts()
        self.tree.check()
        running = self.running.values()
        blocks = sum(one.count - one.held for one in running) + self.tree.num_blocks
        states = sum(one.slots for one in running) + self.tree.num_windows
        memory = self.memory
        assert (self._rest + blocks * memory.block + states * memory.state, self._ids + states) == (
            memory.nbytes,
            memory.num_ids,
        )


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(4, 96), Schedule(8, 256, shared=True)])
@pytest.mark.parametrize(("block", "state"), [(1, 1), (7, 30), (30, 7)])
def test_no_byte_is_lost(schedule: Schedule, block: int, state: int) -> None:
    chains = Chains(oracle.branches(80, 5, 64), 32)
    cache = Checked(chains, 110, 40, shared(110 * block + 41 * state, block, state))
    served = serve_with(cache, chains, schedule)
    cache.step_starts()
    cache.check()
    assert not served.never_fit and served.hits.sum() > 0 and cache.num_evicted > 0


RUN = {"groups": "full+3*state", "unified_memory": True}
SOURCE = {"name": "long branches", "limit": 150, "seed": 3}


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize(("size", "groups"), [(16, "full+state"), (64, "full+3*state"), (128, "2*full+state")])
def test_the_engine_itself(sglang: Process, size: int, groups: str, mode: str) -> None:
    schedule, source = oracle.SCHEDULES[mode], SOURCE | {"limit": 100, "seed": size}
    sizes = oracle.capacities(oracle.trace_of(**source), size, schedule.at_once, len(Group.from_text(groups)))
    runs = [(source, oracle.asked(size, blocks, schedule) | RUN | {"groups": groups}) for blocks in sizes[:3:2]]
    row = oracle.agreements(sglang, SGLANG, mode, runs)
    assert row["unequal"] == 0 and row["requests"] == 200 and row["hit_percent"] > 1


@pytest.mark.parametrize("setting", [{"states_per_path": 1}, {"memory_ratio": 0.3}, {"core": "python"}])
def test_beside_its_other_settings(sglang: Process, setting: dict[str, object]) -> None:
    mode = "16 share a budget"
    plain = oracle.asked(64, 288, oracle.SCHEDULES[mode]) | RUN
    assert oracle.agreements(sglang, SGLANG, mode, [(SOURCE, plain | setting)])["unequal"] == 0


@pytest.mark.parametrize("wrong", ["leaf", "state", "apart", "own", "sink"])
def test_a_difference_would_be_seen(sglang: Process, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal if blocks evict states of their own, if a state evicts states first, if the memory is divided, if
    more room is kept, and if all of the memory can hold something."""
    mode = "16 share a budget"
    run = SOURCE, oracle.asked(64, 200, oracle.SCHEDULES[mode]) | RUN
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] == 0
    lose_leaf, lose_state = UnifiedLRU._lose_leaf, UnifiedLRU._lose_state
    change: dict[str, tuple[object, str, object]] = {
        "leaf": (UnifiedLRU, "_lose_leaf", lambda self: lose_state(self, 1 << 30) or lose_leaf(self)),
        "state": (UnifiedLRU, "_ids", property(lambda self: 0, lambda self, value: None)),
        "apart": (UnifiedLRU, "_take", StateLRU._take),
        "own": (edge_unified, "OWN", 6),
        "sink": (edge_unified, "ceil_div", lambda a, b: a // b - (a == b)),
    }
    monkeypatch.setattr(*change[wrong])
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] > 0
