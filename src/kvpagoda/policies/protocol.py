"""The policy that replaces one of your own that fails: ``kvpagoda.abc.EvictionPolicy`` is the interface of all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvpagoda.abc import EvictionPolicy, Forgotten, Keys
from kvpagoda.errors import CheckFailed

__all__ = ["EvictionPolicy", "Forgotten", "Keys", "OldestLeaf"]


class OldestLeaf:
    """The policy that takes over from one that failed: the text that became a leaf, or was used as one, longest ago is
    evicted first. It needs to know nothing but the present leaves, and cannot fail.

    Args:
        leaves: the present ones.
    """

    def __init__(self, leaves: Iterable[int]) -> None:
        self._leaves = OrderedDict.fromkeys(leaves)

    def add(self, keys: Keys, priority: int) -> None:
        pass

    def touch(self, keys: Keys, priority: int) -> None:
        deepest = int(keys[-1])
        if deepest in self._leaves:
            self._leaves.move_to_end(deepest)

    def set_leaf(self, key: int, is_leaf: bool) -> None:
        if is_leaf:
            self._leaves[key] = None
        else:
            del self._leaves[key]

    def choose(self, chain: Callable[[int], Keys]) -> Keys:
        return chain(next(iter(self._leaves)))

    def remove(self, keys: Keys, *, evicted: bool) -> Forgotten:
        return keys

    def check(self, keys: Keys, leaves: set[int]) -> None:
        if self._leaves.keys() != leaves:
            raise CheckFailed(
                f"the oldest leaf and the tree disagree about {sorted(self._leaves.keys() ^ leaves)[:16]}"
            )
