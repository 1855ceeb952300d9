"""A radix tree whose nodes are edges: a node holds the blocks that its parent's blocks go on with, up to where texts part.

It exists beside ``PrefixTree``, which evicts block by block, because engines with a tree of edges evict whole edges: which
blocks leave together depends on where earlier look-ups and insertions cut the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

import numpy as np

from kvpagoda.replay.trace import Ints


class Edge:
    """Blocks that follow those of ``parent``: int64 ``[n]``, n > 0 but for the root. ``used``: the tick of its last use.
    ``locks``: requests that run on it, or below it. ``end``: blocks from the root to its end. ``has_window``,
    ``window_used``, ``window_locks``: see ``edge_windows.WindowTree`` and ``edge_states.StateTree``."""

    __slots__ = ("blocks", "children", "end", "has_window", "locks", "parent", "used", "window_locks", "window_used")

    def __init__(self, parent: Edge | None, blocks: Ints, used: int, locks: int) -> None:
        self.parent, self.blocks, self.used, self.locks = parent, blocks, used, locks
        self.children: dict[int, Edge] = {}
        self.end: int = len(blocks) + (parent.end if parent else 0)
        self.has_window, self.window_used, self.window_locks = False, 0, 0

    @property
    def path(self) -> list[Edge]:
        """The edges from the one below the root to this one."""
        path: list[Edge] = []
        on = self
        while on.parent is not None:
            path.append(on)
            on = on.parent
        return path[::-1]


class TextTree:
    """Edges in order of their last use. ``num_blocks``: the blocks that it holds; ``num_unlocked``: those without locks.

    A leaf without locks can be evicted, the one that was used longest ago first, and all its blocks with it. ``match`` and
    ``insert`` use each edge on their way, the deeper ones later; where a text ends inside an edge they split it, and the
    lower part counts as used too. O(blocks compared + edges on the way), eviction O(log leaves) an edge.
    """

    def __init__(self) -> None:
        self._ticks = count()
        self.root = Edge(None, np.empty(0, np.int64), next(self._ticks), 1)
        self.num_blocks = self.num_unlocked = self.num_evicted = 0
        self._leaves: list[tuple[int, int, Edge]] = []  # a heap; those used since, or no longer leaves, are left in it

    def match(self, blocks: Ints) -> tuple[int, Edge]:
        """Return how many of the first ``blocks`` are cached, and the edge that ends there."""
        found, edge = self._walk(blocks, at_once=False)
        for on in edge.path:
            self._use(on)
        return found, edge

    def peek(self, blocks: Ints) -> int:
        """Return how many of the first ``blocks`` are cached, using and cutting no edge."""
        return sum(same for _, same in self._follow(blocks))

    def _follow(self, blocks: Ints) -> Iterator[tuple[Edge, int]]:
        """Yield the edges on the way of ``blocks``, each with how many of its blocks are the same."""
        edge, at, same = self.root, 0, 0
        while (
            at < len(blocks) and same == len(edge.blocks) and (below := edge.children.get(int(blocks[at]))) is not None
        ):
            edge, same = below, _common(below.blocks, blocks[at:])
            at += same
            yield edge, same

    def insert(self, blocks: Ints) -> tuple[int, Edge]:
        """Add ``blocks``; return how many of them were there, and the edge that ends where they end."""
        found, edge = self._walk(blocks, at_once=True)
        if found < len(blocks):
            edge = Edge(edge, blocks[found:].copy(), next(self._ticks), 0)
            assert edge.parent is not None
            edge.parent.children[int(edge.blocks[0])] = edge
            self.num_blocks += len(edge.blocks)
            self.num_unlocked += len(edge.blocks)
            self._offer(edge)
        return found, edge

    def _walk(self, blocks: Ints, at_once: bool) -> tuple[int, Edge]:
        """Follow ``blocks`` as far as they are cached, and split the edge in which that ends. ``at_once``: use each edge
        when it is reached, before a split."""
        edge, at = self.root, 0
        while at < len(blocks):
            below = edge.children.get(int(blocks[at]))
            if below is None:
                break
            if at_once:
                self._use(below)
            same = _common(below.blocks, blocks[at:])
            at += same
            if same < len(below.blocks):
                return at, self._split(below, same)
            edge = below
        return at, edge

    def _split(self, edge: Edge, at: int) -> Edge:
        """Cut ``edge`` after ``at`` blocks; return the upper part, which is new. The lower part counts as used later."""
        parent = edge.parent
        assert parent is not None
        upper = Edge(parent, edge.blocks[:at], next(self._ticks), edge.locks)
        parent.children[int(upper.blocks[0])] = upper
        edge.parent, edge.blocks = upper, edge.blocks[at:]
        upper.children[int(edge.blocks[0])] = edge
        self._use(edge)
        return upper

    def _use(self, edge: Edge) -> None:
        edge.used = next(self._ticks)
        self._offer(edge)

    def _offer(self, edge: Edge) -> None:
        if not edge.children and not edge.locks and edge.parent is not None:
            heappush(self._leaves, (edge.used, next(self._ticks), edge))

    def lock(self, edge: Edge) -> None:
        """Keep ``edge`` and those above it until ``unlock``."""
        on: Edge | None = edge
        while on is not None:
            if not on.locks:
                self.num_unlocked -= len(on.blocks)
            on.locks += 1
            on = on.parent

    def unlock(self, edge: Edge) -> None:
        """Undo one ``lock`` of an edge that ends where ``edge`` ends."""
        on: Edge | None = edge
        while on is not None:
            assert on.locks > 0
            on.locks -= 1
            if not on.locks:
                self.num_unlocked += len(on.blocks)
                self._offer(on)
            on = on.parent

    def evict(self, num_blocks: int) -> int:
        """Evict whole leaves until at least ``num_blocks`` blocks are free, or no leaf is left; return how many are."""
        before = self.num_blocks
        while before - self.num_blocks < num_blocks and self._leaves:
            used, _, edge = heappop(self._leaves)
            if used == edge.used and not edge.children and not edge.locks and edge.parent is not None:
                self._remove(edge)
        return before - self.num_blocks

    def _remove(self, edge: Edge) -> None:
        """Remove a leaf without locks."""
        parent = edge.parent
        assert parent is not None
        del parent.children[int(edge.blocks[0])]
        edge.parent = None  # what is left of it in the heap is no leaf
        self.num_blocks -= len(edge.blocks)
        self.num_unlocked -= len(edge.blocks)
        self.num_evicted += len(edge.blocks)
        self._offer(parent)

    def check(self) -> None:
        """Raise AssertionError if the blocks are not counted right, or a leaf without locks is not offered."""
        offered = {id(edge) for used, _, edge in self._leaves if used == edge.used}
        seen, unlocked, edges = 0, 0, [self.root]
        while edges:
            edge = edges.pop()
            seen += len(edge.blocks)
            unlocked += 0 if edge.locks else len(edge.blocks)
            for first, below in edge.children.items():
                assert below.parent is edge and first == below.blocks[0] and below.locks <= edge.locks
            assert edge is self.root or edge.children or edge.locks or id(edge) in offered
            edges += edge.children.values()
        assert (seen, unlocked) == (self.num_blocks, self.num_unlocked)


def _common(held: Ints, asked: Ints) -> int:
    """Return how many of the first blocks are the same; the first one is."""
    n = min(len(held), len(asked))
    differ = held[:n] != asked[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
