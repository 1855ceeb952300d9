"""Proofs of the tree's invariants, from scratch. Each raises CheckFailed naming what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvpagoda.errors import CheckFailed
from kvpagoda.prefix.node import Node


def expect(is_so: bool, what: str) -> None:
    """Raise CheckFailed with ``what`` unless ``is_so``."""
    if not is_so:
        raise CheckFailed(f"prefix tree: {what}")


def prove_shape(nodes: Iterable[Node], num_rows: int) -> None:
    """Prove that edges are whole blocks and not empty, links are mutual, and depths add up."""
    for node in nodes:
        where = f"node at block {node.start} with ids {node.ids[:, :4].tolist()}"
        n = node.num_blocks
        expect((n == 0) == (node.parent is None) == (node.root is not None), f"{where}: empty, or a root that is not")
        expect(len(node.tokens) == n * node.block_size, f"{where}: arrays of other lengths")
        expect(node.ids.shape == (num_rows, n), f"{where}: ids of shape {node.ids.shape}")
        expect(node.into is None, f"{where}: reachable though it was merged")
        for block, child in node.children.items():
            expect(child.parent is node and child.start == node.end, f"{where}: a child does not hang here")
            expect(child.block(0) == block == child.first, f"{where}: a child is filed under another block")


def prove_counts(nodes: list[Node], num_cached: int, num_pinned: int) -> None:
    """Prove that ``num_cached`` and ``num_pinned`` are the sums over ``nodes``."""
    counted = sum(node.num_blocks for node in nodes), sum(node.num_pinned for node in nodes)
    expect((num_cached, num_pinned) == counted, f"{num_cached, num_pinned} is not {counted}")


def prove_pins(nodes: Iterable[Node], num_leases: int, tree: object) -> None:
    """Prove that leases and pins agree.

    There are ``num_leases`` open leases, each ends in its node, pins count leases and pinned children, and
    ``num_pinned`` of each node is as far as leases cover it.
    """
    counted = 0
    for node in reversed(list(nodes)):
        where = f"node at block {node.start} with ids {node.ids[:, :4].tolist()}"
        for lease in node.leases:
            inside = node.start < lease.num_blocks <= node.end or lease.num_blocks == node.start == node.end
            mutual = lease.node is node and lease.tree is tree and lease.is_open
            expect(mutual and inside, f"{where}: has {lease}, which is not of it")
        pins = len(node.leases) + sum(child.pins > 0 for child in node.children.values())
        expect(pins == node.pins, f"{where}: {node.pins} pins, counted {pins}")
        expect(node.covered() == node.num_pinned, f"{where}: covers {node.num_pinned}, leases {node.covered()}")
        counted += len(node.leases)
    expect(counted == num_leases, f"{num_leases} leases are open, nodes have {counted}")


def prove_ids(nodes: list[Node], num_groups: int, owned: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> None:
    """Prove that every id is in one place, and that ``owned``, bool ``[num_groups, ids]``, flags exactly these ids."""
    for group in range(num_groups):
        ids = np.concatenate([np.empty(0, np.int32), *(node.ids[group] for node in nodes)])
        ids = np.sort(ids[ids != 0])
        twice = ids[1:][ids[1:] == ids[:-1]]
        expect(not len(twice), f"ids {twice[:16].tolist()} of group {group} are at two places")
        odd = np.setxor1d(ids, np.flatnonzero(owned[group]))
        expect(not len(odd), f"nodes and flags disagree about ids {odd[:16].tolist()} of group {group}")
