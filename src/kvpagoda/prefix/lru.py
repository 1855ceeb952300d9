"""Least recently used first, by stretches of blocks that were used together: nothing is kept for a single block."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix.clock import Clock
from kvpagoda.prefix.invariants import expect
from kvpagoda.prefix.node import NO_USES, Node

_NEVER = 2**63


class LRUOrder:
    """The order of LRU: the blocks of one use lie on one path, so a node keeps ``used``, when its last stretch of blocks
    was used, and ``uses``, (end depth, when) of the stretches before that, by depth.

    Of the blocks of one use the deepest counts as used first, so a stretch goes from its end. No two leaves were last used
    at the same time. ``queued``: the time under which a node lies in the queue, 0 for not at all; a node whose last block
    may go is in the queue, one that was used since, or may not go now, is corrected when it comes up. Times that grow are
    queued at the end of a list, others in a heap: amortised O(1) and O(log leaves).
    """

    num_rows = 0

    def __init__(self, clock: Clock) -> None:
        self._clock, self._newest = clock, 0
        self._in_order: deque[Node] = deque()
        self._heap: list[int] = []
        self._heaped: dict[int, Node] = {}

    def prepare(self, node: Node, tokens: Ids, n: int) -> Ids:
        """Nothing is kept with each block."""
        return np.empty((0, n), np.int32)

    def add(self, rows: Ids, priority: int) -> None:
        """``added`` says it all."""

    def added(self, node: Node, n: int) -> None:
        """The last ``n`` blocks of ``node`` are new."""
        if n < node.num_blocks:
            node.uses = [*node.uses, (node.start + node.num_blocks - n, node.used)]
        node.used = self._clock.tick()

    def touch(self, node: Node, depth: int, priority: int) -> None:
        """The blocks up to ``depth``, which lies in ``node``, were used together. O(stretches behind it)."""
        clock = self._clock.tick()
        while node.parent is not None:
            if depth == node.start + node.num_blocks:
                node.used, node.uses = clock, NO_USES
            else:
                node.uses = [(depth, clock), *node.uses[bisect_left(node.uses, (depth + 1,)) :]]
            depth, node = node.start, node.parent

    def mark(self, node: Node) -> None:
        """See to it that ``node`` is queued if its last block may go."""
        if not node.queued and not node.children and node.num_blocks > node.num_pinned:
            self._queue(node, node.used)

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Nodes whose last blocks go next, and how many, ``limit`` in all if there are so many. A node is not queued any more
        when it comes; it is taken care of before the next is asked for."""
        heap, in_order, heaped = self._heap, self._in_order, self._heaped
        while limit > 0:
            if in_order and (not heap or in_order[0].queued < heap[0]):
                node = in_order.popleft()
            elif heap:
                node = heaped.pop(heappop(heap))
            else:
                return
            when, node.queued = node.queued, 0
            count = node.num_blocks - node.num_pinned
            if not count or node.children:
                continue
            if node.used != when:
                self._queue(node, node.used)
                continue
            if node.uses:  # stretches before this time go too: what is queued comes up at that time or later
                uses, first = node.uses, len(node.uses)
                next_up = min(in_order[0].queued if in_order else _NEVER, heap[0] if heap else _NEVER)
                while first and uses[first - 1][1] < next_up:
                    first -= 1
                if first:
                    count = min(count, node.end - uses[first - 1][0])
            if count > limit:
                count = limit
            limit -= count
            yield node, count

    def remove(self, node: Node, count: int) -> None:
        """The last ``count`` blocks of ``node``, which still has them, are going."""
        end, uses = node.end - count, node.uses
        while uses and uses[-1][0] >= end:
            node.used = uses.pop()[1]

    def put_back(self, node: Node) -> None:
        """``node`` came up and keeps its blocks: it is queued again."""
        self.mark(node)

    def clear(self, nodes: list[Node]) -> None:
        """``nodes`` are dropped; what of them lies in the queue is passed over, for it has no blocks any more."""

    def check(self, nodes: list[Node]) -> None:
        """Prove that stretches cover the blocks of ``nodes``, and that each that may go is queued in time. O(nodes)."""
        times = [node.queued for node in self._in_order]
        queued = {**dict(zip(times, self._in_order)), **self._heaped}
        for node in nodes:
            depths = [depth for depth, _ in node.uses]
            where = f"node at block {node.start}: stretches {node.uses[:8]}, the last one used at {node.used}"
            expect(depths == sorted(set(depths)) and all(node.start < depth < node.end for depth in depths), where)
            expect(all(0 < when <= self._clock.now for _, when in node.uses), where)
            expect(node.root is not None or 0 < node.used <= self._clock.now, where)
            if node.is_evictable:
                in_time = queued.get(node.queued) is node and node.queued <= node.used
                expect(in_time, f"{where}: would not come up in time")
        expect(times == sorted(times), "the queue is not in order")
        expect(sorted(self._heap) == sorted(self._heaped), "the heap and its nodes disagree")

    def oldest(self) -> int | None:
        for node, _ in self.victims(1):
            self.put_back(node)
            return node.used
        return None

    def _queue(self, node: Node, when: int) -> None:
        node.queued = when
        if when > self._newest:
            self._newest = when
            self._in_order.append(node)
        else:
            heappush(self._heap, when)
            self._heaped[when] = node
