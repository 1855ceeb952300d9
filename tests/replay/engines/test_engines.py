"""Replays as engines serve them: by hand, and beside the installed engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from letters import hits, trace

sys.path.insert(0, str(Path(__file__).parents[3]))

from unittest.mock import ANY

from benchmarks import oracle
from benchmarks.peers import Process

from kvpagoda.errors import BadInput
from kvpagoda.replay import PROFILES, Group, Schedule, replay, replay_engine, synthetic
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import serve_with
from kvpagoda.replay.engines.queued import QueuedManager
from raises import raises

VLLM, TRTLLM = "vllm-0.33", "dynamo-1.6.1-trtllm"


@pytest.mark.parametrize("engine", ["vllm-0.33", "kvpagoda"])
def test_all_but_the_block_of_the_last_token_is_found(engine: str) -> None:
    assert hits(engine, 9, "abc", "abc", "abcd", "xbc", "abd") == [0, 2, 3, 0, 2]


def test_vllm_uses_the_last_blocks_of_the_oldest_text_first() -> None:
    assert hits(VLLM, 6, "abc", "def", "gh", "abcd") == [0, 0, 0, 1]
    assert hits(VLLM, 6, "abc", "def", "g", "abcd") == [0, 0, 0, 2]


def test_vllm_keeps_a_second_block_for_a_whole_text_that_is_computed_again() -> None:
    """The last block of a text that is cached as a whole is computed again and kept twice: there is no room for "c"."""
    assert hits(VLLM, 4, "c", "ab", "ab", "d", "cx") == [0, 0, 1, 0, 0]
    assert hits("kvpagoda", 4, "c", "ab", "ab", "d", "cx") == [0, 0, 1, 0, 1]


def test_vllm_shares_a_chunk_in_the_step_in_which_it_is_computed() -> None:
    assert hits(VLLM, 20, "abcd", "abcd", at_once=2, step_tokens=8) == [0, 2]
    assert hits("kvpagoda", 20, "abcd", "abcd", at_once=2, step_tokens=8) == [0, 0]


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    found = replay(trace("abcd", "efgh", output=5), 6, engine=VLLM, block_size=4, at_once=2, step_tokens=12)
    assert (found.preempted, found.never_fit) == (0, 0)
    chunked = replace(PROFILES[VLLM], reserves="chunk")
    chains = Chains(trace("abcd", "efgh", output=5), 4)
    assert serve_with(QueuedManager(chains, 6, chunked), chains, Schedule(2, 12)).preempted == 1


def test_a_request_waits_until_its_output_fits_beside_those_that_run() -> None:
    """Each holds 4 blocks at its end, of which the last is for the last token of its output."""
    texts = trace("ab", "cd", output=5)
    for blocks, engine, steps, preempted in ((8, TRTLLM, 5, 0), (7, TRTLLM, 10, 0), (5, VLLM, 9, 1)):
        found = replay(texts, blocks, engine=engine, block_size=4, at_once=2, step_tokens=40, shared=True)
        assert (found.steps, found.preempted, found.never_fit) == (steps, preempted, 0)
    assert replay(trace("ab", output=5), 3, engine=TRTLLM, block_size=4).never_fit == 1


def test_what_is_shared_at_the_end_is_not_found_before() -> None:
    chains = Chains(trace("abcd", "abcd"), 4)
    late = QueuedManager(chains, 20, replace(PROFILES[VLLM], shares="end"))
    assert serve_with(late, chains, Schedule(2, 8)).hits.tolist() == [0, 0]
    assert serve_with(late, chains, Schedule(1)).hits.tolist() == [12, 12]


@pytest.mark.parametrize("kind", ["window:4", "state"])
def test_windows_and_states_are_kept_where_prompts_end_and_texts_part(kind: str) -> None:
    """The third text finds "ab" in the group of full attention alone, so it keeps what is needed there for the fourth."""
    groups = Group.from_text(f"full+{kind}")
    assert hits(VLLM, 40, "abcd", "abcx", "abx", "aby", groups=groups) == [0, 3, 0, 2]
    dense = hits(VLLM, 40, "abcd", "abcx", "abx", "aby", groups=groups, retention=None)
    assert dense == ([0, 3, 2, 2] if kind != "state" else [0, 3, 0, 2])  # a state is written where a chunk ends
    in_chunks = hits(VLLM, 40, "abcd", "abx", groups=groups, retention=None, step_tokens=4)
    assert in_chunks == [0, 2]


def test_a_state_is_found_from_the_next_step_on() -> None:
    """The second text waits as long as the newest state that it finds was computed in the same step."""
    texts, settings = trace("abcd", "abcd"), {"engine": VLLM, "block_size": 4, "at_once": 2, "step_tokens": 4}
    for groups, retention, found in (("full", 0, 4), ("full+state", 0, 0), ("full+state", None, 12)):
        result = replay(texts, 20, groups=Group.from_text(groups), retention=retention, **settings)  # type: ignore[call-overload]
        assert (result.per_request.tolist(), result.steps) == ([0, found], 4)


def test_groups_share_the_blocks_and_a_chunk_needs_no_block_before_it() -> None:
    groups = Group.from_text("full+chunk:8")
    assert hits(VLLM, 40, "abcd", "abcx", "abx", groups=groups) == [0, 3, 2]
    assert replay(trace("abcd"), 7, engine=VLLM, block_size=4, groups=groups).never_fit == 1
    assert replay(trace("abcd"), 8, engine=VLLM, block_size=4, groups=groups).never_fit == 0


def test_one_block_is_too_few_for_a_state_that_moves_on() -> None:
    """A chunk writes its state into another block than it reads."""
    settings = dict(engine=VLLM, block_size=4, groups=Group.from_text("state"), step_tokens=4, shared=True)
    assert [replay(trace("abcd"), blocks, **settings).never_fit for blocks in (1, 2)] == [1, 0]


def test_errors_say_what_there_is() -> None:
    with raises(BadInput, needed="vllm", available=ANY):
        replay_engine(trace("ab"), "vllm", 4)
    with raises(BadInput, field="at_once", needed=0, available=1):
        replay(trace("ab"), 4, engine=VLLM, at_once=0)
    with raises(BadInput, needed="kvpagoda", available=2):
        replay(trace("ab"), 4, engine="kvpagoda", groups=Group.from_text("full+state"))
    with raises(BadInput, needed="vllm-0.33", available=0):
        replay(trace("ab"), 4, engine=VLLM, groups=())
    for groups, retention in (("full", 16), ("full+state", 17), ("full+chunk:64", 16)):
        with raises(BadInput, needed=retention, available=16):
            replay(trace("ab"), 4, engine=VLLM, groups=Group.from_text(groups), retention=retention)


def test_the_result_in_json() -> None:
    found = replay(synthetic(30), 4_000, engine=VLLM, at_once=4, step_tokens=512).to_dict()
    assert found["engine"] == VLLM and 0 < found["hit_rate"] < 1 and "per_request" not in found
    assert (found["block_size"], found["at_once"], found["step_tokens"]) == (16, 4, 512)


@pytest.mark.parametrize("mode", [*oracle.SCHEDULES])
@pytest.mark.parametrize("size", [16, 64])
def test_the_engine_itself(vllm: Process, size: int, mode: str) -> None:
    """Random mixes with little memory, whose blocks vLLM hashes itself, from their tokens."""
    source, schedule = {"name": "mix", "limit": 60, "seed": size}, oracle.SCHEDULES[mode]
    for blocks in oracle.capacities(oracle.trace_of(**source), size, schedule.at_once)[:2]:
        asked = oracle.asked(size, blocks, schedule)
        row = oracle.agreement(vllm, VLLM, "a mix", source, {**asked, "hashed": True})
        assert row["unequal"] == 0 and row["requests"] == 60 and row["hit_percent"] > 1


@pytest.mark.parametrize("retention", [0, None, 256])
@pytest.mark.parametrize(
    "groups", ["full+window:128", "full+2*window:100+state", "full+2*chunk:512", "full+3*state", "window:40"]
)
def test_the_engine_itself_with_groups_of_layers(vllm: Process, groups: str, retention: int | None) -> None:
    if retention and "chunk" in groups:
        pytest.skip("vLLM refuses this retention without windows and states")
    source, more = {"name": "mix", "limit": 30, "seed": len(groups)}, {"groups": groups, "retention": retention}
    found = []
    for mode, schedule in oracle.SCHEDULES.items():
        least, most = oracle.capacities(oracle.trace_of(**source), 16, schedule.at_once, len(Group.from_text(groups)))[
            ::3
        ]
        runs = [(source, oracle.asked(16, blocks, schedule) | more) for blocks in (least, most)]
        found.append(oracle.agreements(vllm, VLLM, mode, runs))
    assert {row["unequal"] for row in found} == {0}, found
    assert max(row["hit_percent"] for row in found) > 1


@pytest.mark.parametrize("setting", [{"watermark": 0.1}, {"watermark": 0.35}, {"reserve_prompt": False}])
@pytest.mark.parametrize("groups", ["full", "full+2*window:100", "full+3*state"])
def test_who_is_admitted_is_a_setting(vllm: Process, groups: str, setting: dict[str, Any]) -> None:
    """Requests that need more than their chunk leave some room free, or all of a prompt need not fit."""
    schedule, more = oracle.SCHEDULES["16 share a budget"], {"groups": groups}
    source = {"name": "mix", "limit": 60, "seed": 16}
    least = oracle.capacities(oracle.trace_of(**source), 16, 1, len(Group.from_text(groups)))[0]
    plain = oracle.asked(16, least, schedule) | more
    row = oracle.agreements(vllm, VLLM, "", [(source, plain | setting)])
    assert row["unequal"] == 0 and row["hit_percent"] > 1
    assert row["hit_percent"] != oracle.agreements(vllm, VLLM, "", [(source, plain)])["hit_percent"]


def test_errors_of_who_is_admitted() -> None:
    for setting in ({"watermark": 0.1}, {"reserve_prompt": False}):
        with raises(BadInput, needed="sglang-0.5.23", available=setting.get("watermark", 0.0)):
            replay(trace("ab"), 40, engine="sglang-0.5.23", **setting)  # type: ignore[call-overload]
    with raises(BadInput, needed=1.0, available=1):
        replay(trace("ab"), 40, engine=VLLM, watermark=1.0)


@pytest.mark.parametrize(("size", "unit", "retention"), [(64, 16, 0), (16, 4, None), (128, 16, 512)])
def test_the_engine_itself_with_a_unit_of_matching(vllm: Process, size: int, unit: int, retention: int | None) -> None:
    """Hits end within blocks, which are copied; without the setting vLLM's hits are others."""
    more = {"groups": "full+3*state", "retention": retention, "match_unit": unit}
    found = []
    for name, (mode, schedule) in product(("mix", "branches"), oracle.SCHEDULES.items()):
        source = {"name": name, "limit": 60, "seed": 1}
        least, _, most, *_ = oracle.capacities(oracle.trace_of(**source), size, schedule.at_once, 4)
        runs = [(source, oracle.asked(size, blocks, schedule) | more) for blocks in (least, most)]
        found.append(oracle.agreements(vllm, VLLM, mode, runs))
    assert {row["unequal"] for row in found} == {0}, found
    assert max(row["hit_percent"] for row in found) > 10
    assert any(row["preempted"] for row in found)


def test_a_unit_of_matching_finds_the_end_of_a_prompt_within_a_block() -> None:
    """Prompts of 4 tokens a letter in blocks of 8: the second finds "abc", of which the last block has "c" alone, and computes
    on in a copy of it; the third finds it there again."""
    settings = {"engine": VLLM, "block_size": 8, "groups": Group.from_text("full+state")}
    texts = trace("abcx", "abcxy", "abcz")
    whole, part = (replay(texts, 40, match_unit=unit, **settings) for unit in (None, 4))  # type: ignore[call-overload]
    assert whole.per_request.tolist() == [0, 8, 8] and part.per_request.tolist() == [0, 12, 12]


@pytest.mark.parametrize(
    ("engine", "groups", "unit", "needed", "available"),
    [
        (VLLM, "full", 8, 8, 1), (VLLM, "full+window:64", 8, 8, 2), (VLLM, "full+state", 5, 5, 16),
        ("sglang-0.5.23", "full+state", 8, "sglang-0.5.23", 8),
    ],
)  # fmt: skip
def test_errors_of_a_unit_of_matching(engine: str, groups: str, unit: int, needed: object, available: int) -> None:
    with raises(BadInput, needed=needed, available=available):
        replay(trace("ab"), 40, engine=engine, groups=Group.from_text(groups), match_unit=unit)


def test_a_difference_would_be_seen(vllm: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one setting of the profile changed, hits of the same requests are unequal."""
    source = {"name": "mix", "limit": 60, "seed": 16}
    blocks = oracle.capacities(oracle.trace_of(**source), 16, 16)[0]
    asked = oracle.asked(16, blocks, oracle.SCHEDULES["16 at once"])
    assert oracle.agreement(vllm, VLLM, "", source, asked)["unequal"] == 0
    right = PROFILES[VLLM]
    for wrong in ({"shares": "end"}, {"reserves": "chunk"}, {"watermark": 0.2}):
        monkeypatch.setitem(PROFILES, VLLM, replace(right, **wrong))  # type: ignore[arg-type]
        assert oracle.agreement(vllm, VLLM, "", source, asked)["unequal"] > 0, wrong
    with_watermark = oracle.agreement(vllm, VLLM, "", source, {**asked, "watermark": 0.2})
    assert with_watermark["unequal"] == 0


@pytest.mark.parametrize("engine", ["dynamo-1.6.1", TRTLLM])
@pytest.mark.parametrize("size", [16, 64])
def test_dynamos_mocker(dynamo: Process, size: int, engine: str) -> None:
    """Random mixes, one request at a time and 16 that share a budget: it has its own scheduler."""
    source = {"name": "mix", "limit": 120, "seed": size}
    for mode in oracle.JUDGES[engine].modes:
        schedule = oracle.SCHEDULES[mode]
        for blocks in oracle.capacities(oracle.trace_of(**source), size, 1)[:2]:
            asked = oracle.asked(size, 2 * blocks, schedule)
            row = oracle.agreement(dynamo, engine, "a mix", source, asked)
            assert row["unequal"] == 0 and row["requests"] == 120 and row["hit_percent"] > 1, (mode, blocks)


def test_a_difference_to_the_mocker_would_be_seen(dynamo: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the prompt must fit, as in vLLM, hits of the setting ``trtllm`` are unequal."""
    source, schedule = {"name": "mix", "limit": 100, "seed": 5}, oracle.SCHEDULES["16 share a budget"]
    asked = oracle.asked(64, 996, schedule)
    assert oracle.agreement(dynamo, TRTLLM, "", source, asked)["unequal"] == 0
    monkeypatch.setitem(PROFILES, TRTLLM, replace(PROFILES[TRTLLM], reserves="prompt"))
    assert oracle.agreement(dynamo, TRTLLM, "", source, asked)["unequal"] > 0


def test_a_text_that_is_cached_as_a_whole_is_found_as_a_whole_by_trtllm() -> None:
    assert hits(TRTLLM, 9, "abc", "abc", "ab") == [0, 3, 2]
    assert hits("dynamo-1.6.1", 9, "abc", "abc", "ab") == [0, 2, 1]


def test_a_text_that_is_cached_as_a_whole_needs_no_tokens_of_a_step() -> None:
    """The last text of the first is admitted beside the long one, which leaves no tokens to it, before "y" is evicted; of
    two such texts the second waits for the next step. The third computes "cd" in the step in which it finds "ab"."""
    assert hits(TRTLLM, 15, "xy", "rstuv", "cdefghijk", "xy", at_once=2, step_tokens=4, shared=True) == [0, 0, 0, 2]
    texts = "ab", "xy", "ab", "a", "cdefghijk", "a"
    assert hits(TRTLLM, 10, *texts, at_once=3, step_tokens=4, shared=True) == [0, 0, 2, 1, 0, 1]
    settings = {"engine": TRTLLM, "block_size": 4, "at_once": 2, "step_tokens": 8, "shared": True}
    assert replay(trace("ab", "ab", "cd"), 20, **settings).steps == 2  # type: ignore[call-overload]


def test_a_text_cached_as_a_whole_in_the_mocker(dynamo: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule one of these requests finds something else."""
    source = {"name": "long branches", "limit": 114, "seed": 13}
    asked = oracle.asked(16, 623, oracle.SCHEDULES["16 share a budget"])
    assert oracle.agreement(dynamo, TRTLLM, "", source, asked)["unequal"] == 0
    monkeypatch.setattr(QueuedManager, "finds_all", property(lambda _: False, lambda _, wrong: None), raising=False)
    assert oracle.agreement(dynamo, TRTLLM, "", source, asked)["unequal"] == 1


def test_the_blocks_that_no_other_request_can_find_are_used_first() -> None:
    """Why the mocker finds more than a tree of the trace's ids: the block of the output is used for "c", not "ab"."""
    assert hits("dynamo-1.6.1", 4, "ab", "c", "abx", output=3) == [0, 0, 2]
