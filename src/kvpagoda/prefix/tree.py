"""The prefix tree: which texts are cached, in which blocks, and which of them may go."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvpagoda.blocks.ids import Ids, whole_number
from kvpagoda.errors import BadInput, RetryLater, StaleHandle
from kvpagoda.prefix.checkpoints import Checkpoints
from kvpagoda.prefix.children import Children
from kvpagoda.prefix.node import Node, new_root
from kvpagoda.prefix.owned import OwnedIds
from kvpagoda.prefix.policy import Policy
from kvpagoda.prefix.proof import expect, nodes_below, prove_ids, prove_pins, prove_shape
from kvpagoda.prefix.recency import Recency
from kvpagoda.prefix.results import Evicted, Inserted, Lease, Mask, Match
from kvpagoda.prefix.run import arrays_of
from kvpagoda.prefix.turnover import ByCell, Turnover
from kvpagoda.prefix.walk import Walk, walk

_INT32 = np.dtype(np.int32)
_TO_EVICT = "the number of blocks to evict"


class PrefixTree:
    """A radix tree over int32 token arrays whose edges are whole blocks.

    Tokens are compared, an edge at a time, never hashed. Texts are shared by the block, and only within one namespace (a
    ``bytes`` key; one root each). The tree owns the block ids that it takes (at least 1; 0: the group keeps nothing for
    that block) and the state ids of checkpoints, until it hands them back. ``num_groups`` may be 0.

    A walk costs a dictionary probe for each node on the path and one array compare; nothing recurses and nothing loops over
    tokens. ``policy`` (None: LRU, which is built in) is this tree's alone. ``proves_ids``: that a block is in one place is
    proven at every call, not by ``check`` alone. Not for use from several threads at once.
    """

    def __init__(
        self, block_size: int, num_groups: int = 1, policy: Policy | None = None, *, proves_ids: bool = True
    ) -> None:
        if block_size < 1 or num_groups < 0:
            raise BadInput(f"a tree of {num_groups} groups with blocks of {block_size} tokens cannot be")
        self.block_size, self.num_groups = block_size, num_groups
        self.num_cached = 0  #: blocks that are cached
        self.num_pinned = 0  #: of these, blocks that some lease covers
        self._roots: dict[bytes, Node] = {}
        self._num_roots = 0  # that there ever were
        self.num_leases = 0  #: leases that are open
        self._turnover: Turnover = Recency() if policy is None else ByCell(policy)
        self._nothing: Ids = np.zeros(num_groups, np.int32)  # what all matches have that end at a block
        self._nothing.flags.writeable = False
        self._checkpoints, self._owned = Checkpoints(), OwnedIds(num_groups) if proves_ids else None
        self._removals = 0  # how often something went: a match from before must look again

    @property
    def num_evictable(self) -> int:
        """Blocks that ``evict`` could free now: cached and not pinned. O(1)."""
        return self.num_cached - self.num_pinned

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints in the tree. O(1)."""
        return len(self._checkpoints.places)

    def namespaces(self) -> set[bytes]:
        """The namespaces in which something is cached or pinned."""
        return set(self._roots)

    def owned_ids(self, group: int = 0) -> Ids:
        """All block ids of ``group`` that the tree owns, ascending. O(largest id); O(blocks) if it proves no ids."""
        if self._owned is not None:
            return np.flatnonzero(self._owned.flags[group]).astype(np.int32)
        nodes = [node for root in self._roots.values() for node in nodes_below(root)]
        ids: Ids = np.sort(np.concatenate([np.empty(0, np.int32), *(node.ids[group] for node in nodes)]))
        return ids[ids > 0]

    def match(self, tokens: Ids, namespace: bytes = b"", limit: int | None = None) -> Match:
        """What is cached of the first ``limit`` tokens (None: all) of ``tokens``, int32 ``[n]``. Changes nothing.

        The longest match there is, to the token; nothing for a ``limit`` below 1. O(n) array work, and O(1) for each node
        on the path. Raises BadInput.
        """
        tokens = _vector(tokens)
        if limit is not None and limit < len(tokens):
            tokens = tokens[: max(0, limit)]
        root = self._roots.get(namespace)
        way = Walk(self._new_root(namespace), 0, 0) if root is None else walk(root, 0, tokens)
        checkpoints: tuple[tuple[int, int], ...] = ()
        if self._checkpoints.places:
            checkpoints = tuple(
                (depth * self.block_size, state)
                for node in way.path
                for depth, state in sorted(node.checkpoints.items())
                if depth <= way.depth
            )
        partial, beyond = self._nothing, None
        if way.partial:
            beyond, block = way.partial
            partial = beyond.ids[: self.num_groups, block].copy()
        return Match(
            way.num_tokens, way.depth, way.ids(self.num_groups), partial, checkpoints, namespace, tokens,
            None if root is None else way.node, self._removals, beyond,
        )  # fmt: skip

    def is_current(self, match: Match) -> bool:
        """Whether nothing was evicted or moved since ``match`` was found."""
        return match.removals == self._removals

    def pin(self, at: Match | Lease, num_blocks: int | None = None) -> Lease:
        """Pin the first ``num_blocks`` blocks (None: all) of what ``at`` covers. O(nodes on the path).

        Raises StaleHandle when blocks of the match were evicted meanwhile (match again) or the lease is not open, and
        BadInput for more blocks than ``at`` covers.
        """
        node, depth = self._locate(at, num_blocks)
        return self._new_lease(node, depth)

    def pin_partial(self, match: Match) -> Lease | None:
        """Pin the whole blocks of ``match`` and the block of its ``partial_ids``; None if there is none, or no longer."""
        if match.beyond is None or match.removals != self._removals:
            return None
        depth = match.num_blocks + 1
        return self._new_lease(match.beyond.up_to(depth), depth)

    def last_ids(self, lease: Lease) -> Ids:
        """The ids of the last block that ``lease`` covers, int32 ``[num_groups]``. Raises StaleHandle."""
        node, depth = self._locate(lease)
        ids: Ids = node.ids[: self.num_groups, depth - node.start - 1].copy()
        return ids

    def unpin(self, lease: Lease) -> None:
        """End a lease. Raises StaleHandle, changing nothing, for one that is not open in this tree. O(nodes on the path)."""
        node, _ = self._locate(lease)
        lease.is_open = False
        node.leases.remove(lease)
        self._let_loose(node)
        self.num_leases -= 1

    def touch(self, at: Match | Lease, num_blocks: int | None = None, priority: int = 0) -> None:
        """Say that the first ``num_blocks`` blocks (None: all) of what ``at`` covers were used once, the deepest first,
        and with them the last checkpoint there. ``priority`` is for the policy. O(blocks). Raises as ``pin`` does.
        """
        node, depth = self._locate(at, num_blocks)
        turnover, used = self._turnover, False
        turnover.start_use()
        while node.parent is not None:
            turnover.use(node, depth, priority)
            if not used and node.checkpoints:
                used = self._checkpoints.use(node, depth)
            depth, node = node.start, node.parent

    def touch_checkpoint(self, lease: Lease) -> None:
        """Say that the last checkpoint of what ``lease`` covers was used. O(nodes behind it). Raises StaleHandle."""
        node, depth = self._locate(lease)
        while node.parent is not None and not (node.checkpoints and self._checkpoints.use(node, depth)):
            depth, node = node.start, node.parent

    def insert(
        self,
        at: Match | Lease,
        tokens: Ids,
        blocks: Ids,
        *,
        text: Ids | None = None,
        pin: bool | None = None,
        priority: int = 0,
    ) -> Inserted:
        """Publish the whole blocks that follow what ``at`` covers.

        ``tokens`` int32 ``[n * block_size]``. ``text``: an array of its own that has them at their place, counted from the
        root; it is kept where they are most of it, so nobody may write there any more, only behind them. ``blocks`` int32
        ``[num_groups, n]``. The tree takes the ids of blocks that it lacks, also of single groups of a block that it has.
        ``pin``: let the lease ``at`` cover all of it, or make one for a match; None: extend a lease, make none. New blocks
        count as used; others need ``touch``. Amortised O(n), and O(nodes) along the new part: it goes on where ``at`` ends.

        Raises as ``pin`` does; BadInput for arrays that do not fit; NotOwned for an id that the tree owns already at
        another place or that is named twice. Nothing has changed then.
        """
        tokens, size = _vector(tokens), self.block_size
        n, rest = divmod(len(tokens), size)
        fits = isinstance(blocks, np.ndarray) and blocks.dtype == _INT32 and blocks.shape == (self.num_groups, n)
        if rest or not fits:
            raise BadInput(
                f"{len(tokens)} tokens in blocks of {size} do not go with ids {getattr(blocks, 'dtype', None)} "
                f"{list(np.shape(blocks))}; ids are int32 [{self.num_groups} groups, blocks]"
            )
        node, covered = self._locate(at)
        lease = at if isinstance(at, Lease) and pin is not False else None
        first = tokens[:size].tobytes()
        if covered == node.start + node.num_blocks and first not in node.children:
            have, own, duplicates = 0, blocks, None
            if self._owned is not None:
                self._owned.prove_new(blocks)
                self._owned.add(blocks)
        else:
            way = walk(node, covered, tokens, to_the_token=False)
            node, have = way.node, way.depth - covered
            own, duplicates = self._adopt(way, blocks, have)
        if n and not have:
            node = self._attach(node, covered, first, tokens, own, text, priority)
        elif have < n:
            tokens = tokens[have * size :]
            node = self._attach(node, covered + have, tokens[:size].tobytes(), tokens, own[:, have:], text, priority)
        if lease is not None:
            self._extend(lease, node, covered + n)
        elif pin:
            lease = self._new_lease(node, covered + n)
        if node.num_pinned < node.num_blocks or node.leaf >= 0:
            self._turnover.mark(node)
        return Inserted(own, duplicates, n - have, lease)

    def evict(self, num_blocks: int) -> Evicted:
        """Evict ``num_blocks`` blocks, or all that are not pinned if these are fewer; the policy says which.

        Leaf first, block by block from the tail. Costs what the policy's choice does, amortised O(log leaves) with LRU,
        and O(1) for each block. Raises BadInput for a number below 0.
        """
        left = num_blocks if type(num_blocks) is int and num_blocks >= 0 else whole_number(num_blocks, _TO_EVICT)
        ids: list[Ids] = []
        states: list[int] = []
        turnover, alone = self._turnover, list[int]()
        is_plain = self.num_groups == 1 and not turnover.num_rows
        for node, count in turnover.victims(left):
            is_whole = count == node.num_blocks
            if is_plain and is_whole and count == 1:  # its number alone: thousands of arrays of one are slow to join
                alone.append(node.ids.item())
            else:
                if alone:
                    ids.append(np.array([alone], np.int32))
                    alone = []
                ids.append(node.ids[:, : -count - 1 : -1])
                if not is_whole or turnover.num_rows:
                    turnover.remove(node, count, evicted=True)
            if node.checkpoints:
                states += self._checkpoints.drop_after(node, node.end - count)
            left -= count
            above = node.parent
            if not is_whole:
                node.cut(node.num_blocks - count)
                turnover.mark(node)
            elif above is not None:
                above.children.take(node.first)
                if above.root is None:
                    self._join(above)
                elif not above.children:
                    self._drop_root(above)
        if alone:
            ids.append(np.array([alone], np.int32))
        if ids:
            self.num_cached -= num_blocks - left
            self._removals += 1
        return self._evicted(ids, states, left)

    def remap(self, group: int, names: Ids) -> None:
        """Let every block id of ``group`` be ``names[id]`` from now on, int32. Matches from before are stale. O(blocks)."""
        for root in self._roots.values():
            for node in nodes_below(root):
                row = node.ids[group]
                row[:] = names[row]
        if self._owned is not None:
            self._owned.rename(group, names)
        self._removals += 1

    def clear(self, namespace: bytes | None = None) -> Evicted:
        """Drop everything (None), or everything of one namespace, for good. O(blocks dropped).

        Raises RetryLater, changing nothing, while a lease is open there.
        """
        roots = [root for name, root in self._roots.items() if namespace is None or name == namespace]
        if any(root.pins for root in roots):
            num_open = sum(len(node.leases) for root in roots for node in nodes_below(root))
            raise RetryLater(f"{num_open} leases are open in what is to be cleared; unpin them first")
        ids: list[Ids] = []
        states: list[int] = []
        for root in roots:
            for node in reversed(list(nodes_below(root))):
                if node is not root:
                    ids.append(node.ids[:, ::-1])
                    self._turnover.remove(node, node.num_blocks, evicted=False)
                    states += self._checkpoints.drop_after(node, node.start)
                    self.num_cached -= node.num_blocks
                    node.cut(0)  # it may lie in a queue
                node.children = Children()
            self._drop_root(root)
            self._removals += 1
        return self._evicted(ids, states, 0)

    def set_checkpoint(self, at: Match | Lease, num_tokens: int, state_id: int) -> bool:
        """Keep the state after ``num_tokens`` tokens of what ``at`` covers. False: there is one; the id stays yours.

        Raises as ``pin`` does; BadInput if ``num_tokens`` is no block boundary there, NotOwned if the tree has the id.
        """
        depth, rest = divmod(num_tokens, self.block_size)
        if rest or depth < 1:
            raise BadInput(f"a checkpoint lies at a multiple of {self.block_size} tokens, not at {num_tokens}")
        return self._checkpoints.put(*self._locate(at, depth), state_id)

    def has_checkpoint(self, at: Match | Lease, num_tokens: int) -> bool:
        """Whether there is a checkpoint after ``num_tokens`` tokens, a block boundary, of what ``at`` covers. Raises as ``pin``."""
        node, depth = self._locate(at, num_tokens // self.block_size)
        return depth in node.checkpoints

    def drop_checkpoint(self, state_id: int) -> None:
        """Forget the checkpoint with this state id, which is the caller's again. Raises NotOwned. O(1)."""
        self._checkpoints.drop(state_id)

    def evict_checkpoint(self, num_checkpoints: int = 1, keep: Collection[int] = ()) -> tuple[int, ...]:
        """Forget the least recently used checkpoints (set or touched) that are not in ``keep``; returns their state ids,
        fewer if there are fewer.

        Blocks stay; leases do not hold checkpoints: copy a state before evicting. O(1) for each, and each in ``keep``.
        """
        oldest = self._checkpoints.oldest(num_checkpoints + len(keep))
        states = tuple(state for state in oldest if state not in keep)[:num_checkpoints]
        for state in states:
            self._checkpoints.drop(state)
        return states

    def check(self) -> None:
        """Prove everything from scratch: links, edges, pins, ids, counters, leaves, checkpoints. O(blocks).

        Raises CheckFailed with what does not hold.
        """
        nodes = [node for root in self._roots.values() for node in nodes_below(root)]
        prove_shape(nodes, self.num_groups + self._turnover.num_rows)
        prove_pins(nodes, self.num_leases, self)
        prove_ids(nodes, self.num_groups, None if self._owned is None else self._owned.flags)
        counted = sum(node.num_blocks for node in nodes), sum(node.num_pinned for node in nodes)
        expect((self.num_cached, self.num_pinned) == counted, f"{self.num_cached, self.num_pinned} is not {counted}")
        states = {state: depth for node in nodes for depth, state in node.checkpoints.items()}
        kept = {state: depth for state, (_, depth) in self._checkpoints.places.items()}
        expect(states == kept, f"checkpoints {states} are not {kept}")
        self._turnover.check(nodes)

    def _locate(self, at: Match | Lease, num_blocks: int | None = None) -> tuple[Node, int]:
        """The node that holds the end of the first ``num_blocks`` blocks of ``at``, and that depth."""
        if isinstance(at, Lease) and (not at.is_open or at.tree is not self):
            raise StaleHandle("this lease is not open: unpinned twice, or of another tree")
        if num_blocks is None:
            depth = at.num_blocks
        elif 0 <= num_blocks <= at.num_blocks:
            depth = num_blocks
        else:
            raise BadInput(f"{num_blocks} blocks are not within the {at.num_blocks} that are covered")
        if isinstance(at, Lease):
            return at.node if depth == at.num_blocks else at.node.up_to(depth), depth
        if at.node is not None and at.removals == self._removals:
            return at.node.up_to(depth), depth
        root = self._roots.get(at.namespace) or self._new_root(at.namespace)
        way = walk(root, 0, at.tokens[: at.num_blocks * self.block_size])
        if way.depth < at.num_blocks or not np.array_equal(way.ids(self.num_groups), at.ids):
            raise StaleHandle("blocks of this match were evicted since; match again")
        return way.node.up_to(depth), depth

    def _new_root(self, namespace: bytes) -> Node:
        """A root that is in the tree only once something is pinned or hangs there."""
        if not isinstance(namespace, bytes):
            raise BadInput(f"a namespace is bytes, got {namespace!r}")
        self._num_roots += 1
        return new_root(self.block_size, self.num_groups + self._turnover.num_rows, -self._num_roots, namespace)

    def _drop_root(self, node: Node) -> None:
        if node.root and not node.pins and not node.children:
            del self._roots[node.root[1]]
            self._removals += 1

    def _new_lease(self, node: Node, depth: int) -> Lease:
        if node.root is not None:
            self._roots[node.root[1]] = node
        lease = Lease(self, node, depth)
        self.num_leases += 1
        self._tie(lease, node)
        return lease

    def _extend(self, lease: Lease, node: Node, depth: int) -> None:
        """Let ``lease`` end at ``depth`` in ``node``, at or below where it ends now."""
        old, lease.num_blocks = lease.node, depth
        if node is old:
            self._cover(node, depth - node.start)
            return
        lease.node = node
        old.leases.remove(lease)
        if node.parent is old and not node.pins:  # a pinned child for a lease: the old node stays pinned as it is
            node.put_lease(lease)
            node.pins = 1
            self._cover(node, depth - node.start)
            if old.num_pinned < old.num_blocks:
                self._cover(old, old.num_blocks)
        else:
            self._tie(lease, node)
            old.pins -= 1

    def _tie(self, lease: Lease, node: Node) -> None:
        """``lease`` ends in ``node`` now; what lies above it is pinned. O(nodes that were not pinned before)."""
        node.put_lease(lease)
        node.pins += 1
        self._cover(node, lease.num_blocks - node.start)
        while node.pins == 1 and node.parent is not None:
            node = node.parent
            node.pins += 1
            if node.num_pinned < node.num_blocks:
                self._cover(node, node.num_blocks)

    def _cover(self, node: Node, num_blocks: int) -> None:
        """At least the first ``num_blocks`` of ``node`` are pinned now."""
        if num_blocks > node.num_pinned:
            self.num_pinned += num_blocks - node.num_pinned
            node.num_pinned = num_blocks
            if node.leaf >= 0:
                self._turnover.mark(node)

    def _let_loose(self, node: Node) -> None:
        """One lease less ends in ``node``. O(nodes that are not pinned any more)."""
        while True:
            node.pins -= 1
            covered = node.covered() if node.pins else 0
            if covered < node.num_pinned:
                self.num_pinned += covered - node.num_pinned
                node.num_pinned = covered
                self._turnover.mark(node)
            if node.parent is None:
                self._drop_root(node)
                return
            if node.pins:
                return
            node = node.parent

    def _adopt(self, way: Walk, blocks: Ids, have: int) -> tuple[Ids, Mask]:
        """Take those of ``blocks`` that are not there yet; of the first ``have`` blocks these are holes of single groups.

        Returns the tree's own ids and which of the given ones are duplicates.
        """
        there = np.zeros_like(blocks)
        there[:, :have] = way.ids(self.num_groups)
        given = np.where(blocks == there, 0, blocks)
        if self._owned is not None:
            self._owned.prove_new(given)
        duplicates = (given != 0) & (there != 0)
        own = np.where(there == 0, blocks, there)
        if self._owned is not None:
            self._owned.add(np.where(duplicates, 0, given))
        way.put_ids(own)
        return own, duplicates

    def _attach(
        self, node: Node, depth: int, first: bytes, tokens: Ids, ids: Ids, text: Ids | None, priority: int
    ) -> Node:
        """Put new blocks, the first of them ``first``, at ``depth``, which lies in ``node``; returns the node that ends with
        them."""
        if node.root is not None and not node.pins:
            self._roots[node.root[1]] = node
        if depth < node.start + node.num_blocks:
            node = node.split(depth)
        turnover, n = self._turnover, ids.shape[1]
        if turnover.num_rows:
            ids = np.concatenate((ids, turnover.rows(node, tokens, n, priority)))
        self.num_cached += n
        if node.children or node.root is not None or not node.has_room(n, text):
            size = self.block_size
            child = Node(node, depth, size, *arrays_of(tokens, ids, text, depth * size), n, first)
            node.put_child(child)
            if node.leaf >= 0:
                turnover.mark(node)
            node = child
        else:
            node.append(tokens, ids, text)
        turnover.added(node, n)
        return node

    def _join(self, node: Node) -> None:
        """``node`` lost a child: its last block may go next, or the one child that is left is merged with it."""
        if not node.children:
            self._turnover.mark(node)
        elif len(node.children) == 1:
            (below,) = node.children.values()
            if below.num_blocks <= 2 * node.num_blocks:  # a long rest is left alone: merging copies it
                below.merge(node)

    def _evicted(self, ids: list[Ids], states: list[int], shortfall: int) -> Evicted:
        together = np.empty((self.num_groups, 0), np.int32)
        if ids:
            together = np.concatenate(ids, axis=1)[: self.num_groups]
        if self._owned is not None:
            self._owned.remove(together)
        return Evicted(together, tuple(states), shortfall)


def _vector(tokens: Ids) -> Ids:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != _INT32 or tokens.ndim != 1:
        raise BadInput(f"tokens are an int32 vector, got {getattr(tokens, 'dtype', type(tokens).__name__)}")
    return tokens if tokens.flags.c_contiguous else np.ascontiguousarray(tokens)
