"""SGLang's profile of one memory for blocks and windows, or states: by hand, and beside the installed engine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import pytest
from checked import Checked, serve_all
from judges import SGLANG, agreement
from letters import hits, trace

from raises import raises

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import oracle
from benchmarks.peers import Process
from benchmarks.workload import TRACES

from kvpagoda.errors import BadInput
from kvpagoda.replay import Group, Schedule, replay, replay_engine
from kvpagoda.replay.engines import edge_unified
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.edge_states import StateLRU
from kvpagoda.replay.engines.edge_unified import OneMemory, UnifiedStates, UnifiedWindows, shared
from kvpagoda.replay.engines.edge_windows import WindowLRU
from kvpagoda.replay.engines.pool import divided

STATE, WINDOW = Group.from_text("full+state"), Group.from_text("full+window:5")
one_memory = partial(replay, engine=SGLANG, block_size=64, groups=STATE, unified_memory=True)


def test_the_memory_is_what_would_be_divided() -> None:
    """11 blocks and 10 slots of one block each; what begins it holds nothing."""
    pool = divided(SGLANG, STATE, 64, 21, unified=True)
    assert (pool.num_blocks, pool.num_apart, pool.shared) == (11, 9, OneMemory(20, 1, 1, 20))
    assert shared(1_000, 100, 30) == OneMemory(1_000 - 120, 100, 30, 32)  # a block does not fit into three slots
    pool = divided(SGLANG, WINDOW, 4, 17, unified=True)  # of all 17, also those that neither count has when divided
    assert (pool.num_blocks, pool.num_apart, pool.shared) == (9, 7, OneMemory(16, 1, 1, 16))


def test_texts_take_what_states_do_not_need() -> None:
    """Of 15 blocks for both, 7 hold texts otherwise, and of the rest 3 are the slots of a request."""
    texts = ("abcde", "fg", "abcdex")
    apart = replay(trace(*texts, size=64), 15, engine=SGLANG, block_size=64, groups=STATE)
    assert (apart.per_request // 64).tolist() == [0, 0, 0]
    assert (one_memory(trace(*texts, size=64), 15).per_request // 64).tolist() == [0, 0, 5]


def test_windows_take_what_blocks_do_not_need() -> None:
    """A text of six blocks has as many windows while it is computed: 12 of 13 blocks, of which one holds nothing. Divided, 7
    are of texts and 5 with windows."""
    for unified, found in ((False, [0, 0]), (True, [0, 5])):
        assert hits(SGLANG, 13, "abcdef", "abcdex", groups=WINDOW, unified_memory=unified) == found


def test_leaves_leave_before_windows() -> None:
    """ "efgh" needs 8 of 13 blocks, of which 7 are free: "c", which was cut from "abc", leaves with its window. If the windows
    used longest ago left, "ab" would not be found."""
    for text in ("abx", "abcx"):
        assert hits(SGLANG, 14, "abc", "efgh", text, groups=WINDOW, unified_memory=True) == [0, 0, 2]


@pytest.mark.parametrize(
    ("engine", "groups"),
    [("vllm-0.33", "full+state"), ("vllm-0.33", "full+window:128"), (SGLANG, "full"), ("kvpagoda", "full")],
)
def test_what_has_no_one_memory(engine: str, groups: str) -> None:
    with raises(BadInput, needed=engine, available=ANY):
        replay(trace("ab"), 20, engine=engine, groups=Group.from_text(groups), unified_memory=True)


class CheckedStates(Checked, UnifiedStates):
    """Counts all bytes and states in every step."""


class CheckedWindows(Checked, UnifiedWindows):
    """Counts all bytes in every step."""


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(4, 96), Schedule(8, 256, shared=True)])
@pytest.mark.parametrize(("block", "each"), [(1, 1), (7, 30), (30, 7)])
def test_no_byte_is_lost(schedule: Schedule, block: int, each: int) -> None:
    chains = Chains(oracle.branches(80, 5, 64), 32)
    serve_all(CheckedStates(chains, 110, 40, shared(110 * block + 41 * each, block, each)), chains, schedule)
    chains = Chains(oracle.branches(100, block), 16)
    serve_all(CheckedWindows(chains, 60, 45, 40, shared(60 * block + 45 * each, block, each)), chains, schedule)


RUN = {"groups": "full+3*state", "unified_memory": True}
SOURCE = {"name": "long branches", "limit": 150, "seed": 3}
WINDOWS = {"groups": "full+3*window:200", "unified_memory": True}
of_the_engine = partial(agreement, unified_memory=True)
"""Random texts that part often, with little memory and with more."""


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize(("size", "groups"), [(16, "full+state"), (64, "full+3*state"), (128, "2*full+state")])
def test_the_engine_itself(sglang: Process, size: int, groups: str, mode: str) -> None:
    row = of_the_engine({"name": "long branches", "limit": 100}, sglang, size, mode, groups, size)
    assert row["unequal"] == 0 and row["requests"] == 200 and row["hit_percent"] > 1


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize(
    ("size", "groups"),
    [(1, "full+window:100"), (4, "full+window:128"), (16, "full+3*window:200"), (16, "3*full+window:40")],
)
def test_the_engine_itself_with_windows(sglang: Process, size: int, groups: str, mode: str) -> None:
    row = of_the_engine({"name": "branches", "limit": 150}, sglang, size, mode, groups, size)
    assert row["unequal"] == 0 and row["requests"] == 300 and row["hit_percent"] > 1
    assert row["preempted"] > 0 or mode != "16 share a budget"


@pytest.mark.parametrize("setting", [{"states_per_path": 1}, {"memory_ratio": 0.3}, {"core": "python"}])
def test_beside_its_other_settings(sglang: Process, setting: dict[str, object]) -> None:
    mode = "16 share a budget"
    plain = oracle.asked(64, 288, oracle.SCHEDULES[mode]) | RUN
    assert oracle.agreements(sglang, SGLANG, mode, [(SOURCE, plain | setting)])["unequal"] == 0


@pytest.mark.skipif(not (TRACES / oracle.FILES["conversation"]).exists(), reason="no traces here")
@pytest.mark.parametrize("share", [0.5, 1.05])
def test_a_real_trace_with_windows_and_preemptions(sglang: Process, share: float) -> None:
    """In ``share`` of the blocks that its longest request needs."""
    mode, source = "16 share a budget", {"name": "conversation", "limit": 60}
    blocks = int(share * oracle.capacities(oracle.trace_of(**source), 64, 1, 2)[0])
    run = source, oracle.asked(64, blocks, oracle.SCHEDULES[mode]) | WINDOWS | {"groups": "full+window:128"}
    row = oracle.agreements(sglang, SGLANG, mode, [run])
    assert row["unequal"] == 0 and row["preempted"] > 10 and row["never_fit"] == (share < 1) and row["hit_percent"] > 1


@pytest.mark.parametrize("setting", [{"memory_ratio": 0.3}, {"core": "python"}])
def test_windows_beside_its_other_settings(sglang: Process, setting: dict[str, object]) -> None:
    """The ratio divides nothing."""
    mode, source = "16 share a budget", {"name": "branches", "limit": 100, "seed": 3}
    plain = oracle.asked(16, 280, oracle.SCHEDULES[mode]) | WINDOWS
    row = oracle.agreements(sglang, SGLANG, mode, [(source, plain | setting)])
    assert row["unequal"] == 0 and row["preempted"] > 0
    assert row["hit_percent"] == oracle.agreements(sglang, SGLANG, mode, [(source, plain)])["hit_percent"]


@pytest.mark.parametrize("wrong", ["order", "leaves", "spare", "apart", "sink"])
def test_a_difference_of_windows_would_be_seen(sglang: Process, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal if windows leave before leaves, if all leaves leave before windows, if more leave than the step needs,
    if what must fit is divided, and if all of the memory can hold something."""
    mode = "16 at once"
    run = {"name": "branches", "limit": 100, "seed": 3}, oracle.asked(16, 280, oracle.SCHEDULES[mode]) | WINDOWS
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] == 0
    evict = UnifiedWindows._evict

    def other(self: UnifiedWindows, spare: int) -> None:
        first = wrong == "order"
        while self._rest < 0 and (self._lose(self.tree, first) or self._lose(self.tree, not first)):
            pass

    def more(self: UnifiedWindows, spare: int) -> None:
        tree, memory = self.tree, self.memory
        room = self._rest + tree.num_unlocked * memory.block + tree.num_idle * memory.each
        extra = min(room, spare * (memory.block + memory.each))
        self._rest -= extra
        evict(self, spare)
        self._rest += extra

    change: dict[str, tuple[object, str, object]] = {
        "order": (UnifiedWindows, "_evict", other),
        "leaves": (UnifiedWindows, "_evict", other),
        "spare": (UnifiedWindows, "_evict", more),
        "apart": (UnifiedWindows, "_fits", WindowLRU._fits),
        "sink": (edge_unified, "ceil_div", lambda a, b: a // b - (a == b)),
    }
    monkeypatch.setattr(*change[wrong])
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] > 0


@pytest.mark.parametrize("wrong", ["leaf", "state", "apart", "own", "sink"])
def test_a_difference_would_be_seen(sglang: Process, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal if blocks evict states of their own, if a state evicts states first, if the memory is divided, if
    more room is kept, and if all of the memory can hold something."""
    mode = "16 share a budget"
    run = SOURCE, oracle.asked(64, 200, oracle.SCHEDULES[mode]) | RUN
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] == 0
    lose_leaf, lose_state = UnifiedStates._lose_leaf, UnifiedStates._lose_state
    change: dict[str, tuple[object, str, object]] = {
        "leaf": (UnifiedStates, "_lose_leaf", lambda self: lose_state(self, 1 << 30) or lose_leaf(self)),
        "state": (UnifiedStates, "_ids", property(lambda self: 0, lambda self, value: None)),
        "apart": (UnifiedStates, "_take", StateLRU._take),
        "own": (edge_unified, "OWN", 6),
        "sink": (edge_unified, "ceil_div", lambda a, b: a // b - (a == b)),
    }
    monkeypatch.setattr(*change[wrong])
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] > 0


@pytest.mark.parametrize("groups", ["2*full+state", "full+3*state", "2*full+window:32", "full+3*window:40"])
def test_memories_that_are_too_small_for_a_request(groups: str) -> None:
    records = [
        {"timestamp": 0, "input_length": 40, "output_length": 10, "hash_ids": [1, 2, 3]},
        {"timestamp": 0, "input_length": 50, "output_length": 30, "hash_ids": [1, 2, 4, 5]},
    ]
    settings = {"engine": SGLANG, "block_size": 16, "groups": Group.from_text(groups), "unified_memory": True}
    fit = [2 - replay_engine(records, capacity_blocks=blocks, **settings).never_fit for blocks in (*range(1, 20), 80)]
    assert fit[0] == 0 and fit[-1] == 2 and fit == sorted(fit)
