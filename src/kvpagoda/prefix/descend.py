"""Descent in the prefix tree along a text, and reading of the ids above a place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix.node import Node


@dataclass(slots=True)
class Descent:
    """Where a descent ended: in ``node``, at ``depth`` blocks from the root, ``num_tokens`` tokens after its start.

    ``path``: the nodes of the descent; it began in the first of them, at depth ``begin``. ``beyond``: the node of the
    block whose first tokens match after ``depth``, or None.
    """

    node: Node
    begin: int
    depth: int
    num_tokens: int
    path: list[Node]
    beyond: Node | None = None

    def ids(self, num_groups: int) -> Ids:
        """Return the ids of all blocks on the path, int32 ``[num_groups, blocks]``, a copy."""
        count = self.depth - self.begin
        if not count:
            return np.empty((num_groups, 0), np.int32)
        first = self.begin - self.path[0].start
        if len(self.path) == 1:
            alone: Ids = self.node.ids[:num_groups, first : first + count].copy()
            return alone
        ids: Ids = np.concatenate([node.ids[:num_groups] for node in self.path], axis=1)
        return ids[:, first : first + count]

    def put_ids(self, ids: Ids) -> None:
        """Write the leading columns of ``ids`` into the blocks on the path."""
        for node in self.path:
            first, end = max(node.start, self.begin), min(node.end, self.depth)
            node.ids[: len(ids), first - node.start : end - node.start] = ids[:, first - self.begin : end - self.begin]


def descend(node: Node, depth: int, tokens: Ids, *, to_the_token: bool = True) -> Descent:
    """Descend from ``depth``, which lies in ``node``, as long as whole blocks match ``tokens``.

    One dictionary probe for each node on the path, then one compare of all their tokens. ``to_the_token``: also find
    the block whose first tokens match after the whole blocks; this is O(log children) if the whole blocks end at the
    end of a node.
    """
    size, length, block = node.block_size, len(tokens), b""
    at = (node.end - depth) * size  # tokens on the path so far
    path, keys = ([node], [node.tokens[(depth - node.start) * size :]]) if at else ([], [])
    while at < length:
        block = tokens[at : at + size].tobytes()
        below = node.children.get(block)
        if below is None:
            break
        node = below
        path.append(node)
        keys.append(node.tokens)
        at += node.num_blocks * size
    same = _num_same(keys[0] if len(keys) == 1 else np.concatenate(keys), tokens) if keys else 0
    end = depth + same // size
    if same < at:  # the match ends inside a node: drop the nodes behind it from the path
        while path[-1].start >= end and len(path) > 1:
            path.pop()
        node = path[-1]
        return Descent(node, depth, end, same, path, node if same % size else None)
    beyond, longest = None, 0
    if to_the_token and at < length and size > 1:
        for child in node.children.nearest(block):
            more = _num_same_bytes(child.first, block) // 4
            if more > longest:
                beyond, longest = child, more
    return Descent(node, depth, end, same + longest, path, beyond)


def read_ids_above(node: Node, end: int, begin: int, first: int, out: Ids) -> None:
    """Read into ``out``, int32 ``[k, n]``, the ids of k groups from ``first`` on in blocks ``begin .. end - 1``.

    Depth ``end`` lies in ``node``.
    """
    if begin >= node.start:  # as most do
        out[:] = node.ids[first : first + len(out), begin - node.start : end - node.start]
        return
    for one, some in _slices_above(node, end, begin):
        from_begin = one.start - begin
        out[:, some.start + from_begin : some.stop + from_begin] = one.ids[first : first + len(out), some]


def put_ids_above(node: Node, end: int, begin: int, first: int, ids: Ids) -> None:
    """Write ``ids`` over the ids that ``read_ids_above`` would read."""
    for one, some in _slices_above(node, end, begin):
        from_begin = one.start - begin
        one.ids[first : first + len(ids), some] = ids[:, some.start + from_begin : some.stop + from_begin]


def _slices_above(node: Node, end: int, begin: int) -> Iterator[tuple[Node, slice]]:
    """Yield the nodes that hold the blocks ``begin .. end - 1``, deepest first, each with the slice of its blocks.

    Depth ``end`` lies in ``node``.
    """
    while end > begin:
        yield node, slice(max(begin, node.start) - node.start, end - node.start)
        end = node.start
        if node.parent is None:
            return
        node = node.parent


def _num_same(a: Ids, b: Ids) -> int:
    """Return how many leading tokens are equal. O(the shorter)."""
    length = len(a) if len(a) < len(b) else len(b)
    if not length:
        return 0
    same = a[:length] == b[:length]
    first = int(same.argmin())
    return length if same[first] else first


def _num_same_bytes(a: bytes, b: bytes) -> int:
    """Return how many leading bytes are equal. O(the shorter)."""
    length = min(len(a), len(b))
    differ = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return length - (differ.bit_length() + 7) // 8
