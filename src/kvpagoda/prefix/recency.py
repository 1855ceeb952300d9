"""Least recently used first, by stretches of blocks that were used together: nothing is kept for a single block."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from kvpagoda.alloc.held import Ids
from kvpagoda.prefix.node import Node
from kvpagoda.prefix.proof import expect

_NEVER = 2**63


class Recency:
    """The turnover of LRU: the blocks of one use lie on one path, so a node keeps ``uses``, (end depth, when) by depth.

    Of the blocks of one use the deepest counts as used first, so a stretch goes from its end. No two leaves were last used
    at the same time. ``queued``: the time under which a node lies in the queue, 0 for not at all; a node whose last block
    may go is in the queue, one that was used since, or may not go now, is corrected when it comes up. Times that grow are
    queued at the end of a list, others in a heap: amortised O(1) and O(log leaves).
    """

    num_rows = 0

    def __init__(self) -> None:
        self._clock = self._newest = 0
        self._in_order: OrderedDict[int, Node] = OrderedDict()
        self._heap: list[int] = []
        self._heaped: dict[int, Node] = {}

    def rows(self, node: Node, tokens: Ids, n: int, priority: int) -> Ids:
        """Nothing is kept with each block."""
        return np.empty((0, n), np.int32)

    def added(self, node: Node) -> None:
        """The blocks of ``node`` behind its last stretch are new."""
        self._clock += 1
        node.uses.append((node.start + node.num_blocks, self._clock))

    def start_use(self) -> None:
        """What is used from now on is used together."""
        self._clock += 1

    def use(self, node: Node, depth: int, priority: int) -> None:
        """The blocks of ``node`` up to ``depth`` were used. O(stretches behind it)."""
        uses = node.uses
        if depth >= uses[-1][0]:
            node.uses = [(depth, self._clock)]
        else:
            node.uses = [(depth, self._clock), *uses[bisect_left(uses, (depth + 1,)) :]]

    def mark(self, node: Node) -> None:
        """See to it that ``node`` is queued if its last block may go."""
        if not node.queued and not node.children and node.num_blocks > node.num_pinned:
            self._queue(node, node.uses[-1][1])

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes whose last blocks go next, and how many, ``limit`` in all if there are so many. A node is not queued any more
        when it comes; it is taken care of before the next is asked for."""
        heap, in_order, heaped = self._heap, self._in_order, self._heaped
        while limit > 0:
            if in_order and (not heap or next(iter(in_order)) < heap[0]):
                when, node = in_order.popitem(last=False)
            elif heap:
                when = heappop(heap)
                node = heaped.pop(when)
            else:
                return
            node.queued = 0
            count, uses = node.num_blocks - node.num_pinned, node.uses
            if not count or node.children:
                continue
            if uses[-1][1] != when:
                self._queue(node, uses[-1][1])
                continue
            if len(uses) > 1:
                first = (
                    len(uses) - 1
                )  # stretches before this time go too: what is queued comes up at that time or later
                next_up = min(next(iter(in_order), _NEVER), heap[0] if heap else _NEVER)
                while first and uses[first - 1][1] < next_up:
                    first -= 1
                if first:
                    count = min(count, node.end - uses[first - 1][0])
            if count > limit:
                count = limit
            limit -= count
            yield node, count

    def remove(self, node: Node, count: int, *, evicted: bool) -> None:
        """The last ``count`` blocks of ``node``, which still has them, are going."""
        end, uses, when = node.end - count, node.uses, 0
        while uses and uses[-1][0] > end:
            when = uses.pop()[1]
        if count < node.num_blocks and (not uses or uses[-1][0] < end):
            uses.append((end, when))

    def check(self, nodes: list[Node]) -> None:
        """Prove that stretches cover the blocks of ``nodes``, and that each that may go is queued in time. O(nodes)."""
        queued = {**self._in_order, **self._heaped}
        for node in nodes:
            depths = [depth for depth, _ in node.uses]
            where = f"node at block {node.start}: stretches {node.uses[:8]}"
            expect(depths == sorted(set(depths)) and depths[-1:] == ([] if node.root else [node.end]), where)
            expect(all(depth > node.start and when <= self._clock for depth, when in node.uses), where)
            if node.is_evictable:
                in_time = queued.get(node.queued) is node and node.queued <= node.uses[-1][1]
                expect(in_time, f"{where}: would not come up in time")
        expect(list(self._in_order) == sorted(self._in_order), "the queue is not in order")
        expect(sorted(self._heap) == sorted(self._heaped), "the heap and its nodes disagree")

    def _queue(self, node: Node, when: int) -> None:
        node.queued = when
        if when > self._newest:
            self._newest = when
            self._in_order[when] = node
        else:
            heappush(self._heap, when)
            self._heaped[when] = node
