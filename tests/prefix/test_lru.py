"""How new texts and checkpoints enter the LRU order: on top where checkpoints cost nothing, else by what they spare."""

import random

import numpy as np
import pytest

from kvpagoda import KVCache
from kvpagoda.core.cache.options import Limits, Retention
from kvpagoda.core.cache.prefix_cache import checkpoint_cost
from kvpagoda.core.prefix import Entry, PrefixTree
from kvpagoda.core.prefix.order import Clock
from kvpagoda.retention import RetentionRule
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema

_FULL = Attention(1, 8, 8, "float32")
"""16 tokens of it take 1 KiB."""
_WINDOW = Attention(1, 8, 8, "float32", Growth(window=64))
_STATE = Recurrent((Rows("state", (1024,), "float32"),))


def schema_of(*kinds: LayerKind) -> Schema:
    return Schema(tuple(Layer(at, "layer", (kind,)) for at, kind in enumerate(kinds)))


def text_of(number: int, length: int) -> np.ndarray:
    return np.arange(number * 10_000 + 1, number * 10_000 + 1 + length, dtype=np.int32)


def store(tree: PrefixTree, number: int, length: int, entry: Entry | None = None) -> None:
    """Insert a text of blocks of one token whose ids are its tokens."""
    text = text_of(number, length)
    tree.insert(tree.match(text), text, text[None], entry=entry)
    tree.check()


def evicted(tree: PrefixTree, num_blocks: int) -> list[int]:
    """Evict and return the numbers of the texts, in that order."""
    numbers = [int(one) // 10_000 for one in tree.evict(num_blocks).ids[0]]
    tree.check()
    return list(dict.fromkeys(numbers))


def test_without_a_cost_what_is_new_counts_as_used_now() -> None:
    clock = Clock()
    times = [clock.enter(Entry(gain, 0.0)) for gain in (1, 1000)] + [clock.tick(), clock.enter(None)]
    assert times == sorted(times) and times[-1] == clock.now
    tree = PrefixTree(1)
    for number, gain in ((1, 500), (2, 1)):
        store(tree, number, 3, Entry(gain, 0.0))
    assert evicted(tree, 6) == [1, 2], "plain LRU, whatever they spare"


def test_what_spares_more_for_its_bytes_enters_higher_and_a_hit_counts_as_used_now() -> None:
    clock = Clock(RetentionRule(checkpoint_cost=100.0))
    for _ in range(1000):
        clock.tick()
    low, high = clock.enter(Entry(10, 0.0)), clock.enter(Entry(1000, 0.0))
    found, now = clock.enter(Entry(1000, 0.9)), clock.tick()
    assert 0 < low < high < found < now
    share = high / now
    assert 0.17 < share < 0.19, "at most a fifth, 10/11 of it for ten times the cost"
    assert clock.enter(None) == clock.now > now


def test_no_two_times_are_equal() -> None:
    clock, chance = Clock(RetentionRule(checkpoint_cost=3.5)), random.Random(0)
    times = []
    for _ in range(3000):
        times.append(
            clock.tick() if chance.random() < 0.3 else clock.enter(Entry(chance.randrange(9), chance.random()))
        )
        clock.floor = max(clock.floor, chance.choice(times) - (1 << 50))
        assert clock.floor <= clock.now and times[-1] <= clock.now
    assert len(set(times)) == len(times)


def test_texts_that_were_found_outlive_many_that_were_not() -> None:
    """A scan of new texts takes a part of the cache alone; plain LRU would evict the text that is found now and then."""
    rest = {}
    for cost in (0.0, 4.0):
        tree = PrefixTree(1, rule=RetentionRule(checkpoint_cost=cost))
        store(tree, 1, 4, Entry(4, 0.0))
        tree.touch(tree.match(text_of(1, 4)))
        for number in range(2, 14):
            store(tree, number, 4, Entry(4, 0.0))
            if tree.num_cached > 24:
                evicted(tree, tree.num_cached - 24)
        rest[cost] = tree.match(text_of(1, 4)).num_blocks
    assert rest == {0.0: 0, 4.0: 4}


def test_looking_at_the_oldest_moves_no_floor_and_evicting_does() -> None:
    tree = PrefixTree(1, rule=RetentionRule(checkpoint_cost=1.0))
    for number in range(1, 5):
        store(tree, number, 2)
    clock = tree._order._clock
    oldest = tree.oldest()
    assert oldest is not None and clock.floor == 0
    tree.evict(2)
    assert clock.floor == oldest
    match = tree.match(text_of(4, 2))
    tree.set_checkpoint(match, 2, 7)
    tree.checkpoints.evict()
    assert clock.floor == clock.now


def test_checkpoints_enter_as_texts_do() -> None:
    tree = PrefixTree(1, rule=RetentionRule(checkpoint_cost=10.0))
    for number in range(1, 4):
        store(tree, number, 8)
    for _ in range(50):
        tree.touch(tree.match(text_of(3, 8)))
    for number, gain in ((1, 2), (2, 8)):
        tree.set_checkpoint(tree.match(text_of(number, 8)), 8, number, Entry(gain, 0.0))
    tree.set_checkpoint(tree.match(text_of(3, 8)), 8, 3)
    assert tree.checkpoints.evict(3) == (1, 2, 3), "the one that spares less is first, the one without an entry last"


@pytest.mark.parametrize(
    ("kinds", "cost"),
    [
        ((_FULL,), 0.0),
        ((_FULL, _WINDOW), 64 / 16),
        ((_FULL, _STATE), 4.0),
        ((_FULL, _WINDOW, _STATE), 8.0),
        ((_WINDOW,), 64 / 16),
        ((_STATE,), 0.0),
    ],
)
def test_a_checkpoint_costs_its_bytes_in_blocks_of_text(kinds: tuple[LayerKind, ...], cost: float) -> None:
    cache = KVCache(schema_of(*kinds), num_blocks=64, max_requests=2, device="none", limits=Limits(512))
    prefix = cache._core.prefix
    texts = [group for group in cache._core.groups if not group.growth.is_bounded]
    assert checkpoint_cost(prefix.bounded, texts) == pytest.approx(cost, rel=0.1)
    cache.close()


def test_a_short_text_enters_lower_than_a_long_one_before_it() -> None:
    """Of two texts that were never found, the one that spares less goes first, although it is newer."""
    cache = KVCache(
        schema_of(_FULL, _STATE),
        num_blocks=64,
        max_requests=2,
        device="none",
        limits=Limits(1024),
        retention=Retention(8),
    )
    for number, length in ((3, 32), (4, 32), (5, 32), (6, 32), (1, 480), (2, 48)):
        with cache.open(text_of(number, length), capacity=length) as sequence:
            while sequence.length < length:
                step = min(length - sequence.length, cache.step_limit(sequence))
                sequence.extend(step)
                sequence.commit(text_of(number, length)[sequence.length :][:step])
    cache.check()
    ages = {one.depth: one.used for one in cache._core.prefix.tree.checkpoints.by_state.values()}
    assert ages[29] > ages[2]
    cache.close()
