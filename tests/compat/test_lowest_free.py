"""LowestFirst: a set that knows its smallest member."""

import pytest

from kvpagoda.compat.lowest_free import LowestFirst


@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_536, 65_537])
def test_the_bit_tree_at_the_edges_of_its_words(size):
    tree = LowestFirst(size)
    assert tree.members() == list(range(size))
    for i in {0, size // 2, size - 1}:
        tree.remove(i)
        tree.remove(i)
        assert i not in tree.members()
    tree.add(size - 1)
    tree.add(size - 1)
    for i in range(size - 1):
        tree.remove(i)
    assert tree.lowest() == size - 1
    tree.remove(size - 1)
    assert tree.lowest() == -1 and tree.members() == []
