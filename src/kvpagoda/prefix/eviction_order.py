"""The order in which blocks are evicted: it is notified when blocks come, are used and leave, and consults a policy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from kvpagoda.blocks.free_list import IdPool
from kvpagoda.blocks.ids import Ids
from kvpagoda.policies.ghosts import GhostIndex
from kvpagoda.policies.protocol import EvictionPolicy, Forgotten, OldestLeaf
from kvpagoda.prefix.invariants import expect
from kvpagoda.prefix.lru import Entry, LRUOrder
from kvpagoda.prefix.node import Node

_log = logging.getLogger(__name__)


class PolicyOrder:
    """The order of an ``EvictionPolicy``, which knows each block by a key.

    The keys are the last row of the ids: ``num_rows`` rows are kept with the ids of each block. ``leaves``: key ->
    node, for the last block of each node whose last block is evictable.

    ``prepare``, ``add``, ``touch``, ``remove``, ``clear`` and each step of ``victims`` may raise MemoryError, and have
    then changed nothing; the other methods cannot fail. After a removal, ghosts have to be recorded and unused keys
    freed. Because this may fail, it is done later, when the next blocks are added or removed.

    Nothing that the policy does wrong reaches the caller. If a method raises something else than MemoryError, or
    ``set_leaf`` raises at all, or an answer is impossible, that is logged, and ``OldestLeaf`` takes over for good. What
    the policy is given to read, it cannot write.
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
        self._forgets_all = True  # whether these are, one by one, the vectors of the removed keys themselves
        self._has_failed = False  # whether the policy was replaced: nothing remembers the ghosts any more
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
                node.leaf = leaf
                self._set_leaf(leaf, True)

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
        keys = _read_only(rows[-1])
        try:
            self.policy.add(keys, priority)
        except MemoryError:
            raise
        except Exception as error:
            self._replace(error)
        self._keys.advance(len(keys) - len(self._back))
        for key in self._back:
            self._ghosts.discard(key)

    def added(self, node: Node, n: int, is_late: bool, entry: Entry | None) -> None:
        """Called when these ``n`` blocks are at the end of ``node``."""

    def touch(self, node: Node, depth: int, priority: int) -> None:
        """Count a use of the blocks from the root to ``depth``, which lies in ``node``, the deepest first."""
        keys = [node.ids[-1, : depth - node.start]]
        while node.parent is not None and node.parent.root is None:
            node = node.parent
            keys.append(node.ids[-1])
        used = _read_only(np.concatenate(keys[::-1]) if len(keys) > 1 else keys[0])
        try:
            self.policy.touch(used, priority)
        except MemoryError:
            raise
        except Exception as error:
            self._replace(error)

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes whose last blocks are evicted next, each with the number of blocks, ``limit`` blocks in all.

        Fewer if fewer are evictable. The caller handles each node with ``remove`` and ``mark`` before it asks for the
        next.
        """
        while limit > 0 and self.leaves:
            node, count = self._choice(limit)
            limit -= count
            yield node, count

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

    def _choice(self, limit: int) -> tuple[Node, int]:
        """Return the node whose last blocks are evicted next, and how many of them, at most ``limit``."""

        def chain(leaf: int) -> Ids:
            node = self.leaves[leaf]
            return _read_only(node.ids[-1, max(node.num_pinned, node.num_blocks - limit) :][::-1])

        try:
            keys = self.policy.choose(chain)
            node, count = self.leaves[int(keys[0])], len(keys)  # which ancestors these are follows from the leaf
            if count > min(limit, node.num_blocks - node.num_pinned):
                raise ValueError(f"choose() returned {keys!r}; it must return a leading part of chain(leaf)")
        except MemoryError:
            raise
        except Exception as error:
            self._replace(error)
            return self._choice(limit)
        return node, count

    def _set_leaf(self, key: int, is_leaf: bool) -> None:
        try:
            self.policy.set_leaf(key, is_leaf)
        except Exception as error:
            self._replace(error)

    def _replace(self, error: Exception) -> None:
        """Let ``OldestLeaf`` decide from now on, because the policy raised ``error``, or gave an answer that did."""
        name = type(self.policy).__name__
        self.policy, self._has_failed = OldestLeaf(self.leaves), True
        with suppress(Exception):  # handlers of logs are not ours either
            _log.error("the eviction policy %s failed; from now on the oldest leaf is evicted", name, exc_info=error)

    def _take(self, leaves: list[Node], keys: Ids, *, evicted: bool) -> None:
        """Tell the policy that ``keys`` are removed, ``leaves`` among them. If this raises, nothing has changed.

        ``leaves``: the nodes whose last blocks are removed.
        """
        keys = _read_only(keys)
        forgotten: Forgotten = keys
        for node in leaves:
            self._unmark(node)
        try:
            forgotten = self.policy.remove(keys, evicted=evicted)
        except BaseException as error:
            if isinstance(error, MemoryError) or not isinstance(error, Exception):
                for node in leaves:
                    self.mark(node)
                raise
            self._replace(error)
        self._forgotten.append(forgotten)
        self._forgets_all &= forgotten is keys

    def _settle(self) -> None:
        """Record the ghosts of removed blocks, and free the keys that are neither cached nor ghosts any more."""
        if not self._removed and not self._has_failed and not self._meaningless:
            return
        if self._forgets_all and not self._ghosts and not self._meaningless:
            if self._forgotten:
                self._keys.give(np.concatenate(self._forgotten) if len(self._forgotten) > 1 else self._forgotten[0])
            self._removed.clear()
            self._forgotten.clear()
            self._has_failed = False
            return
        while self._removed:
            above, keys, tokens, size = self._removed[0]
            text = tokens.tobytes()
            self._ghosts.add(above, keys.tolist(), [text[at : at + 4 * size] for at in range(0, len(text), 4 * size)])
            del self._removed[0]
        while self._forgotten and not self._has_failed:
            try:
                forgotten = self._ghosts.proven(self._forgotten[0])
            except MemoryError:
                raise
            except Exception as error:
                self._replace(error)
                break
            self._meaningless += self._ghosts.forget(forgotten)
            del self._forgotten[0]
        if self._has_failed:
            self._meaningless += self._ghosts.clear()
            self._forgotten.clear()
            self._has_failed = False
        self._keys.give(self._meaningless)
        self._meaningless.clear()
        self._forgets_all = True

    def _unmark(self, node: Node) -> None:
        if node.leaf >= 0:
            leaf, node.leaf = node.leaf, -1
            del self.leaves[leaf]
            self._set_leaf(leaf, False)


def _read_only(keys: Ids) -> Ids:
    """Return ``keys`` as a view that cannot be written: they are the tree's own."""
    view = keys[:]
    view.flags.writeable = False
    return view


def _last_key(node: Node) -> int:
    """Return the key of the last block of ``node``, or the name of a root: the key above the blocks below ``node``."""
    return node.root[0] if node.root else int(node.ids[-1, -1])


EvictionOrder = LRUOrder | PolicyOrder
"""The eviction order of a tree: built-in LRU, or a policy."""
