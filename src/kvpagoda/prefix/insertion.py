"""Insertion of blocks into the prefix tree: below a node, or along blocks that are cached already."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix.descend import descend
from kvpagoda.prefix.edge_arrays import arrays_of
from kvpagoda.prefix.eviction_order import EvictionOrder
from kvpagoda.prefix.node import Node, Roots
from kvpagoda.prefix.owned_ids import OwnedIds
from kvpagoda.prefix.results import Mask


class Inserter:
    """The insertion part of a tree: adds blocks below ``roots`` and registers them with the eviction ``order``.

    ``owned``: the ids that the tree owns, or None if the tree does not prove ids.
    """

    def __init__(self, block_size: int, roots: Roots, order: EvictionOrder, owned: OwnedIds | None) -> None:
        self._block_size, self._roots, self._order, self._owned = block_size, roots, order, owned
        self._is_keyed = order.num_rows > 0

    def attach(
        self,
        node: Node,
        depth: int,
        first: bytes,
        tokens: Ids,
        ids: Ids,
        text: Ids | None,
        priority: int,
        is_late: bool,
    ) -> Node:
        """Insert new blocks below ``node``, which ends at ``depth``, and return the node that ends with them.

        ``first``: the tokens of the first of these blocks, as bytes. If this raises, nothing has changed.
        """
        order, n, size = self._order, ids.shape[1], self._block_size
        if self._is_keyed:
            ids = np.concatenate((ids, order.prepare(node, tokens, n)))
        if node.children or node.root is not None or not node.has_room(n, text):
            child = Node(node, depth, size, *arrays_of(tokens, ids, text, depth * size), n, first)
            if self._is_keyed:
                order.add(ids, priority)
            if node.root is not None and not node.pins:  # nothing can fail from here on
                self._roots[node.root[1]] = node
            node.put_child(child)
            if node.leaf >= 0:
                order.mark(node)
            node = child
        else:
            if self._is_keyed:
                node.make_room(n)
                order.add(ids, priority)
            node.append(tokens, ids, text)
        order.added(node, n, is_late)
        return node

    def along(
        self, node: Node, covered: int, tokens: Ids, blocks: Ids, text: Ids | None, priority: int, is_late: bool
    ) -> tuple[Node, int, Ids, Mask]:
        """Insert blocks behind the ``covered`` blocks that end in ``node``, where some of them may be cached already.

        Returns the node that ends with the blocks, the number of blocks added, the ids that the tree owns for all of
        them, and the mask of duplicates. A cached block that lacks the ids of some groups takes them.
        """
        way = descend(node, covered, tokens, to_the_token=False)
        node, have = way.node, way.depth - covered
        there = np.zeros_like(blocks)
        there[:, :have] = way.ids(len(blocks))
        given = np.where(blocks == there, 0, blocks)
        if self._owned is not None:
            self._owned.prove_new(given)
        duplicates = (given != 0) & (there != 0)
        own, given = np.where(there == 0, blocks, there), np.where(duplicates, 0, given)
        if have < blocks.shape[1]:
            if way.depth < node.end:
                node = way.path[-1] = node.split(way.depth)
            rest = tokens[have * self._block_size :]
            first = rest[: self._block_size].tobytes()
            node = self.attach(node, way.depth, first, rest, own[:, have:], text, priority, is_late)
        if self._owned is not None:  # nothing can fail from here on
            self._owned.add(given)
        way.put_ids(own)
        return node, blocks.shape[1] - have, own, duplicates
