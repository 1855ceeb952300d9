"""Removal of blocks from the prefix tree: eviction from the leaves in policy order, or all of a namespace at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix.checkpoints import Checkpoints
from kvpagoda.prefix.children import Children
from kvpagoda.prefix.eviction_order import EvictionOrder
from kvpagoda.prefix.node import Node, nodes_below


def end_of(node: Node, depth: int) -> list[tuple[Node, int]]:
    """Return the nodes up to ``depth``, which lies in ``node``, that no lease and no other text uses: the deepest first,
    each with its number of blocks, as ``EvictionOrder.victims`` yields them. O(nodes)."""
    found: list[tuple[Node, int]] = []
    if depth < node.end:
        return found  # a text goes on there
    while node.parent is not None and not node.num_pinned and len(node.children) == bool(found):
        found.append((node, node.num_blocks))
        node = node.parent
    return found


def emptied(victims: list[tuple[Node, int]]) -> Iterator[tuple[Node, int]]:
    """Yield ``victims``, and empty each after its blocks were evicted: a queue may still refer to it."""
    for node, count in victims:
        yield node, count
        node.cut(0)


def evict(
    order: EvictionOrder, checkpoints: Checkpoints, ids: Ids, victims: Iterable[tuple[Node, int]] | None = None
) -> tuple[int, list[int], list[Node]]:
    """Evict one block for each column of ``ids``, int32 ``[rows, n]``, and write its ids there in that order.

    ``victims``: the nodes whose last blocks are evicted, each with how many (None: in the order of ``order``). At least n
    blocks must be evictable. Returns the number of evicted blocks, the state ids of their checkpoints, and
    the roots without any node left. A step that fails has no effect: the blocks evicted before it are returned, and the
    error is raised only if there are none.
    """
    done = 0
    states: list[int] = []
    bare: list[Node] = []
    parts: list[Ids] = []
    alone: list[int] = []  # ids of nodes of one block: joining thousands of short arrays is slow
    is_plain = len(ids) == 1 and not order.num_rows
    try:
        for node, count in order.victims(ids.shape[1]) if victims is None else victims:
            is_whole = count == node.num_blocks
            try:
                if is_plain and is_whole and count == 1:
                    alone.append(node.ids.item())
                else:
                    if alone:
                        parts.append(np.array([alone], np.int32))
                        alone = []
                    part = node.ids[:, : -count - 1 : -1]
                    if not is_whole or order.num_rows:
                        order.remove(node, count)
                    parts.append(part)
            except BaseException:
                order.put_back(node)
                raise
            done += count
            if node.checkpoints is not None and node.checkpoints.all:
                states += checkpoints.drop_after(node, node.end - count)
            above = node.parent
            if not is_whole:
                node.cut(node.num_blocks - count)
                order.mark(node)
            elif above is not None:
                above.children.take(node.first)
                if above.root is None:
                    _join(order, above)
                elif not above.children:
                    bare.append(above)
    except Exception:
        if not done:
            raise
    if done < ids.shape[1]:
        ids = ids[:, :done]
    if alone:
        ids[0, done - len(alone) :] = alone
        ids = ids[:, : done - len(alone)]
    if parts:
        try:
            np.concatenate(parts, 1, ids)
        except MemoryError:
            _copy(parts, ids)
    return done, states, bare


def clear(order: EvictionOrder, checkpoints: Checkpoints, roots: list[Node], num_rows: int) -> tuple[Ids, list[int]]:
    """Remove all nodes below ``roots``. If this raises, nothing has changed.

    Returns the ids int32 ``[num_rows, n]``, children before their parents, and the state ids of the checkpoints.
    """
    nodes = [node for root in roots for node in reversed(list(nodes_below(root))) if node is not root]
    ids = np.empty((num_rows, sum(node.num_blocks for node in nodes)), np.int32)
    _copy([node.ids[:, ::-1] for node in nodes], ids)
    order.clear(nodes)
    states: list[int] = []
    for node in nodes:
        if node.checkpoints is not None:
            states += checkpoints.drop_after(node, node.start)
        node.cut(0)  # a queue may still refer to it
        node.children = Children()
    for root in roots:
        root.children = Children()
    return ids, states


def _copy(parts: list[Ids], ids: Ids) -> None:
    """Write ``parts`` into ``ids`` one after the other, without allocating memory."""
    done = 0
    for part in parts:
        ids[:, done : done + part.shape[1]] = part
        done += part.shape[1]


def _join(order: EvictionOrder, node: Node) -> None:
    """Update ``node``, which lost a child: mark it if it is a leaf now, or merge it with its only child."""
    if not node.children:
        order.mark(node)
    elif len(node.children) == 1:
        (below,) = node.children.values()
        if below.num_blocks <= 2 * node.num_blocks:  # a long child is not merged: merging copies it
            with suppress(MemoryError):  # without memory they stay two nodes
                below.merge(node)
