"""What stays cached and for how long: namespaces, media, invalidation, pins, fences, priorities, partial blocks."""

from __future__ import annotations

import itertools
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from kvpagoda import Retention
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import BadInput, OutOfBlocks, RetryLater, StaleHandle
from kvpagoda.namespace import Namespace, namespace_key
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema
from options import grouped
from raises import raises

FULL = Attention(2, 4, 4, "float32")
WINDOW = Attention(1, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("recurrent", (2, 4, 4), "float32"),))


def books(*kinds: LayerKind, num_blocks: int = 12, max_requests: int = 4, **arguments: object) -> KVCache:
    """Return a cache without memory."""
    schema = Schema(tuple(Layer(i, "layer", (kind,)) for i, kind in enumerate(kinds or (FULL,))))
    sizes = dict(num_blocks=num_blocks, max_requests=max_requests, block_size=4, device="none")
    return KVCache(schema, **grouped(**sizes, **arguments))


def leave(cache: KVCache, tokens: object, namespace: object = None, **arguments: object) -> int:
    """Compute the prompt ``tokens`` in a request and close it. Returns how many tokens were cached."""
    with cache.open(tokens, namespace, capacity=0, **arguments) as sequence:  # type: ignore[arg-type]
        cached, prompt = sequence.cached_tokens, sequence._request.tokens
        while sequence.length < sequence.prompt_length:
            end = min(sequence.prompt_length, sequence.length + cache.step_limit(sequence))
            sequence.extend(end - sequence.length)
            sequence.commit(prompt[sequence.length : end])
    cache.check()
    return cached


def test_namespaces_are_never_taken_for_one_another() -> None:
    parts: list[str | bytes | None] = [None, "", b"", "a", b"a", "ab", "n", "s\x01", b"\x00" * 8]
    made = [Namespace(*fields) for fields in itertools.product(parts, repeat=3)]
    assert len({namespace_key(one) for one in made}) == len(made)
    assert namespace_key("a") == namespace_key(Namespace("a")) and namespace_key(None) == namespace_key(Namespace())
    with raises(BadInput, needed=7):
        namespace_key(Namespace(adapter=7))  # type: ignore[arg-type]


def test_tenants_and_adapters_share_nothing_and_equal_ones_do() -> None:
    cache, spaces = books(num_blocks=60), [None, "a", Namespace("a", "lora"), Namespace("a", "lora", "step 2")]
    for turn, space in itertools.product(range(2), spaces):
        assert leave(cache, range(9), space) == 8 * turn


def test_texts_with_different_images_share_only_the_tokens_before_them() -> None:
    cache, cat, dog = books(num_blocks=60), b"\1" * 16, b"\2" * 16
    text = [*range(6), *[9] * 8, *range(6)]
    assert leave(cache, text, media={6: cat}) == 0
    assert leave(cache, text, media={6: cat}) == 19
    assert leave(cache, text, media={6: dog}) == 6
    assert leave(cache, text) == 6
    assert leave(cache, text, media={6: cat, 15: dog}) == 15
    with raises(BadInput, needed=20, available=19):
        cache.open(text, media={20: cat})
    with raises(BadInput, needed=b"cat", available=16):
        cache.open(text, media={1: b"cat"})


def test_a_rewind_to_before_an_image_removes_it_from_the_text() -> None:
    cache = books(num_blocks=60)
    with cache.open(range(20), media={10: b"\1" * 16}) as sequence:
        sequence.commit(range(20))
        sequence.rewind(12)
        sequence.extend(12)
        sequence.commit(range(8, 20))
    assert cache.open(range(20)).cached_tokens == 19


@pytest.mark.parametrize("kinds", [(FULL,), (FULL, WINDOW, STATE), (STATE,)])
def test_invalidation_hides_at_once_and_frees_when_the_last_request_ends(kinds: tuple[LayerKind, ...]) -> None:
    cache = books(*kinds, num_blocks=60)
    for space in ("a", "b"):
        leave(cache, range(9), space)
    runs = cache.open(range(9), "a")
    assert runs.cached_tokens == 8
    cache.invalidate("a")
    runs.commit(range(8, 9))
    assert leave(cache, range(9), "a") == 0  # though a request from before still runs
    assert leave(cache, range(9), "b") == 8
    held = cache.stats().groups[0].held
    runs.close()
    cache.check()
    assert cache.stats().groups[0].held < held
    assert leave(cache, range(9), "a") == 8
    cache.invalidate()
    assert cache.stats().groups[0].held == 0 and leave(cache, range(9), "b") == 0


def test_pins_are_released_last_have_a_budget_and_never_block_a_request() -> None:
    cache = books(num_blocks=12, pin_share=0.5)
    leave(cache, range(16))
    pin = cache.pin(range(16))
    for first in range(100, 800, 100):
        leave(cache, range(first, first + 20))
    assert pin.is_held and leave(cache, range(16)) == 15
    leave(cache, range(900, 916))
    with raises(OutOfBlocks, needed=4, available=2):
        cache.pin(range(900, 916))
    assert leave(cache, range(1000, 1044)) == 0  # needs 11 of the 12 blocks
    assert not pin.is_held and leave(cache, range(16)) == 0
    cache.unpin(pin)
    cache.check()


def test_a_pin_keeps_the_checkpoint_too() -> None:
    cache = books(FULL, STATE, num_blocks=60, max_requests=2)
    leave(cache, range(9))
    pin = cache.pin(range(9))
    for first in range(100, 900, 100):
        leave(cache, range(first, first + 9))
    assert leave(cache, range(9)) == 8
    cache.unpin(pin)
    cache.check()
    for first in range(100, 9000, 100):  # what was found outlives what was not, but not five times as long
        leave(cache, range(first, first + 9))
    assert leave(cache, range(9)) == 0


def test_a_fence_keeps_the_blocks_that_a_step_in_flight_may_use() -> None:
    cache = books(FULL, WINDOW, num_blocks=24)
    sequence = cache.open(range(20), reserve=40)
    held = [ledger.held_places(sequence.slot).tolist() for ledger in cache.core.groups]
    with cache.fence([sequence]):
        sequence.commit(range(20))
        assert cache.open(range(20)).cached_tokens == 0  # not published before the step is done
        assert [ledger.held_places(sequence.slot).tolist() for ledger in cache.core.groups] == held
        for refused in (sequence.fork, lambda: sequence.rewind(1)):
            with raises(RetryLater, available=1):
                refused()
        with cache.fence([sequence]):
            sequence.close()
        with pytest.raises(StaleHandle):
            sequence.extend(1)
        assert cache.stats().running == 2 and all(group.held >= 5 for group in cache.stats().groups)
        cache.check()
    assert cache.stats().running == 1
    cache.check()
    assert cache.open(range(12)).match.num_tokens == 11


def test_the_end_of_a_request_makes_its_text_no_younger() -> None:
    cache = books(num_blocks=8, max_requests=4)
    first, second = cache.open(range(6), reserve=11), cache.open(range(100, 111), reserve=11)
    for sequence, text in ((first, range(6)), (second, range(100, 111))):
        sequence.commit(text)
        cache.lookup(range(8))  # whole blocks are published, in this order
    first.extend(5)
    first.commit(range(6, 11))
    second.close()
    first.close()  # closed last, but used first: it is evicted before the other text, and so is its unfinished block
    assert [cache.lookup(range(at, at + 12)).cached for at in (0, 100)] == [11, 11]
    with cache.open(range(200, 220), reserve=20):
        found = [cache.lookup(range(at, at + 12)).cached for at in (0, 100)]
        assert found[0] < found[1] == 11


def test_one_request_that_cannot_end_with_its_fence_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = books(num_blocks=20)
    first, second, third = (cache.open(range(at, at + 9)) for at in (0, 100, 200))
    release, failing = cache.core.release, first._request

    def fail(request: object, *arguments: object, **named: object) -> None:
        if request is failing:
            raise MemoryError
        release(request, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(cache.core, "release", fail)
    with pytest.raises(MemoryError), cache.fence([first, second, third]):
        for sequence in (first, second, third):
            sequence.close()
    assert [*cache.core.running.values()] == [failing]
    monkeypatch.undo()
    cache.close()
    assert not cache.core.running and cache.core.groups[0].num_held == cache.core.prefix.tree.num_cached
    cache.check()


@pytest.mark.parametrize("error", [MemoryError, OutOfBlocks, RuntimeError])
def test_a_copy_that_fails_while_publishing_fails_no_commit_and_is_made_later(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = books(FULL, STATE, num_blocks=24)
    sequence = cache.open(range(16), capacity=0, reserve=40)

    def fail(*_: object) -> None:
        raise error("the copy failed")

    monkeypatch.setattr(cache.core.memory, "convert", fail)
    sequence.extend(12)
    sequence.commit(range(12))  # the prompt's checkpoint is due here
    assert sequence.length == 12 and not cache.stats().checkpoints
    num_errors = cache.stats().publish_failures
    assert num_errors == len([one for one in caplog.records if one.levelname == "ERROR"]) == (error is RuntimeError)
    monkeypatch.undo()
    sequence.extend(12)
    sequence.commit([*range(12, 16), *range(8)])
    sequence.extend(12)
    sequence.commit(range(8, 20))
    assert cache.lookup(range(16)).cached == 15 and cache.stats().checkpoints
    sequence.close()
    cache.check()


def test_a_checkpoint_that_could_not_be_kept_is_kept_with_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = books(FULL, WINDOW, num_blocks=24)
    sequence = cache.open(range(16), capacity=0, reserve=40)
    index = cache.core.prefix
    tails = index.tails

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(index, "tails", fail)
    sequence.extend(16)
    sequence.commit(range(16))
    assert not cache.stats().checkpoints
    monkeypatch.setattr(index, "tails", tails)
    sequence.extend(1)
    sequence.commit([9])
    assert cache.stats().checkpoints == 1 and cache.lookup(range(16)).resumable == 12
    sequence.close()
    cache.check()


def test_a_copy_for_which_the_device_has_no_memory_is_a_lack_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema(tuple(Layer(i, "layer", (kind,)) for i, kind in enumerate((FULL, STATE))))
    cache = KVCache(schema, num_blocks=24, max_requests=2, block_size=4, device="cpu")

    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    sequence = cache.open(range(16), capacity=0)
    for arena in cache.core.memory.arenas:  # type: ignore[attr-defined]
        monkeypatch.setattr(arena, "copy", fail)
    sequence.extend(12)
    sequence.commit(range(12))
    assert not cache.stats().checkpoints and not cache.stats().publish_failures
    with raises(OutOfBlocks, needed=1):
        sequence.fork()
    monkeypatch.undo()
    sequence.fork().close()
    sequence.close()
    cache.check()


def test_an_error_of_the_library_while_publishing_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = books(FULL, STATE, num_blocks=24)

    def fail(*_: object) -> None:
        raise AssertionError("copied twice")

    sequence = cache.open(range(16), capacity=0)
    monkeypatch.setattr(cache.core.memory, "convert", fail)
    sequence.extend(12)
    with pytest.raises(AssertionError, match="copied twice"):
        sequence.commit(range(12))


def test_without_room_for_copies_a_hit_ends_on_the_grid_too() -> None:
    cache = books(num_blocks=6, hit_grid=8)
    leave(cache, range(20))
    prefix, key = cache.core.prefix, cache.core.namespaces.key(None)
    match, found = prefix.find(np.arange(13, dtype=np.int32), key)
    assert (found.num_tokens, found.resumable, prefix.without_copies(match, found).resumable) == (12, 8, 8)


def test_fenced_blocks_do_not_move() -> None:
    schema = Schema(
        tuple(
            Layer(i, "layer", (kind,)) for i, kind in enumerate((FULL, Recurrent((Rows("r", (9, 8, 4), "float32"),))))
        )
    )
    cache = KVCache(schema, 24_000, max_requests=6, block_size=4, device="cpu", retention=Retention(checkpoints=8))
    fenced = [cache.open(range(first, first + 12), reserve=20) for first in (0, 100)]
    held = [[ledger.held_places(s.slot).tolist() for ledger in cache.core.groups] for s in fenced]
    with cache.fence(fenced):
        for first in range(1000, 4000, 100):
            with cache.open(range(first, first + 24), capacity=0) as other:
                other.extend(24)
                other.commit(range(first, first + 24))
        assert [[ledger.held_places(s.slot).tolist() for ledger in cache.core.groups] for s in fenced] == held
        cache.check()


def test_windows_near_the_end_of_a_prompt_stay_while_it_is_computed() -> None:
    """Prompts that extend another one often part from it a little before its end: its windows there are kept from the moment
    when they slide out."""
    cache, text = books(FULL, WINDOW, num_blocks=500), np.arange(1200)
    (window,) = cache.core.prefix.windows
    with cache.open(text, capacity=0) as sequence:
        for begin in range(0, 1040, 40):
            sequence.extend(40)
            sequence.commit(text[begin : begin + 40])
        cache.core.capacity.forget(window.evict, window.num_cold)  # what nothing keeps
        sequence.extend(160)
        sequence.commit(text[1040:])
    parted = [np.where(text < end, text, text + 5_000) for end in (400, 800, 1000, 1160)]
    assert [cache.lookup(one).resumable for one in parted] == [0, 800, 1000, 1160]


def test_blocks_of_high_priority_stay_cached() -> None:
    cache = books(num_blocks=12, policy="priority")
    leave(cache, range(16), priority=5)
    for first in range(100, 800, 100):
        leave(cache, range(first, first + 20))
    assert leave(cache, range(16)) == 15
    with raises(BadInput, needed="best", available=ANY):
        books(policy="best")


def test_full_attention_reuses_up_to_the_token_and_copies_the_rest_of_the_block() -> None:
    schema = Schema((Layer(0, "layer", (FULL,)),))
    cache = KVCache(schema, num_blocks=7, block_size=8, device="cpu", max_requests=2, poison=True)
    with cache.open(range(24)) as sequence:
        view = cache.batch([sequence], [24]).layer(0)
        where = view.slot_mapping.long()
        view["k"][where // 8, where % 8] = torch.arange(24.0)[:, None, None]
        sequence.commit(range(24))
    other = cache.open([*range(21), 99, 98])
    assert other.cached_tokens == 21 and other.match.groups == {"full": 21}
    table = cache.core.groups[0].table.cells[other.slot]
    assert view["k"][int(table[2]), :5, 0, 0].tolist() == [16, 17, 18, 19, 20]
    other.commit([99, 98])
    cache.check()
    assert cache.open(range(24)).cached_tokens == 23  # the block that was copied is unchanged
    cache.check()


def test_the_match_reports_the_hit_of_each_group_and_what_limited_it() -> None:
    cache = books(FULL, WINDOW, STATE, num_blocks=60)
    leave(cache, range(32))
    match = cache.open(range(31)).match
    assert (match.num_tokens, match.resumable, match.limited_by) == (30, 28, "alignment")
    assert match.groups == {"full": 28, "window(10)": 28, "state": 28}
    parted = cache.open([*range(13), 99, 99, 99]).match
    assert (parted.num_tokens, parted.resumable, parted.limited_by) == (13, 0, "checkpoint")
    assert parted.groups == {"full": 12, "window(10)": 12, "state": 0}


@pytest.mark.parametrize("is_persistent", [False, True])
def test_states_that_are_ahead_of_a_text_are_not_kept_for_it(is_persistent: bool) -> None:
    """A step computes 8 tokens, of which 4 are committed: the states are those after 12 tokens, not after 8."""
    state = Recurrent((Rows("recurrent", (2, 4, 4), "float32"),))
    schema = Schema((Layer(0, "full", (Attention(1, 4, 4, "float32"),)), Layer(1, "state", (state,))))
    cache = KVCache(schema, num_blocks=40, max_requests=4, block_size=4, device="none")
    text = np.arange(16, dtype=np.int32)
    with cache.open(text[:4], reserve=32) as sequence:
        sequence.commit(text[:4])
        if is_persistent:
            batch = cache.persistent_batch([sequence])
            batch.extend(8)
            batch.commit(text[4:8], [4])
        else:
            sequence.extend(8)
            cache.batch([sequence], [8])
            sequence.commit(text[4:8])
        with cache.open(text) as other:
            assert other.match.num_tokens == 8 and other.cached_tokens == 4
        sequence.extend(4)
        cache.batch([sequence], [4])
        sequence.commit(text[8:12])  # now the states are those after 12 tokens again
        if is_persistent:
            batch.remove(sequence)
    with cache.open(text) as other:
        assert other.cached_tokens == 12
    cache.check()
