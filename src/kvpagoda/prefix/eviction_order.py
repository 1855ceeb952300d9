"""The order in which blocks are evicted: it is notified when blocks come, are used and leave, and consults a policy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput
from kvpagoda.prefix.ghost_index import GhostIndex
from kvpagoda.prefix.id_pool import IdPool
from kvpagoda.prefix.invariants import expect
from kvpagoda.prefix.lru import LRUOrder
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.policies.protocol import EvictionPolicy, Forgotten


class PolicyOrder:
    """The order of an ``EvictionPolicy``, which knows each block by a key.

    The keys are the last row of the ids: ``num_rows`` rows are kept with the ids of each block. ``leaves``: key ->
    node, for the last block of each node whose last block is evictable.

    ``prepare``, ``add``, ``touch``, ``remove``, ``clear`` and each step of ``victims`` may raise, and have then changed
    nothing; the other methods cannot fail. After a removal, ghosts have to be recorded and unused keys freed. Because
    this may fail, it is done later, when the next blocks are added or removed.
    """

    num_rows = 1

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.leaves: dict[int, Node] = {}
        self._keys, self._ghosts = IdPool(), GhostIndex()
        self._back: list[int] = []  # keys of ghosts among the blocks that ``add`` will add
        # what ``_settle`` still has to do:
        self._removed: list[tuple[int, Ids, Ids, int]] = []  # removed blocks: key above, keys, tokens, block size
        self._forgotten: list[Forgotten] = []  # keys that the policy forgot
        self._meaningless: list[int] = []  # keys to be freed

    def mark(self, node: Node) -> None:
        """Update whether the last block of ``node`` is evictable.

        Called when it may have become evictable and, for a node with a ``leaf``, also when it may have ceased to be.
        """
        leaf = int(node.ids[-1, -1]) if node.is_evictable else -1
        if leaf != node.leaf:
            self._unmark(node)
            if leaf >= 0:
                self.leaves[leaf] = node
                self.policy.set_leaf(leaf, True)
                node.leaf = leaf

    def prepare(self, node: Node, tokens: Ids, n: int) -> Ids:
        """Return the rows ``[num_rows, n]`` of ``n`` blocks with ``tokens`` that are to be added below ``node``.

        Blocks that are ghosts get their former keys, the others fresh ones.
        """
        self._settle()
        former: list[int] = []
        size, above = len(tokens) // n, _last_key(node)
        while len(former) < n and self._ghosts:
            key = self._ghosts.find(above, tokens[len(former) * size : (len(former) + 1) * size].tobytes())
            if key is None:
                break
            former.append(key)
            above = key
        fresh = self._keys.peek(n - len(former))
        self._back = former
        return np.concatenate((np.array(former, np.int32), fresh))[None] if former else fresh[None]

    def add(self, rows: Ids, priority: int) -> None:
        """Register the blocks for which ``prepare`` has just returned ``rows``."""
        keys = rows[-1]
        self.policy.add(keys, priority)
        self._keys.advance(len(keys) - len(self._back))
        for key in self._back:
            self._ghosts.discard(key)

    def added(self, node: Node, n: int, is_late: bool) -> None:
        """Called when these ``n`` blocks are at the end of ``node``."""

    def touch(self, node: Node, depth: int, priority: int) -> None:
        """Count a use of the blocks from the root to ``depth``, which lies in ``node``, the deepest first."""
        keys = [node.ids[-1, : depth - node.start]]
        while node.parent is not None and node.parent.root is None:
            node = node.parent
            keys.append(node.ids[-1])
        self.policy.touch(np.concatenate(keys[::-1]) if len(keys) > 1 else keys[0], priority)

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes whose last blocks are evicted next, each with the number of blocks, ``limit`` blocks in all.

        Fewer if fewer are evictable. The caller handles each node with ``remove`` and ``mark`` before it asks for the
        next.
        """

        def chain(leaf: int) -> Ids:
            node = self.leaves[leaf]
            return node.ids[-1, max(node.num_pinned, node.num_blocks - limit) :][::-1]

        while limit > 0 and self.leaves:
            keys = self.policy.choose(chain)
            node = self.leaves.get(int(keys[0])) if len(keys) else None
            if node is None or len(keys) > min(limit, node.num_blocks - node.num_pinned):
                raise BadInput(f"{self.policy!r} chose {keys!r}; choose() must return a leading part of chain(leaf)")
            limit -= len(keys)
            yield node, len(keys)

    def oldest(self) -> None:
        """Return None: the times of a policy are not those of the tree's clock."""

    def remove(self, node: Node, count: int) -> None:
        """Record the eviction of the last ``count`` blocks of ``node``, which still has them.

        ``mark`` follows if the node keeps some blocks.
        """
        assert node.parent is not None
        self._settle()
        kept = node.num_blocks - count
        above = int(node.ids[-1, kept - 1]) if kept else _last_key(node.parent)
        removed = above, node.ids[-1, kept:], node.tokens[kept * node.block_size :], node.block_size
        self._take([node], removed[1][::-1], evicted=True)
        self._removed.append(removed)

    def put_back(self, node: Node) -> None:
        """Restore the mark of a victim that was not removed after all."""
        self._unmark(node)
        self.mark(node)

    def clear(self, nodes: list[Node]) -> None:
        """Record that all of ``nodes``, children before their parents, are removed for good."""
        if not nodes:
            return
        self._settle()
        above = [_last_key(node.parent) for node in nodes if node.parent is not None]
        keys = np.concatenate([node.ids[-1, ::-1] for node in nodes])
        self._take([node for node in nodes if node.leaf >= 0], keys, evicted=False)
        for node, key in zip(nodes, above):
            self._removed.append((key, node.ids[-1], node.tokens, node.block_size))

    def check(self, nodes: list[Node]) -> None:
        """Prove that this order agrees with ``nodes``, all nodes of the tree. Raises CheckFailed."""
        keys: Ids = np.concatenate([np.empty(0, np.int32), *(node.ids[-1] for node in nodes)])
        expect(len(np.unique(keys)) == len(keys), "a key names two blocks")
        leaves = {_last_key(node): node for node in nodes if node.is_evictable}
        expect(leaves == self.leaves, f"leaves {sorted(leaves.keys() ^ self.leaves.keys())[:16]}")
        marked = {node.leaf: node for node in nodes if node.leaf >= 0}
        expect(leaves == marked, f"marked leaves {sorted(leaves.keys() ^ marked.keys())[:16]}")
        self.policy.check(keys, set(leaves))

    def _take(self, leaves: list[Node], keys: Ids, *, evicted: bool) -> None:
        """Tell the policy that ``keys`` are removed, ``leaves`` among them. If it raises, nothing has changed.

        ``leaves``: the nodes whose last blocks are removed.
        """
        for node in leaves:
            self._unmark(node)
        try:
            self._forgotten.append(self.policy.remove(keys, evicted=evicted))
        except BaseException:
            for node in leaves:
                self.mark(node)
            raise

    def _settle(self) -> None:
        """Record the ghosts of removed blocks, and free the keys that are neither cached nor ghosts any more."""
        if not self._removed and not self._forgotten and not self._meaningless:
            return
        if not self._ghosts and sum(len(removed[1]) for removed in self._removed) == sum(map(len, self._forgotten)):
            self._keys.give(np.concatenate(self._forgotten) if len(self._forgotten) > 1 else self._forgotten[0])
            self._removed.clear()
            self._forgotten.clear()
            return
        while self._removed:
            above, keys, tokens, size = self._removed[0]
            text = tokens.tobytes()
            self._ghosts.add(above, keys.tolist(), [text[at : at + 4 * size] for at in range(0, len(text), 4 * size)])
            del self._removed[0]
        while self._forgotten:
            forgotten = self._forgotten[0]
            self._meaningless += self._ghosts.forget(forgotten if isinstance(forgotten, list) else forgotten.tolist())
            del self._forgotten[0]
        self._keys.give(self._meaningless)
        self._meaningless.clear()

    def _unmark(self, node: Node) -> None:
        if node.leaf >= 0:
            del self.leaves[node.leaf]
            self.policy.set_leaf(node.leaf, False)
            node.leaf = -1


def _last_key(node: Node) -> int:
    """Return the key of the last block of ``node``, or the name of a root: the key above the blocks below ``node``."""
    return node.root[0] if node.root else int(node.ids[-1, -1])


EvictionOrder = LRUOrder | PolicyOrder
"""The eviction order of a tree: built-in LRU, or a policy."""
