"""The order in which blocks go: what it is told as they come and go, and how a policy is asked."""

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
    """An ``EvictionPolicy`` is asked. It knows each block by its key, which is the last row of the ids: ``num_rows`` rows are
    kept with the ids of each block.

    ``prepare``, ``add``, ``touch``, ``remove``, ``clear`` and the step of ``victims`` may raise, having changed nothing;
    the others cannot fail. ``leaves``: key -> node, for the last block of each node that may go. What follows from a
    removal, ghosts to be kept and keys to be given back, is done when the next blocks come or go, since it may fail.
    """

    num_rows = 1

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.leaves: dict[int, Node] = {}
        self._keys, self._ghosts = IdPool(), GhostIndex()
        self._back: list[int] = []  # keys of ghosts among the blocks that are to be added
        self._removed: list[tuple[int, Ids, Ids, int]] = []  # key above, keys, tokens, block size
        self._forgotten: list[Forgotten] = []
        self._meaningless: list[int] = []

    def mark(self, node: Node) -> None:
        """Whether the last block of ``node`` may go can have changed: told when it may begin to, and for a ``leaf`` also when
        it may not any more."""
        leaf = int(node.ids[-1, -1]) if node.is_evictable else -1
        if leaf != node.leaf:
            self._unmark(node)
            if leaf >= 0:
                self.leaves[leaf] = node
                self.policy.set_leaf(leaf, True)
                node.leaf = leaf

    def prepare(self, node: Node, tokens: Ids, n: int) -> Ids:
        """``n`` blocks of ``tokens`` are to be added below all blocks of ``node``: their rows ``[num_rows, n]``. Fresh keys;
        ghosts get theirs back."""
        self._settle()
        back: list[int] = []
        size, above = len(tokens) // n, _last_key(node)
        while len(back) < n and self._ghosts:
            key = self._ghosts.find(above, tokens[len(back) * size : (len(back) + 1) * size].tobytes())
            if key is None:
                break
            back.append(key)
            above = key
        keys = self._keys.peek(n - len(back))
        self._back = back
        return np.concatenate((np.array(back, np.int32), keys))[None] if back else keys[None]

    def add(self, rows: Ids, priority: int) -> None:
        """They are added, with the ``rows`` that ``prepare`` said just now."""
        keys = rows[-1]
        self.policy.add(keys, priority)
        self._keys.advance(len(keys) - len(self._back))
        for key in self._back:
            self._ghosts.discard(key)

    def added(self, node: Node, n: int) -> None:
        """They stand at the end of ``node`` now."""

    def touch(self, node: Node, depth: int, priority: int) -> None:
        """The blocks from the root up to ``depth``, which lies in ``node``, were used, the deepest first."""
        keys = [node.ids[-1, : depth - node.start]]
        while node.parent is not None and node.parent.root is None:
            node = node.parent
            keys.append(node.ids[-1])
        self.policy.touch(np.concatenate(keys[::-1]) if len(keys) > 1 else keys[0], priority)

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes whose last blocks go next, and how many, ``limit`` in all if so many may go; each is taken care of, with
        ``remove`` and ``mark``, before the next is asked for."""

        def chain(leaf: int) -> Ids:
            node = self.leaves[leaf]
            return node.ids[-1, max(node.num_pinned, node.num_blocks - limit) :][::-1]

        while limit > 0 and self.leaves:
            keys = self.policy.choose(chain)
            node = self.leaves.get(int(keys[0])) if len(keys) else None
            if node is None or len(keys) > min(limit, node.num_blocks - node.num_pinned):
                raise BadInput(f"{self.policy!r} chose {keys!r}, which does not begin with a leaf or passes its chain")
            limit -= len(keys)
            yield node, len(keys)

    def oldest(self) -> None:
        """When the block was used that goes next, by the clock of the tree: nobody knows."""

    def remove(self, node: Node, count: int) -> None:
        """The last ``count`` blocks of ``node``, which still has them, are evicted; ``mark`` follows if some are left."""
        assert node.parent is not None
        self._settle()
        left = node.num_blocks - count
        above = int(node.ids[-1, left - 1]) if left else _last_key(node.parent)
        removed = above, node.ids[-1, left:], node.tokens[left * node.block_size :], node.block_size
        self._take([node], removed[1][::-1], evicted=True)
        self._removed.append(removed)

    def put_back(self, node: Node) -> None:
        """A victim was not removed after all."""
        self._unmark(node)
        self.mark(node)

    def clear(self, nodes: list[Node]) -> None:
        """All of ``nodes``, children before their parents, are dropped for good."""
        if not nodes:
            return
        self._settle()
        above = [_last_key(node.parent) for node in nodes if node.parent is not None]
        keys = np.concatenate([node.ids[-1, ::-1] for node in nodes])
        self._take([node for node in nodes if node.leaf >= 0], keys, evicted=False)
        for node, key in zip(nodes, above):
            self._removed.append((key, node.ids[-1], node.tokens, node.block_size))

    def check(self, nodes: list[Node]) -> None:
        """Prove that this agrees with ``nodes``, all there are. Raises CheckFailed."""
        keys: Ids = np.concatenate([np.empty(0, np.int32), *(node.ids[-1] for node in nodes)])
        expect(len(np.unique(keys)) == len(keys), "a key names two blocks")
        leaves = {_last_key(node): node for node in nodes if node.is_evictable}
        expect(leaves == self.leaves, f"leaves {sorted(leaves.keys() ^ self.leaves.keys())[:16]}")
        marked = {node.leaf: node for node in nodes if node.leaf >= 0}
        expect(leaves == marked, f"marked leaves {sorted(leaves.keys() ^ marked.keys())[:16]}")
        self.policy.check(keys, set(leaves))

    def _take(self, leaves: list[Node], keys: Ids, *, evicted: bool) -> None:
        """Tell the policy that ``keys`` go, the last blocks of ``leaves`` among them; all or nothing."""
        for node in leaves:
            self._unmark(node)
        try:
            self._forgotten.append(self.policy.remove(keys, evicted=evicted))
        except BaseException:
            for node in leaves:
                self.mark(node)
            raise

    def _settle(self) -> None:
        """Keep the ghosts of what was removed, and give back the keys that mean nothing any more."""
        if not self._removed and not self._forgotten and not self._meaningless:
            return
        if not self._ghosts and sum(len(one[1]) for one in self._removed) == sum(map(len, self._forgotten)):
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
    """What the blocks below ``node`` have above them: a key, or the name of a root."""
    return node.root[0] if node.root else int(node.ids[-1, -1])


EvictionOrder = LRUOrder | PolicyOrder
"""How a tree keeps the order in which its blocks go."""
