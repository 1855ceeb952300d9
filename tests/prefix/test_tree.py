"""The tree, case by case: sharing, duplicates, groups, leases across splits and merges, checkpoints, bad input."""

from collections.abc import Iterator

import numpy as np
import pytest
from partial_block import partial_ids
from plain_lru import LRU

from kvpagoda.core.prefix import EvictionPolicy, PrefixTree
from kvpagoda.core.prefix.node import Children, Node
from kvpagoda.errors import BadInput, CheckFailed, NotOwned, RetryLater, StaleHandle
from raises import raises


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def ids(*values: int) -> np.ndarray:
    return np.array([values], np.int32)


def store(tree: PrefixTree, text: np.ndarray, first_id: int, namespace: bytes = b"") -> np.ndarray:
    """Insert ``text``; its new blocks get ids from ``first_id`` on. Returns the ids of all its blocks, int32
    ``[num_groups, n]``."""
    match = tree.match(text, namespace)
    count = len(text) // tree.block_size - match.num_blocks
    new = np.arange(first_id, first_id + count, dtype=np.int32)[None]
    tree.insert(match, text[match.num_blocks * tree.block_size :], np.repeat(new, tree.num_groups, axis=0))
    tree.check()
    return tree.match(text, namespace).ids


def test_match_is_to_the_token_and_sharing_by_the_block() -> None:
    tree = PrefixTree(4)
    store(tree, np.arange(12, dtype=np.int32), 1)
    match = tree.match(tokens(0, 1, 2, 3, 4, 5, 6, 99, 8))
    assert (match.num_tokens, match.num_blocks) == (7, 1)
    assert match.ids.tolist() == [[1]] and partial_ids(tree, match) == [2]
    inside_the_first_block = tree.match(tokens(0, 1, 7))
    assert (inside_the_first_block.num_tokens, inside_the_first_block.num_blocks) == (2, 0)
    assert partial_ids(tree, inside_the_first_block) == [1]
    nothing = tree.match(tokens(5))
    assert (nothing.num_tokens, nothing.ids.shape, partial_ids(tree, nothing)) == (0, (1, 0), [0])


def test_a_limit_keeps_a_token_to_compute() -> None:
    tree = PrefixTree(4)
    text = np.arange(12, dtype=np.int32)
    store(tree, text, 1)
    match = tree.match(text, limit=len(text) - 1)
    assert (match.num_tokens, match.num_blocks, partial_ids(tree, match)) == (11, 2, [3])
    assert tree.match(text, limit=0).num_tokens == tree.match(text, limit=-3).num_tokens == 0


@pytest.mark.parametrize("width", [3, 2000])
def test_the_best_partial_block_is_found_among_many(width: int) -> None:
    tree, rng = PrefixTree(8), np.random.default_rng(width)
    texts = rng.integers(0, 3, (width, 8)).astype(np.int32)
    unique = np.unique(texts, axis=0)
    for i, text in enumerate(unique):
        store_quietly(tree, text, i + 1)
    for text in rng.integers(0, 3, (300, 8)).astype(np.int32):
        same = (np.cumprod(unique[:, :7] == text[:7], axis=1)).sum(axis=1)
        match = tree.match(text, limit=7)
        assert match.num_tokens == same.max()
        assert same[partial_ids(tree, match)[0] - 1] == same.max() or not same.max()
    assert tree.evict(width).shortfall == width - len(unique)
    tree.check()


def store_quietly(tree: PrefixTree, text: np.ndarray, block_id: int) -> None:
    """Insert a text of one block, without a check of the tree."""
    tree.insert(tree.match(text), text, ids(block_id))


def test_children_stay_sorted_through_growth_and_decay() -> None:
    children: Children[int] = Children()
    rng = np.random.default_rng(2)
    keys = [b"head" + int(key).to_bytes(4, "big") for key in rng.permutation(5000)]
    for key in keys[:10]:
        children.put(key, 0)
    assert len(children.nearest(b"head\0")) == 1 and not children.nearest(b"tail\0")
    children.put(b"tail", 0)
    assert len(children.nearest(b"tail\0")) == 1
    children.take(b"tail")
    for key in keys[10:]:
        children.put(key, 1)
    for key in keys[:4900]:
        children.take(key)
    left = sorted(keys[4900:])
    for number in range(0, 5000, 7):
        key = b"head" + number.to_bytes(4, "big")
        before, after = [k for k in left if k < key][-1:], [k for k in left if k >= key][:1]
        children[key] = children.get(key, 2)
        del children[key]
        for k in left:
            children.setdefault(k, 1)
        expected = [children[k] for k in (*before, *after)]
        assert children.nearest(key) == expected
    for key in left:
        children.take(key)
    assert not children and children.nearest(keys[0]) == [] and not any(children._pieces)


def test_namespaces_never_share_and_the_same_one_does() -> None:
    tree = PrefixTree(2)
    text = tokens(1, 2, 3, 4)
    store(tree, text, 1, b"a")
    assert tree.match(text, b"a").num_tokens == 4
    for other in (b"", b"b", b"a\0", b"aa"):
        assert tree.match(text, other).num_tokens == 0
    store(tree, text, 3, b"b")
    assert tree.match(text, b"b").ids.tolist() == [[3, 4]]
    assert sorted(tree.clear(b"a").ids[0].tolist()) == [1, 2]
    assert tree.match(text, b"a").num_tokens == 0 and tree.match(text, b"b").num_tokens == 4
    tree.check()


def test_near_misses_of_weak_hashes_do_not_hit() -> None:
    """Tokens are compared, not hashed: 65 and 321 have the same low 8 bits, and [a + 31, b - 1] and [a, b] may have the
    same polynomial hash."""
    tree = PrefixTree(2)
    store(tree, tokens(65, 100), 1)
    for text in ((321, 100), (65 + 31, 99), (65 - 31, 101), (100, 65), (65 + 2**16, 100)):
        assert tree.match(tokens(*text)).num_tokens == 0


def test_duplicates_come_back_once_with_the_ids_to_adopt() -> None:
    tree = PrefixTree(2)
    store(tree, tokens(1, 1, 2, 2, 3, 3), 1)
    root = tree.match(tokens())
    given = ids(11, 12, 13, 14)
    result = tree.insert(root, tokens(1, 1, 2, 2, 9, 9, 8, 8), given)
    assert result.duplicates.tolist() == [[True, True, False, False]]
    assert result.ids.tolist() == [[1, 2, 13, 14]] and result.num_added == 2
    again = tree.insert(root, tokens(1, 1, 2, 2, 9, 9, 8, 8), result.ids)
    assert not again.duplicates.any() and again.num_added == 0
    assert tree.owned_ids().tolist() == [1, 2, 3, 13, 14]
    tree.check()


def test_a_group_that_keeps_nothing_can_be_filled_later() -> None:
    tree = PrefixTree(1, num_groups=2)
    root = tree.match(tokens())
    tree.insert(root, tokens(5, 6, 7), np.array([[1, 2, 3], [0, 0, 9]], np.int32))
    result = tree.insert(root, tokens(5, 6, 8), np.array([[4, 5, 6], [7, 0, 8]], np.int32))
    assert result.ids.tolist() == [[1, 2, 6], [7, 0, 8]]
    assert result.duplicates.tolist() == [[True, True, False], [False, False, False]]
    assert tree.match(tokens(5, 6, 7)).ids.tolist() == [[1, 2, 3], [7, 0, 9]]
    assert tree.owned_ids(1).tolist() == [7, 8, 9]
    tree.check()
    assert sorted(map(tuple, tree.evict(9).ids.T.tolist())) == [(1, 7), (2, 0), (3, 9), (6, 8)]


def test_a_lease_outlives_splits_and_merges() -> None:
    tree = PrefixTree(1)
    long = np.arange(100, dtype=np.int32)
    store(tree, long, 1)
    leases = {depth: tree.pin(tree.match(long), depth) for depth in (0, 1, 30, 50, 51, 99, 100)}
    for i, cut in enumerate((50, 1, 30, 99, 75)):
        store(tree, np.append(long[:cut], np.int32(500)), 200 + i)
    assert tree.num_pinned == 100
    for depth in (100, 51, 0, 99):
        tree.unpin(leases.pop(depth))
        tree.check()
    assert tree.num_pinned == 50
    evicted = tree.evict(200)
    assert tree.num_cached == 50 and evicted.shortfall == 200 - evicted.ids.shape[1] == 145
    tree.check()
    result = tree.insert(leases[30], tokens(700, 701), ids(301, 302))
    assert result.lease is leases[30] and leases[30].num_blocks == 32
    assert tree.match(np.append(long[:30], (700, 701)).astype(np.int32)).ids[0, -2:].tolist() == [301, 302]
    assert tree.num_pinned == 52
    for lease in leases.values():
        tree.unpin(lease)
    tree.check()
    assert tree.evict(52).shortfall == 0


def test_chains_are_merged_again() -> None:
    """Branches are inserted and evicted; the chain that remains has one edge, or a few."""
    tree = PrefixTree(1)
    long = np.arange(1000, dtype=np.int32)
    for i, cut in enumerate(range(10, 1000, 10)):
        store(tree, np.append(long[:cut], np.int32(5000)), 2000 + 20 * i)
    store(tree, long, 1)
    tree.touch(tree.match(long))
    tree.evict(99)
    tree.check()
    node, nodes = next(iter(tree._roots[b""].children.values())), 1
    while node.children:
        node, nodes = next(iter(node.children.values())), nodes + 1
    assert nodes <= 10
    assert tree.match(long).num_blocks == tree.num_cached == 1000


def test_split_leaves_a_checkpoint_where_it_is() -> None:
    """A split never gives the state of the longer prefix to the shorter one."""
    tree = PrefixTree(2)
    store(tree, tokens(1, 1, 2, 2, 3, 3, 4, 4), 1)
    lease = tree.pin(tree.match(tokens(1, 1, 2, 2, 3, 3, 4, 4)))
    assert tree.set_checkpoint(lease, 4, 70) and tree.set_checkpoint(lease, 8, 71)
    assert not tree.set_checkpoint(lease, 8, 72)
    store(tree, tokens(1, 1, 2, 2, 3, 3, 9, 9), 9)
    store(tree, tokens(1, 1, 8, 8), 11)
    assert tree.match(tokens(1, 1, 2, 2, 3, 3, 9, 9)).checkpoint == (4, 70)
    assert tree.match(tokens(1, 1, 2, 2, 3, 3, 4, 4)).checkpoint == (8, 71)
    assert tree.match(tokens(1, 1, 8, 8)).checkpoint is None
    assert tree.match(tokens(1, 1, 2, 2, 3, 3, 4, 4), limit=7).checkpoint == (4, 70)


def test_checkpoints_are_evicted_by_use_alone_or_with_their_blocks() -> None:
    tree = PrefixTree(1)
    store(tree, np.arange(6, dtype=np.int32), 1)
    match = tree.match(np.arange(6, dtype=np.int32))
    for depth in (2, 4, 6):
        tree.set_checkpoint(match, depth, 100 + depth)
    tree.touch(match, 3)  # uses the checkpoint at 2
    assert tree.checkpoints.evict() == (104,)
    assert tree.num_cached == 6 and len(tree.checkpoints.by_state) == 2
    evicted = tree.evict(3)
    assert evicted.states == (106,) and evicted.ids.tolist() == [[6, 5, 4]]
    assert tree.checkpoints.evict(5) == (102,) and tree.checkpoints.evict() == ()
    tree.check()


def test_bad_checkpoints_are_refused() -> None:
    tree = PrefixTree(4)
    text = np.arange(8, dtype=np.int32)
    store(tree, text, 1)
    match = tree.match(text)
    for place in (0, -4, 3, 12):
        with pytest.raises(BadInput):
            tree.set_checkpoint(match, place, 1)
    tree.set_checkpoint(match, 4, 1)
    with raises(NotOwned, needed=1, available="checkpoint"):
        tree.set_checkpoint(match, 8, 1)
    with raises(NotOwned, needed=2):
        tree.checkpoints.drop(2)
    tree.checkpoints.drop(1)
    assert tree.match(text).checkpoint is None
    tree.check()


def test_a_match_from_before_an_eviction_is_stale_or_still_good() -> None:
    tree = PrefixTree(1)
    store(tree, tokens(1, 2, 3), 1)
    store(tree, tokens(7, 8), 4)
    match = tree.match(tokens(7, 8))
    tree.evict(3)
    tree.unpin(tree.pin(match))
    tree.evict(1)
    with raises(StaleHandle, needed=2, available=1):
        tree.pin(match)
    tree.insert(tree.match(tokens(7)), tokens(8), ids(9))
    with pytest.raises(StaleHandle):  # the text is cached again, but in another block
        tree.pin(match)
    assert tree.pin(tree.match(tokens(7, 8))).num_blocks == 2


def test_leases_of_nothing_keep_their_namespace() -> None:
    tree = PrefixTree(1)
    lease = tree.pin(tree.match(tokens(1), b"n"))
    tree.insert(lease, tokens(1), ids(1), pin=False)
    assert lease.num_blocks == 0 and tree.num_pinned == 0
    tree.evict(1)
    tree.insert(lease, tokens(2), ids(2))
    assert tree.match(tokens(2), b"n").num_tokens == 1 and tree.num_pinned == 1
    tree.unpin(lease)
    tree.evict(1)
    assert not tree._roots
    tree.check()


def test_clear_is_refused_while_something_is_pinned() -> None:
    tree = PrefixTree(1)
    store(tree, tokens(1, 2), 1, b"a")
    store(tree, tokens(1, 2), 3, b"b")
    lease = tree.pin(tree.match(tokens(1), b"a"))
    with raises(RetryLater, needed=0, available=1):
        tree.clear()
    assert sorted(tree.clear(b"b").ids[0].tolist()) == [3, 4]
    tree.unpin(lease)
    assert sorted(tree.clear().ids[0].tolist()) == [1, 2]
    assert tree.clear(b"none").ids.shape == (1, 0)
    tree.check()


def test_bad_input_is_refused_and_nothing_changes() -> None:
    tree = PrefixTree(2)
    store(tree, tokens(1, 1, 2, 2), 1)
    match = tree.match(tokens(1, 1))
    for text in ([1, 1], np.array([1, 1]), np.array([[1, 1]], np.int32), None):
        with raises(BadInput, needed=type(text).__name__):
            tree.match(text)
    for text, blocks in [
        (tokens(3, 3, 3), ids(9)),
        (tokens(3, 3), ids(9, 10)),
        (tokens(3, 3), np.array([9], np.int32)),
        (tokens(3, 3), np.array([[9]], np.int64)),
        (tokens(3, 3), ids(-1)),
        (tokens(3, 3), [[9]]),
    ]:
        with pytest.raises(BadInput):
            tree.insert(match, text, blocks)
    for count in (-1, 2):
        with pytest.raises(BadInput):
            tree.pin(match, count)
    with pytest.raises(BadInput):
        tree.evict(-1)
    with raises(BadInput, needed="tenant"):
        tree.match(tokens(1, 1), "tenant")
    with raises(StaleHandle, needed="lease"):
        PrefixTree(2).unpin(tree.pin(match))
    for size, groups in ((0, 1), (1, -1)):
        with pytest.raises(BadInput):
            PrefixTree(size, groups)
    tree.check()
    assert tree.num_cached == 2


def test_check_names_what_is_wrong() -> None:
    def broken(harm, policy: str | EvictionPolicy) -> None:
        tree = PrefixTree(1, policy=policy)
        store(tree, tokens(1, 2, 3), 41)
        store(tree, tokens(1, 2, 4), 50)
        lease = tree.pin(tree.match(tokens(1, 2, 4)))
        tree.set_checkpoint(lease, 2, 7)
        tree.check()
        harm(tree, tree._roots[b""].children[tokens(1).tobytes()])
        with pytest.raises(CheckFailed):
            tree.check()

    def set_field(name: str, value: object):
        return lambda tree, node: setattr(node, name, value)

    fields = (("pins", 3), ("num_pinned", 1), ("start", 1), ("first", b""))
    anyhow = (
        *(set_field(name, value) for name, value in fields),
        lambda tree, node: node.ids.__setitem__((0, 0), 42),
        lambda tree, node: node.checkpoints.all.clear(),
        lambda tree, node: node.children.take(tokens(4).tobytes()),
        lambda tree, node: setattr(tree, "num_cached", 9),
        lambda tree, node: setattr(tree.leases, "num_pinned", 9),
        lambda tree, node: setattr(tree.leases, "num_open", 0),
        lambda tree, node: node.children[tokens(4).tobytes()].leases.clear(),
        lambda tree, node: setattr(next(iter(node.children.values())), "parent", None),
    )
    by_stretch = (
        lambda tree, node: tree._order._in_order.clear(),
        lambda tree, node: tree._order._heap.append(3),
        set_field("used", 0),
        set_field("uses", [(2, 1)]),
        lambda tree, node: setattr(node.children[tokens(3).tobytes()], "used", 99),
    )
    by_cell = (
        set_field("leaf", 0),
        lambda tree, node: tree._order.leaves.clear(),
        lambda tree, node: tree._order.policy._leaves.members.clear(),
        lambda tree, node: tree._order.policy._leaves._heap.clear(),
        lambda tree, node: node.ids.__setitem__((1, 0), 1),
    )
    for harm in (*anyhow, *by_stretch):
        broken(harm, "lru")
    for harm in (*anyhow, *by_cell):
        broken(harm, LRU())


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_chain_of_a_hundred_thousand_blocks(every: int) -> None:
    """There is a branch at every fourth block, or at every block: nothing recurses, whatever the depth."""
    depth, tree = 100_000, PrefixTree(1, 1)
    lease = tree.pin(tree.match(tokens()))
    spine, branches = np.ones(depth, np.int32), depth // every
    own = np.arange(1, depth + 1, dtype=np.int32)[None]
    for i in range(branches):
        tree.insert(lease, tokens(2), ids(depth + 1 + i), pin=False)
        tree.insert(lease, spine[:every], own[:, i * every : (i + 1) * every])
    match = tree.match(spine)
    assert match.num_blocks == depth == tree.num_pinned and tree.num_cached == depth + branches
    other = tree.pin(match, depth // 2)
    tree.touch(lease)
    tree.check()
    tree.unpin(lease)
    gone = min(depth, depth // 2 + branches)
    assert tree.evict(depth).shortfall == depth - gone
    tree.unpin(other)
    left = depth + branches - gone
    assert tree.num_cached == left and tree.evict(depth).shortfall == depth - left
    tree.check()
    assert tree.num_cached == 0 and not tree._roots


def test_a_checkpoint_is_touched_alone() -> None:
    """Only the last checkpoint on the path is touched, and no block: the block that was used first is evicted first."""
    tree, leases = PrefixTree(1), []
    for i in (1, 2):
        store(tree, tokens(i, i, i), 10 * i)
        leases.append(tree.pin(tree.match(tokens(i, i, i))))
        assert tree.set_checkpoint(leases[-1], 1, 2 * i) and tree.set_checkpoint(leases[-1], 3, 2 * i + 1)
    tree.checkpoints.touch(leases[0].node, leases[0].num_blocks)
    assert tree.checkpoints.evict(3) == (2, 4, 5)
    for lease in leases:
        tree.unpin(lease)
    assert tree.evict(3).ids.tolist() == [[12, 11, 10]]
    tree.check()


def test_a_text_that_is_kept_is_found_like_one_that_is_copied() -> None:
    """Texts grow in arrays of their own, branch off one another and are evicted; a second tree copies every text."""
    rng, trees = np.random.default_rng(5), (PrefixTree(2), PrefixTree(2))
    texts: list[np.ndarray] = []
    free, in_place = list(range(1, 4000)), 0
    for _ in range(150):
        text = rng.integers(0, 2, 2 * rng.integers(4, 200)).astype(np.int32)
        if texts and rng.random() < 0.7:  # it begins like another text
            other = texts[rng.integers(len(texts))]
            shared = rng.integers(0, min(len(other), len(text)))
            text[:shared] = other[:shared]
        texts.append(text.copy())
        leases = [tree.pin(tree.match(text)) for tree in trees]
        done = leases[0].num_blocks
        written = text.copy()
        written[2 * done :] = -1  # what is not published yet is not written yet
        while done < len(text) // 2:
            end = min(len(text) // 2, done + int(rng.integers(1, 150)))
            written[2 * done : 2 * end] = text[2 * done : 2 * end]
            given = ids(*(free.pop() for _ in range(end - done)))
            for tree, lease, whole in zip(trees, leases, (written, None)):
                tree.insert(lease, written[2 * done : 2 * end], given.copy(), text=whole)
            done = end
            in_place += any(node._tokens.base is written and node.num_blocks > 64 for node in chain_of(leases[0].node))
        for tree, lease in zip(trees, leases):
            tree.unpin(lease)
        gone = [tree.evict(max(0, tree.num_cached - 800)).ids[0].tolist() for tree in trees]
        assert gone[0] == gone[1]
        free += gone[0]
        for other in texts[-20:]:
            found = [tree.match(other) for tree in trees]
            assert found[0].num_tokens == found[1].num_tokens and np.array_equal(found[0].ids, found[1].ids)
        for tree in trees:
            tree.check()
    assert in_place > 50


def chain_of(node: Node | None) -> Iterator[Node]:
    """Yield ``node`` and its ancestors up to the root."""
    while node is not None:
        yield node
        node = node.parent
