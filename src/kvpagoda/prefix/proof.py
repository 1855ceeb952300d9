"""Proofs of what must hold in the tree, from scratch. Each raises CheckFailed naming what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from kvpagoda.alloc.held import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.results import Lease


def nodes_below(root: Node) -> Iterator[Node]:
    """``root`` and every node below it, a parent before its children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


def expect(is_so: bool, what: str) -> None:
    """Raise CheckFailed unless ``is_so``."""
    if not is_so:
        raise CheckFailed(f"prefix tree: {what}")


def prove_shape(nodes: Iterable[Node], num_groups: int) -> None:
    """Edges are whole blocks and not empty, links are mutual, depths add up, checkpoints lie in their node."""
    for node in nodes:
        where = f"node at block {node.start} with ids {node.ids[:, :4].tolist()}"
        n = node.num_blocks
        expect((n == 0) == (node.parent is None) == (node.root is not None), f"{where}: empty, or a root that is not")
        expect(len(node.key) == n * node.block_size and len(node.cells) == n, f"{where}: arrays of other lengths")
        expect(node.ids.shape == (num_groups, n), f"{where}: ids of shape {node.ids.shape}")
        expect(node.into is None, f"{where}: reachable though it was merged")
        expect(all(node.start < depth <= node.end for depth in node.checkpoints), f"{where}: {node.checkpoints}")
        for block, child in node.children.items():
            expect(child.parent is node and child.start == node.end, f"{where}: a child does not hang here")
            expect(child.block(0) == block, f"{where}: a child is filed under another block")


def prove_pins(nodes: Iterable[Node], leases: Iterable[Lease]) -> None:
    """The pins of each node are the leases that end in it or below, and it covers as far as they reach."""
    ends: dict[Node, Counter[int]] = {}
    for lease in leases:
        ends.setdefault(lease.node.up_to(lease.num_blocks), Counter())[lease.num_blocks] += 1
    for node in reversed(list(nodes)):
        own = ends.pop(node, Counter())
        pins = own.total() + sum(child.pins for child in node.children.values())
        where = f"node at block {node.start} with ids {node.ids[:, :4].tolist()}"
        expect(own == node.ends and pins == node.pins, f"{where}: {node.pins} pins, {pins} leases")
        expect(node.covered() == node.num_pinned, f"{where}: covers {node.num_pinned}, leases {node.covered()}")
    expect(not ends, f"leases on nodes that are not in the tree: {ends}")


def prove_ids(nodes: list[Node], owned: np.ndarray[tuple[int, int], np.dtype[np.bool_]] | None) -> Ids:
    """Every id is at one place, and the flags, if there are any, say which. Returns the cells, all of them distinct."""
    cells: Ids = np.concatenate([np.empty(0, np.int32), *(node.cells for node in nodes)])
    expect(len(np.unique(cells)) == len(cells), "a cell names two blocks")
    for group in range(len(nodes[0].ids) if nodes else 0):
        ids = np.concatenate([np.empty(0, np.int32), *(node.ids[group] for node in nodes)])
        ids = np.sort(ids[ids != 0])
        twice = ids[1:][ids[1:] == ids[:-1]]
        expect(not len(twice), f"ids {twice[:16].tolist()} of group {group} are at two places")
        odd = ids[:0] if owned is None else np.setxor1d(ids, np.flatnonzero(owned[group]))
        expect(not len(odd), f"nodes and flags disagree about ids {odd[:16].tolist()} of group {group}")
    return cells
