"""The order in which cached blocks are evicted: LRU and its clock, the order that a policy decides, and checkpoints.

LRU is kept for stretches of blocks that were used together, not for single blocks. ``EvictionOrder`` is notified when blocks
come, are used and leave. Checkpoints, copied states at block boundaries, are ordered by last use.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from kvpagoda.abc import EvictionPolicy, Forgotten
from kvpagoda.arrays import Ids
from kvpagoda.core.prefix.node import NO_USES, Checkpoint, Node, NodeCheckpoints, expect
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.free_list import IdPool
from kvpagoda.policies.ghosts import GhostIndex
from kvpagoda.policies.heap import LazyHeap
from kvpagoda.policies.protocol import OldestLeaf
from kvpagoda.retention import RetentionRule

# -- LRU and its clock -----------------------------------------------------------------------------------------------

_ENTRIES = 40  # the lowest bits of a time count entries, and keep their times apart
_USE = 1 << 20 + _ENTRIES  # from one use to the next


class LeafRun(NamedTuple):
    """Nodes that are evicted whole, one after the other, in one step. ``ids``: int32 ``[rows, blocks]`` of each.
    ``keys``: parent -> the keys of those among them that are its children; it is a root, or keeps two others."""

    ids: list[Ids]
    keys: dict[Node, list[bytes]]
    num_blocks: int


Victims = tuple[Node, int] | LeafRun
"""What an eviction order gives up next: the last so many blocks of a node, or whole nodes."""


class Entry(NamedTuple):
    """What is known of a new text or checkpoint: the arguments of ``RetentionRule.rank``.

    Args:
        gain: see there.
        found: see there.
    """

    gain: int
    found: float


class Clock:
    """A count of uses, by which blocks and checkpoints are compared by age.

    ``now``: the time of the last use. Nothing was used at time 0. ``floor``: the latest time of use that was evicted so far.
    ``rule``: how high what is new enters between these two. A hit counts as used now.
    """

    __slots__ = ("_num_entries", "_rule", "floor", "now")

    def __init__(self, rule: RetentionRule | None = None) -> None:
        self.now = self.floor = self._num_entries = 0
        self._rule = rule or RetentionRule()

    def tick(self) -> int:
        """Count one more use and return its time."""
        self.now += _USE
        return self.now

    def enter(self, entry: Entry | None) -> int:
        """Return the time under which something new is kept; None: now. No two times are equal."""
        now = self.now = self.now + _USE
        if entry is None or not self._rule.checkpoint_cost:
            return now
        floor = self.floor >> _ENTRIES
        self._num_entries += 1
        return (floor + int(((now >> _ENTRIES) - floor) * self._rule.rank(*entry)) << _ENTRIES) + self._num_entries


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

    def victims(self, limit: int) -> Iterator[Victims]:
        """Yield what is evicted next, ``limit`` blocks in all, fewer if fewer are evictable.

        A node is out of the queue when it is yielded; the caller handles it before it asks for the next one. Those of a
        ``LeafRun`` leave the queue when the caller, which evicted them, asks for more.
        """
        heap, in_order, heaped, clock = self._heap, self._in_order, self._heaped, self._clock
        while limit > 0:
            if in_order and (not heap or in_order[0].queued < heap[0]):
                if in_order[0].num_blocks < limit and len((run := self._run(limit)).ids) > 1:
                    yield run
                    limit -= run.num_blocks
                    popleft = in_order.popleft
                    for _ in run.ids:
                        node = popleft()
                    clock.floor = max(clock.floor, node.queued)
                    continue
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
            clock.floor = max(clock.floor, when)  # not before the caller asks for more: it did evict these

    def _run(self, limit: int) -> LeafRun:
        """Return the longest run of nodes, first in the queue, that ``victims`` would yield whole one by one, ``limit``
        blocks at most, and of which none changes the order when it is evicted. Changes nothing."""
        ids: list[Ids] = []
        keys: dict[Node, list[bytes]] = {}
        left, end = limit, self._heap[0] if self._heap else inf
        parent: Node | None = None
        spare = 0  # how many children of ``parent`` may still go before it is a leaf, or merged with the last one
        for node in self._in_order:
            when, count = node.queued, node.num_blocks
            if not 0 < count <= left or node.used != when or node.pins or node.children or node.uses or when >= end:
                break
            if node.checkpoints is not None and node.checkpoints.all:
                break
            if node.parent is not parent:
                parent = node.parent
                assert parent is not None, "roots have no blocks"
                among = keys.setdefault(parent, [])
                spare = limit if parent.root is not None else len(parent.children) - 2 - len(among)
            if spare <= 0:
                break
            spare -= 1
            left -= count
            ids.append(node.ids)
            among.append(node.first)
        return LeafRun(ids, keys, limit - left)

    def remove(self, node: Node, count: int) -> None:
        """Update the stretches of ``node``, which still has its last ``count`` blocks; they are about to be evicted."""
        end, uses = node.start + node.num_blocks - count, node.uses
        while uses and uses[-1][0] >= end:
            node.used = uses.pop()[1]

    def put_back(self, node: Node) -> None:
        """Queue ``node`` again, whose blocks were not evicted after all."""
        self.mark(node)

    def clear(self, nodes: list[Node]) -> None:
        """Do nothing: nodes without blocks are skipped when they come up in the queue."""

    def ages(self) -> Callable[[Node], int]:
        """Return what says by when the last stretch of an evictable node was used: the lower, the sooner it is evicted."""
        return lambda node: node.used

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
        heap, in_order, heaped = self._heap, self._in_order, self._heaped
        while in_order or heap:  # as ``victims``, but the node that comes up stays where it is
            is_first = bool(in_order) and (not heap or in_order[0].queued < heap[0])
            node = in_order[0] if is_first else heaped[heap[0]]
            is_evictable = not node.children and node.num_blocks > node.num_pinned
            if is_evictable and node.used == node.queued:
                return node.used
            if is_first:
                in_order.popleft()
            else:
                del heaped[heappop(heap)]
            node.queued = 0
            if is_evictable:
                self._queue(node, node.used)
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


# -- the order, which a policy may decide ----------------------------------------------------------------------------

_log = logging.getLogger(__name__)


class PolicyOrder:
    """The order of an ``EvictionPolicy``, which knows each block by a key.

    The keys are the last row of the ids: ``num_rows`` rows are kept with the ids of each block. ``leaves``: key ->
    node, for the last block of each node whose last block is evictable.

    ``prepare``, ``add``, ``touch``, ``remove``, ``clear`` and each step of ``victims`` may raise MemoryError, and have
    then changed nothing; the other methods cannot fail. After a removal, ghosts have to be recorded and unused keys
    freed. Because this may fail, it is done later, when the next blocks are added or removed.

    Nothing that the policy does wrong reaches the caller. If a method raises something else than MemoryError, or
    ``set_leaf`` raises at all, or an answer is impossible, that is logged, and ``OldestLeaf`` takes over for good. What
    the policy is given to read, it cannot write.
    """

    num_rows = 1

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.leaves: dict[int, Node] = {}
        self._keys, self._ghosts = IdPool(), GhostIndex()
        self._back: list[int] = []  # keys of ghosts among the blocks that ``add`` will add
        # what ``_settle`` still has to do:
        self._removed: list[tuple[int, Ids, Ids, int]] = []  # removed blocks: key above, keys, tokens, block size
        self._forgotten: list[Forgotten] = []  # keys that the policy forgot
        self._forgets_all = True  # whether these are, one by one, the vectors of the removed keys themselves
        self._has_failed = False  # whether the policy was replaced: nothing remembers the ghosts any more
        self._meaningless: list[int] = []  # keys to be freed

    def mark(self, node: Node) -> None:
        """Update whether the last block of ``node`` is evictable.

        Called when it may have become evictable and, for a node with a ``leaf``, also when it may have ceased to be.
        """
        leaf = int(node.ids[-1, -1]) if node.is_evictable else -1
        if leaf != node.leaf:
            self._unmark(node)
            if leaf >= 0:
                self.leaves[leaf] = node
                node.leaf = leaf
                self._set_leaf(leaf, True)

    def prepare(self, node: Node, tokens: Ids, n: int) -> Ids:
        """Return the rows ``[num_rows, n]`` of ``n`` blocks with ``tokens`` that are to be added below ``node``.

        Blocks that are ghosts get their former keys, the others fresh ones.
        """
        self._settle()
        former: list[int] = []
        size, above = len(tokens) // n, _last_key(node)
        while len(former) < n and self._ghosts:
            key = self._ghosts.find(above, tokens[len(former) * size : (len(former) + 1) * size].tobytes())
            if key is None:
                break
            former.append(key)
            above = key
        fresh = self._keys.peek(n - len(former))
        self._back = former
        return np.concatenate((np.array(former, np.int32), fresh))[None] if former else fresh[None]

    def add(self, rows: Ids, priority: int) -> None:
        """Register the blocks for which ``prepare`` has just returned ``rows``."""
        keys = _read_only(rows[-1])
        try:
            self.policy.add(keys, priority)
        except MemoryError:
            raise
        except Exception as error:
            self._replace(error)
        self._keys.advance(len(keys) - len(self._back))
        for key in self._back:
            self._ghosts.discard(key)

    def added(self, node: Node, n: int, is_late: bool, entry: Entry | None) -> None:
        """Called when these ``n`` blocks are at the end of ``node``."""

    def touch(self, node: Node, depth: int, priority: int) -> None:
        """Count a use of the blocks from the root to ``depth``, which lies in ``node``, the deepest first."""
        keys = [node.ids[-1, : depth - node.start]]
        while node.parent is not None and node.parent.root is None:
            node = node.parent
            keys.append(node.ids[-1])
        used = _read_only(np.concatenate(keys[::-1]) if len(keys) > 1 else keys[0])
        try:
            self.policy.touch(used, priority)
        except MemoryError:
            raise
        except Exception as error:
            self._replace(error)

    def victims(self, limit: int) -> Iterator[Victims]:
        """Yield the nodes whose last blocks are evicted next, each with the number of blocks, ``limit`` blocks in all.

        Fewer if fewer are evictable. The caller handles each node with ``remove`` and ``mark`` before it asks for the
        next.
        """
        while limit > 0 and self.leaves:
            node, count = self._choice(limit)
            limit -= count
            yield node, count

    def oldest(self) -> None:
        """Return None: the times of a policy are not those of the tree's clock."""

    def ages(self) -> Callable[[Node], int]:
        """Return what says since when a node is a leaf, for those that are now: the lower, the longer. O(leaves)."""
        ranks = {leaf: rank for rank, leaf in enumerate(self.leaves)}
        return lambda node: ranks.get(node.leaf, len(ranks))

    def remove(self, node: Node, count: int) -> None:
        """Record the eviction of the last ``count`` blocks of ``node``, which still has them.

        ``mark`` follows if the node keeps some blocks.
        """
        assert node.parent is not None
        self._settle()
        kept = node.num_blocks - count
        above = int(node.ids[-1, kept - 1]) if kept else _last_key(node.parent)
        removed = above, node.ids[-1, kept:], node.tokens[kept * node.block_size :], node.block_size
        self._take([node], removed[1][::-1], evicted=True)
        self._removed.append(removed)

    def put_back(self, node: Node) -> None:
        """Restore the mark of a victim that was not removed after all."""
        self._unmark(node)
        self.mark(node)

    def clear(self, nodes: list[Node]) -> None:
        """Record that all of ``nodes``, children before their parents, are removed for good."""
        if not nodes:
            return
        self._settle()
        above = [_last_key(node.parent) for node in nodes if node.parent is not None]
        keys = np.concatenate([node.ids[-1, ::-1] for node in nodes])
        self._take([node for node in nodes if node.leaf >= 0], keys, evicted=False)
        for node, key in zip(nodes, above):
            self._removed.append((key, node.ids[-1], node.tokens, node.block_size))

    def check(self, nodes: list[Node]) -> None:
        """Prove that this order agrees with ``nodes``, all nodes of the tree. Raises CheckFailed."""
        keys: Ids = np.concatenate([np.empty(0, np.int32), *(node.ids[-1] for node in nodes)])
        expect(len(np.unique(keys)) == len(keys), "a key names two blocks")
        leaves = {_last_key(node): node for node in nodes if node.is_evictable}
        expect(leaves == self.leaves, f"leaves {sorted(leaves.keys() ^ self.leaves.keys())[:16]}")
        marked = {node.leaf: node for node in nodes if node.leaf >= 0}
        expect(leaves == marked, f"marked leaves {sorted(leaves.keys() ^ marked.keys())[:16]}")
        self.policy.check(keys, set(leaves))

    def _choice(self, limit: int) -> tuple[Node, int]:
        """Return the node whose last blocks are evicted next, and how many of them, at most ``limit``."""

        def chain(leaf: int) -> Ids:
            node = self.leaves[leaf]
            return _read_only(node.ids[-1, max(node.num_pinned, node.num_blocks - limit) :][::-1])

        try:
            keys = self.policy.choose(chain)
            node, count = self.leaves[int(keys[0])], len(keys)  # which ancestors these are follows from the leaf
            if count > min(limit, node.num_blocks - node.num_pinned):
                raise ValueError(f"choose() returned {keys!r}; it must return a leading part of chain(leaf)")
        except MemoryError:
            raise
        except Exception as error:
            self._replace(error)
            return self._choice(limit)
        return node, count

    def _set_leaf(self, key: int, is_leaf: bool) -> None:
        try:
            self.policy.set_leaf(key, is_leaf)
        except Exception as error:
            self._replace(error)

    def _replace(self, error: Exception) -> None:
        """Let ``OldestLeaf`` decide from now on, because the policy raised ``error``, or gave an answer that did."""
        name = type(self.policy).__name__
        self.policy, self._has_failed = OldestLeaf(self.leaves), True
        with suppress(Exception):  # handlers of logs are not ours either
            _log.error("the eviction policy %s failed; from now on the oldest leaf is evicted", name, exc_info=error)

    def _take(self, leaves: list[Node], keys: Ids, *, evicted: bool) -> None:
        """Tell the policy that ``keys`` are removed, ``leaves`` among them. If this raises, nothing has changed.

        ``leaves``: the nodes whose last blocks are removed.
        """
        keys = _read_only(keys)
        forgotten: Forgotten = keys
        for node in leaves:
            self._unmark(node)
        try:
            forgotten = self.policy.remove(keys, evicted=evicted)
        except BaseException as error:
            if isinstance(error, MemoryError) or not isinstance(error, Exception):
                for node in leaves:
                    self.mark(node)
                raise
            self._replace(error)
        self._forgotten.append(forgotten)
        self._forgets_all &= forgotten is keys

    def _settle(self) -> None:
        """Record the ghosts of removed blocks, and free the keys that are neither cached nor ghosts any more."""
        if not self._removed and not self._has_failed and not self._meaningless:
            return
        if self._forgets_all and not self._ghosts and not self._meaningless:
            if self._forgotten:
                self._keys.give(np.concatenate(self._forgotten) if len(self._forgotten) > 1 else self._forgotten[0])
            self._removed.clear()
            self._forgotten.clear()
            self._has_failed = False
            return
        while self._removed:
            above, keys, tokens, size = self._removed[0]
            text = tokens.tobytes()
            self._ghosts.add(above, keys.tolist(), [text[at : at + 4 * size] for at in range(0, len(text), 4 * size)])
            del self._removed[0]
        while self._forgotten and not self._has_failed:
            try:
                forgotten = self._ghosts.proven(self._forgotten[0])
            except MemoryError:
                raise
            except Exception as error:
                self._replace(error)
                break
            self._meaningless += self._ghosts.forget(forgotten)
            del self._forgotten[0]
        if self._has_failed:
            self._meaningless += self._ghosts.clear()
            self._forgotten.clear()
            self._has_failed = False
        self._keys.give(self._meaningless)
        self._meaningless.clear()
        self._forgets_all = True

    def _unmark(self, node: Node) -> None:
        if node.leaf >= 0:
            leaf, node.leaf = node.leaf, -1
            del self.leaves[leaf]
            self._set_leaf(leaf, False)


def _read_only(keys: Ids) -> Ids:
    """Return ``keys`` as a view that cannot be written: they are the tree's own."""
    view = keys[:]
    view.flags.writeable = False
    return view


def _last_key(node: Node) -> int:
    """Return the key of the last block of ``node``, or the name of a root: the key above the blocks below ``node``."""
    return node.root[0] if node.root else int(node.ids[-1, -1])


EvictionOrder = LRUOrder | PolicyOrder
"""The eviction order of a tree: built-in LRU, or a policy."""


# -- checkpoints -----------------------------------------------------------------------------------------------------


class Checkpoints:
    """State ids at depths of nodes, ordered by last use. Held checkpoints are outside of the order.

    ``by_state``: state id -> checkpoint, for all of them. ``num_held``: how many of these are held. The node of a
    checkpoint is the one in which it lies, also after splits and merges. A checkpoint belongs to the tree; leases do
    not hold it. All calls are amortised O(log n), and O(nodes) where they search along a path.
    """

    def __init__(self, clock: Clock) -> None:
        self.by_state: dict[int, Checkpoint] = {}
        self._clock = clock
        self._loose = LazyHeap(lambda state_id: (self.by_state[state_id].used, 0))
        self.num_held = 0

    def put(self, node: Node, depth: int, state_id: int, entry: Entry | None = None) -> bool:
        """Add a checkpoint at ``depth`` of ``node``; return False if there is one already.

        ``entry``: see ``Clock``; None: it counts as used now.
        Raises NotOwned for a state id that is a checkpoint already.
        """
        if state_id in self.by_state:
            raise NotOwned(f"state {state_id} is a checkpoint already", needed=state_id, available="checkpoint")
        if node.checkpoints is None:
            node.checkpoints = NodeCheckpoints()
        checkpoint = Checkpoint(state_id, depth)
        if not node.checkpoints.put(checkpoint):
            return False
        self.by_state[state_id] = checkpoint
        checkpoint.used = self._clock.enter(entry)
        self._loose.add(state_id)
        return True

    def find(self, state_id: int) -> Checkpoint:
        """Return the checkpoint with this state id. Raises NotOwned."""
        if state_id not in self.by_state:
            raise NotOwned(f"state {state_id} is not a checkpoint of this tree", needed=state_id)
        return self.by_state[state_id]

    def is_held(self, state_id: int) -> bool:
        """Return whether the checkpoint with this state id is held. Raises NotOwned. O(1)."""
        return self.find(state_id).num_holds > 0

    def last(self, node: Node, depth: int) -> Checkpoint | None:
        """Return the deepest checkpoint of ``node`` and the nodes above it, up to ``depth``; None if there is none."""
        while node.parent is not None:
            if node.checkpoints is not None and (found := node.checkpoints.last(depth)):
                return found
            node = node.parent
        return None

    def touch(self, node: Node, depth: int) -> None:
        """Count a use of the checkpoint that ``last`` returns, if there is one."""
        if self.by_state and (found := self.last(node, depth)):
            found.used = self._clock.tick()

    def use(self, state_id: int) -> None:
        """Count a use of the checkpoint with this state id. Raises NotOwned."""
        checkpoint = self.by_state.get(state_id) or self.find(state_id)
        checkpoint.used = self._clock.tick()

    def oldest(self) -> int | None:
        """Return when the checkpoint that ``evict`` removes next was last used; None if it would remove none."""
        first = self._loose.first()
        return None if first is None else first[0]

    def hold(self, state_id: int) -> None:
        """Protect the checkpoint with this state id from ``evict`` and ``drop``. Holds are counted.

        ``release`` ends one hold. The checkpoint is still removed if its blocks are removed. Raises NotOwned.
        """
        checkpoint = self.find(state_id)
        checkpoint.num_holds += 1
        if checkpoint.num_holds == 1:
            self.num_held += 1
            self._loose.discard(state_id)

    def release(self, state_id: int) -> None:
        """End one hold; this does not count as a use. Raises NotOwned, and BadInput if the checkpoint is not held."""
        checkpoint = self.find(state_id)
        if not checkpoint.num_holds:
            raise BadInput(f"checkpoint {state_id} is released more often than it was held")
        checkpoint.num_holds -= 1
        if not checkpoint.num_holds:
            self.num_held -= 1
            self._loose.add(state_id)

    def drop(self, state_id: int) -> None:
        """Remove a checkpoint; the caller owns its state id again. Raises NotOwned, and BadInput if it is held."""
        checkpoint = self.find(state_id)
        if checkpoint.num_holds:
            raise BadInput(f"checkpoint {state_id} is held {checkpoint.num_holds} times; release it first")
        self._take(checkpoint)

    def drop_after(self, node: Node, depth: int) -> list[int]:
        """Remove the checkpoints of ``node`` deeper than ``depth``, held or not; return their ids, deepest first."""
        states: list[int] = []
        while node.checkpoints is not None and (last := node.checkpoints.last(node.end)) and last.depth > depth:
            self._take(last)
            states.append(last.state_id)
        return states

    def evict(self, count: int = 1) -> tuple[int, ...]:
        """Remove the ``count`` least recently used checkpoints that are not held, fewer if there are fewer.

        Returns their state ids. ``touch`` and ``use`` count as uses. Their blocks stay cached.
        """
        states: list[int] = []
        while len(states) < count and (first := self._loose.first()):
            states.append(first[2])
            self._take(self.by_state[first[2]])
            self._clock.floor = max(self._clock.floor, first[0])
        return tuple(states)

    def check(self, nodes: list[Node]) -> None:
        """Prove that ``nodes`` have these checkpoints, each in its place, and that the order is right.

        Raises CheckFailed.
        """
        found = {}
        for node in nodes:
            for entry in node.checkpoints.all if node.checkpoints is not None else ():
                found[entry.state_id] = entry
                inside = node.start < entry.depth <= node.end and entry.among is node.checkpoints
                expect(inside, f"checkpoint {entry.state_id} of depth {entry.depth} is not of {node.start}..{node.end}")
                expect(self.last(node, entry.depth) is entry, f"checkpoint {entry.state_id} is not found")
        expect(found == self.by_state, f"checkpoints {sorted(found.keys() ^ self.by_state.keys())[:16]} are misplaced")
        loose = {state_id for state_id, entry in found.items() if not entry.num_holds}
        expect(
            self.num_held == len(found) - len(loose), f"{self.num_held} held checkpoints, not {len(found) - len(loose)}"
        )
        self._loose.check(loose)

    def _take(self, checkpoint: Checkpoint) -> None:
        self.num_held -= checkpoint.num_holds > 0
        del self.by_state[checkpoint.state_id]
        self._loose.discard(checkpoint.state_id)
        checkpoint.among.take(checkpoint.depth)
