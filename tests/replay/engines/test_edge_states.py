"""SGLang's profile of models with recurrent states: by hand, and beside the installed engine."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from checked import Checked, serve_all
from judges import SGLANG, agreement
from letters import trace

from raises import raises

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import oracle
from benchmarks.peers import Process

from kvpagoda.errors import BadInput
from kvpagoda.replay import Group, Schedule, replay
from kvpagoda.replay.engines import edge_states
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import serve_with
from kvpagoda.replay.engines.edge_states import StateLRU, StateTree, slots
from kvpagoda.replay.engines.edge_windows import WindowTree

STATE = Group.from_text("full+state")


def found(*texts: str, blocks: int = 400, output: int = 1, **schedule: int) -> list[int]:
    """The blocks of 64 tokens that each text finds."""
    hits = replay(trace(*texts, output=output, size=64), blocks, engine=SGLANG, block_size=64, groups=STATE, **schedule)
    return [tokens // 64 for tokens in hits.per_request.tolist()]


def test_blocks_and_slots_share_the_memory() -> None:
    assert slots(1_900, Group.from_text("full+3*state")) == (1_000, 300)
    for groups in ("full+state+window:8", "state", "full+state+chunk:8"):
        with raises(BadInput, needed=tuple(one.kind for one in Group.from_text(groups))):
            replay(trace("ab"), 20, engine=SGLANG, block_size=4, groups=Group.from_text(groups))


def test_a_text_is_found_up_to_a_state_and_one_is_kept_where_texts_part() -> None:
    """A state is copied at the end of "abc", so that "abd" finds nothing; it publishes "ab" with a state, and nothing more."""
    assert found("abc", "abcx", "abd", "abe", "abdy") == [0, 3, 0, 2, 2]
    assert found("abcd", "abx", step_tokens=128) == [0, 2]


def test_an_output_is_published_up_to_a_multiple_of_256_tokens() -> None:
    for output, blocks in ((10, 5), (250, 8)):
        chains = Chains(trace("abcde", output=output, size=64), 64)
        cache = StateLRU(chains, 20, 20)
        serve_with(cache, chains, Schedule(1, 64))
        assert (cache.tree.num_blocks, cache.tree.peek(chains.keys(0)), cache.free) == (blocks, blocks, 20 - blocks)


def test_the_state_that_was_used_longest_ago_leaves_first() -> None:
    """Of 6 slots 3 are a request's: the third text needs one of those of "a" and "b", and "a" was found since."""
    assert slots(14, STATE) == (7, 6)
    assert found("a", "b", "ax", "c", "d", "ay", "bx", blocks=14) == [0, 0, 1, 0, 0, 1, 0]


def test_more_of_the_memory_for_states_leaves_less_for_texts() -> None:
    assert slots(14, STATE, 0.4) == (10, 4)
    with raises(BadInput, needed=SGLANG, available=0.5):
        replay(trace("ab"), 20, engine=SGLANG, memory_ratio=0.5)
    with raises(BadInput, needed="vllm-0.33", available=2):
        replay(trace("ab"), 20, engine="vllm-0.33", groups=STATE, states_per_path=2)
    with raises(BadInput, field="states_per_path", needed=0, available=1):
        replay(trace("ab", size=64), 20, engine=SGLANG, block_size=64, groups=STATE, states_per_path=0)


def test_a_new_state_evicts_the_first_of_its_text() -> None:
    """Chunks of a block leave a state after each of "abcd". With two a path, those after "a" and "b" are gone: "abx" finds
    nothing, and leaves one where it parts. That one stays, though "abcde" has a third then."""
    once = {"step_tokens": 64}
    assert found("abcd", "abx", **once) == [0, 2]
    texts = "abcd", "abcdy", "abx", "aby", "abcdez", "abw"
    assert found(*texts, states_per_path=2, **once) == [0, 4, 0, 2, 4, 2]


class CheckedStates(Checked, StateLRU):
    """Counts all blocks and slots in every step."""


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(4, 96), Schedule(8, 256, shared=True)])
def test_no_block_is_lost(schedule: Schedule) -> None:
    chains = Chains(oracle.branches(80, 5, 64), 32)
    serve_all(CheckedStates(chains, 110, 40), chains, schedule)


of_the_engine = partial(agreement, {"name": "long branches", "limit": 100})
"""Random texts that part often, with little memory and with more."""


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize(("size", "groups"), [(16, "full+state"), (64, "full+3*state"), (128, "2*full+state")])
def test_the_engine_itself(sglang: Process, size: int, groups: str, mode: str) -> None:
    row = of_the_engine(sglang, size, mode, groups, size)
    assert row["unequal"] == 0 and row["requests"] == 200 and row["hit_percent"] > 1


@pytest.mark.parametrize("setting", [{"states_per_path": 1}, {"states_per_path": 3}, {"memory_ratio": 0.3}])
def test_its_settings(sglang: Process, setting: dict[str, float]) -> None:
    mode = "16 share a budget"
    for seed in (1, 2):
        source, schedule = {"name": "long branches", "limit": 200, "seed": seed}, oracle.SCHEDULES[mode]
        plain = oracle.asked(64, 288, schedule) | {"groups": "full+3*state"}
        row = oracle.agreements(sglang, SGLANG, mode, [(source, plain | setting)])
        assert row["unequal"] == 0 and row["hit_percent"] > 1
        assert row["hit_percent"] != oracle.agreements(sglang, SGLANG, mode, [(source, plain)])["hit_percent"]


def test_its_tree_in_python(sglang: Process) -> None:
    assert of_the_engine(sglang, 64, "16 at once", "full+3*state", 3, core="python")["unequal"] == 0


@pytest.mark.parametrize("wrong", ["use", "branch", "leaf", "own", "least", "interval", "split"])
def test_a_difference_would_be_seen(sglang: Process, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal if a look-up does not use the state, if none is copied where texts part, if a leaf stays without its
    state, if a request has a slot less, if more requests run than may, if an output is copied more often, and if an edge
    keeps its state above a cut."""
    mode = "one at a time" if wrong == "split" else "16 share a budget"
    source, schedule = {"name": "long branches", "limit": 200, "seed": 3}, oracle.SCHEDULES[mode]
    run = source, oracle.asked(64, 288, schedule) | {"groups": "full+3*state"}
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] == 0
    change: dict[str, tuple[object, str, object]] = {
        "use": (StateTree, "_use_windows", lambda self, edge: None),
        "branch": (StateLRU, "_branch", property(lambda self: 0, lambda self, value: None)),
        "leaf": (StateTree, "_is_leaf", lambda self, edge: False),
        "own": (edge_states, "OWN", 2),
        "least": (edge_states, "LEAST", 4),
        "interval": (edge_states, "INTERVAL", 64),
        "split": (StateTree, "_split", WindowTree._split),
    }
    monkeypatch.setattr(*change[wrong], raising=False)
    assert oracle.agreements(sglang, SGLANG, mode, [run])["unequal"] > 0
