"""The setting ``state_cache`` of Dynamo's mocker: by hand, and beside the installed package."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from letters import hits, trace

sys.path.insert(0, str(Path(__file__).parents[3]))

from unittest.mock import ANY

from benchmarks import oracle
from benchmarks.peers import Process

from kvpagoda.errors import BadInput
from kvpagoda.replay import PROFILES, Group, Schedule, replay
from kvpagoda.replay.engines.block_queue import BlockPool
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import serve_with
from kvpagoda.replay.engines.moved_states import MovedStates
from raises import raises

DYNAMO = "dynamo-1.6.1"
STATE = Group.from_text("full+state")
SHORT, LONG = Schedule(3, 32, shared=True), Schedule(12, 512, shared=True)
found = partial(hits, DYNAMO, groups=STATE)


def test_a_state_is_found_where_a_prompt_ends_and_nowhere_else() -> None:
    assert found(40, "abc", "abcd", "abcx", "abx", "abc") == [0, 3, 3, 0, 0]
    cut = trace("abc", "abcd")
    cut.input_lengths[0] -= 1  # the prompt ends within a block, so that no state is at a boundary
    assert replay(cut, 40, engine=DYNAMO, block_size=4, groups=STATE).per_request.tolist() == [0, 0]
    assert replay(cut, 40, engine=DYNAMO, block_size=4).per_request.tolist() == [0, 8]


def test_an_output_takes_the_state_along() -> None:
    """Of an output of 5 tokens 4 are computed, a whole block behind the prompt."""
    assert found(40, "abc", "abcd", output=4) == [0, 3]
    assert found(40, "abc", "abcd", output=5) == [0, 0]


def test_of_the_chunks_of_a_prompt_the_last_one_that_ends_at_a_boundary_leaves_its_state() -> None:
    assert found(40, "abcd", "abx", "abcx", step_tokens=8) == [0, 0, 0]
    assert found(40, "abc", "abx", "abcx", step_tokens=8) == [0, 0, 3]
    cut = trace("abc", "abx", "ax")
    cut.input_lengths[0] -= 1
    for step, hit in ((8, 8), (4, 8), (5, 0)):  # with 4 and 8 tokens a step it is that after "ab"
        result = replay(cut, 40, engine=DYNAMO, block_size=4, groups=STATE, step_tokens=step)
        assert result.per_request.tolist() == [0, hit, 0]


def test_a_state_is_found_from_the_next_step_on() -> None:
    """With 4 tokens a step the second request starts in the second step, in which an output would copy the state."""
    for step, output, expected in ((4, 1, [0, 4, 8]), (4, 2, [0, 0, 4]), (40, 1, [0, 0, 0])):
        schedule = {"at_once": 3, "step_tokens": step, "shared": True}
        texts = trace("a", "ab", "abc", output=output)
        result = replay(texts, 40, engine=DYNAMO, block_size=4, groups=STATE, **schedule)  # type: ignore[call-overload]
        assert result.per_request.tolist() == expected


def test_states_take_blocks() -> None:
    """Of 4 blocks a prompt fills 3 and its state 1; with one token more a copy of the state needs a block too."""
    for blocks, output, states, never_fit in ((3, 1, 1, 1), (4, 1, 1, 0), (4, 1, 2, 1), (5, 2, 1, 1), (6, 3, 1, 0)):
        groups = Group.from_text(f"full+{states}*state")
        result = replay(trace("abc", output=output), blocks, engine=DYNAMO, block_size=4, groups=groups)
        assert (result.never_fit + result.preempted > 0) == bool(never_fit), (blocks, output, states)


def test_what_is_used_again_first() -> None:
    """A state is free before the blocks of its text, so that the output of the first request takes it. A look-up uses it."""
    texts = trace("abcde", "a", "afgh")
    texts.output_lengths[0] = 10
    result = replay(texts, 11, engine=DYNAMO, block_size=4, groups=STATE, at_once=4, step_tokens=4, shared=True)
    assert result.per_request.tolist() == [0, 0, 0]
    assert found(12, "abc", "def", "abcx", "ghi", "abcy") == [0, 0, 3, 0, 3]


class Checked(MovedStates):
    """Counts all blocks in every step."""

    def step_starts(self) -> None:
        super().step_starts()
        held = {int(block) for one in self._running.values() for block in one.blocks[0] if block}
        own = [int(block) for one in self._states.values() for block in one.blocks]
        assert len({*own, *held}) == len(own) + len(held)
        assert self.pool.queue.num_free == self.pool.num_blocks - len(held) - len(own)
        free = self.pool.queue.order()
        assert len({*free.tolist()}) == len(free) and not (self.pool.counts[free] > 0).any()


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(4, 96), SHORT])
def test_no_block_is_lost(schedule: Schedule) -> None:
    chains = Chains(oracle.trace_of("whole branches", 80, 5), 16)
    cache = Checked(chains, 160, PROFILES[DYNAMO], 2, schedule.step_tokens)
    served = serve_with(cache, chains, schedule)
    cache.step_starts()
    assert not served.never_fit and served.hits.sum() > 0 and cache.num_evicted > 0
    assert cache.pool.queue.num_free == 160


def test_other_groups_and_other_backends_are_refused() -> None:
    for engine, groups in ((DYNAMO, "full+window:8"), (DYNAMO, "state"), (DYNAMO, "2*full+state")):
        with raises(BadInput, needed="dynamo-1.6.1", available=ANY):
            replay(trace("ab"), 20, engine=engine, block_size=4, groups=Group.from_text(groups))
    with raises(BadInput, needed="dynamo-1.6.1-trtllm", available=2):
        replay(trace("ab"), 20, engine="dynamo-1.6.1-trtllm", block_size=4, groups=STATE)
    with raises(BadInput, needed="dynamo-1.6.1"):
        replay(trace("ab"), 20, engine=DYNAMO, block_size=4, groups=STATE, retention=None)


def run(size: int, schedule: Schedule, groups: str, seed: int, times: int) -> oracle.Run:
    """Random texts of whole blocks that part often, in so many times the blocks that the longest needs."""
    source = {"name": "whole branches", "limit": 100, "seed": seed}
    longest = int(Chains(oracle.trace_of(**source), size).totals.max()) // size + 2 * len(Group.from_text(groups))
    return source, {**oracle.asked(size, times * longest, schedule), "groups": groups}


@pytest.mark.parametrize("schedule", [Schedule(), SHORT, LONG])
@pytest.mark.parametrize(("size", "groups"), [(16, "full+state"), (8, "full+3*state"), (64, "full+state")])
def test_the_mocker_itself(dynamo: Process, size: int, groups: str, schedule: Schedule) -> None:
    asked = [run(size, schedule, groups, seed, times) for seed, times in ((1, 2), (3, 8), (4, 12))]
    row = oracle.agreements(dynamo, DYNAMO, "", asked)
    assert row["unequal"] == 0 and row["requests"] == 300 and row["hit_percent"] > 0.5


WRONG: dict[str, tuple[object, str, object]] = {
    "give up": (MovedStates, "_give_up", lambda self, own: None),
    "use": (MovedStates, "_source", lambda self, new: np.empty(0, np.int32)),
    "drop": (BlockPool, "drop", BlockPool._forget),
}


@pytest.mark.parametrize("wrong", [*WRONG, "reserves"])
def test_a_difference_would_be_seen(dynamo: Process, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal if copies are kept, if a look-up does not use the state that it finds, if what is given up is not taken
    first, and if a request starts as soon as its first chunk fits."""
    asked = [run(16, schedule, "full+state", seed, times) for schedule, seed, times in ((SHORT, 3, 8), (LONG, 1, 2))]
    assert oracle.agreements(dynamo, DYNAMO, "", asked)["unequal"] == 0
    if wrong in WRONG:
        monkeypatch.setattr(*WRONG[wrong])
    else:
        monkeypatch.setitem(PROFILES, DYNAMO, replace(PROFILES[DYNAMO], reserves="chunk"))
    assert oracle.agreements(dynamo, DYNAMO, "", asked)["unequal"] > 0
