"""The tree of edges: what is found, what is split, what leaves first; and random texts beside a slow model."""

from __future__ import annotations

import numpy as np
import pytest

from kvpagoda.replay.engines.text_tree import Edge, TextTree


def blocks(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int64)


def text_of(edge: Edge) -> str:
    return "".join(map(chr, edge.blocks))


def edges(tree: TextTree) -> list[str]:
    """The texts of all edges, sorted."""
    found, left = [], [tree.root]
    while left:
        edge = left.pop()
        left += edge.children.values()
        found.append(text_of(edge))
    return sorted(found[1:])


def test_a_text_is_one_edge_until_another_parts_from_it() -> None:
    tree = TextTree()
    assert tree.insert(blocks("abcd"))[0] == 0 and edges(tree) == ["abcd"]
    found, edge = tree.insert(blocks("abxy"))
    assert (found, text_of(edge)) == (2, "xy") and edges(tree) == ["ab", "cd", "xy"]
    assert tree.insert(blocks("ab"))[0] == 2 and tree.num_blocks == 6
    tree.check()


def test_a_look_up_cuts_the_edge_in_which_it_ends() -> None:
    tree = TextTree()
    tree.insert(blocks("abcd"))
    found, edge = tree.match(blocks("abc"))
    assert (found, text_of(edge)) == (3, "abc") and edges(tree) == ["abc", "d"]
    assert tree.match(blocks("x"))[0] == 0 and tree.match(blocks(""))[1] is tree.root


def test_whole_edges_leave_the_one_used_longest_ago_first() -> None:
    tree = TextTree()
    for text in ("abcd", "efg", "hi"):
        tree.insert(blocks(text))
    tree.match(blocks("abcd"))
    assert tree.evict(1) == 3 and edges(tree) == ["abcd", "hi"]
    assert tree.evict(3) == 6 and edges(tree) == [] and tree.num_blocks == 0
    assert tree.evict(1) == 0


def test_what_a_split_cuts_off_counts_as_used_by_it() -> None:
    tree = TextTree()
    tree.insert(blocks("abcd"))
    tree.insert(blocks("efg"))
    tree.insert(blocks("ax"))  # cuts "bcd" off, later than "efg" was used
    assert tree.evict(1) == 3 and edges(tree) == ["a", "bcd", "x"]
    assert tree.evict(1) == 3 and edges(tree) == ["a", "x"]


def test_a_parent_leaves_after_its_last_child_and_before_what_was_used_later() -> None:
    tree = TextTree()
    tree.insert(blocks("abcd"))
    tree.match(blocks("ab"))
    tree.insert(blocks("xyz"))
    assert tree.evict(3) == 4 and edges(tree) == ["xyz"]


def test_a_locked_edge_and_those_above_it_stay() -> None:
    tree = TextTree()
    _, edge = tree.insert(blocks("abcd"))
    tree.insert(blocks("abx"))
    tree.lock(edge)
    assert tree.num_unlocked == 1 and tree.evict(9) == 1 and edges(tree) == ["ab", "cd"]
    _, upper = tree.match(blocks("abc"))  # a split copies the lock
    assert upper.locks == 1 and tree.num_unlocked == 0
    tree.unlock(edge)
    tree.check()
    assert tree.evict(9) == 4


class _Slow:
    """Every block with the tick of its last use, and the cuts: what the tree does, without edges or a heap."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}  # text up to a block -> tick
        self.cuts: set[str] = set()
        self.ticks = 0

    def _common(self, text: str) -> str:
        n = max((n for n in range(len(text) + 1) if not n or text[:n] in self.used), default=0)
        return text[:n]

    def _path(self, text: str) -> list[str]:
        return [text[:n] for n in range(1, len(text) + 1) if text[:n] in self.cuts]

    def _use(self, end: str) -> None:
        """Use the edge that ends with ``end``."""
        self.ticks += 1
        self.used[end] = self.ticks

    def _cut(self, at: str) -> None:
        if at and at not in self.cuts:
            self.cuts.add(at)
            self._use(at)
            (lower,) = [end for end in self.cuts if end.startswith(at) and end != at and not self._between(at, end)]
            self._use(lower)

    def _between(self, at: str, end: str) -> bool:
        return any(at < other < end and end.startswith(other) and other.startswith(at) for other in self.cuts)

    def match(self, text: str) -> int:
        found = self._common(text)
        self._cut(found)
        for end in self._path(found):
            self._use(end)
        return len(found)

    def insert(self, text: str) -> int:
        found = self._common(text)
        for end in self._path(found):
            self._use(end)
        self._cut(found)
        if len(found) < len(text):
            self.used |= {text[:n]: 0 for n in range(len(found) + 1, len(text) + 1)}
            self.cuts.add(text)
            self._use(text)
        return len(found)

    def evict(self, count: int) -> int:
        freed = 0
        while freed < count and self.used:
            leaves = [end for end in self.cuts if not any(o.startswith(end) and o != end for o in self.used)]
            end = min(leaves, key=self.used.__getitem__)
            self.cuts.remove(end)
            while end and end not in self.cuts:
                del self.used[end]
                freed, end = freed + 1, end[:-1]
        return freed


@pytest.mark.parametrize("seed", range(8))
def test_random_texts_beside_a_slow_model(seed: int) -> None:
    random, tree, slow = np.random.default_rng(seed), TextTree(), _Slow()
    for _ in range(300):
        text = "".join(random.choice(list("ab"), random.integers(1, 9)))
        match random.integers(3):
            case 0:
                assert tree.match(blocks(text))[0] == slow.match(text)
            case 1:
                assert tree.insert(blocks(text))[0] == slow.insert(text)
            case _:
                count = int(random.integers(1, 6))
                assert tree.evict(count) == slow.evict(count)
        tree.check()
        assert tree.num_blocks == len(slow.used) and len(edges(tree)) == len(slow.cuts)
