"""Insertion of blocks into the prefix tree, below a node or along cached blocks, and the ids that the tree owns then."""

from __future__ import annotations

import numpy as np

from kvpagoda.blocks.free_list import grown
from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.prefix.descend import descend
from kvpagoda.prefix.edge_arrays import arrays_of
from kvpagoda.prefix.eviction_order import EvictionOrder
from kvpagoda.prefix.lru import Entry
from kvpagoda.prefix.node import Node, Roots
from kvpagoda.prefix.results import Mask


class OwnedIds:
    """One flag for each id of each group: ``flags`` bool ``[num_groups, more than the largest id]``.

    Arguments are int32 ``[num_groups, n]``; 0 is no id and is ignored.
    """

    def __init__(self, num_groups: int) -> None:
        self.flags = np.zeros((num_groups, 64), np.bool_)

    def prove_new(self, ids: Ids) -> None:
        """Prove that none of ``ids`` is owned or named twice. O(n log n).

        Raises NotOwned for an id that is, and BadInput for a negative id.
        """
        if not ids.size:
            return
        top = int(ids.view(np.uint32).max())
        if top >= 2**31:
            raise BadInput(f"block ids are at least 1, 0 for none, got {ids.min()}")
        self.flags = grown(self.flags, top + 1)
        for group, row in enumerate(ids):
            owned = self.flags[group, row]
            if owned.any():
                text = f"the tree owns id {row[owned][0]} of group {group} already; a block is in one place"
                raise NotOwned(text, needed=int(row[owned][0]), available="owned")
            if len(row) > 1:
                named = np.sort(row)
                again = named[1:][(named[1:] == named[:-1]) & (named[1:] > 0)]
                if len(again):
                    text = f"id {again[0]} is named twice in group {group}; a block is in one place"
                    raise NotOwned(text, needed=int(again[0]), available="twice")

    def add(self, ids: Ids) -> None:
        """Mark ``ids``, which were proven new, as owned."""
        self._set(ids, True)

    def remove(self, ids: Ids) -> None:
        """Mark ``ids`` as not owned."""
        self._set(ids, False)

    def _set(self, ids: Ids, owned: bool) -> None:
        for flags, row in zip(self.flags, ids):
            flags[row] = owned
            flags[0] = False


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
        entry: Entry | None,
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
        order.added(node, n, is_late, entry)
        return node

    def along(
        self,
        node: Node,
        covered: int,
        tokens: Ids,
        blocks: Ids,
        text: Ids | None,
        priority: int,
        is_late: bool,
        entry: Entry | None,
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
            node = self.attach(node, way.depth, first, rest, own[:, have:], text, priority, is_late, entry)
        if self._owned is not None:  # nothing can fail from here on
            self._owned.add(given)
        way.put_ids(own)
        return node, blocks.shape[1] - have, own, duplicates
