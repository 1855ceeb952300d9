"""The way from a place in the tree along a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpagoda.alloc.held import Ids
from kvpagoda.prefix.node import Node


@dataclass(slots=True, eq=False)
class Walk:
    """Where a walk ended: at ``depth`` blocks from the root, in ``node``, ``num_tokens`` tokens after its start.

    ``pieces``: (node, first, end), the blocks of each node that it went through. ``partial``: (node, block) whose first
    tokens go on from there, if any do.
    """

    node: Node
    depth: int
    num_tokens: int = 0
    pieces: list[tuple[Node, int, int]] | tuple[()] = ()
    partial: tuple[Node, int] | None = None

    def ids(self, num_groups: int) -> Ids:
        """The ids of all blocks on the way, int32 ``[num_groups, blocks]``, a copy."""
        if not self.pieces:
            return np.zeros((num_groups, 0), np.int32)
        if len(self.pieces) == 1:
            node, first, end = self.pieces[0]
            alone: Ids = node.ids[:, first:end].copy()
            return alone
        ids: Ids = np.concatenate([node.ids[:, first:end] for node, first, end in self.pieces], axis=1)
        return ids

    def put_ids(self, ids: Ids) -> None:
        """Write the leading columns of ``ids`` into the blocks on the way."""
        column = 0
        for node, first, end in self.pieces:
            node.ids[:, first:end] = ids[:, column : column + end - first]
            column += end - first


def walk(node: Node, depth: int, tokens: Ids) -> Walk:
    """Go from ``depth``, which lies in ``node``, as far along ``tokens`` as whole blocks are there.

    One array compare and one dictionary probe for each node; O(log children) more where the text ends in a block.
    """
    size, at, pieces, probed = node.block_size, 0, [], 0
    while True:
        first = depth - node.start
        rest = node.num_blocks - first
        if rest:
            same = probed * size  # a probe has compared the first block
            if rest > probed:
                same += _num_same(node.key[first * size + same :], tokens[at + same :])
            whole = same // size
            if whole:
                pieces.append((node, first, first + whole))
            depth, at = depth + whole, at + same
            if whole < rest:
                return Walk(node, depth, at, pieces, (node, first + whole) if same % size else None)
        block = tokens[at : at + size].tobytes()
        child = node.children.get(block)
        if child is None:
            break
        node, probed = child, 1
    partial, longest = None, 0
    for child in node.children.nearest(block) if block and size > 1 else ():
        same = _num_same(child.key[:size], tokens[at:])
        if same > longest:
            partial, longest = (child, 0), same
    return Walk(node, depth, at + longest, pieces, partial)


def _num_same(a: Ids, b: Ids) -> int:
    """How many leading tokens are the same. O(the shorter)."""
    length = min(len(a), len(b))
    if not length:
        return 0
    same = a[:length] == b[:length]
    first = int(same.argmin())
    return length if same[first] else first
