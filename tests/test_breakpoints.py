"""Positions at which the caller of ``open`` wants a text to be resumable, and what it is told of each."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from tests.test_looking_up import KINDS, cache_of, compute

from kvpagoda import Limits, Retention
from kvpagoda.errors import BadInput
from raises import raises

TEXT = list(range(41))
ASKED = [3, 9, 20, 40, 41, 90]
BOUNDED = [name for name in KINDS if name != "full"]


def told(sequence: Any) -> list[tuple[int, int, str]]:
    return [tuple(one) for one in sequence.checkpoints]


@pytest.mark.parametrize("given", [ASKED, tuple(ASKED), np.array(ASKED), np.array(ASKED, np.uint8)], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_can_be_resumed_where_the_caller_asked_for_it(name: str, given: Any) -> None:
    cache = cache_of(*KINDS[name])
    with cache.open(TEXT, capacity=0, checkpoints=given) as sequence:
        due = [(9, 8, "due"), (20, 20, "due"), (40, 40, "due"), (41, 40, "due")]
        assert told(sequence) == [(3, 0, "always"), *due, (90, 0, "beyond")]
        compute(cache, sequence)
        assert {state for _, at, state in told(sequence) if at} == {"kept"}
    cache.check()
    found = [cache.lookup(TEXT[:end] + [77] * 9).resumable for end in (8, 19, 22, 41)]
    assert found == ([8, 8, 20, 40] if name.startswith(("state", "all")) else [8, 16, 20, 40])
    bare = cache_of(*KINDS[name])
    with bare.open(TEXT, capacity=0) as sequence:
        assert sequence.checkpoints == ()
        compute(bare, sequence)
    if cache.core.states is not None:
        assert [bare.lookup(TEXT[:end] + [77] * 9).resumable for end in (9, 22)] == [0, 0]


def test_full_attention_needs_nothing_and_says_so() -> None:
    cache = cache_of(*KINDS["full"])
    with cache.open(TEXT, checkpoints=[0, 7, 41, 42]) as sequence:
        assert told(sequence) == [(0, 0, "always"), (7, 7, "always"), (41, 41, "always"), (42, 0, "beyond")]
    with cache.open(TEXT, checkpoints=[7], publish=False) as sequence:
        assert told(sequence) == [(7, 7, "private")]


@pytest.mark.parametrize("name", BOUNDED)
def test_positions_in_what_was_cached(name: str) -> None:
    cache = cache_of(*KINDS[name])
    with cache.open(TEXT, capacity=0, checkpoints=[8, 20]) as sequence:
        compute(cache, sequence)
    has_states = cache.core.states is not None
    with cache.open([*TEXT[:22], 5, 6, 7], capacity=0, checkpoints=[8, 12, 20, 24]) as sequence:
        assert sequence.cached_tokens == 20
        middle = "skipped" if has_states else "kept"
        assert [state for _, _, state in told(sequence)] == ["cached", middle, "cached", "due"]
        compute(cache, sequence)
        assert told(sequence)[3] == (24, 24, "kept")
    cache.check()


def test_a_position_is_rounded_to_the_grid_and_a_request_that_publishes_nothing_keeps_nothing() -> None:
    cache = cache_of(*KINDS["all"], limits=Limits(hit_grid=16))
    with cache.open(TEXT, capacity=0, checkpoints=[15, 31, 36]) as sequence:
        assert told(sequence) == [(15, 0, "always"), (31, 16, "due"), (36, 32, "due")]
    with cache.open(TEXT, capacity=0, checkpoints=[36], publish=False) as sequence:
        assert told(sequence) == [(36, 32, "private")]
        compute(cache, sequence)
    assert cache.lookup(TEXT).cached == 0


def test_a_step_past_a_position_and_no_room_are_told() -> None:
    cache = cache_of(*KINDS["state"])
    with cache.open(TEXT, checkpoints=[8, 20]) as sequence:
        sequence.commit(TEXT[:20])
        assert told(sequence) == [(8, 8, "passed"), (20, 20, "kept")]
    assert cache.stats().passed_boundaries == 1
    without = cache_of(*KINDS["state"], retention=Retention(checkpoints=0))
    with without.open(TEXT, checkpoints=[8]) as sequence:
        compute(without, sequence)
        assert told(sequence) == [(8, 8, "memory")]


def test_a_rewind_shortens_the_prompt_and_a_lost_resume_asks_again() -> None:
    windows = cache_of(*KINDS["window"])
    with windows.open(TEXT, capacity=0, checkpoints=[8, 36]) as sequence:
        compute(windows, sequence, 12)
        assert windows.lookup(TEXT).resumable == 12  # settles what waits
        sequence.rewind(1)
        assert told(sequence) == [(8, 8, "kept"), (36, 36, "beyond")]
    cache = cache_of(*KINDS["all"])
    sequence = cache.open(TEXT, capacity=0, checkpoints=[8, 36])
    compute(cache, sequence)
    sequence.suspend(whole=False)
    cache.core.capacity.forget(cache.core.prefix.clear)
    assert sequence.resume() == 41 and [state for _, _, state in told(sequence)] == ["due", "due"]
    sequence.close()


@pytest.mark.parametrize("wrong", [[-1], [1.5], "12", [[1]], [True, "a"], 4, [10**6], [2**40], {3}, ...], ids=repr)
def test_positions_that_are_none_are_refused(wrong: Any) -> None:
    cache = cache_of(*KINDS["all"])
    with raises(BadInput, needed=wrong if wrong not in ([10**6], [2**40]) else ANY, available=ANY):
        cache.open(TEXT, checkpoints=wrong)
    assert cache.stats().running == 0
    cache.check()
