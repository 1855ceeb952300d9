"""Whole leaves that are evicted in one step are those that are evicted one by one, in the same order."""

from __future__ import annotations

import numpy as np
import pytest

from kvpagoda.core.prefix import PrefixTree
from kvpagoda.core.prefix import tree as of_tree
from kvpagoda.core.prefix.order import LeafRun, LRUOrder
from kvpagoda.retention import RetentionRule


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes of each run from now on."""
    sizes: list[int] = []
    write = of_tree._write_whole

    def counted(parts: list[np.ndarray], ids: np.ndarray) -> None:
        sizes.append(len(parts))
        write(parts, ids)

    monkeypatch.setattr(of_tree, "_write_whole", counted)
    return sizes


def traffic(tree: PrefixTree, seed: int, num_texts: int = 300) -> list[list[object]]:
    """Store texts of 1 to 3 blocks behind a few heads in two namespaces, pin, touch and checkpoint some, and evict now and
    then; return what each eviction evicted, and the tree's shape after it."""
    random, size, evicted = np.random.default_rng(seed), tree.block_size, list[list[object]]()
    heads = [random.integers(0, 9, size * n).astype(np.int32) for n in (0, 0, 1, 2)]
    leases, number, state = [], 1, 1
    for _ in range(num_texts):
        own = random.integers(0, 99, size * int(random.integers(1, 4))).astype(np.int32)
        text = np.concatenate((heads[random.integers(len(heads))], own))
        match = tree.match(text, bytes([random.integers(2)]))
        rest = text[match.num_blocks * size :]
        n = len(rest) // size
        ids = np.arange(number, number + n * tree.num_groups, dtype=np.int32).reshape(tree.num_groups, n)
        number += n * max(1, tree.num_groups)
        lease = tree.insert(match, rest, ids, pin=True).lease
        assert lease is not None
        if random.random() < 0.1:
            state += tree.set_checkpoint(lease, lease.num_blocks * size, state)
        if random.random() < 0.2:
            tree.touch(lease, int(random.integers(lease.num_blocks + 1)))
        leases.append(lease)
        while len(leases) > (0 if random.random() < 0.5 else 3):
            tree.unpin(leases.pop(int(random.integers(len(leases)))))
        if random.random() < 0.1:
            gone = tree.evict(int(random.integers(1, tree.num_cached // 2 + 2)))
            nodes = [(node.start, node.ids.tolist(), node.used, node.uses) for node in tree.nodes()]
            evicted.append([gone.ids.tolist(), gone.states, gone.shortfall, tree.checkpoints._clock.floor, nodes])
            tree.check()
    return evicted


@pytest.mark.parametrize("num_groups", [0, 1, 3])
@pytest.mark.parametrize("cost", [0.0, 2.0])
def test_a_run_evicts_what_single_steps_evict(
    num_groups: int, cost: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        together = traffic(PrefixTree(2, num_groups, rule=RetentionRule(checkpoint_cost=cost)), seed)
        with monkeypatch.context() as patch:
            patch.setattr(LRUOrder, "_run", lambda *_: LeafRun([], {}, 0))
            before = len(sizes)
            assert traffic(PrefixTree(2, num_groups, rule=RetentionRule(checkpoint_cost=cost)), seed) == together
            assert len(sizes) == before
    assert sum(sizes) > 100


def test_leaves_of_one_block_are_one_step(sizes: list[int]) -> None:
    tree = PrefixTree(1)
    for number in range(1, 1001):
        text = np.array([number], np.int32)
        tree.insert(tree.match(text), text, np.array([[number]], np.int32))
    assert tree.evict(600).ids.tolist() == [[*range(1, 601)]] and sizes == [600]
    assert tree.evict(600).shortfall == 200 and sizes == [600, 400] and not tree.nodes()


def test_a_run_without_memory_is_still_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    tree = PrefixTree(1)
    for number in range(1, 9):
        text = np.array([number], np.int32)
        tree.insert(tree.match(text), text, np.array([[number]], np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(of_tree, "_write_whole", fails)
        with pytest.raises(MemoryError):
            tree.evict(4)
    tree.check()
    assert tree.evict(4).ids.tolist() == [[1, 2, 3, 4]]


def test_a_leaf_whose_beginning_was_used_later_is_not_evicted_whole() -> None:
    tree = PrefixTree(1)
    for number, n in ((1, 2), (3, 1), (4, 1), (5, 1)):
        text = np.arange(number, number + n, dtype=np.int32)
        tree.insert(tree.match(text), text, text[None])
    tree.touch(tree.match(np.array([1, 2], np.int32)), 1)
    assert tree.evict(4).ids.tolist() == [[2, 3, 4, 5]]
