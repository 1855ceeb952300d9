"""Failures that other prefix caches had do not happen here. Names have the number in the project's list (R), if any."""

import numpy as np
import pytest
from plain_lru import LRU

from kvpagoda.core.prefix import PrefixTree
from kvpagoda.errors import StaleHandle
from kvpagoda.free_list import FreeList
from raises import raises


def text(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def store(tree: PrefixTree, tokens: np.ndarray, blocks: list[int]) -> None:
    """Insert ``tokens``; ``blocks`` are the ids of the blocks that are not cached."""
    match = tree.match(tokens)
    rest = tokens[match.num_blocks * tree.block_size :]
    tree.insert(match, rest, np.array([blocks], np.int32))
    tree.check()


def test_r1_free_cached_and_used_add_up_to_the_total() -> None:
    total, size, rng = 300, 4, np.random.default_rng(1)
    tree, free = PrefixTree(size), FreeList(total, first=1, what="blocks")
    running: list = []
    for _ in range(3000):
        tokens = rng.integers(0, 2, size * rng.integers(1, 12)).astype(np.int32)
        match = tree.match(tokens, limit=len(tokens) - 1)
        lease = tree.pin(match)
        need = len(tokens) // size - match.num_blocks
        if need > free.num_free:
            free.release(tree.evict(need - free.num_free).ids[0])
        if need > free.num_free:
            tree.unpin(lease)
        else:
            own = free.acquire(need)
            result = tree.insert(lease, tokens[match.num_blocks * size :], own[None])
            free.release(own[result.duplicates[0]])
            running.append(lease)
        if len(running) > 15 or rng.random() < 0.3:
            tree.unpin(running.pop(int(rng.integers(len(running)))))
        assert free.num_free + tree.num_evictable + tree.num_pinned == total
        assert np.array_equal(tree.owned_ids(), free.held_ids())
    tree.check()


def test_r2_a_shared_block_is_counted_once() -> None:
    tree = PrefixTree(1)
    store(tree, text(1, 2, 3), [1, 2, 3])
    leases = [tree.pin(tree.match(text(1, 2, 3))) for _ in range(4)]
    assert (tree.num_cached, tree.num_pinned, tree.num_evictable) == (3, 3, 0)
    for left in (3, 2, 1, 0):
        tree.unpin(leases.pop())
        assert tree.num_evictable == (0 if left else 3)


def test_r3_a_count_never_goes_below_zero() -> None:
    tree = PrefixTree(1)
    store(tree, text(1, 2), [1, 2])
    lease, other = tree.pin(tree.match(text(1, 2))), tree.pin(tree.match(text(1, 2)))
    tree.unpin(lease)
    with raises(StaleHandle, needed="lease"):
        tree.unpin(lease)
    for call in (tree.pin, tree.touch):
        with pytest.raises(StaleHandle):
            call(lease)
    tree.check()
    assert tree.num_pinned == 2 and tree.evict(9).ids.shape == (1, 0)
    tree.unpin(other)


def test_r4_a_pin_holds_the_matched_block_itself() -> None:
    tree = PrefixTree(1)
    store(tree, text(1, 2, 3), [1, 2, 3])
    tree.pin(tree.match(text(1, 2)))
    assert tree.evict(3).ids.tolist() == [[3]]
    assert tree.match(text(1, 2, 3)).num_tokens == 2


def test_r5_a_cascade_finds_every_parent() -> None:
    """Leaves are evicted, then their parents, over several levels with a branch between them; no block is orphaned."""
    tree = PrefixTree(1)
    store(tree, text(1, 2, 3, 4), [1, 2, 3, 4])
    store(tree, text(1, 2, 5), [5])
    store(tree, text(1, 2, 5, 6), [6])
    store(tree, text(1, 7), [7])
    gone: list[int] = []
    while tree.num_cached:
        evicted = tree.evict(1)
        tree.check()
        gone += evicted.ids[0].tolist()
    assert sorted(gone) == [1, 2, 3, 4, 5, 6, 7]
    for child, parent in ((4, 3), (3, 2), (6, 5), (5, 2), (2, 1), (7, 1)):
        assert gone.index(child) < gone.index(parent)


def test_r7_one_request_cannot_use_up_the_pin_of_another() -> None:
    tree = PrefixTree(1)
    store(tree, text(1, 2), [1, 2])
    mine, theirs = tree.pin(tree.match(text(1, 2))), tree.pin(tree.match(text(1, 2)))
    tree.unpin(mine)
    with pytest.raises(StaleHandle):
        tree.unpin(mine)
    assert tree.num_pinned == 2 and theirs.is_open


def test_r8_pinned_blocks_stay_until_they_are_unpinned() -> None:
    tree = PrefixTree(1)
    store(tree, np.arange(768, dtype=np.int32), list(range(1, 769)))
    match = tree.match(np.arange(768, dtype=np.int32))
    lease = tree.pin(match)
    assert tree.evict(117).shortfall == 117
    assert tree.match(np.arange(768, dtype=np.int32)).ids.tolist() == match.ids.tolist()
    tree.unpin(lease)
    assert tree.evict(117).shortfall == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfuda", "fifo", "priority", "sieve", "arc", "auto"])
def test_r16_the_newest_block_is_not_evicted_first(policy: str) -> None:
    tree = PrefixTree(1, 1, policy, capacity=10)
    for i in range(10):
        store(tree, text(i), [i + 1])
    assert tree.evict(9).ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_r17_the_beginning_of_a_text_outlives_its_end() -> None:
    tree = PrefixTree(2)
    store(tree, np.arange(40, dtype=np.int32), list(range(1, 21)))
    for left in range(19, -1, -1):
        assert tree.evict(1).ids.tolist() == [[left + 1]]
        assert tree.match(np.arange(40, dtype=np.int32)).num_blocks == left


def test_extending_a_cached_prefix_keeps_the_count() -> None:
    tree = PrefixTree(1)
    store(tree, text(1, 2, 3), [1, 2, 3])
    store(tree, text(1, 2, 3, 4, 5), [4, 5])
    assert tree.num_evictable == 5
    assert tree.evict(5).ids.tolist() == [[5, 4, 3, 2, 1]]
    assert (tree.num_evictable, tree.num_cached) == (0, 0)
    assert tree.evict(1).shortfall == 1


def test_evict_with_everything_pinned_ends_and_says_so() -> None:
    tree = PrefixTree(1)
    store(tree, text(1, 2, 3), [1, 2, 3])
    store(tree, text(1, 4), [4])
    leases = [tree.pin(tree.match(one)) for one in (text(1, 2, 3), text(1, 4))]
    evicted = tree.evict(2)
    assert evicted.ids.shape == (1, 0) and evicted.shortfall == 2 and evicted.states == ()
    for lease in leases:
        tree.unpin(lease)
    assert tree.evict(4).shortfall == 0


def test_eviction_takes_no_more_than_asked_and_the_oldest_first() -> None:
    """The order is right however fast the accesses follow one another: the clock is a counter."""
    tree = PrefixTree(1)
    for i in range(50):
        store(tree, text(i, i), [2 * i + 1, 2 * i + 2])
    for i in (0, 1, 2):
        tree.touch(tree.match(text(i, i)))
    evicted = tree.evict(3)
    assert evicted.ids.tolist() == [[8, 7, 10]]
    assert tree.num_cached == 97


@pytest.mark.parametrize("policy", [None, LRU])
def test_pins_come_and_go_without_the_queue_growing(policy: type[LRU] | None) -> None:
    tree = PrefixTree(1, policy=policy() if policy else "lru")
    store(tree, text(1, 2, 3), [1, 2, 3])
    for _ in range(20_000):
        tree.unpin(tree.pin(tree.match(text(1, 2, 3))))
    order = tree._order
    queued = len(order.policy._leaves._heap) if policy else len(order._heap) + len(order._in_order)
    assert queued < (2000 if policy else 2)
    tree.check()
