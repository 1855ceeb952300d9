"""SGLang's profile: by hand, and beside the installed engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from judges import SGLANG
from letters import hits, trace

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import oracle
from benchmarks.peers import Process

from kvpagoda.replay import Schedule, replay
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import serve_with
from kvpagoda.replay.engines.edge_lru import EdgeLRU
from kvpagoda.replay.engines.text_tree import Edge, TextTree


def test_all_but_the_block_of_the_last_token_is_found() -> None:
    assert hits(SGLANG, 12, "abc", "abc", "abcd", "xbc", "abd") == [0, 2, 3, 0, 2]


def test_a_text_that_nothing_cut_leaves_as_a_whole() -> None:
    """One block is needed, and one more is to be free: "abc" goes with its first two blocks, which vLLM keeps."""
    texts = "abc", "de", "f", "abcx"
    assert hits(SGLANG, 6, *texts) == [0, 0, 0, 0]
    assert [tokens // 4 for tokens in replay(trace(*texts), 6, engine="vllm-0.33", block_size=4).per_request] == [
        0,
        0,
        0,
        3,
    ]


def test_a_text_that_was_cut_leaves_from_its_end() -> None:
    """A look-up cuts "ab" from "c", which counts as used then, later than "d". So "d" leaves first, then "c"."""
    assert hits(SGLANG, 7, "abc", "d", "abx", "ef", "abcy") == [0, 0, 2, 0, 3]
    assert hits(SGLANG, 7, "abc", "d", "abx", "efg", "abcy") == [0, 0, 2, 0, 2]


def test_what_a_step_computes_is_found_from_the_next_one_on() -> None:
    assert hits(SGLANG, 20, "abcd", "abcd", at_once=2, step_tokens=8) == [0, 0]
    assert hits(SGLANG, 20, "abcd", "ef", "abcd", at_once=2, step_tokens=8) == [0, 0, 2]


def test_a_block_that_two_requests_computed_is_kept_once() -> None:
    """Both compute "ab"; afterwards the six blocks hold "ab", "cd" and "ef", so that all are found."""
    texts = "ab", "ab", "cd", "abx", "cdx"
    assert hits(SGLANG, 7, *texts, at_once=2) == [0, 0, 0, 2, 2]


def test_an_output_can_leave_without_its_prompt() -> None:
    chains = Chains(trace("ab", "cd", output=9), 4)
    cache = EdgeLRU(chains, 9)
    serve_with(cache, chains, Schedule())
    assert cache.tree.num_blocks == 8 and cache.free == 1
    assert cache.tree.evict(1) == 2 and cache.tree.match(chains.keys(0)[:3])[0] == 2
    cache.check()


def test_a_preempted_request_leaves_what_it_published_before() -> None:
    found = replay(trace("abcd", "efgh", output=9), 9, engine=SGLANG, block_size=4, at_once=2, step_tokens=8)
    assert found.preempted == 1 and found.never_fit == 0


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize("size", [1, 16, 64, 512])
def test_the_engine_itself(sglang: Process, size: int, mode: str) -> None:
    """Random mixes with little memory."""
    source, schedule = {"name": "mix", "limit": 60, "seed": size}, oracle.SCHEDULES[mode]
    for blocks in oracle.capacities(oracle.trace_of(**source), size, schedule.at_once)[:2]:
        asked = {
            "block_size": size, "num_blocks": blocks, "at_once": schedule.at_once, "step_tokens": schedule.step_tokens,
        }  # fmt: skip
        row = oracle.agreement(sglang, SGLANG, "a mix", source, asked)
        assert row["unequal"] == 0 and row["requests"] == 60 and row["hit_percent"] > 1


@pytest.mark.parametrize("core", ["rust", "python", "old"])
def test_each_of_its_trees(sglang: Process, core: str) -> None:
    """Its unified tree in Rust, which serves by default, the same in Python, and the older tree find the same."""
    source = {"name": "mix", "limit": 60, "seed": 3}
    asked = {"block_size": 16, "num_blocks": 3000, "at_once": 16, "step_tokens": 2048, "core": core}
    assert oracle.agreement(sglang, SGLANG, "a mix", source, asked)["unequal"] == 0


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
def test_a_difference_would_be_seen(sglang: Process, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are unequal without the block that is to be free beside what is needed, which is seen with 16 at once; and if
    what a look-up cuts off is not used by it, which is seen one at a time."""
    source, schedule = {"name": "mix", "limit": 60, "seed": 3}, oracle.SCHEDULES[mode]
    blocks = oracle.capacities(oracle.trace_of(**source), 512, schedule.at_once)[schedule.at_once == 1]
    asked = {
        "block_size": 512, "num_blocks": blocks, "at_once": schedule.at_once, "step_tokens": schedule.step_tokens,
    }  # fmt: skip
    assert oracle.agreement(sglang, SGLANG, "", source, asked)["unequal"] == 0
    whole, split = EdgeLRU._allocate, TextTree._split

    def exact(self: EdgeLRU) -> None:
        self._due = {request: ((more - 1) * self.size, more) for request, (_, more) in self._due.items()}
        whole(self)

    def unused(self: TextTree, edge: Edge, at: int) -> Edge:
        used, upper = edge.used, split(self, edge, at)
        edge.used = used
        self._offer(edge)
        return upper

    if schedule.at_once > 1:
        monkeypatch.setattr(EdgeLRU, "_allocate", exact)
    else:
        monkeypatch.setattr(TextTree, "_split", unused)
    assert oracle.agreement(sglang, SGLANG, "", source, asked)["unequal"] > 0
