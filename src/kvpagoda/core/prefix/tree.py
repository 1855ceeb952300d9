"""The prefix tree: which texts are cached, in which blocks, and which of these blocks are evicted next.

insertion   blocks below a node or along cached blocks, and the ids that the tree owns then
leases      how many blocks of each node they pin, counted as leases open, grow and close
eviction    from the leaves in the order of the policy, or all of a namespace at once
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import cast

import numpy as np

from kvpagoda.abc import EvictionPolicy
from kvpagoda.arrays import Ids, grown
from kvpagoda.core.prefix.node import (
    Children,
    Descent,
    Evicted,
    Inserted,
    Lease,
    Mask,
    Match,
    Node,
    Roots,
    arrays_of,
    descend,
    nodes_below,
    prove_counts,
    prove_ids,
    prove_pins,
    prove_shape,
    put_ids_above,
    read_ids_above,
)
from kvpagoda.core.prefix.order import Checkpoints, Clock, Entry, EvictionOrder, LeafRun, LRUOrder, PolicyOrder, Victims
from kvpagoda.errors import BadInput, NotOwned, RetryLater, StaleHandle
from kvpagoda.policies import as_policy
from kvpagoda.retention import RetentionRule
from kvpagoda.units import whole_number

# -- insertion -------------------------------------------------------------------------------------------------------


class OwnedIds:
    """One flag for each id of each group: ``flags`` bool ``[num_groups, more than the largest id]``.

    Arguments are int32 ``[num_groups, n]``; 0 is no id and is ignored.
    """

    def __init__(self, num_groups: int) -> None:
        self.flags = np.zeros((num_groups, 64), np.bool_)

    def prove_new(self, ids: Ids) -> None:
        """Prove that none of ``ids`` is owned or named twice. O(n log n).

        Raises NotOwned for an id that is, and BadInput for a negative id.
        """
        if not ids.size:
            return
        top = int(ids.view(np.uint32).max())
        if top >= 2**31:
            raise BadInput(f"block ids are at least 1, 0 for none, got {ids.min()}")
        self.flags = grown(self.flags, top + 1)
        for group, row in enumerate(ids):
            owned = self.flags[group, row]
            if owned.any():
                text = f"the tree owns id {row[owned][0]} of group {group} already; a block is in one place"
                raise NotOwned(text, needed=int(row[owned][0]), available="owned")
            if len(row) > 1:
                named = np.sort(row)
                again = named[1:][(named[1:] == named[:-1]) & (named[1:] > 0)]
                if len(again):
                    text = f"id {again[0]} is named twice in group {group}; a block is in one place"
                    raise NotOwned(text, needed=int(again[0]), available="twice")

    def add(self, ids: Ids) -> None:
        """Mark ``ids``, which were proven new, as owned."""
        self._set(ids, True)

    def remove(self, ids: Ids) -> None:
        """Mark ``ids`` as not owned."""
        self._set(ids, False)

    def _set(self, ids: Ids, owned: bool) -> None:
        for flags, row in zip(self.flags, ids):
            flags[row] = owned
            flags[0] = False


class Inserter:
    """The insertion part of a tree: adds blocks below ``roots`` and registers them with the eviction ``order``.

    ``owned``: the ids that the tree owns, or None if the tree does not prove ids.
    """

    def __init__(self, block_size: int, roots: Roots, order: EvictionOrder, owned: OwnedIds | None) -> None:
        self._block_size, self._roots, self._order, self._owned = block_size, roots, order, owned
        self._is_keyed = order.num_rows > 0

    def attach(
        self,
        node: Node,
        depth: int,
        first: bytes,
        tokens: Ids,
        ids: Ids,
        text: Ids | None,
        priority: int,
        is_late: bool,
        entry: Entry | None,
    ) -> Node:
        """Insert new blocks below ``node``, which ends at ``depth``, and return the node that ends with them.

        ``first``: the tokens of the first of these blocks, as bytes. If this raises, nothing has changed.
        """
        order, n, size = self._order, ids.shape[1], self._block_size
        if self._is_keyed:
            ids = np.concatenate((ids, order.prepare(node, tokens, n)))
        if node.children or node.root is not None or not node.has_room(n, text):
            child = Node(node, depth, size, *arrays_of(tokens, ids, text, depth * size), n, first)
            if self._is_keyed:
                order.add(ids, priority)
            if node.root is not None and not node.pins:  # nothing can fail from here on
                self._roots[node.root[1]] = node
            node.put_child(child)
            if node.leaf >= 0:
                order.mark(node)
            node = child
        else:
            if self._is_keyed:
                node.make_room(n)
                order.add(ids, priority)
            node.append(tokens, ids, text)
        order.added(node, n, is_late, entry)
        return node

    def along(
        self,
        node: Node,
        covered: int,
        tokens: Ids,
        blocks: Ids,
        text: Ids | None,
        priority: int,
        is_late: bool,
        entry: Entry | None,
    ) -> tuple[Node, int, Ids, Mask]:
        """Insert blocks behind the ``covered`` blocks that end in ``node``, where some of them may be cached already.

        Returns the node that ends with the blocks, the number of blocks added, the ids that the tree owns for all of
        them, and the mask of duplicates. A cached block that lacks the ids of some groups takes them.
        """
        way = descend(node, covered, tokens, to_the_token=False)
        node, have = way.node, way.depth - covered
        there = np.zeros_like(blocks)
        there[:, :have] = way.ids(len(blocks))
        given = np.where(blocks == there, 0, blocks)
        if self._owned is not None:
            self._owned.prove_new(given)
        duplicates = (given != 0) & (there != 0)
        own, given = np.where(there == 0, blocks, there), np.where(duplicates, 0, given)
        if have < blocks.shape[1]:
            if way.depth < node.end:
                node = way.path[-1] = node.split(way.depth)
            rest = tokens[have * self._block_size :]
            first = rest[: self._block_size].tobytes()
            node = self.attach(node, way.depth, first, rest, own[:, have:], text, priority, is_late, entry)
        if self._owned is not None:  # nothing can fail from here on
            self._owned.add(given)
        way.put_ids(own)
        return node, blocks.shape[1] - have, own, duplicates


# -- leases ----------------------------------------------------------------------------------------------------------


class Leases:
    """The open leases of one tree. Nothing here can fail.

    ``num_pinned``: blocks that at least one lease covers. ``num_open``: open leases; ``num_closed``: those that ended.
    """

    def __init__(self, tree: object, roots: Roots, order: EvictionOrder) -> None:
        self._tree, self._roots, self._order = tree, roots, order
        self.num_pinned = self.num_open = self.num_closed = 0

    def open(self, node: Node, depth: int) -> Lease:
        """Open a lease of the blocks up to ``depth``, which lies in ``node``. O(nodes that were not pinned before)."""
        lease = Lease(self._tree, node, depth)
        if node.root is not None:
            self._roots[node.root[1]] = node
        self.num_open += 1
        self._tie(lease, node)
        return lease

    def extend(self, lease: Lease, node: Node, depth: int) -> None:
        """Extend ``lease`` to end at ``depth`` in ``node``, at or below its present end. The caller marks ``node``."""
        old, lease.num_blocks = lease.node, depth
        if node is old:
            if (covered := depth - node.start) > node.num_pinned:
                self.num_pinned += covered - node.num_pinned
                node.num_pinned = covered
            return
        lease.node = node
        old.leases.remove(lease)
        self._tie(lease, node)
        old.pins -= 1

    def close(self, lease: Lease, node: Node) -> Node | None:
        """Close ``lease``, which ends in ``node``; return the root if nothing below it is pinned any more, else None.

        O(nodes that are not pinned any more).
        """
        lease.is_open = False
        node.leases.remove(lease)
        self.num_open -= 1
        self.num_closed += 1
        while True:
            node.pins -= 1
            covered = node.covered() if node.pins else 0
            if covered < node.num_pinned:
                self.num_pinned += covered - node.num_pinned
                node.num_pinned = covered
                self._order.mark(node)
            if node.pins:
                return None
            if node.parent is None:
                return node
            node = node.parent

    def _tie(self, lease: Lease, node: Node) -> None:
        """Let ``lease`` end in ``node``, and pin everything above it."""
        node.put_lease(lease)
        node.pins += 1
        if (covered := lease.num_blocks - node.start) > node.num_pinned:
            self._cover(node, covered)
        while node.pins == 1 and node.parent is not None:
            node = node.parent
            node.pins += 1
            if node.num_pinned < node.num_blocks:
                self._cover(node, node.num_blocks)

    def _cover(self, node: Node, num_blocks: int) -> None:
        """Pin at least the first ``num_blocks`` blocks of ``node``."""
        if num_blocks > node.num_pinned:
            self.num_pinned += num_blocks - node.num_pinned
            node.num_pinned = num_blocks
            if node.leaf >= 0:
                self._order.mark(node)


# -- eviction --------------------------------------------------------------------------------------------------------


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


def ends_in(order: EvictionOrder, roots: Iterable[Node], limit: int) -> Iterator[tuple[Node, int]]:
    """Yield what is evicted next below ``roots`` by ``order.ages()``, ``limit`` blocks in all, as ``EvictionOrder.victims``
    does. The caller evicts each before it asks for the next. O(nodes below), and O(log nodes) for each."""
    age, number = order.ages(), itertools.count()
    leaves = [node for root in roots for node in nodes_below(root) if node.is_evictable]
    heap = [(age(node), next(number), node) for node in leaves]
    heapify(heap)
    while heap and limit > 0:
        _, _, node = heappop(heap)
        kept = max(node.num_pinned, node.uses[-1][0] - node.start if node.uses else 0)
        num_blocks = min(node.num_blocks - kept, limit)
        limit -= num_blocks
        is_whole, above = num_blocks == node.num_blocks, node.parent
        yield node, num_blocks
        if is_whole:
            node.cut(0)  # a queue may still refer to it
            assert above is not None
            node = above
        else:
            node.used = max(node.used, node.queued)  # it comes up no sooner than it is queued
        if node.is_evictable:
            heappush(heap, (age(node), next(number), node))


def evict_leaves(
    order: EvictionOrder, checkpoints: Checkpoints, ids: Ids, victims: Iterable[Victims] | None = None
) -> tuple[int, list[int], list[Node]]:
    """Evict one block for each column of ``ids``, int32 ``[rows, n]``, and write its ids there in that order.

    ``victims``: what is evicted (None: in the order of ``order``). At least n blocks must be evictable. Returns the number
    of evicted blocks, the state ids of their checkpoints, and the roots without any node left. A step that fails has no
    effect: the blocks evicted before it are returned, and the error is raised only if there are none.
    """
    done = 0
    states: list[int] = []
    bare: list[Node] = []
    try:
        for victim in order.victims(ids.shape[1]) if victims is None else victims:
            if isinstance(victim, LeafRun):
                _write_whole(victim.ids, ids[:, done : done + victim.num_blocks])
                done += victim.num_blocks  # nothing can fail from here on
                for parent, keys in victim.keys.items():
                    parent.children.take(*keys)
                    if not parent.children:
                        bare.append(parent)
                continue
            node, count = victim
            is_whole = count == node.num_blocks
            try:
                ids[:, done : done + count] = node.ids[:, : -count - 1 : -1]
                if order.num_rows or (node.uses and not is_whole):
                    order.remove(node, count)
            except BaseException:
                order.put_back(node)
                raise
            done += count
            if node.checkpoints is not None and node.checkpoints.all:
                states += checkpoints.drop_after(node, node.start + node.num_blocks - count)
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
    return done, states, bare


def _write_whole(parts: list[Ids], ids: Ids) -> None:
    """Write the ids of all blocks of ``parts`` into ``ids``, int32 ``[rows, n]``, the last block of each part first."""
    if not len(ids):
        return
    blocks: list[Ids] | list[bytes] = parts
    if len(ids) > 1:
        blocks = [part.tobytes("F") for part in parts]  # block by block
    # Bytes join thousands of short arrays in a fifth of the time that numpy takes.
    joined = np.frombuffer(b"".join(cast(list[bytes], blocks[::-1])), np.int32)
    ids[:] = joined.reshape(-1, len(ids))[::-1].T


def clear_roots(
    order: EvictionOrder, checkpoints: Checkpoints, roots: list[Node], num_rows: int
) -> tuple[Ids, list[int]]:
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


# -- the tree --------------------------------------------------------------------------------------------------------

_INT32 = np.dtype(np.int32)
_TO_EVICT = "the number of blocks to evict"


class PrefixTree:
    """A radix tree over int32 token arrays whose edges are whole blocks.

    Tokens are compared, an edge at a time, never hashed. Texts share whole blocks, and only within one namespace (a
    ``bytes`` key; each namespace has its own root). The tree owns the block ids that are inserted (at least 1; 0 means
    that the group keeps nothing for that block) and the state ids of checkpoints, until it returns them.

    A descent costs one dictionary probe for each node on the path, and one array compare; nothing recurses, and nothing
    loops over tokens. Every method validates and allocates first: if it raises, even MemoryError, nothing has changed.
    Not safe for concurrent use.

    Args:
        block_size: tokens of a block.
        num_groups: ids of a block; may be 0.
        policy: a name from ``POLICY_NAMES``, or an ``EvictionPolicy`` object that no other tree uses or used.
        capacity: the most blocks that the caller lets the tree keep; some policies need it.
        proves_ids: check at every call, not only in ``check``, that each block is in one place.
        rule: how high what is new enters the order of LRU.

    Examples:
        >>> tree = PrefixTree(block_size=2)
        >>> text = np.array([5, 6, 7, 8, 9], np.int32)
        >>> inserted = tree.insert(tree.match(text), text[:4], np.array([[1, 2]], np.int32))
        >>> match = tree.match(text)
        >>> match.num_tokens, match.ids
        (4, array([[1, 2]], dtype=int32))
        >>> lease = tree.pin(match, num_blocks=1)
        >>> tree.evict(2).ids, tree.num_cached
        (array([[2]], dtype=int32), 1)
        >>> tree.unpin(lease)
    """

    def __init__(
        self,
        block_size: int,
        num_groups: int = 1,
        policy: str | EvictionPolicy = "lru",
        *,
        capacity: int = 0,
        proves_ids: bool = True,
        rule: RetentionRule | None = None,
    ) -> None:
        if block_size < 1 or num_groups < 0:
            raise BadInput(f"a tree of {num_groups} groups with blocks of {block_size} tokens cannot be")
        asked = as_policy(policy, capacity)
        self.block_size, self.num_groups = block_size, num_groups
        self.num_cached = 0  #: blocks that are cached
        clock = Clock(rule)
        self.checkpoints = Checkpoints(clock)  #: hold, release, drop and evict checkpoints through this
        self._order: EvictionOrder = LRUOrder(clock) if asked is None else PolicyOrder(asked)
        self._num_rows = num_groups + self._order.num_rows
        self._roots = Roots(block_size, self._num_rows)
        self._owned = OwnedIds(num_groups) if proves_ids else None
        self._inserter = Inserter(block_size, self._roots, self._order, self._owned)
        self.leases = Leases(self, self._roots, self._order)
        self._removals = 0  # removals so far: a match from before the last one has to be located again

    @property
    def num_pinned(self) -> int:
        """Cached blocks that at least one lease covers. O(1)."""
        return self.leases.num_pinned

    @property
    def num_leases(self) -> int:
        """Open leases. O(1)."""
        return self.leases.num_open

    @property
    def num_evictable(self) -> int:
        """Blocks that ``evict`` could evict now: cached and not pinned. O(1)."""
        return self.num_cached - self.leases.num_pinned

    def namespaces(self) -> set[bytes]:
        """Return the namespaces in which something is cached or pinned."""
        return set(self._roots)

    def owned_ids(self, group: int = 0) -> Ids:
        """Return all block ids of a group that the tree owns, ascending. O(largest id) if it ``proves_ids``, else
        O(blocks).

        Args:
            group: its index.
        """
        if self._owned is not None:
            return np.flatnonzero(self._owned.flags[group]).astype(np.int32)
        ids: Ids = np.sort(self.all_ids()[group])
        return ids[ids > 0]

    def all_ids(self) -> Ids:
        """Return the ids of all blocks, in no order: int32 ``[num_groups, num_cached]``, a copy. O(blocks)."""
        nodes = self._roots.nodes() or [self._roots.new(b"")]
        return np.concatenate([node.ids[: self.num_groups] for node in nodes], axis=1)

    def all_in(self, namespace: bytes) -> tuple[Ids, list[int]]:
        """Return the ids of all blocks of a namespace, in no order, and the state ids of its checkpoints. O(blocks).

        Args:
            namespace: which has a root.

        Returns:
            int32 ``[num_groups, n]``, a copy; and the state ids.
        """
        nodes = [*nodes_below(self._roots[namespace])]
        states = [one.state_id for node in nodes if node.checkpoints is not None for one in node.checkpoints.all]
        return np.concatenate([node.ids[: self.num_groups] for node in nodes], axis=1), states

    def nodes(self) -> list[Node]:
        """Return all nodes, to be read only: each root, then its nodes, parents before children. O(nodes)."""
        return self._roots.nodes()

    def match(self, tokens: Ids, namespace: bytes = b"", limit: int | None = None) -> Match:
        """Find the longest cached prefix, to the token. Changes nothing. O(n) array work, O(1) for each node on the path.

        Args:
            tokens: int32 ``[n]``.
            namespace: in which it is searched.
            limit: search the first ``limit`` tokens; None: all. No match for one below 1.

        Raises:
            BadInput: ``tokens`` is no int32 vector.
        """
        tokens = _vector(tokens)
        if limit is not None and limit < len(tokens):
            tokens = tokens[: max(0, limit)]
        root = self._roots.get(namespace)
        way = Descent(self._roots.new(namespace), 0, 0, 0, []) if root is None else descend(root, 0, tokens)
        node, ids = None if root is None else way.node, way.ids(self.num_groups)
        match = Match(way.num_tokens, way.depth, ids, namespace, tokens, node, self._removals, way.beyond)
        if self.checkpoints.by_state and (last := self.checkpoints.last(way.node, way.depth)):
            match.checkpoint = last.depth * self.block_size, last.state_id
        return match

    def pin(self, at: Match | Lease, num_blocks: int | None = None) -> Lease:
        """Pin the first blocks of what ``at`` covers. O(nodes on the path).

        Args:
            at: a match, or an open lease.
            num_blocks: how many; None: all.

        Raises:
            StaleHandle: blocks of the match have been evicted (match again), or the lease is not open.
            BadInput: ``at`` covers fewer blocks.
        """
        return self.leases.open(*self._locate(at, num_blocks))

    def pin_partial(self, match: Match) -> Lease | None:
        """Pin the whole blocks of a match and the block that begins with the matching tokens after them.

        Args:
            match: of this tree.

        Returns:
            The lease, of which ``last_ids`` are the ids of that block; None if there is none, or if the tree has
            removed any block since.
        """
        if match.beyond is None or match.removals != self._removals:
            return None
        depth = match.num_blocks + 1
        return self.leases.open(match.beyond.up_to(depth), depth)

    def last_ids(self, lease: Lease) -> Ids:
        """Return the ids of the last block that a lease covers, int32 ``[num_groups]``.

        Args:
            lease: of this tree.

        Raises:
            StaleHandle: it is not open.
        """
        return self.ids_between(lease, lease.num_blocks - 1, lease.num_blocks).ravel()

    def unpin(self, lease: Lease) -> None:
        """End a lease. O(nodes on the path).

        Args:
            lease: of this tree.

        Raises:
            StaleHandle: it is not open; nothing changed.
        """
        node = lease.node if lease.is_open and lease.tree is self else self._locate(lease)[0]
        root = self.leases.close(lease, node)
        if root is not None and self._roots.drop(root):
            self._removals += 1

    def touch(self, at: Match | Lease, num_blocks: int | None = None, priority: int = 0) -> None:
        """Count one use of the first blocks of what ``at`` covers, the deepest first, and of the last checkpoint there.
        O(blocks).

        Args:
            at: a match, or an open lease.
            num_blocks: how many; None: all.
            priority: passed to the policy.

        Raises:
            StaleHandle: as ``pin``.
            BadInput: as ``pin``.
        """
        node, depth = self._locate(at, num_blocks)
        if depth:
            self._order.touch(node, depth, priority)
            if self.checkpoints.by_state:
                self.checkpoints.touch(node, depth)

    def insert(
        self,
        at: Match | Lease,
        tokens: Ids,
        blocks: Ids,
        *,
        text: Ids | None = None,
        pin: bool | None = None,
        priority: int = 0,
        is_late: bool = False,
        entry: Entry | None = None,
    ) -> Inserted:
        """Publish the whole blocks that follow what ``at`` covers. Amortised O(n), and O(nodes) behind ``at``.

        The tree takes the ids of blocks that it lacks; in a cached block that lacks the ids of some groups, it takes
        these. If it raises, nothing has changed.

        Args:
            at: a match, or an open lease.
            tokens: int32 ``[n * block_size]``.
            blocks: int32 ``[num_groups, n]``.
            text: an array that owns its memory and has ``tokens`` at their position from the root. If they are many,
                the tree keeps a view of it, so it may then be written only behind them.
            pin: let the lease ``at`` cover all blocks, or open one for a match; None: only extend a lease; False:
                neither.
            priority: passed to the policy.
            is_late: for LRU, blocks that extend a leaf count as used when its last block was.
            entry: new blocks count as used now, or for LRU as it says (see ``Clock``). Others need ``touch``.

        Raises:
            StaleHandle: as ``pin``.
            BadInput: as ``pin``, or arrays do not fit.
            NotOwned: the tree owns an id already at another place, or it is named twice.
        """
        size = self.block_size
        is_ready = type(tokens) is np.ndarray and tokens.dtype == _INT32 and tokens.ndim == 1
        if not is_ready or not tokens.flags.c_contiguous:
            tokens = _vector(tokens)  # which is not called for each commit
        n, rest = divmod(len(tokens), size)
        fits = isinstance(blocks, np.ndarray) and blocks.dtype == _INT32 and blocks.shape == (self.num_groups, n)
        if rest or not fits:
            raise BadInput(_misfit(tokens, size, blocks, self.num_groups))
        lease = at if isinstance(at, Lease) else None
        if lease is not None and lease.is_open and lease.tree is self:
            node, covered = lease.node, lease.num_blocks
        else:
            node, covered = self._locate(at)
        lease = lease if pin is not False else None
        first, added, own, duplicates = tokens[:size].tobytes(), n, blocks, None
        if covered == node.start + node.num_blocks and first not in node.children:
            if self._owned is not None:
                self._owned.prove_new(blocks)
            if n:
                node = self._inserter.attach(node, covered, first, tokens, blocks, text, priority, is_late, entry)
            if self._owned is not None:
                self._owned.add(blocks)
        else:
            node, added, own, duplicates = self._inserter.along(
                node, covered, tokens, blocks, text, priority, is_late, entry
            )
        self.num_cached += added
        if lease is not None:
            self.leases.extend(lease, node, covered + n)
        elif pin:
            lease = self.leases.open(node, covered + n)
        if node.num_pinned < node.num_blocks or node.leaf >= 0:
            self._order.mark(node)
        return Inserted(own, duplicates, added, lease)

    def evict(self, num_blocks: int, victims: Iterator[tuple[Node, int]] | None = None) -> Evicted:
        """Evict blocks in the order of the policy: leaves first, block by block from the end.

        Costs the policy's choice, amortised O(log leaves) with LRU, and O(1) for each block.

        Args:
            num_blocks: how many, or all unpinned blocks if these are fewer.
            victims: see ``evict_end``.

        Raises:
            BadInput: a negative number.
        """
        asked = num_blocks if type(num_blocks) is int and num_blocks >= 0 else whole_number(num_blocks, _TO_EVICT)
        evictable = self.num_cached - self.leases.num_pinned
        ids = np.empty((self._num_rows, asked if asked < evictable else evictable), np.int32)
        done, states, bare = evict_leaves(self._order, self.checkpoints, ids, victims)
        if done:
            self.num_cached -= done
            self._removals += 1
            for root in bare:
                self._roots.drop(root)
        if done < ids.shape[1]:
            ids = ids[:, :done]
        if self._owned is None and self._num_rows == self.num_groups:
            return Evicted(ids, tuple(states), asked - done)
        return self._gone(ids, states, asked - done)

    def evict_end(self, at: Match | Lease) -> Evicted:
        """Evict the blocks at the end of what ``at`` covers that no lease and no other text uses, whatever their age.

        O(nodes behind it).

        Args:
            at: a match, or an open lease.

        Raises:
            StaleHandle: as ``pin``.
        """
        victims = end_of(*self._locate(at))
        return self.evict(sum(count for _, count in victims), emptied(victims))

    def evict_in(self, namespaces: Iterable[bytes], num_blocks: int) -> Evicted:
        """Evict blocks of some namespaces: from the ends of the texts that were used least recently; if a policy decides, of
        those that are unused the longest. O(nodes in these namespaces), and with a policy O(leaves).

        Args:
            namespaces: whose; those without a root have none.
            num_blocks: how many, or all unpinned ones if these are fewer.
        """
        roots = [self._roots[name] for name in namespaces if name in self._roots]
        return self.evict(num_blocks, ends_in(self._order, roots, num_blocks))

    def namespace_of(self, lease: Lease) -> bytes:
        """Return the namespace of a lease. O(nodes above it).

        Args:
            lease: which is open.
        """
        node = lease.node
        while node.parent is not None:
            node = node.parent
        assert node.root is not None
        return node.root[1]

    def checkpoints_in(self, namespaces: Iterable[bytes]) -> list[int]:
        """Return the state ids of the checkpoints that are not held, the least recently used first. O(nodes in these
        namespaces).

        Args:
            namespaces: whose; those without a root have none.
        """
        roots = [self._roots[name] for name in namespaces if name in self._roots]
        found = [
            checkpoint
            for root in roots
            for node in nodes_below(root)
            if node.checkpoints is not None
            for checkpoint in node.checkpoints.all
            if not checkpoint.num_holds
        ]
        return [checkpoint.state_id for checkpoint in sorted(found, key=lambda one: one.used)]

    def oldest(self) -> int | None:
        """Return when the block that is evicted next was last used, by the clock of ``checkpoints``. None if no block
        is evictable, or if the policy does not order by use. Amortised O(log leaves)."""
        return self._order.oldest()

    def ids_between(self, at: Match | Lease, begin: int, end: int) -> Ids:
        """Return ids of blocks of ``at``.

        Args:
            at: a match, or an open lease.
            begin: the first block.
            end: the block behind the last.

        Returns:
            int32 ``[num_groups, end - begin]``.

        Raises:
            StaleHandle: as ``pin``.
            BadInput: ``at`` covers fewer blocks.
        """
        ids = np.empty((self.num_groups, end - begin), np.int32)
        self.read_ids(at, begin, 0, ids)
        return ids

    def read_ids(self, at: Match | Lease, begin: int, first: int, out: Ids) -> None:
        """Copy ids of k groups, for n blocks of ``at``.

        Args:
            at: a match, or an open lease.
            begin: the first block.
            first: the first group.
            out: int32 ``[k, n]``, written.
        """
        read_ids_above(*self._locate(at, begin + out.shape[1]), begin, first, out)

    def put_ids(self, at: Match | Lease, begin: int, first: int, ids: Ids) -> None:
        """Write ids where ``read_ids`` reads; not in a tree that ``proves_ids``. Costs and raises as that does.

        Args:
            at: a match, or an open lease.
            begin: the first block.
            first: the first group.
            ids: int32 ``[k, n]``.
        """
        put_ids_above(*self._locate(at, begin + ids.shape[1]), begin, first, ids)

    def clear(self, namespace: bytes | None = None) -> Evicted:
        """Remove everything, for good. O(blocks removed).

        Args:
            namespace: only what is in it; None: all.

        Raises:
            RetryLater: a lease is open there; nothing changed.
        """
        roots = [root for name, root in self._roots.items() if namespace is None or name == namespace]
        if any(root.pins for root in roots):
            num_open = sum(len(node.leases) for root in roots for node in nodes_below(root))
            text = f"{num_open} leases are open in what is to be cleared; unpin them first"
            raise RetryLater(text, needed=0, available=num_open)
        ids, states = clear_roots(self._order, self.checkpoints, roots, self._num_rows)
        self.num_cached -= ids.shape[1]
        for root in roots:
            self._roots.drop(root)
        self._removals += 1
        return self._gone(ids, states, 0)

    def set_checkpoint(self, at: Match | Lease, num_tokens: int, state_id: int, entry: Entry | None = None) -> bool:
        """Add a state as a checkpoint.

        Args:
            at: a match, or an open lease.
            num_tokens: the state is that after the first ``num_tokens`` tokens of what ``at`` covers.
            state_id: of the state.
            entry: as for ``insert``.

        Returns:
            False if there is one already; ``state_id`` then stays with the caller.

        Raises:
            StaleHandle: as ``pin``.
            BadInput: ``num_tokens`` is no block boundary there.
            NotOwned: the tree owns the id already.
        """
        depth, rest = divmod(num_tokens, self.block_size)
        if rest or depth < 1:
            raise BadInput(f"a checkpoint lies at a multiple of {self.block_size} tokens, not at {num_tokens}")
        return self.checkpoints.put(*self._locate(at, depth), state_id, entry)

    def last_checkpoint(self, at: Match | Lease, num_blocks: int | None = None) -> tuple[int, int] | None:
        """Return the deepest checkpoint of what ``at`` covers. O(nodes behind it).

        Args:
            at: a match, or an open lease.
            num_blocks: within the first ``num_blocks`` blocks; None: all.

        Returns:
            (num_tokens, state id), or None.

        Raises:
            StaleHandle: as ``pin``.
            BadInput: as ``pin``.
        """
        found = self.checkpoints.last(*self._locate(at, num_blocks))
        return None if found is None else (found.depth * self.block_size, found.state_id)

    def check(self) -> None:
        """Prove everything from scratch: links, edges, pins, ids, counters, leaves, checkpoints. O(blocks). Raises
        CheckFailed naming what does not hold."""
        nodes = self._roots.nodes()
        prove_shape(nodes, self._num_rows)
        prove_pins(nodes, self.num_leases, self)
        if self._owned is not None:
            prove_ids(nodes, self.num_groups, self._owned.flags)
        prove_counts(nodes, self.num_cached, self.num_pinned)
        self.checkpoints.check(nodes)
        self._order.check(nodes)

    def _locate(self, at: Match | Lease, num_blocks: int | None = None) -> tuple[Node, int]:
        """Return the node that holds the end of the first ``num_blocks`` blocks of ``at``, and the depth of the end."""
        depth = at.num_blocks if num_blocks is None else num_blocks
        if not 0 <= depth <= at.num_blocks:
            raise BadInput(f"{num_blocks} blocks are not within the {at.num_blocks} that are covered")
        if isinstance(at, Lease):
            if not at.is_open or at.tree is not self:
                raise StaleHandle("this lease is not open: unpinned twice, or of another tree", needed="lease")
            return at.node if depth == at.num_blocks else at.node.up_to(depth), depth
        if at.node is not None and at.removals == self._removals:
            return at.node if depth > at.node.start and at.node.into is None else at.node.up_to(depth), depth
        root = self._roots.get(at.namespace) or self._roots.new(at.namespace)
        return _found_again(root, at, self.num_groups).up_to(depth), depth

    def _gone(self, ids: Ids, states: list[int], shortfall: int) -> Evicted:
        if self._num_rows > self.num_groups:  # the eviction order has rows of its own
            ids = ids[: self.num_groups]
        if self._owned is not None:
            self._owned.remove(ids)
        return Evicted(ids, tuple(states), shortfall)


def _vector(tokens: Ids) -> Ids:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != _INT32 or tokens.ndim != 1:
        text = f"tokens are an int32 vector, got {getattr(tokens, 'dtype', type(tokens).__name__)}"
        raise BadInput(text, needed=type(tokens).__name__)
    return tokens if tokens.flags.c_contiguous else np.ascontiguousarray(tokens)


def _misfit(tokens: Ids, block_size: int, blocks: Ids, num_groups: int) -> str:
    return (
        f"{len(tokens)} tokens in blocks of {block_size} do not go with ids {getattr(blocks, 'dtype', None)} "
        f"{list(np.shape(blocks))}; ids are int32 [{num_groups} groups, blocks]"
    )


def _found_again(root: Node, match: Match, num_groups: int) -> Node:
    """Return the node below ``root`` where the whole blocks of ``match`` end now. Raises StaleHandle if any is gone."""
    way = descend(root, 0, match.tokens[: match.num_blocks * root.block_size])
    if way.depth < match.num_blocks or not np.array_equal(way.ids(num_groups), match.ids):
        text = "blocks of this match were evicted since; match again"
        raise StaleHandle(text, needed=match.num_blocks, available=way.depth)
    return way.node
