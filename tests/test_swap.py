"""Suspend and resume: every byte comes back, whatever happened in between, and every row has one owner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda import Limits, Retention
from kvpagoda.arrays import Ids
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import BadInput, CheckFailed, NeverFits, OutOfBlocks, RetryLater, StaleHandle
from kvpagoda.schema import Schema
from options import evict, grouped, is_suspended
from raises import raises
from records import records_of
from test_manager import FULL, SCHEMAS, SHARING, STATE, WINDOW, FakeEngine, schema_of, text

WHOLE = pytest.mark.parametrize("whole", [True, False], ids=["whole", "in part"])
FULL_AND_STATE = schema_of(FULL, STATE)


def cache_of(schema: Schema, num_blocks: int = 40, **arguments: object) -> KVCache:
    sizes: dict[str, object] = dict(max_requests=4, block_size=8, device="cpu", poison=True, num_blocks=num_blocks)
    return KVCache(schema, **grouped(**{**sizes, **arguments}))


def fill_random(cache: KVCache) -> None:
    """Fill all memory of ``cache`` with random bytes."""
    for buffer in cache.core.memory._buffers:
        buffer.random_(0, 255)


def rows_of(sequence: Sequence, cache: KVCache) -> list[torch.Tensor]:
    """Return the records of the blocks that hold committed tokens, uint8 ``[n, nbytes]`` for each group."""
    found = []
    for ledger in cache.core.groups:
        first, end = ledger.first[sequence.slot], -(-sequence.length // ledger.block_size)
        ids = ledger.table.cells[sequence.slot, first:end]
        found.append(records_of(cache.core.memory.arenas[ledger.index], ids))
    return found


def computed(cache: KVCache, tokens: object, reserve: int = 0, n: int = 0) -> Sequence:
    """Return a sequence whose prompt and ``n`` more tokens are committed. Its rows are whatever the memory held."""
    sequence = cache.open(tokens, capacity=0, reserve=reserve)
    while sequence.length < sequence.prompt_length:
        end = min(sequence.length + min(9, cache.step_limit(sequence)), sequence.prompt_length)
        sequence.extend(end - sequence.length)
        sequence.commit(sequence._request.tokens[sequence.length : end])
    for i in range(n):
        sequence.extend(1)
        sequence.commit([i])
    return sequence


def overwrite(cache: KVCache, first: int = 500) -> None:
    """Let other requests take every block that they can get, and overwrite these blocks."""
    others = []
    with contextlib.suppress(RetryLater):
        while True:
            others.append(cache.open(range(first, first + 9)))
            first += 20
    with contextlib.suppress(OutOfBlocks, BadInput):
        while True:
            others[0].extend(others[0].capacity - others[0].length + 1)
    for other in others:
        for ledger in cache.core.groups:
            own = ledger.table.cells[other.slot, ledger.shared[other.slot] : ledger.end[other.slot]]
            cache.core.memory.arenas[ledger.index].poison(own[ledger.first[other.slot] :])
        other.close()


def families() -> list[str]:
    pytest.importorskip("transformers")
    from models import TINY

    return sorted(TINY)


def check_bytes(cache: KVCache, whole: bool) -> None:
    """Suspend and resume a request, and compare all bytes and public values before and after."""
    fill_random(cache)
    sequence = computed(cache, range(100, 121), 40, n=4)
    cache.lookup([1])  # settles it: its windows slide
    before, shown = (
        rows_of(sequence, cache),
        (sequence.length, sequence.tokens.tolist(), sequence.match, sequence.capacity),
    )
    sequence.suspend(whole)
    cache.check()
    stats = cache.stats()
    assert (stats.running, stats.suspended) == (0, 1) and 0 < stats.swap_nbytes <= stats.swap_capacity
    assert all(group.free + group.evictable == group.total and not group.outstanding for group in stats.groups)
    assert is_suspended(sequence) and (sequence.length, sequence.tokens.tolist(), sequence.match) == shown[:3]
    if whole:
        cache.core.capacity.forget(cache.core.prefix.clear)
        fill_random(cache)
    assert sequence.resume() == 0
    cache.check()
    assert not is_suspended(sequence) and cache.stats().swap_nbytes == 0
    assert (sequence.length, sequence.tokens.tolist(), sequence.match, sequence.capacity) == shown
    assert all(torch.equal(old, new) for old, new in zip(before, rows_of(sequence, cache)))
    sequence.extend(9)
    sequence.commit(range(9))
    cache.check()
    sequence.close()
    assert cache.open(range(100, 121)).match.num_tokens == 20 or not cache.plan.groups  # it was published again
    cache.check()


@WHOLE
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_byte_comes_back(name: str, whole: bool) -> None:
    check_bytes(cache_of(SCHEMAS[name]), whole)
    check_bytes(cache_of(SCHEMAS[name], order="layer"), whole)


@WHOLE
@pytest.mark.parametrize("name", SHARING)
def test_every_byte_comes_back_where_groups_share_their_memory(name: str, whole: bool) -> None:
    check_bytes(cache_of(SHARING[name], None, budget="96KiB"), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", families())
def test_every_byte_comes_back_for_every_family(name: str) -> None:
    from models import TINY

    schema = Schema.from_hf_config(TINY[name]())
    for whole in (True, False):
        check_bytes(cache_of(schema, block_size=16 if name == "deepseek_v4" else 8), whole)


@pytest.mark.parametrize("name", ["full", "mixed", "state"])
def test_all_other_blocks_may_be_overwritten_while_suspended(name: str) -> None:
    cache = cache_of(SCHEMAS[name], 12)
    fill_random(cache)
    sequence = computed(cache, range(30), 60, n=3)
    before = rows_of(sequence, cache)
    for _ in range(3):
        sequence.suspend()
        overwrite(cache)
        assert sequence.resume() == 0
        cache.check()
        assert all(torch.equal(old, new) for old, new in zip(before, rows_of(sequence, cache)))


def test_blocks_that_others_still_use_are_shared_again_and_not_copied() -> None:
    cache = cache_of(SCHEMAS["full"])
    fill_random(cache)
    sequence, other = computed(cache, range(20)), computed(cache, range(20))
    ids = cache.core.groups[0].held_places(other.slot)[:2].tolist()
    assert cache.core.groups[0].held_places(sequence.slot)[:2].tolist() == ids
    copied: list[int] = []
    memory, from_host = cache.core.memory, cache.core.memory.from_host

    def count(group: int, ids: Ids, table: np.ndarray, rows: list[int]) -> None:
        copied.extend(ids.tolist())
        from_host(group, ids, table, rows)

    memory.from_host = count  # type: ignore[method-assign, assignment]
    sequence.suspend()
    assert sequence.resume() == 0
    held = cache.core.groups[0].held_places(sequence.slot).tolist()
    assert held[:2] == ids and copied == held[2:] and len(copied) == 1


def test_a_suspended_sequence_only_answers_what_it_knows() -> None:
    cache = cache_of(SCHEMAS["mixed"])
    sequence, other = computed(cache, range(20)), computed(cache, range(40, 50))
    together = cache.persistent_batch([sequence, other])
    together.extend()
    together.commit([7, 8])
    batch = cache.batch([other], [1]) if other.capacity > other.length else None
    sequence.suspend()
    assert sequence.tokens.tolist() == [*range(20), 7] and sequence.length == 21 and sequence.cached_tokens == 0
    if batch is not None:
        batch.layer(0)  # that batch has another sequence
    calls: list[Callable[[], object]] = [
        lambda: sequence.slot, lambda: sequence.capacity, lambda: sequence.extend(1), lambda: sequence.commit([1]),
        sequence.fork, lambda: sequence.rewind(1), sequence.suspend, lambda: sequence.__enter__(),
        lambda: cache.batch([sequence], [1]), lambda: cache.fence([sequence]).__enter__(),
        lambda: cache.persistent_batch([sequence]),
    ]  # fmt: skip
    for call in calls:
        with raises(StaleHandle, needed="sequence", available="suspended"):
            call()
    with raises(StaleHandle, needed=[0]):
        together.extend()
    sequence.resume()
    cache.check()
    assert together.extend().rows.slots[0] == sequence.slot
    together.commit([9, 9])
    assert sequence.tokens.tolist() == [*range(20), 7, 9]
    with raises(BadInput, needed="suspended", available="running"):
        sequence.resume()
    sequence.suspend()
    together.remove(sequence)
    together.extend()
    sequence.close()
    cache.check()
    assert cache.stats().swap_nbytes == 0 and not is_suspended(sequence)
    for call in (sequence.close, sequence.resume, sequence.suspend):
        with raises(StaleHandle, needed="sequence", available="closed"):
            call()


def test_a_batch_is_over_when_one_of_its_sequences_was_suspended_even_if_it_runs_again() -> None:
    cache = cache_of(SCHEMAS["full"])
    one, other = computed(cache, range(20), 30), computed(cache, range(40, 50), 30)
    for sequence in (one, other):
        sequence.extend(1)
    batch = cache.batch([one], [1])
    other.suspend()
    batch.layer(0)
    one.suspend()
    one.resume()
    with raises(StaleHandle, needed="batch", available="over"):
        batch.layer(0)


@WHOLE
def test_without_room_in_the_swap_or_behind_a_fence_nothing_changes(whole: bool) -> None:
    cache = cache_of(SCHEMAS["mixed"], swap=3500)
    sequence = computed(cache, range(20))
    cells = [ledger.table.cells.copy() for ledger in cache.core.groups]
    with raises(OutOfBlocks, needed=6 if whole else 4, available=3):
        sequence.suspend(whole)
    with cache.fence([sequence]), raises(RetryLater, available=1):
        sequence.suspend(whole)
    assert all(np.array_equal(old, ledger.table.cells) for old, ledger in zip(cells, cache.core.groups))
    sequence.extend(1)
    cache.check()
    for swap, figures in ((-1, {"field": "swap", "needed": -1, "available": 0}), ("much", {"needed": "much"})):
        with raises(BadInput, **figures):
            cache_of(SCHEMAS["full"], swap=swap)
    none = computed(cache_of(SCHEMAS["full"], swap=0), range(9))
    with raises(OutOfBlocks, needed=2, available=0):
        none.suspend()


def test_resume_waits_for_a_slot_and_for_room() -> None:
    cache = cache_of(FULL_AND_STATE, 8, max_requests=2)
    sequence = computed(cache, range(20), 30)
    held = cache.core.groups[0].reserved[sequence.slot]
    sequence.suspend()
    others = [cache.open([1], reserve=8), cache.open([2], reserve=8)]
    with raises(RetryLater, needed=1, available=0):
        sequence.resume()
    others.pop().close()
    others[0].extend(40)
    for _ in range(2):
        with raises(RetryLater, needed=4, available=3, group="full"):
            sequence.resume()
        cache.check()
        assert is_suspended(sequence) and cache.stats().suspended == 1
    others[0].close()
    with raises(NeverFits, needed=65, available=64):
        sequence.resume(reserve=65)
    with raises(BadInput, field="capacity", needed=-1, available=0):
        sequence.resume(capacity=-1)
    assert sequence.resume() == 0 and cache.core.groups[0].reserved[sequence.slot] == held
    sequence.suspend()
    sequence.resume(capacity=25, reserve=50)
    assert sequence.capacity >= 25 and cache.core.groups[0].reserved[sequence.slot] == 7
    cache.check()


def test_the_oldest_pin_is_released_for_a_request_that_could_not_resume() -> None:
    cache = cache_of(SCHEMAS["full"], 4, pin_share=1)
    sequence = computed(cache, range(20))
    sequence.suspend()
    cache.core.capacity.forget(cache.core.prefix.clear)
    computed(cache, range(100, 117)).close()
    pin = cache.pin(range(100, 117))
    assert sequence.resume() == 0 and not pin.is_held
    cache.check()


@pytest.mark.parametrize("num_left", [0, 1])
def test_suspended_in_part_a_request_resumes_from_the_blocks_still_cached(num_left: int) -> None:
    cache = cache_of(SCHEMAS["full"])
    fill_random(cache)
    sequence = computed(cache, range(20), 40, n=3)
    before = rows_of(sequence, cache)[0]
    sequence.suspend(whole=False)
    evict(cache, 2 - num_left)
    cache.check()
    assert sequence.resume(reserve=50) == 23 - 8 * num_left
    cache.check()
    assert sequence.length == sequence.cached_tokens == 8 * num_left and sequence.capacity == sequence.length
    assert sequence.prompt_length == 23 and cache.stats().swap_nbytes == 0
    assert torch.equal(before[:num_left], rows_of(sequence, cache)[0])
    sequence.extend(23 - sequence.length)
    with raises(BadInput, needed=999, available=ANY):
        sequence.commit([999])
    sequence.commit([*range(20), 0, 1, 2][sequence.length :])
    assert sequence.tokens.tolist() == [*range(20), 0, 1, 2]
    assert cache.stats().computed_tokens == 23 + 23 - 8 * num_left and cache.stats().cached_tokens == 8 * num_left
    sequence.close()
    cache.check()


def test_suspended_in_part_a_hybrid_resumes_from_a_checkpoint() -> None:
    cache = cache_of(FULL_AND_STATE, checkpoint_every=1)
    fill_random(cache)
    sequence = computed(cache, range(34), 60)
    sequence.suspend(whole=False)
    evict(cache, 1)
    assert sequence.resume() == 34 - 24 and sequence.length == 24 and sequence.match.checkpoint is not None
    cache.check()
    sequence.extend(10)
    sequence.commit(range(24, 34))
    sequence.suspend(whole=False)
    cache.core.capacity.forget(cache.core.prefix.clear)
    assert sequence.resume() == 34 and sequence.length + cache.step_limit(sequence) == 8
    cache.check()


def test_suspending_in_part_copies_less_than_the_whole() -> None:
    cache = cache_of(SCHEMAS["mixed"])
    sequence = computed(cache, range(200), 210)
    sequence.suspend(whole=False)
    part = cache.stats().swap_nbytes
    assert sequence.resume() == 0
    sequence.suspend()
    # suspended in part, not even the shared blocks of windows are copied
    assert cache.stats().swap_nbytes >= part + 25 * cache.core.swap.width


@WHOLE
def test_forks_and_rewinds_after_a_resume_are_those_of_before(whole: bool) -> None:
    cache = cache_of(schema_of(FULL, WINDOW), num_blocks=60)
    fill_random(cache)
    sequence = computed(cache, range(30), 60, n=2)
    rewound = sequence.fork(reserve=40)
    rewound.rewind(3)
    expected = rows_of(rewound, cache)
    child = sequence.fork()
    sequence.suspend(whole)
    child.close()
    assert sequence.resume() == 0
    again = sequence.fork(reserve=40)
    cache.check()
    assert all(torch.equal(old, new) for old, new in zip(rows_of(sequence, cache), rows_of(again, cache)))
    again.suspend(whole)
    again.resume()
    for one in (again, sequence):
        one.rewind(3)
        assert all(torch.equal(old[:, :64], new[:, :64]) for old, new in zip(expected, rows_of(one, cache)))
        one.extend(2)
        one.commit([5, 6])
        cache.check()
    sequence.suspend(whole)
    assert sequence.resume() == 0 and sequence.tokens.tolist() == [*range(29), 5, 6]
    cache.check()


@WHOLE
@pytest.mark.parametrize("all_of_them", [False, True])
def test_after_an_invalidation_a_request_resumes_and_publishes_nothing(whole: bool, all_of_them: bool) -> None:
    cache = cache_of(FULL_AND_STATE)
    fill_random(cache)
    sequence = cache.open(range(20), "a")
    sequence.commit(range(20))
    before = rows_of(sequence, cache)
    sequence.suspend(whole)
    cache.invalidate(*([] if all_of_them else ["a"]))
    cache.check()
    assert cache.stats().groups[0].held == 0
    again = sequence.resume()
    assert again == (0 if whole else 20)
    if whole:
        assert all(torch.equal(old, new) for old, new in zip(before, rows_of(sequence, cache)))
    else:
        sequence.extend(20)
        sequence.commit(range(20))
    assert cache.open(range(20), "a", capacity=0).cached_tokens == 0
    sequence.suspend(whole)
    sequence.resume()
    sequence.close()
    cache.check()
    assert cache.stats().groups[0].held == 0 and not cache.core.stale


def test_reset_is_refused_and_close_works_while_a_request_is_suspended() -> None:
    cache = cache_of(SCHEMAS["mixed"])
    sequence, other = computed(cache, range(20)), computed(cache, range(30, 50))
    sequence.suspend()
    other.close()
    with raises(RetryLater, available=[]):
        cache.reset()
    cache.close()
    assert not sequence.is_open and cache.stats().swap_nbytes == 0 and cache.stats().suspended == 0
    with pytest.raises(StaleHandle):
        sequence.resume()


def test_a_with_block_ends_what_is_suspended() -> None:
    cache = cache_of(SCHEMAS["mixed"])
    with computed(cache, range(20)) as sequence:
        sequence.suspend()
    assert not sequence.is_open and cache.stats().swap_nbytes == 0
    cache.check()


def test_check_names_rows_that_are_lost() -> None:
    cache = cache_of(SCHEMAS["full"])
    sequence = computed(cache, range(20))
    sequence.suspend()
    lost = cache.core.swap._rows.acquire(1)
    with raises(CheckFailed, available=[3]):
        cache.check()
    cache.core.swap._rows.give(lost)
    cache.check()


class Broken(Exception):
    """The error of a copy that fails."""


@WHOLE
@pytest.mark.parametrize("name", ["full", "mixed", "state", "compressed"])
def test_after_a_copy_that_failed_everything_is_as_before(name: str, whole: bool) -> None:
    cache = cache_of(SCHEMAS[name])
    fill_random(cache)
    sequence = computed(cache, range(20), 40, n=1)
    before = rows_of(sequence, cache)
    left = 0

    def breaking(copy: Callable[..., None]) -> Callable[..., None]:
        def inner(*arguments: object) -> None:
            nonlocal left
            copy(*arguments)
            left -= 1
            if not left:
                raise Broken

        return inner

    memory = cache.core.memory
    memory.to_host, memory.from_host = breaking(memory.to_host), breaking(memory.from_host)  # type: ignore[method-assign]
    num_failed = 0
    for call, is_aside in ((lambda: sequence.suspend(whole), False), (sequence.resume, True)):
        for nth in range(1, len(cache.core.groups) + 1):
            left = nth
            slots, swapped = sorted(cache.core.free_slots), cache.stats().swap_nbytes
            with pytest.raises(Broken):
                call()
            num_failed += 1
            cache.check()
            assert is_suspended(sequence) == is_aside
            assert (sorted(cache.core.free_slots), cache.stats().swap_nbytes) == (slots, swapped)
        left = 0
        call()
        cache.check()
    assert num_failed == 2 * len(cache.core.groups)
    assert all(torch.equal(old, new) for old, new in zip(before, rows_of(sequence, cache)))


def traffic(cache: KVCache, steps: int, seed: int) -> dict[str, int]:
    """Make random opens, steps, forks, rewinds, fences, suspends, resumes and closes over texts that share prefixes.
    Rows are compared whenever they are read, and ``check`` runs after each. Returns how often each kind happened."""
    rng, engine = np.random.default_rng(seed), FakeEngine(cache)
    heads = [rng.integers(0, 50, n) for n in (5, 16, 17, 33, 40)]
    alive: list[Sequence] = []
    seen = dict.fromkeys(("suspended", "resumed", "again", "refused", "fenced", "closed", "invalidated"), 0)
    for _ in range(steps):
        kind, running = rng.random(), [sequence for sequence in alive if not is_suspended(sequence)]
        aside = [sequence for sequence in alive if is_suspended(sequence)]
        picked = running[int(rng.integers(len(running)))] if running else None
        if kind < 0.2 and len(alive) < 8:
            prompt, space = text(rng, heads), int(rng.integers(2))
            with contextlib.suppress(RetryLater, NeverFits):
                alive.append(cache.open(prompt, f"{space}", capacity=0, reserve=len(prompt) + int(rng.integers(0, 20))))
                engine.spaces[id(alive[-1])] = space
        elif kind < 0.26 and alive:
            alive.pop(int(rng.integers(len(alive)))).close()
        elif kind < 0.3 and picked:
            with contextlib.suppress(RetryLater, NeverFits):
                alive.append(picked.fork(reserve=picked.length + int(rng.integers(0, 20))))
                engine.spaces[id(alive[-1])] = engine.spaces[id(picked)]
        elif kind < 0.34 and picked:
            with contextlib.suppress(BadInput, OutOfBlocks):
                picked.rewind(int(rng.integers(0, min(picked.length, 9) + 1)))
        elif kind < 0.45 and picked:
            try:
                picked.suspend(whole=rng.random() < 0.5)
                seen["suspended"] += 1
            except OutOfBlocks:
                seen["refused"] += 1
        elif kind < 0.65 and aside:
            suspended = aside[int(rng.integers(len(aside)))]
            with contextlib.suppress(RetryLater, NeverFits):
                room = None if rng.random() < 0.5 else int(rng.integers(0, suspended.length + 9))
                again = suspended.resume(capacity=room, reserve=None if rng.random() < 0.5 else suspended.length + 9)
                seen["resumed"] += 1
                seen["again"] += again > 0
        elif kind < 0.655:
            cache.invalidate(*([] if rng.random() < 0.3 else [f"{rng.integers(2)}"]))
            seen["invalidated"] += 1
        else:
            ready, new = [], []
            for sequence in [s for s in running if rng.random() < 0.7]:
                left = sequence.prompt_length - sequence.length
                n = int(rng.integers(1, min(left, 9) + 1)) if left > 0 else 1
                n = min(n, cache.step_limit(sequence) or n)
                try:
                    sequence.extend(n)
                except (OutOfBlocks, BadInput):
                    continue
                known = sequence._request.tokens[sequence.length : min(sequence.length + n, sequence.prompt_length)]
                ready.append(sequence)
                new.append(np.concatenate((known, rng.integers(0, 50, n - len(known)))).astype(np.int32))
            if ready:
                engine.step(ready, new)
                with cache.fence(ready) if rng.random() < 0.2 else contextlib.nullcontext():
                    for sequence, tokens in zip(ready, new):
                        sequence.commit(tokens)
                        if sequence._request.num_fences:
                            with raises(RetryLater, available=1):
                                sequence.suspend()
                            seen["fenced"] += 1
        cache.check()
    for sequence in alive:
        sequence.close()
        seen["closed"] += 1
    cache.check()
    stats = cache.stats()
    assert all(group.free + group.evictable == group.total and not group.outstanding for group in stats.groups)
    assert stats.swap_nbytes == stats.suspended == 0
    return seen


@pytest.mark.parametrize("name", ["full", "window", "mixed", "state", "latent"])
def test_rows_read_after_a_resume_are_the_rows_written(name: str) -> None:
    cache = KVCache(
        SCHEMAS[name], num_blocks=40, max_requests=6, block_size=4, device="cpu", poison=True,
        limits=Limits(step_tokens=9, swap="12KB"), retention=Retention(checkpoints=8, checkpoint_every=2),
    )  # fmt: skip
    seen = traffic(cache, 1200, seed=3)
    assert seen["resumed"] > 60 and seen["fenced"] > 60, seen
    assert name in ("window", "state") or seen["again"], seen


@pytest.mark.parametrize(("name", "budget"), [("mixed", 24_000), ("full and state", 24_000), ("windows", 7_000)])
def test_rows_stay_right_when_blocks_move_and_requests_are_set_aside(name: str, budget: int) -> None:
    cache = KVCache(
        SHARING[name], budget, max_requests=6, block_size=4, device="cpu", poison=True, limits=Limits(step_tokens=9),
        retention=Retention(checkpoints=8, checkpoint_every=2),
    )  # fmt: skip
    seen = traffic(cache, 1000, seed=4)
    assert seen["resumed"] > 50, seen
