"""The built-in LRU order, kept for stretches of blocks that were used together, not for single blocks; and its clock."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.prefix.invariants import expect
from kvpagoda.prefix.node import NO_USES, Node

_ENTRIES = 40  # the lowest bits of a time count entries, and keep their times apart
_USE = 1 << 20 + _ENTRIES  # from one use to the next
_NEVER_FOUND = 0.2  # of the way from the floor to now: as high as something enters whose request found nothing


class Entry(NamedTuple):
    """What is known of a new text or checkpoint. ``gain``: the blocks that a request which resumes at its end need not
    compute, but would if it resumed at the checkpoint before. ``found``: the share of its prompt that the request which
    computes it found, 0 to 1."""

    gain: int
    found: float


class Clock:
    """A count of uses, by which blocks and checkpoints are compared by age.

    ``now``: the time of the last use. Nothing was used at time 0. ``floor``: the latest time of use that was evicted so far.

    ``checkpoint_cost``: the bytes of a checkpoint, in blocks of text that take as many. If it is 0, what is new counts as
    used now. Else it enters lower: by the computing that it spares for its bytes, as in GreedyDual-Size (Cao and Irani,
    USITS 1997), and by how much its request found, since a text that was never found may never be. A hit counts as used now.
    """

    __slots__ = ("_cost", "_num_entries", "floor", "now")

    def __init__(self, checkpoint_cost: float = 0.0) -> None:
        self.now = self.floor = self._num_entries = 0
        self._cost = checkpoint_cost

    def tick(self) -> int:
        """Count one more use and return its time."""
        self.now += _USE
        return self.now

    def enter(self, entry: Entry | None) -> int:
        """Return the time under which something new is kept; None: now. No two times are equal."""
        now = self.now = self.now + _USE
        if entry is None or not self._cost:
            return now
        gain, floor = max(1, entry.gain), self.floor >> _ENTRIES
        height = min(1.0, _NEVER_FOUND + entry.found) * gain / (gain + self._cost)
        self._num_entries += 1
        return (floor + int(((now >> _ENTRIES) - floor) * height) << _ENTRIES) + self._num_entries


class LRUOrder:
    """Least recently used blocks first.

    The blocks of one use lie on one path. So a node stores ``used``, the time of use of its last stretch of blocks, and
    ``uses``, the (end depth, time of use) of the stretches before it, by depth. Of the blocks of one use the deepest
    counts as used first, so a stretch is evicted from its end. No two leaves were last used at the same time. New blocks
    are kept under the time that ``Clock.enter`` gives them.

    ``queued``: the time under which a node is in the queue, 0 if it is not. A node whose last block is evictable is in
    the queue. An entry is corrected when it comes up, if its node was used since or is not evictable now. Times that
    grow are queued at the end of a list, others in a heap: amortised O(1) and O(log leaves).
    """

    num_rows = 0

    def __init__(self, clock: Clock) -> None:
        self._clock, self._newest = clock, 0
        self._in_order: deque[Node] = deque()
        self._heap: list[int] = []
        self._heaped: dict[int, Node] = {}

    def prepare(self, node: Node, tokens: Ids, n: int) -> Ids:
        """Return no rows: nothing is stored for each block."""
        return np.empty((0, n), np.int32)

    def add(self, rows: Ids, priority: int) -> None:
        """Do nothing: ``added`` does the work."""

    def added(self, node: Node, n: int, is_late: bool, entry: Entry | None) -> None:
        """Let the last ``n`` blocks of ``node``, which are new, enter as ``entry`` says; with ``is_late``, where others are
        in front of them, they count as used with these."""
        if n < node.num_blocks:
            if is_late:
                return
            node.uses = [*node.uses, (node.start + node.num_blocks - n, node.used)]
        node.used = max(self._clock.enter(entry), node.queued)  # it comes up no sooner than it is queued

    def touch(self, node: Node, depth: int, priority: int) -> None:
        """Count the blocks up to ``depth``, which lies in ``node``, as used together now. O(stretches behind it)."""
        clock = self._clock.tick()
        while node.parent is not None:
            if depth == node.start + node.num_blocks:
                node.used, node.uses = clock, NO_USES
            else:
                node.uses = [(depth, clock), *node.uses[bisect_left(node.uses, (depth + 1,)) :]]
            depth, node = node.start, node.parent

    def mark(self, node: Node) -> None:
        """Queue ``node`` if its last block is evictable and it is not queued yet."""
        if not node.queued and not node.children and node.num_blocks > node.num_pinned:
            self._queue(node, node.used)

    def victims(self, limit: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes whose last blocks are evicted next, each with the number of blocks, ``limit`` blocks in all.

        Fewer if fewer are evictable. A node is out of the queue when it is yielded; the caller handles it before it
        asks for the next one.
        """
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
            if node.uses:  # take earlier stretches too that were used before the next node in the queue
                uses, first = node.uses, len(node.uses)
                next_up = min(in_order[0].queued if in_order else inf, heap[0] if heap else inf)
                while first and uses[first - 1][1] < next_up:
                    first -= 1
                if first:
                    count = min(count, node.end - uses[first - 1][0])
            if count > limit:
                count = limit
            limit -= count
            yield node, count
            self._clock.floor = max(self._clock.floor, when)  # not before the caller asks for more: it did evict these

    def remove(self, node: Node, count: int) -> None:
        """Update the stretches of ``node``, which still has its last ``count`` blocks; they are about to be evicted."""
        end, uses = node.end - count, node.uses
        while uses and uses[-1][0] >= end:
            node.used = uses.pop()[1]

    def put_back(self, node: Node) -> None:
        """Queue ``node`` again, whose blocks were not evicted after all."""
        self.mark(node)

    def clear(self, nodes: list[Node]) -> None:
        """Do nothing: nodes without blocks are skipped when they come up in the queue."""

    def check(self, nodes: list[Node]) -> None:
        """Prove that stretches cover the blocks of ``nodes``, and that evictable nodes are queued in time. O(nodes)."""
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
        """Return when the block that is evicted next was last used, or None. Amortised O(log leaves)."""
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
            if when not in self._heaped:  # else that of a node below, used together with this one and removed since
                heappush(self._heap, when)
            self._heaped[when] = node
