"""Sequences and fences that callers lose: by an interrupt just as a call returns, or because nobody keeps them."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType
from typing import Any

import pytest

from kvpagoda.core.kv_cache import KVCache
from kvpagoda.errors import RetryLater, StaleHandle
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema
from raises import raises

FULL = Attention(2, 4, 4, "float32")
WINDOW = Attention(1, 4, 4, "float32", Growth(window=10))
STATE = Recurrent((Rows("recurrent", (2, 4, 4), "float32"),))
KINDS: dict[str, tuple[LayerKind, ...]] = {"full": (FULL,), "all": (FULL, WINDOW, STATE)}


def cache_of(*kinds: LayerKind, num_blocks: int = 40, max_requests: int = 2) -> KVCache:
    schema = Schema(tuple(Layer(i, "layer", (kind,)) for i, kind in enumerate(kinds or (FULL,))))
    return KVCache(schema, num_blocks=num_blocks, max_requests=max_requests, block_size=4, device="none")


def interrupted_as_it_returns(call: Callable[[], object]) -> None:
    """Make ``call``, a method of a cache or a sequence, and interrupt it once it has released the lock of the cache."""

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_return" and argument.__name__ == "release" and frame.f_code.co_name == "guarded":
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return
    finally:
        sys.setprofile(None)
    raise AssertionError("it was not interrupted")


@pytest.mark.parametrize("name", KINDS)
def test_what_an_interrupted_open_began_is_closed_when_its_slot_is_needed(name: str) -> None:
    cache = cache_of(*KINDS[name], max_requests=1)
    interrupted_as_it_returns(lambda: cache.open(range(9)))
    assert cache.stats().running == 1
    with cache.open(range(100, 109)) as sequence:
        sequence.commit(range(100, 109))
    cache.check()
    stats = cache.stats()
    assert (stats.dropped, stats.closed, stats.running) == (1, 2, 0)


@pytest.mark.parametrize("name", KINDS)
def test_the_child_of_an_interrupted_fork_is_closed_and_its_parent_runs_on(name: str) -> None:
    cache = cache_of(*KINDS[name])
    parent = cache.open(range(9), reserve=20)
    parent.commit(range(9))
    interrupted_as_it_returns(parent.fork)
    child = parent.fork()
    assert cache.stats().dropped == 1 and parent.is_open
    for sequence in (parent, child):
        sequence.extend(1)
        sequence.commit([5])
        sequence.close()
    cache.check()
    cache.reset()


def test_a_fork_that_is_refused_does_not_end_its_parent() -> None:
    cache = cache_of()
    parent, other = cache.open(range(9)), cache.open([1])
    with pytest.raises(RetryLater):
        parent.fork()
    gc.collect()
    with raises(RetryLater, needed=1, available=0):
        cache.open([2])
    assert parent.is_open and other.is_open and not cache.stats().dropped


def test_a_dropped_sequence_leaves_what_it_published_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(max_requests=1)
    cache.open(range(9)).commit(range(9))
    with caplog.at_level(logging.INFO, "kvpagoda"):
        for _ in range(2):
            with cache.open(range(9)) as sequence:
                assert sequence.cached_tokens == 8
    assert [record.getMessage() for record in caplog.records] == [
        "a sequence of 9 tokens was dropped without close(), and is closed now"
    ]


@pytest.mark.parametrize("call", ["open", "extend", "fork", "rewind"])
def test_dropped_sequences_make_room(call: str) -> None:
    cache = cache_of(num_blocks=12, max_requests=4)
    sequence = cache.open(range(13), reserve=16)
    sequence.commit(range(13))
    child = sequence.fork(reserve=13)
    cache.open(range(100, 124), reserve=24)
    if call == "open":
        pin = cache.pin(range(12))
        assert cache.open(range(200, 220)).cached_tokens == 0 and pin.is_held, "what is pinned is kept"
    elif call == "extend":
        sequence.extend(19)
    elif call == "fork":
        assert sequence.fork(reserve=32).length == 13
    else:
        child.extend(3)
        cache.open(range(200, 204))
        sequence.rewind(3)
    assert cache.stats().dropped >= (call != "rewind")
    cache.check()


def test_a_suspended_sequence_that_is_dropped_frees_the_swap() -> None:
    cache = cache_of()
    sequence = cache.open(range(9))
    sequence.commit(range(9))
    sequence.suspend()
    del sequence
    with raises(RetryLater, available=[0]):
        held = cache.open([1])
        cache.core.dropped.clear()  # as if it were still named
        try:
            cache.reset()
        finally:
            held.close()
    cache.core.dropped.append(None)
    cache.reset()
    stats = cache.stats()
    assert (stats.suspended, stats.swap_nbytes, stats.dropped) == (0, 0, 1)
    cache.check()


def test_a_batch_names_its_sequences() -> None:
    cache = cache_of(max_requests=1)
    batch = cache.persistent_batch([cache.open([1], reserve=9)])
    gc.collect()
    with raises(RetryLater, needed=1, available=0):
        cache.open([3])
    batch.extend()
    batch.commit([1])
    del batch
    gc.collect()
    cache.open([3]).close()
    assert cache.stats().dropped == 1


def test_a_dropped_sequence_waits_for_its_fence() -> None:
    cache = cache_of(max_requests=1)
    with cache.fence([cache.open(range(9))]):
        with pytest.raises(RetryLater):
            cache.open([1])
        assert cache.stats().running == 1
        cache.check()
    assert not cache.stats().running
    cache.open([1]).close()


def test_closed_sequences_and_other_threads_cost_nothing() -> None:
    cache = cache_of(max_requests=1)
    for _ in range(3):
        cache.open([1]).close()
    gc.collect()
    assert not cache.core.dropped
    held = [cache.open([1])]
    thread = Thread(target=held.clear)
    thread.start()
    thread.join()
    cache.open([2]).close()
    assert cache.stats().dropped == 1 and not cache.core.dropped


def test_nothing_is_printed_at_exit() -> None:
    code = (
        "from kvpagoda import KVCache, Schema\n"
        "llama = dict(model_type='llama', num_hidden_layers=1, hidden_size=64, num_attention_heads=4)\n"
        "cache = KVCache(Schema.from_hf_config(llama), num_blocks=8, max_requests=2, device='none')\n"
        "kept = [cache.open([1]), cache.open([2])]\n"
        "fence = cache.fence(kept)\n"
        "fence.__enter__()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


# -- fences ------------------------------------------------------------------------------------------------------------


def test_a_fence_protects_each_time_that_it_is_entered() -> None:
    cache = cache_of(FULL, WINDOW)
    sequence = cache.open(range(9), reserve=20)
    sequence.commit(range(9))
    fence = cache.fence([sequence])
    for _ in range(2):
        with fence, raises(RetryLater, available=1):
            sequence.rewind(1)
        sequence.rewind(1)
        sequence.commit([8])
    sequence.close()
    with pytest.raises(StaleHandle), fence:
        pass
    cache.check()


def test_a_fence_inside_itself_ends_with_the_outer_block() -> None:
    cache = cache_of(max_requests=1)
    sequence = cache.open(range(9), reserve=20)
    fence = cache.fence([sequence])
    with fence:
        with fence, raises(RetryLater, available=2):
            sequence.fork()
        with raises(RetryLater, available=1):
            sequence.fork()
        sequence.close()
        with pytest.raises(StaleHandle), fence:
            pass
        assert cache.stats().running == 1
        cache.check()
    assert not cache.stats().running
    cache.open([1]).close()


def test_a_fence_that_is_collected_inside_its_block_ends() -> None:
    cache = cache_of(max_requests=1)
    sequence = cache.open(range(9), reserve=20)
    fence = cache.fence([sequence])
    fence.__enter__()
    interrupted_as_it_returns(fence.__enter__)
    sequence.commit(range(9))
    del fence
    gc.collect()
    assert cache.lookup(range(9)).cached == 8, "published, as at the end of its block"
    sequence.rewind(1)
    sequence.close()
    assert not cache.stats().running
    cache.check()
