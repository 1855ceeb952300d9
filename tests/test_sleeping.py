"""A cache that sleeps gives its memory back; its addresses, its requests and what it keeps are there when it wakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from gc import collect
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY
from weakref import ref

import numpy as np
import pytest
import torch
from tests.sweep.kinds import KINDS, make_cache
from tests.sweep.scene import Scene

from kvpagoda import Identity, KVCache, Retention, Schema, Sequence
from kvpagoda.errors import Asleep, BadInput, Exhausted, RetryLater, StaleHandle
from kvpagoda.events import EventLog
from kvpagoda.schema import Attention, Growth, Layer
from kvpagoda.tiers import disk_tier, host_tier
from kvpagoda.units import format_bytes, parse_bytes
from raises import raises
from random_driver.caches import has_xxhash
from test_below import Flaky, Slow, run, slow_tier
from test_below import cache_of as tiered
from test_manager import FakeEngine
from test_recording import proven

FULL, WINDOW = Attention(1, 4, 4, "float32"), Attention(1, 4, 4, "float32", Growth(window=8))
ONE = Schema((Layer(0, "full", (FULL,)),), "one")
MIXED = Schema((*ONE.layers, Layer(1, "window", (WINDOW,))), "mixed")
LARGE = dict(model_type="llama", num_hidden_layers=4, hidden_size=512, num_attention_heads=4, num_key_value_heads=4)


def cache_of(schema: Schema = ONE, num_blocks: int = 33, **settings: Any) -> KVCache:
    settings = {"device": "cpu", "max_requests": 4, **settings}
    return KVCache(schema, num_blocks=num_blocks, block_size=4, **settings)


def leave(cache: KVCache, first: int, length: int = 16) -> list[int]:
    """Leave a text in the cache, and return it."""
    tokens = [first, *range(1, length)]
    with cache.open(tokens, capacity=0) as sequence:
        for at in range(sequence.length, length, 4):
            sequence.extend(4)
            sequence.commit(tokens[at : at + 4])
    return tokens


def found(cache: KVCache, tokens: list[int]) -> int:
    """Return how many of ``tokens`` a request would not have to compute, from the device or from tiers."""
    with cache.open([*tokens, 999], capacity=0) as sequence:
        return sequence.cached_tokens


def place_of(cache: KVCache, sequence: Sequence) -> int:
    """Return the place of the first block of ``sequence`` in the group that keeps all tokens."""
    assert cache.core.full is not None
    return int(cache.core.full.held_places(sequence.slot)[0])


def resident(memory: torch.Tensor) -> int:
    """Return how many bytes of the mappings in which ``memory`` lies are resident: ``Rss`` of /proc/self/smaps."""
    begin, total, is_inside = memory.data_ptr(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(bound, 16) for bound in bounds.groups())
            is_inside = low < begin + memory.nbytes and begin < high
        elif is_inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not say what is resident")
@pytest.mark.parametrize("keep", ["nothing", "tree"])
def test_the_arena_is_given_back_at_the_same_addresses(keep: Any, tmp_path: Path) -> None:
    """With the tree on disk: 95 % of the arena's resident bytes go, and of what the process has at all."""
    pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")
    cache = KVCache(
        Schema.from_hf_config(LARGE), "128MiB", device="cpu", max_requests=4, identity=Identity("w"),
        tiers=[disk_tier(tmp_path, "256MiB", admit_all=True, staging="64MiB", timeout=60.0)],
    )  # fmt: skip
    layers = [cache.layer(i)[name] for i in range(4) for name in ("k", "v")]
    addresses = [layer.data_ptr() for layer in layers]
    texts = [[first, *range(1, 600)] for first in range(1, 5)]
    for text in texts:
        with cache.open(text, capacity=0) as sequence:
            sequence.extend(600)
            view = cache.batch([sequence], [600]).layer(0)
            rows = torch.full((600, 4, 128), text[0], dtype=torch.bfloat16)
            view.write(k=rows, v=rows)
            sequence.commit(text)
    for layer in layers:
        layer[layer.shape[0] // 2 :] = 1  # no page is left out
    before = resident(layers[0])
    assert before > 64 << 20
    slept = cache.sleep(keep, timeout=60.0)
    assert before - resident(layers[0]) >= 0.95 * before, (before, resident(layers[0]))
    assert slept.given_back == cache.plan.nbytes and slept.host_nbytes == 0
    cache.wake()
    again = [cache.layer(i)[name] for i in range(4) for name in ("k", "v")]
    assert [layer.data_ptr() for layer in again] == addresses == [layer.data_ptr() for layer in layers]
    cache.core.tiers.took(1.0)  # computing takes longer than loading
    assert slept.kept == (4 * 37 if keep == "tree" else 0)
    assert slept.kept + slept.dropped == 4 * 38  # a partial block goes to no tier
    if keep == "tree":
        for text in texts:
            with cache.open([*text, 5], capacity=0) as sequence:
                assert sequence.match.loaded == 592 == sequence.cached_tokens
                assert (cache.layer(0)["k"][place_of(cache, sequence)] == text[0]).all()
    cache.check()
    cache.close()


class Own:
    """Memory of a caller, which may not be there when it is asked for."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.calls: list[str] = []
        self.is_there = True

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def give_back(self) -> int:
        self.calls.append("give back")
        for buffer in self.buffers:
            buffer.fill_(0x55)
        return 7

    def get_again(self) -> None:
        if not self.is_there:
            raise Exhausted("another process has it")
        self.calls.append("get again")
        for buffer in self.buffers:
            buffer.zero_()


@pytest.mark.parametrize("order", ["block", "layer"])
def test_memory_of_the_caller(order: str) -> None:
    own = Own()
    cache = cache_of(MIXED, 33, memory=own, order=order, poison=True)
    assert sum(buffer.nbytes for buffer in own.buffers) == cache.plan.nbytes
    text = leave(cache, 1)
    running = cache.open(range(50, 60))
    running.commit(range(50, 60))
    place = place_of(cache, running)
    cache.layer(0)["k"][place] = 3.0
    assert cache.sleep("tree").given_back == 7
    own.is_there = False
    for _ in range(2):
        with pytest.raises(Exhausted, match="another process has it"):
            cache.wake()
        assert cache.stats().is_asleep
    own.is_there = True
    cache.wake()
    cache.wake()  # it is awake
    assert own.calls == ["give back", "get again"]
    assert (cache.layer(0)["k"][place] == 3.0).all() and found(cache, text) == 16
    assert cache.core.full is not None
    free = int(cache.core.full.free.free_ids()[0])
    assert cache.layer(0)["k"][free].isnan().all(), "free memory is poisoned again"
    cache.check()


def test_memory_that_is_not_what_was_asked_for() -> None:
    own, allocated = Own(), list[Callable[[int], Any]]()
    allocated += [lambda n: torch.zeros(n - 1, dtype=torch.uint8), torch.zeros, lambda n: np.zeros(n, np.uint8)]
    allocated += [lambda n: torch.zeros(2 * n, dtype=torch.uint8)[::2]]
    allocated += [lambda n: torch.zeros(n, dtype=torch.uint8, device="meta"), lambda n: None]
    for allocate in allocated:
        own.allocate = allocate  # type: ignore[method-assign]
        with raises(BadInput, needed=4352, available=ANY):
            cache_of(memory=own)
    with raises(BadInput, needed=["give_back", "get_again"]):
        cache_of(memory=SimpleNamespace(allocate=torch.zeros, give_back=3))
    with raises(BadInput, field="memory", needed="memory"):
        cache_of(device="none", memory=Own())


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the sweep get four times the memory and enough checkpoints, so that nothing is evicted by the way."""
    monkeypatch.setattr("tests.sweep.kinds.Retention", lambda *_, **named: Retention(32, 1, **named))
    for name, kind in KINDS.items():
        size = {key: 4 * value if key == "num_blocks" else 4 * parse_bytes(value) for key, value in kind.size.items()}
        monkeypatch.setitem(KINDS, name, kind._replace(size=size))


# -- what is there after waking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["nothing", "tree"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("roomy")
def test_rows_of_running_and_cached_texts_are_those_written(kind: str, keep: Any) -> None:
    """Every layer kind: running requests step on with their own rows; with the tree, as much is found as before."""
    scene = Scene(kind, has_tier=False)
    cache, texts = scene.cache, [scene.words(number, 3) for number in (1, 2)]
    for text in texts:
        scene.leave(text)
    for number in (3, 4):
        scene.compute(scene.open(scene.words(number, 2.5)))
    # more tokens behind a block than a ring can rewind: a checkpoint ahead of its text is right, but this oracle takes a
    # ring for one value
    suspended = scene.compute(scene.open(scene.words(5, 1.75)))
    suspended.sequence.suspend()
    before = [cache.lookup([*text, 9], "one").resumable for text in texts]
    assert any(before) or not KINDS[kind].shares
    slots = [request.sequence.slot for request in scene.requests[:2]]
    slept = cache.sleep(keep)
    assert (slept.running, cache.stats().suspended) == (2, 1) and slept.host_nbytes > 0 < slept.given_back
    after = [cache.lookup([*text, 9], "one").resumable for text in texts]
    assert after == (before if keep == "tree" else [0, 0])
    assert (slept.dropped == 0 < slept.kept) if keep == "tree" else (slept.kept == 0 < slept.dropped)
    cache.wake()
    assert [request.sequence.slot for request in scene.requests[:2]] == slots
    suspended.sequence.resume()
    scene.took_up(suspended)
    scene.prove()
    scene.end()


@pytest.mark.parametrize("kind", ["full", "gemma", "qwen3_next", "deepseek_v4"])
@pytest.mark.parametrize("way", ["commit", "evict", "disk"])
@pytest.mark.usefixtures("roomy")
def test_a_tree_in_tiers_is_found_again(kind: str, way: Any, tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")
    small: dict[str, Any] = {"staging": "1MiB", "timeout": 30.0}
    disk = disk_tier(tmp_path, "8MiB", admit_all=True, **small)
    cache, texts = make_cache(kind, (disk if way == "disk" else host_tier("8MiB", write=way, **small),)), []
    size = cache.block_size
    for number in (1, 2):
        texts.append([number, *range(10, 10 + 4 * size - 1)])
        with cache.open(texts[-1], capacity=0) as sequence:
            while sequence.length < len(texts[-1]):
                n = min(size, cache.step_limit(sequence))
                sequence.extend(n)
                sequence.commit(texts[-1][sequence.length : sequence.length + n])
    before = [cache.lookup([*text, 9]).resumable for text in texts]
    slept = cache.sleep("tree")
    assert slept.kept_in == "tiers" and 8 <= slept.kept <= slept.kept + slept.dropped and slept.host_nbytes == 0
    cache.wake()
    stats = cache.stats()
    assert not any(group.evictable for group in stats.groups)
    for text, was in zip(texts, before):
        with cache.open([*text, 9], capacity=0) as sequence:
            least = was if not slept.dropped else size  # a disk that is slow drops what waits too long, and says so
            assert sequence.cached_tokens == sequence.match.loaded >= least > 0, slept
    cache.check()
    cache.close()


def test_a_persistent_batch_steps_on() -> None:
    cache = cache_of(MIXED, 40)
    sequences = [cache.open([first] * 6, reserve=40) for first in (1, 2, 3)]
    for sequence in sequences:
        sequence.commit([1 + sequence.slot] * 6)
    running = cache.persistent_batch(sequences, 4, tokens_per_row=1)
    arrays = running.extend().layer(0)
    address, block_table = arrays.block_table.data_ptr(), arrays.block_table.clone()
    running.commit([1, 2, 3])
    for row in range(3):
        cache.layer(0)["k"][block_table[row, 0]] = float(row + 1)
    rows = [cache.layer(0)["k"][block_table[i, 0]].clone() for i in range(3)]
    cache.sleep()
    with raises(Asleep, needed="PersistentBatch.extend"):
        running.extend()
    with pytest.raises(Asleep):
        running.commit([1, 2, 3])
    cache.wake()
    for _ in range(9):
        batch = running.extend().layer(0)
        assert batch.block_table.data_ptr() == address
        running.commit([4, 5, 6])
    assert [sequence.length for sequence in sequences] == [16] * 3
    assert torch.equal(batch.block_table[:3, :2], block_table[:3, :2])
    for i, row in enumerate(rows):
        assert torch.equal(cache.layer(0)["k"][block_table[i, 0]], row)
    cache.check()


@pytest.mark.parametrize("num_left", [0, 2, 5])
def test_the_coldest_is_dropped_first(num_left: int) -> None:
    cache = cache_of(num_blocks=40)
    texts = [leave(cache, first) for first in range(5)]
    found(cache, texts[0])  # used last
    nbytes = 4 * num_left * cache.plan.groups[0].row_nbytes
    slept = cache.sleep("tree", nbytes=max(1, nbytes))
    assert (slept.kept, slept.dropped) == (4 * num_left, 20 - 4 * num_left)
    assert (slept.kept_nbytes, slept.host_nbytes, slept.kept_in) == (nbytes, nbytes, "host")
    assert str(slept).endswith(f"{slept.kept} blocks ({format_bytes(nbytes)}) kept in host, {slept.dropped} "
                               f"({format_bytes(slept.dropped_nbytes)}) dropped; 0 requests")  # fmt: skip
    assert cache.stats().evicted_blocks == slept.dropped
    cache.wake()
    order = [1, 2, 3, 4, 0]
    assert [found(cache, texts[i]) > 12 for i in order] == [False] * (5 - num_left) + [True] * num_left


def test_several_groups_lose_their_coldest() -> None:
    cache = cache_of(MIXED, 40, retention=Retention(8))
    texts = [leave(cache, first) for first in range(4)]
    whole = cache.sleep("tree")
    cache.wake()
    half = cache.sleep("tree", nbytes=whole.kept_nbytes // 2)
    assert whole.dropped == 0 < half.dropped and half.kept + half.dropped == whole.kept
    assert 0.6 * whole.kept_nbytes // 2 < half.kept_nbytes <= whole.kept_nbytes // 2
    cache.wake()
    cache.check()
    hits = [found(cache, text) for text in texts]
    assert hits == sorted(hits) and hits[0] < hits[-1] == 16


def test_cold_window_blocks_are_dropped_before_all_others() -> None:
    cache = cache_of(MIXED, 60, retention=Retention(checkpoints=0))
    text = leave(cache, 1, 40)
    assert cache.stats().groups[1].cold == 10
    whole = cache.sleep("tree").kept_nbytes
    cache.wake()
    assert cache.sleep("tree", nbytes=whole - 1).dropped > 0
    cache.wake()
    assert found(cache, text) == 40


def test_what_is_pinned_is_kept_with_nothing_else() -> None:
    cache = cache_of(MIXED, 40)
    kept, lost = leave(cache, 1), leave(cache, 2)
    pin = cache.pin(kept)
    slept = cache.sleep("nothing")
    assert slept.kept == 0 and slept.host_nbytes > 0 and pin.is_held
    cache.wake()
    assert (found(cache, kept), found(cache, lost)) == (16, 0)
    slept = cache.sleep("nothing")
    cache.unpin(pin)  # asleep: its blocks are evictable when it wakes
    cache.check()
    cache.wake()
    assert found(cache, kept) == 16
    assert cache.sleep("nothing").host_nbytes == 0


def test_host_memory_is_freed_at_waking() -> None:
    cache = cache_of()
    leave(cache, 1)
    cache.sleep("tree")
    waiting = ref(cache.core.guard.aside.copies[0].table)
    assert waiting() is not None
    cache.wake()
    collect()
    assert waiting() is None


# -- failures ------------------------------------------------------------------------------------------------------------


def test_a_tier_that_always_fails_loses_blocks_and_not_the_cache() -> None:
    spec, made = Flaky.tier(1.0, write="evict", staging="1MiB")
    cache = tiered("full", spec)
    text = np.arange(30, dtype=np.int32)
    run(cache, text)
    running = cache.open(range(60, 70))
    running.commit(range(60, 70))
    slept = cache.sleep("tree")
    assert (slept.kept, slept.kept_in) == (0, "tiers") and slept.dropped >= 7 and made[0].num_faults
    cache.wake()
    cache.check()
    assert run(cache, text) == 0 and running.length == 10
    cache.close()


def test_a_tier_that_hangs_costs_the_timeout() -> None:
    spec, driver = slow_tier(write="evict", timeout=0.2)
    cache = tiered("full", spec)
    assert isinstance(driver, Slow)
    run(cache, np.arange(30, dtype=np.int32))
    driver.seconds = {"store": 2.0, "lookup": 2.0}
    began = monotonic()
    slept = cache.sleep("tree", timeout=0.3)
    assert monotonic() - began < 1.5 and slept.kept == 0
    driver.seconds = {}
    cache.wake()
    cache.check()
    cache.close(timeout=3.0)


def test_more_than_the_staging_memory_goes_below_a_piece_at_a_time() -> None:
    cache = tiered("full", host_tier("4MiB", staging="16KiB"), num_blocks=120)
    texts = [np.arange(100 * i, 100 * i + 60, dtype=np.int32) for i in range(7)]
    for text in texts:
        run(cache, text)
    slept = cache.sleep("tree")
    assert cache.core.tiers.levels[0].buffer.num_records < 50 < slept.kept == 7 * 15
    assert slept.dropped == 0
    cache.wake()
    assert [run(cache, text) for text in texts] == [56] * 7
    cache.close()


def test_nothing_is_stored_where_nothing_is_kept() -> None:
    cache = tiered("full", host_tier("1MiB", staging="64KiB"))
    run(cache, np.arange(60, dtype=np.int32))
    assert cache.sleep().dropped == 15
    cache.wake()
    assert cache.flush() and cache.stats().tiers[0].stored == 0
    cache.close()


def test_layers_that_are_on_their_way_arrive_first() -> None:
    cache, text = tiered("full", host_tier("1MiB", write="commit", staging="1MiB")), np.arange(60, dtype=np.int32)
    run(cache, text)
    assert cache.flush()
    cache.reset()
    with cache.open(text, "tenant 0", layerwise=True) as sequence:
        assert sequence.match.loaded == 56 and cache.core.memory.is_copying
        cache.sleep()
        cache.wake()
        assert not cache.core.memory.is_copying
        engine = FakeEngine(cache)
        engine.spaces[id(sequence)] = 0
        engine.step([sequence], [text[56:]])  # compares all rows that it reads
        sequence.commit(text[56:])
    cache.close()


def test_a_fence_refuses() -> None:
    cache = cache_of()
    text = leave(cache, 1)
    sequence = cache.open(range(5))
    with cache.fence([sequence]):
        with raises(RetryLater, available=1):
            cache.sleep()
        sequence.commit(range(5))
    assert found(cache, text) == 16, "nothing was dropped"
    cache.sleep()
    with raises(Asleep, needed="Fence.__enter__"), cache.fence([sequence]):
        pass
    cache.wake()


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        ({"keep": "all"}, {"field": "keep", "needed": "all"}),
        ({"keep": None}, {"field": "keep"}),
        ({"keep": "tree", "nbytes": "much"}, {"needed": "much"}),
        ({"timeout": -1}, {"field": "the timeout, in seconds,", "needed": -1, "available": 0}),
    ],
)
def test_bad_arguments_drop_nothing(arguments: dict[str, Any], figures: dict[str, Any]) -> None:
    cache = cache_of()
    tokens = leave(cache, 1)
    with raises(BadInput, **figures):
        cache.sleep(**arguments)
    assert not cache.stats().is_asleep and found(cache, tokens) == 16


# -- asleep --------------------------------------------------------------------------------------------------------------


def test_calls_that_need_memory_raise_and_others_answer() -> None:
    cache = cache_of(tiers=[host_tier("1MiB", staging="64KiB")] if has_xxhash() else ())
    text, sequence = leave(cache, 1), cache.open(range(5))
    aside = cache.open(range(7))
    aside.suspend()
    batch, fence = cache.persistent_batch([]), cache.fence([sequence])
    cache.sleep()
    calls: list[Callable[[], Any]] = [
        lambda: cache.open([1]), lambda: cache.prefetch([1]), lambda: cache.step_limit(sequence), lambda: cache.layer(0),
        lambda: cache.batch([sequence], [1]), cache.persistent_batch, lambda: cache.pin(text), cache.flush, cache.sleep,
        lambda: sequence.extend(1), lambda: sequence.commit([0]), sequence.fork, lambda: sequence.rewind(0),
        sequence.suspend, aside.resume, batch.extend, lambda: batch.commit([]), lambda: batch.add(sequence),
        fence.__enter__,
    ]  # fmt: skip
    for call in calls:
        with raises(Asleep, needed=ANY) as told:
            call()
        assert told.value.hint == "call wake() first" and isinstance(told.value, RuntimeError)
    assert cache.lookup(text).cached == 0 and cache.stats().running == 1
    cache.check()
    cache.invalidate()
    assert (sequence.length, sequence.is_open, sequence.slot) == (0, True, 0)
    cache.wake()
    sequence.commit(range(5))
    assert aside.resume() == 0
    for one in (sequence, aside):
        one.close()
    cache.check()


def test_a_request_closed_asleep_ends_at_waking_and_publishes() -> None:
    cache = cache_of()
    sequence, other = cache.open(range(8)), cache.open(range(20, 29))
    sequence.commit(range(8))
    other.suspend()
    cache.sleep()
    sequence.close()
    other.close()
    assert not sequence.is_open and cache.stats().running == 1 and cache.stats().suspended == 0
    with pytest.raises(StaleHandle):
        sequence.close()
    cache.check()
    cache.wake()
    assert cache.stats().running == 0 and found(cache, [*range(8)]) == 8
    cache.check()


def test_a_sequence_that_is_collected_asleep_is_closed_later() -> None:
    cache = cache_of(max_requests=1)
    sequence = cache.open(range(8))
    cache.sleep()
    del sequence
    cache.wake()
    cache.open([1]).close()
    assert cache.stats().dropped == 1


def test_new_weights_while_it_sleeps(tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")
    disk = disk_tier(tmp_path, "1MiB", admit_all=True, staging="128KiB", timeout=30.0)
    cache = cache_of(tiers=[disk], identity=Identity("old"))
    text, sequence = leave(cache, 1), cache.open(range(30, 38), reserve=20)
    sequence.commit(range(30, 38))
    assert cache.sleep("tree").kept == 4
    cache.invalidate(weights="new")
    cache.wake()
    assert found(cache, text) == 0 == found(cache, [*range(30, 38)])
    sequence.extend(1)
    sequence.commit([1])
    assert sequence.epochs == [(0, 0), (8, 1)]
    sequence.close()
    cache.invalidate(weights="old")
    assert found(cache, text) == 16, "the records of the old weights are there under their own name"
    cache.check()
    cache.close()


def test_what_is_invalidated_asleep_is_not_copied_back() -> None:
    cache = cache_of(MIXED, 40, poison=True)
    text = leave(cache, 1)
    with cache.open([*text, 5], capacity=0) as sequence:
        place = place_of(cache, sequence)
    cache.layer(0)["k"][place] = 1.0
    assert cache.sleep("tree").kept > 4
    cache.invalidate()
    assert cache.lookup(text).cached == 0
    cache.wake()
    cache.check()
    assert cache.layer(0)["k"][place].isnan().all()
    assert all(group.free == group.total for group in cache.stats().groups)


def test_reset_and_close_work_asleep() -> None:
    cache = cache_of()
    text = leave(cache, 1)
    cache.sleep("tree")
    cache.reset()
    cache.check()
    cache.wake()
    assert found(cache, text) == 0
    sequence = cache.open(range(5))
    cache.sleep()
    with pytest.raises(RetryLater):
        cache.reset()
    cache.close()
    assert not sequence.is_open and not cache.stats().is_asleep
    for call in (lambda: cache.open([1]), cache.sleep, cache.wake):
        with raises(StaleHandle, needed="cache", available="closed"):
            call()


def test_close_asleep_stores_no_bytes_that_are_not_there(tmp_path: Path) -> None:
    """What a request computed and no tier has yet is not stored from memory that was given back."""
    pytest.importorskip("xxhash", reason="tiers need kvpagoda[disk]")
    disk = disk_tier(tmp_path, "1MiB", admit_all=True, staging="128KiB", timeout=30.0)
    cache = cache_of(tiers=[disk], identity=Identity("w"))
    sequence = cache.open(range(6), reserve=20)
    sequence.commit(range(6))
    cache.flush()
    sequence.extend(3)
    sequence.commit(range(6, 9))  # a second whole block
    cache.sleep()
    sequence.close()
    cache.close()
    again = cache_of(tiers=[disk], identity=Identity("w"))
    assert found(again, [*range(9)]) <= 8
    again.close()


def test_without_memory_behind_it() -> None:
    cache = cache_of(MIXED, 40, device="none")
    text = leave(cache, 1)
    slept = cache.sleep("tree")
    assert (slept.given_back, slept.host_nbytes) == (0, 0) and slept.kept > 0
    cache.wake()
    assert found(cache, text) == 16


# -- who is told ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["nothing", "tree"])
def test_a_follower_is_told_what_is_gone(keep: Any) -> None:
    pytest.importorskip("msgspec", reason="events need kvpagoda[events]")
    from events.following import Line

    log = EventLog()
    cache = cache_of(MIXED, 40, events=log)
    line = Line(cache, log, np.random.default_rng(0))
    texts = [leave(cache, first) for first in range(3)]
    running = cache.open([*texts[1], 7])
    half = cache.plan.groups[0].row_nbytes * 8
    cache.sleep(keep, nbytes=half)
    for _ in range(2):
        line.catch_up()
        line.check()
        for text in texts:
            line.compare([*text, 8])
        cache.wake()
    running.close()
    assert line.num_hits and line.num_compared == 6


def test_a_recording_and_the_counters_tell_of_it(tmp_path: Path) -> None:
    path = tmp_path / "asleep.json"
    cache = cache_of(record=path)
    leave(cache, 1)
    slept = cache.sleep()
    assert (cache.stats().sleeps, cache.stats().is_asleep) == (1, True)
    cache.wake()
    cache.sleep()
    cache.close()
    assert (cache.stats().sleeps, cache.stats().is_asleep) == (2, False)
    events = [event for event in proven(path) if event["name"] == "asleep"]
    assert [event["args"] for event in events] == [vars(slept), vars(slept) | {"dropped": 0, "dropped_nbytes": 0}]
    evicted = [event["args"] for event in proven(path) if event["name"] == "evict"]
    assert evicted == [{"full": slept.dropped}]
    assert json.loads(path.read_text())


def test_metrics_count_it() -> None:
    pytest.importorskip("prometheus_client", reason="metrics need kvpagoda[metrics]")
    from prometheus_client.registry import CollectorRegistry

    from kvpagoda.metrics import CacheCollector

    registry, cache = CollectorRegistry(), cache_of()
    registry.register(CacheCollector(cache))
    labels = {"model_name": "", "engine": "0"}
    told = []
    for call in (cache.sleep, cache.wake):
        call()
        told.append([registry.get_sample_value(name, labels) for name in ("kvpagoda_sleeps_total", "kvpagoda_asleep")])
    assert told == [[1.0, 1.0], [1.0, 0.0]]


def test_the_room_is_not_imported_before_it_is_used() -> None:
    code = (
        "import sys; from kvpagoda import KVCache, Schema; "
        "c = KVCache(Schema.from_hf_config(dict(model_type='llama', num_hidden_layers=1, hidden_size=8, "
        "num_attention_heads=1)), '64KiB', device='none'); c.open([1]).close(); "
        "assert 'kvpagoda.core.sleeping' not in sys.modules; c.sleep(); assert 'kvpagoda.core.sleeping' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
