"""The slot face: what an engine with one slot a request asks of it, and the faults that it must not have."""

import random

import numpy as np
import pytest
import torch

from kvpagoda.compat.prefix_cache_manager import PrefixCacheManager
from kvpagoda.compat.slot_allocator import SlotAllocator
from kvpagoda.errors import BadInput, NotOwned
from raises import raises


def test_find_gives_the_longest_prefix_at_any_token() -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2, 3, 4], 5, 1)
    assert cache.find([1, 2, 3, 4, 9]) == (4, 5, 1)
    assert cache.find([1, 2, 7]) == (2, 5, 1)
    assert cache.find((1,)) == cache.find(np.array([1, 8])) == (1, 5, 1)
    assert cache.find(torch.tensor([1, 2])) == (2, 5, 1)
    assert cache.find([7]) == cache.find([]) == (0, -1, 0)
    assert all(type(number) is int for number in cache.find([1, 2]))


def test_a_slot_is_reported_with_the_version_it_was_stored_under() -> None:
    """A shorter prefix may lie in a newer slot than a longer one; each answer holds all that it claims."""
    cache = PrefixCacheManager()
    cache.insert([1, 2, 3, 4, 5], 0, 1)
    cache.insert([1, 2, 3, 9], 1, 7)
    assert cache.find([1, 2, 3, 4, 5]) == (5, 0, 1)
    assert cache.find([1, 2, 3, 4]) == (4, 0, 1)
    assert cache.find([1, 2, 3]) == (3, 1, 7)
    assert cache.find([1, 2, 3, 9, 9]) == (4, 1, 7)
    cache.insert([1, 2], 0, 2)  # slot 0 was given to another request
    assert cache.find([1, 2]) == (2, 0, 2)
    assert cache.find([1, 2, 3, 4, 5]) == (5, 0, 1)  # stale: the allocator says version 2


def test_extend_then_evict_everything() -> None:
    cache = PrefixCacheManager()
    for text in ([1, 2, 3], [1, 2, 3, 4, 5]):
        cache.insert(text, 0, 1)
        cache.release(text)
    assert (cache.num_cached, cache.num_evictable, cache.num_pinned) == (5, 5, 0)
    assert cache.evict(5) == 5 and cache.evict(5) == 0
    assert (cache.num_cached, cache.num_evictable) == (0, 0)
    assert cache.find([1, 2, 3]) == (0, -1, 0)
    cache.check()


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = PrefixCacheManager(max_capacity=6)
    for slot, text in enumerate(([1, 2, 3], [4, 5, 6])):
        cache.insert(text, slot, 1)
        cache.release(text)
    cache.find([1, 2, 3])
    cache.insert([7, 8], 2, 1)
    assert cache.num_cached == 6
    assert cache.find([4, 5, 6]) == (1, 1, 1)
    assert cache.find([1, 2, 3]) == (3, 0, 1)
    cache.check()


def test_nothing_below_an_evicted_token_is_left_behind() -> None:
    cache = PrefixCacheManager(max_capacity=4)
    cache.insert([1, 2, 3, 4], 0, 1)
    cache.release([1, 2, 3, 4])
    for first in range(10, 20):
        cache.insert([first], 1, 1)
        cache.release([first])
        cache.check()
        assert cache.num_cached == 4
    assert cache.find([1, 2, 3, 4])[0] == 0


def test_referenced_texts_may_exceed_the_capacity_and_shrink_on_release() -> None:
    cache = PrefixCacheManager(max_capacity=4)
    cache.insert([1, 2, 3], 0, 1)
    cache.insert([4, 5, 6], 1, 1)  # everything is pinned: ends, and evicts nothing
    assert (cache.num_cached, cache.num_pinned, cache.evict(9)) == (6, 6, 0)
    assert cache.find([1, 2, 3]) == (3, 0, 1) and cache.find([4, 5, 6]) == (3, 1, 1)
    cache.release([1, 2, 3])
    assert (cache.num_cached, cache.num_pinned) == (4, 3)
    assert cache.find([1, 2, 3]) == (1, 0, 1)
    cache.release([4, 5, 6])
    assert (cache.num_cached, cache.num_pinned) == (4, 0)
    cache.check()
    everything = PrefixCacheManager(max_capacity=0)
    everything.insert([1, 2], 0, 1)
    everything.release([1, 2])
    assert everything.num_cached == 0


def test_references_belong_to_their_text_and_never_go_below_zero() -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2, 3], 0, 1)
    cache.pin([1, 2])
    cache.pin([1, 2, 3])
    for text in ([1], [1, 2, 3, 4], [9]):
        with raises(NotOwned, needed=len(text)):
            cache.release(text)
    for text in ([1, 2, 3], [1, 2, 3]):
        assert cache.num_pinned == 3
        cache.release(text)
    assert cache.num_pinned == 2
    cache.release([1, 2])
    assert cache.num_pinned == 0
    with pytest.raises(NotOwned):
        cache.release([1, 2])
    assert (cache.num_pinned, cache.num_cached) == (0, 3)
    with raises(NotOwned, needed=4, available=3):
        cache.pin([1, 2, 3, 4])
    cache.check()


def test_bad_input() -> None:
    cache = PrefixCacheManager()
    for text in ([1.5], [-1], [2**31], [2**70], [[1]], [[1], [1, 2]], "ab", None):
        with pytest.raises(BadInput):
            cache.find(text)
    for slot, version in ((-1, 0), (0, -1), (0.5, 0), (0, None)):
        with pytest.raises(BadInput):
            cache.insert([1], slot, version)
    with pytest.raises(BadInput):
        PrefixCacheManager(-1)
    assert cache.num_cached == 0


@pytest.mark.parametrize("make", [torch.arange, np.arange], ids=["torch", "numpy"])
def test_copy_kv_moves_the_prefix_of_the_first_layers(make) -> None:
    slots, positions, layers, heads = 4, 8, 3, 2
    k = make(slots * positions * layers * heads).reshape(slots, positions, layers, heads)
    v = -k
    before_k, before_v = np.asarray(k).copy(), np.asarray(v).copy()
    cache = PrefixCacheManager()
    cache.insert([5, 6, 7], 2, 1)
    cache.copy_kv([5, 6], 0, (k, v), 2)
    for after, before in ((np.asarray(k), before_k), (np.asarray(v), before_v)):
        assert np.array_equal(after[0, :2, :2], before[2, :2, :2])
        assert np.array_equal(after[0, 2:], before[0, 2:]) and np.array_equal(after[0, :, 2], before[0, :, 2])
        assert np.array_equal(after[1:], before[1:])
    cache.copy_kv([5, 6, 7], 2, (k, v), 3)  # onto itself: nothing to do
    cache.copy_kv([], 0, (k, v), 3)
    for text, target, n_layers, error in (
        ([5, 6, 7, 8], 0, 3, NotOwned),
        ([5, 6], 4, 3, BadInput),
        ([5, 6], -1, 3, BadInput),
        ([5, 6], 0, 4, BadInput),
    ):
        with pytest.raises(error):
            cache.copy_kv(text, target, (k, v), n_layers)
    with pytest.raises(BadInput):
        cache.copy_kv([5, 6, 7], 0, (k[:, :2], v[:, :2]), 1)


def test_an_engine_never_reads_a_slot_that_does_not_hold_the_text() -> None:
    """Requests come and go in 4 slots; what find reports under a current version is what the slot holds."""
    rng, slots, cache = random.Random(4), SlotAllocator(4), PrefixCacheManager(max_capacity=40)
    held: dict[int, tuple[list[int], int]] = {}  # slot -> text and version, also after it was freed
    running: list[tuple[list[int], int]] = []
    hits = 0
    for step in range(6000):
        if running and (len(running) == 4 or rng.random() < 0.4):
            text, slot = running.pop(rng.randrange(len(running)))
            cache.release(text)
            slots.free(slot)
        text = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        length, slot, version = cache.find(text)
        if length and slots.version(slot) == version:
            hits += 1
            assert held[slot][0][:length] == text[:length] and held[slot][1] == version
        target = slots.alloc()
        held[target] = (text, slots.version(target))
        cache.insert(text, target, slots.version(target))
        running.append((text, target))
        assert cache.num_cached <= max(40, cache.num_pinned)
        if step % 20 == 0:
            cache.check()
    assert hits > 1000


def test_the_array_of_an_insert_stays_the_callers():
    cache, tokens = PrefixCacheManager(), np.arange(8, dtype=np.int32)
    cache.insert(tokens, 3, 1)
    tokens[:] = 7
    assert cache.find(list(range(8))) == (8, 3, 1)
    cache.release(list(range(8)))
    cache.check()


@pytest.mark.parametrize("place", [(0, 2**63), (2**63, 0)])
def test_a_place_that_no_array_holds_changes_nothing(place):
    cache = PrefixCacheManager(100)
    with pytest.raises(BadInput):
        cache.insert([1, 2], *place)
    assert cache.num_cached == 0 and cache.find([1, 2]) == (0, -1, 0)


def test_copy_kv_takes_both_caches_and_keeps_no_graph():
    cache = PrefixCacheManager(100)
    cache.insert([1, 2], 0, 1)
    k, v = torch.arange(8.0).view(2, 2, 2).requires_grad_(), torch.arange(8.0).view(2, 2, 2)
    with raises(BadInput, needed=2, available=1):
        cache.copy_kv([1, 2], 1, (k,), 2)
    cache.copy_kv([1, 2], 1, (k, v), 2)
    assert torch.equal(k[1], k[0]) and torch.equal(v[1], v[0])
