"""States that a step leaves at positions inside of it: named by its batch, kept by its commit, given back otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.test_looking_up import FULL, STATE, WINDOW

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.core.batch.step_buffers import StepBuffers
from kvpagoda.core.groups import StateGroup
from kvpagoda.errors import BadInput, CheckFailed, NeedsReset, StaleHandle
from kvpagoda.free_list import FreeStack
from kvpagoda.schema import Layer, LayerKind, Schema
from raises import raises

TEXT = list(range(41))
ALL: tuple[LayerKind, ...] = (FULL, WINDOW, STATE)


def cache_of(*kinds: LayerKind, named: int = 4, budget: Any = None, **arguments: Any) -> KVCache:
    schema = Schema(tuple(Layer(i, type(kind).__name__, (kind,)) for i, kind in enumerate(kinds)), "test")
    sizes: dict[str, Any] = {"budget": budget} if budget else {"num_blocks": 60}
    return KVCache(
        schema, block_size=4, max_requests=4, device="none", limits=Limits(step_checkpoints=named), **sizes, **arguments
    )


def begun(cache: KVCache, asked: Any = (8, 20, 36), end: int = 41) -> tuple[Any, Any]:
    """Return a request whose step has computed ``TEXT[:end]``, and its batch."""
    sequence = cache.open(TEXT, checkpoints=asked)
    return sequence, cache.batch([sequence], [end])


def free_states(cache: KVCache) -> int:
    return cache.stats().groups[-1].free


@pytest.mark.parametrize("kinds", [(STATE,), (FULL, STATE), ALL], ids=["state", "full and state", "all"])
def test_one_step_leaves_states_at_every_position(kinds: tuple[LayerKind, ...]) -> None:
    cache = cache_of(*kinds)
    other = cache.open([7] * 4)
    sequence = cache.open(TEXT, checkpoints=[8, 20, 36])
    assert cache.step_limit(sequence) == cache.max_context
    batch = cache.batch([other, sequence], [4, 41], pad_to=3)
    named = batch.layer(0).checkpoints
    assert named.rows.tolist() == [1] * 4 and named.tokens.tolist() == [4 + at - 1 for at in (8, 20, 36, 40)]
    assert {array.dtype for array in named} == {np.dtype(np.int32)}
    places = named.places.tolist()
    assert len({*places, *batch.state_indices[:2].tolist(), 0}) == 7
    assert sequence.step_checkpoints == (8, 20, 36, 40) and other.step_checkpoints == ()
    cache.check()
    sequence.commit(TEXT, sequence.step_checkpoints)
    assert sequence.step_checkpoints == () and {one.state for one in sequence.checkpoints} == {"kept"}
    cache.check()
    kept = cache.core.prefix.kept
    held = [int(cache.core.states.places_of(one.states)[0]) for one in kept.values()]
    assert held == places and cache.stats().passed_boundaries == 0
    found = [cache.lookup(TEXT[:end] + [77] * 9).resumable for end in (9, 22, 37, 41)]
    assert found == [8, 20, 36, 40]


def test_what_the_engine_does_not_name_is_not_kept_and_counts_as_passed() -> None:
    cache = cache_of(*ALL)
    sequence, _ = begun(cache)
    free = free_states(cache)
    sequence.commit(TEXT, [20])
    assert [one.state for one in sequence.checkpoints] == ["passed", "kept", "passed"]
    assert cache.stats().passed_boundaries == 3 and free_states(cache) == free + 3
    cache.check()
    without = cache_of(*ALL)
    sequence, _ = begun(without)
    sequence.commit(TEXT)
    assert without.stats().passed_boundaries == 4 and not without.core.prefix.kept
    without.check()


def test_without_the_option_nothing_is_named_and_a_step_ends_as_before() -> None:
    cache = cache_of(*ALL, named=0)
    sequence, batch = begun(cache)
    assert [len(part) for part in batch.checkpoints] == [0, 0, 0] and sequence.step_checkpoints == ()
    assert cache.step_limit(sequence) == 8
    with raises(BadInput, needed=8):
        sequence.commit(TEXT, [8])


def test_a_model_without_states_names_nothing() -> None:
    cache = cache_of(FULL, WINDOW)
    sequence, batch = begun(cache)
    assert [len(part) for part in batch.checkpoints] == [0, 0, 0] and sequence.step_checkpoints == ()
    sequence.commit(TEXT)
    sequence.close()
    cache.check()


def test_a_step_that_may_leave_two_states_ends_at_the_third_position() -> None:
    cache = cache_of(*ALL, named=2)
    sequence = cache.open(TEXT, checkpoints=[8, 20, 36], capacity=0)
    limits = []
    while sequence.length < 41:
        limits.append(int(cache.step_limit(sequence)))
        n = min(limits[-1], 41 - sequence.length)
        sequence.extend(n)
        cache.batch([sequence], [n])
        sequence.commit(TEXT[sequence.length : sequence.length + n], sequence.step_checkpoints)
    assert limits == [36, cache.max_context - 36]
    assert cache.stats().passed_boundaries == 0 and len(cache.core.prefix.kept) == 4


def ways_to_abandon(cache: KVCache, sequence: Any) -> Iterator[tuple[str, Any]]:
    yield "close", sequence.close
    yield "suspend", sequence.suspend
    yield "a new batch", lambda: cache.batch([sequence], [1])
    yield "rewind", lambda: (sequence.commit(TEXT[:3]), sequence.rewind(1))
    yield "reset", lambda: (sequence.close(), cache.reset())
    yield "invalidate", lambda: (cache.invalidate(), sequence.commit(TEXT, (8,)))


@pytest.mark.parametrize("way", [name for name, _ in ways_to_abandon(None, cache_of(*ALL).open(TEXT))])  # type: ignore[arg-type]
def test_an_abandoned_step_gives_its_blocks_back(way: str) -> None:
    cache, asked, end = cache_of(*ALL), (8, 20, 36), 41
    if way == "rewind":
        schema, asked, end = cache.schema.rewindable(4), (4,), 6
        limits = Limits(step_checkpoints=4)
        cache = KVCache(schema, num_blocks=60, block_size=4, max_requests=4, device="none", limits=limits)
    before, places = free_states(cache), cache.core.states.places
    sequence, batch = begun(cache, asked, end)
    assert free_states(cache) == before - places - len(sequence.step_checkpoints) and sequence.step_checkpoints
    cache.check()
    dict(ways_to_abandon(cache, sequence))[way]()
    cache.check()
    is_running = sequence.is_open and way != "suspend"
    assert free_states(cache) == before - is_running * places
    assert not cache.core.states.named and not cache.core.states.wrote
    if not is_running:
        with pytest.raises(StaleHandle):
            _ = batch.checkpoints


def test_inside_a_fence_nothing_is_given_back_and_its_end_keeps_what_was_written() -> None:
    cache = cache_of(*ALL)
    sequence, batch = begun(cache, end=38)
    with cache.fence([sequence]):
        free, first = free_states(cache), batch.checkpoints.places.tolist()
        again = cache.batch([sequence], [38])
        assert free_states(cache) == free and again.checkpoints.places.tolist() == []
        sequence.commit(TEXT[:38], (8, 36))
        assert free_states(cache) == free and not cache.core.prefix.kept
        cache.check()
    assert len(cache.core.prefix.kept) == 2 and free_states(cache) == free + 1 and len(first) == 3
    cache.check()
    with cache.fence([sequence]):
        sequence.close()
        cache.check()
    assert not cache.core.states.named
    cache.check()


def test_a_step_of_which_a_part_is_committed_keeps_that_part() -> None:
    cache = cache_of(FULL, STATE)
    sequence, _ = begun(cache)
    with raises(BadInput, needed=36):
        sequence.commit(TEXT[:20], (8, 36))
    sequence.commit(TEXT[:20], (8, 20))
    assert [one.state for one in sequence.checkpoints] == ["kept", "kept", "due"] and sequence.step_checkpoints == (
        36,
        40,
    )
    cache.check()
    cache.batch([sequence], [21])
    sequence.commit(TEXT[20:], sequence.step_checkpoints)
    assert sequence.checkpoints[2].state == "kept"
    cache.check()


@pytest.mark.parametrize("wrong", [[9], [-8], [8.0], "8", [44], [8, 8, 12], 8])
def test_other_positions_are_refused_and_nothing_is_committed(wrong: Any) -> None:
    cache = cache_of(*ALL)
    sequence, _ = begun(cache)
    with pytest.raises(BadInput):
        sequence.commit(TEXT, wrong)
    assert sequence.length == 0 and len(sequence.step_checkpoints) == 4
    cache.check()


def test_two_requests_with_one_text_keep_one_checkpoint_of_it() -> None:
    cache = cache_of(*ALL)
    first, second = (cache.open(TEXT, checkpoints=[8, 20]) for _ in range(2))
    batch = cache.batch([first, second], [41, 41])
    assert batch.checkpoints.rows.tolist() == [0] * 3 + [1] * 3
    first.commit(TEXT, first.step_checkpoints)
    second.commit(TEXT, second.step_checkpoints)
    assert len(cache.core.prefix.kept) == 3 and not cache.core.states.named
    cache.check()


def test_without_room_fewer_are_named() -> None:
    cache = cache_of(STATE, named=8, retention=Retention(checkpoints=2))
    others = [cache.open([50 + i] * 3) for i in range(3)]
    sequence = cache.open(TEXT, checkpoints=range(4, 40, 4))
    free = free_states(cache)
    batch = cache.batch([sequence], [41])
    assert len(batch.checkpoints.places) == free == 2 and sequence.step_checkpoints == (4, 8)
    cache.check()
    sequence.commit(TEXT, sequence.step_checkpoints)
    assert len(cache.core.prefix.kept) == 2 and cache.lookup(TEXT).resumable == 8
    cache.check()
    for one in (sequence, *others):
        one.close()
    cache.check()


def test_a_batch_that_raises_leaves_what_the_step_before_it_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the same positions, and more: then there is no batch, and the states of the step before it are kept."""
    cache = cache_of(*ALL)
    sequence, _ = begun(cache, end=30)
    named, free = sequence.step_checkpoints, free_states(cache)
    blocks = dict(cache.core.states.named[sequence._request])
    assert named == (8, 20)

    def lacks_memory(*_: Any) -> None:
        raise MemoryError("no memory for index arrays")

    with monkeypatch.context() as patch:
        patch.setattr(StepBuffers, "put", lacks_memory)
        with pytest.raises(MemoryError):
            cache.batch([sequence], [41])
    assert sequence.step_checkpoints == named and free_states(cache) == free
    assert cache.core.states.named[sequence._request] == blocks
    cache.check()
    sequence.commit(TEXT[:30], named)
    assert [one.state for one in sequence.checkpoints] == ["kept", "kept", "due"]
    cache.check()


def test_a_batch_that_is_made_again_names_the_same_blocks() -> None:
    cache = cache_of(*ALL)
    sequence, batch = begun(cache)
    free, places = free_states(cache), batch.checkpoints.places.tolist()
    again = cache.batch([sequence], [25]).checkpoints
    assert again.places.tolist() == places[:2] and sequence.step_checkpoints == (8, 20)
    assert free_states(cache) == free + 2
    cache.check()


def test_lacking_memory_names_fewer_and_tears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = cache_of(*ALL), []
    sequence = cache.open(TEXT, checkpoints=[8, 20, 36])
    peek = FreeStack.peek

    def lacks_memory(free: FreeStack, n: int) -> Any:
        calls.append(n)
        if len(calls) == 2:
            raise MemoryError("no memory for a number")
        return peek(free, n)

    monkeypatch.setattr(FreeStack, "peek", lacks_memory)
    assert len(cache.batch([sequence], [41]).checkpoints.places) == 1
    assert sequence.step_checkpoints == (8,)
    cache.check()


def test_a_checkpoint_that_was_kept_when_memory_ran_out_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers cannot note it; the next commit, which tries again, finds it kept."""
    cache = cache_of(*ALL)
    sequence, _ = begun(cache)

    def lacks_memory(*_: Any) -> None:
        raise MemoryError("no memory for hashes")

    with monkeypatch.context() as patch:
        patch.setattr(type(cache.core.tiers), "checkpoint_saved", lacks_memory)
        sequence.commit(TEXT, sequence.step_checkpoints)
    cache.check()
    sequence.commit([])
    assert {one.state for one in sequence.checkpoints} == {"kept"} and cache.stats().passed_boundaries == 0
    assert len(cache.core.prefix.kept) == 4
    cache.check()


def test_a_commit_that_is_interrupted_keeps_the_states_or_needs_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(*ALL)
    sequence, _ = begun(cache)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StateGroup, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sequence.commit(TEXT, (8, 20))
    with pytest.raises(NeedsReset):
        cache.check()
    cache.reset()
    cache.check()


def test_a_lost_block_is_found() -> None:
    cache = cache_of(*ALL)
    sequence, _ = begun(cache)
    cache.core.states.pop(sequence._request, 2)
    with raises(CheckFailed, available=[2], group="group 'state'"):
        cache.check()
