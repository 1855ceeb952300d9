"""The nodes of the prefix tree: each is one edge with its blocks, children, checkpoints and links.

The arrays of an edge hold the tokens of consecutive blocks, and their ids in every group. Children are found by their first
block, or by the longest common prefix with a block. Descent follows a text down the tree and reads the ids above a place;
the answers are a match, a lease, inserted and evicted blocks. Proofs of the invariants, from scratch, are at the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import Ids
from kvpagoda.errors import BadInput, CheckFailed

# -- children of a node ----------------------------------------------------------------------------------------------

Child = TypeVar("Child")
_LONGEST = 512
_TOKEN = 4  # bytes
_NONE: list[Any] = []  # shared by all instances that have none, to save memory
_NO_HEADS: set[bytes] = set()


class Children(dict[bytes, Child], Generic[Child]):
    """Children by the bytes of their first block. Write with ``put`` and ``take`` only.

    ``nearest`` builds indexes when it is first needed: a set of the first tokens of all keys at its first call, and the
    sorted keys, in pieces of at most 512, at the first call that finds its token in the set. Each call of ``nearest``
    then brings the pieces up to date: it sorts keys in that were put since, in O(log n + 512), and deletes keys that it
    passes and that were taken out. All indexes are dropped when more keys were taken out than are left.
    """

    __slots__ = ("_fresh", "_heads", "_num_taken", "_pieces", "_starts")

    def __init__(self) -> None:
        self._pieces: list[list[bytes]] = _NONE
        self._starts: list[bytes] = _NONE  # lower bounds of the pieces; the first one is never read
        self._fresh: list[bytes] = _NONE  # keys that are not in the pieces yet
        self._heads = _NO_HEADS  # the first token of every key
        self._num_taken = 0  # keys taken out since the indexes were built

    def put(self, key: bytes, child: Child) -> None:
        """Add ``child``, or replace the child of the same key by it."""
        if self._heads:
            self._heads.add(key[:_TOKEN])
            if self._pieces and key not in self:
                self._fresh.append(key)
        self[key] = child

    def take(self, *keys: bytes) -> None:
        """Remove the children of ``keys``. Amortised O(1) each."""
        for key in keys:
            del self[key]
        if len(self) == 1:  # iterating over a dictionary that was large is slow, unless it is rebuilt
            last_key, last_child = self.popitem()
            self.clear()
            self[last_key] = last_child
        if self._heads:
            self._num_taken += len(keys)
            if self._num_taken > len(self) + _LONGEST:
                self._heads, self._pieces, self._fresh, self._num_taken = _NO_HEADS, _NONE, _NONE, 0

    def nearest(self, key: bytes) -> list[Child]:
        """Return at most two children; one of them has the longest common prefix of tokens with ``key``.

        Amortised O(log n), and O(1) if no child has the first token of ``key``.
        """
        if not self._heads:
            self._heads = {child_key[:_TOKEN] for child_key in self}
        if key[:_TOKEN] not in self._heads:
            return _NONE
        if not self._pieces:
            if len(self) <= 1:
                return list(self.values())
            keys = sorted(self)
            self._pieces = [keys[i : i + _LONGEST] for i in range(0, len(keys), _LONGEST)]
            self._starts, self._fresh = [piece[0] for piece in self._pieces], []
        while self._fresh:
            self._sort_in(self._fresh.pop())
        neighbours = (self._next(key, -1), self._next(key, 1))
        return [self[neighbour] for neighbour in neighbours if neighbour is not None]

    def _sort_in(self, key: bytes) -> None:
        """Insert ``key`` into its piece; split the piece if it becomes too long."""
        number = self._piece(key)
        piece = self._pieces[number]
        position = bisect_left(piece, key)
        if position == len(piece) or piece[position] != key:
            piece.insert(position, key)
            if len(piece) > _LONGEST:
                self._pieces[number : number + 1] = [piece[: _LONGEST // 2], piece[_LONGEST // 2 :]]
                self._starts.insert(number + 1, piece[_LONGEST // 2])

    def _next(self, key: bytes, step: int) -> bytes | None:
        """Return the greatest key below ``key`` (step -1) or the smallest that is at least ``key`` (step 1), or None.

        Deletes the keys on the way that were taken out.
        """
        number = self._piece(key)
        position = bisect_left(self._pieces[number], key)
        while True:
            piece = self._pieces[number]
            while True:
                candidate = position - 1 if step < 0 else position
                if not 0 <= candidate < len(piece):
                    break
                if piece[candidate] in self:
                    return piece[candidate]
                del piece[candidate]
                position = candidate
            if not piece and len(self._pieces) > 1:
                del self._pieces[number], self._starts[number]
                number -= step > 0
            number += step
            if not 0 <= number < len(self._pieces):
                return None
            position = 0 if step > 0 else len(self._pieces[number])

    def _piece(self, key: bytes) -> int:
        """Return the number of the piece that ``key`` belongs to."""
        return max(0, bisect_right(self._starts, key) - 1)


# -- arrays of an edge -----------------------------------------------------------------------------------------------

_FEW = 4  # up to so many blocks are copied instead of kept as a view of the text: cheaper to keep and to free
_SMALL, _SPARE = 64, 16  # arrays of up to 64 blocks, or of up to 16 times the blocks in use, are not shrunk


class EdgeArrays:
    """The arrays of an edge. They grow and shrink at the end, and split anywhere.

    ``tokens``: int32 ``[num_blocks * block_size]``. ``ids``: int32 ``[rows, num_blocks]``. Both are views, valid until
    the edge changes. The arrays behind them belong to this edge alone, except read-only tokens, which are a view of a
    text:

        | split off | num_blocks blocks, from _at on | room to grow |
    """

    __slots__ = ("_at", "_ids", "_tokens", "block_size", "ids", "num_blocks", "tokens")
    _at: int
    _tokens: Ids
    _ids: Ids
    tokens: Ids
    ids: Ids
    num_blocks: int

    def __init__(self, block_size: int, tokens: Ids, ids: Ids) -> None:
        """Take over the arrays ``tokens`` and ``ids``."""
        self.block_size = block_size
        self._adopt(tokens, ids)

    def block(self, i: int) -> bytes:
        """Return the tokens of block ``i`` as bytes."""
        return self.tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def make_room(self, n: int) -> None:
        """Make sure that ``append`` of ``n`` blocks needs no memory; may copy the arrays, and changes nothing else."""
        new = self.num_blocks + n
        if self._at + new > self._ids.shape[1] or not self._tokens.flags.writeable:
            self._move(max(new + new // 4, 8))

    def append(self, tokens: Ids, ids: Ids, text: Ids | None = None) -> None:
        """Append blocks. Copies them, except tokens that lie in ``text`` already. Amortised O(blocks added).

        May raise if ``make_room`` was not called before; nothing has changed then.
        """
        new, size = self.num_blocks + ids.shape[1], self.block_size
        is_view = text is not None and self._tokens.base is text
        if self._at + new > self._ids.shape[1] or not (is_view or self._tokens.flags.writeable):
            self._move(max(new + new // 4, 8))
            is_view = False
        first, end = self._at + self.num_blocks, self._at + new
        if not is_view:
            self._tokens[first * size : end * size] = tokens
        self._ids[:, first:end] = ids
        self.num_blocks = new
        self.tokens, self.ids = self._tokens[self._at * size : end * size], self._ids[:, self._at : end]

    def has_room(self, n: int, text: Ids | None) -> bool:
        """Return whether appending ``n`` blocks is cheap: there is room, or the blocks to copy are few."""
        if self.num_blocks <= _SMALL:
            return True
        room = self._ids.shape[1] - self._at - self.num_blocks
        return bool(n <= room and (self._tokens.flags.writeable or self._tokens.base is text))

    def cut(self, num_blocks: int) -> None:
        """Remove all but the first ``num_blocks`` blocks. Amortised O(1) for each block removed."""
        at, size, end = self._at, self.block_size, self._at + num_blocks
        self.num_blocks = num_blocks
        self.tokens, self.ids = self._tokens[at * size : end * size], self._ids[:, at:end]
        if self._ids.shape[1] > _SMALL and self._ids.shape[1] > _SPARE * num_blocks:
            self.trim()

    def trim(self) -> None:
        """Replace arrays that are much larger than the blocks in use by smaller ones."""
        if self._ids.shape[1] > max(_SMALL, _SPARE * self.num_blocks):
            with suppress(MemoryError):  # without memory the large arrays stay
                self._move(2 * self.num_blocks)

    def take_front(self, num_blocks: int) -> tuple[Ids, Ids]:
        """Remove the first ``num_blocks`` blocks; return their tokens and ids, owned by the caller. O(smaller part)."""
        size, count = self.block_size, self.num_blocks
        front = self.tokens[: num_blocks * size], self.ids[:, :num_blocks]
        if 2 * num_blocks > count:  # the front keeps the arrays
            self._adopt(self.tokens[num_blocks * size :].copy(), self.ids[:, num_blocks:].copy())
            return front
        copies = front[0].copy(), front[1].copy()
        self._view(self._at + num_blocks, count - num_blocks)
        return copies

    def put_front(self, other: EdgeArrays) -> None:
        """Insert the blocks of ``other``, which is not used any more, before the first block of this edge.

        Amortised O(blocks of this edge) if ``other`` has more blocks, else O(both).
        """
        if other.num_blocks > self.num_blocks:
            other.append(self.tokens, self.ids)
            self._tokens, self._ids = other._tokens, other._ids
            self._view(other._at, other.num_blocks)
            return
        self._adopt(np.concatenate((other.tokens, self.tokens)), np.concatenate((other.ids, self.ids), axis=1))

    def _adopt(self, tokens: Ids, ids: Ids) -> None:
        self._tokens = self.tokens = tokens
        self._ids = self.ids = ids
        self._at, self.num_blocks = 0, ids.shape[1]

    def _view(self, at: int, num_blocks: int) -> None:
        size, end = self.block_size, at + num_blocks
        self._at, self.num_blocks = at, num_blocks
        self.tokens, self.ids = self._tokens[at * size : end * size], self._ids[:, at:end]

    def _move(self, room: int) -> None:
        """Copy the blocks into new arrays with room for ``room`` blocks."""
        count, size = self.num_blocks, self.block_size
        tokens, ids = np.empty(room * size, np.int32), np.empty((len(self._ids), room), np.int32)
        tokens[: count * size], ids[:, :count] = self.tokens, self.ids
        self._tokens, self._ids = tokens, ids
        self._view(0, count)


def arrays_of(tokens: Ids, ids: Ids, text: Ids | None, first: int) -> tuple[Ids, Ids]:
    """Return arrays (tokens, ids) for a new edge that begins with ``tokens`` and ``ids``.

    ``text`` contains ``tokens`` from ``first`` on. If the blocks are many and most of the text follows ``first``, the
    token array is a read-only view of the rest of the text, so there is room to grow. Otherwise both are copies; the
    copies have room for the rest of the text if most of it is still to come.
    """
    rows, n = ids.shape
    rest = tokens if text is None or n <= _FEW else text[first:]
    if text is not None and rest is not tokens and 2 * len(rest) >= len(text):
        rest.flags.writeable = False
    elif 2 * len(tokens) >= len(rest):
        return tokens.copy(), ids.copy()
    else:
        rest = np.empty(len(rest), np.int32)
        rest[: len(tokens)] = tokens
    room = np.empty((rows, len(rest) * n // len(tokens)), np.int32)
    room[:, :n] = ids
    return rest, room


# -- nodes -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The state ``state_id`` after ``depth`` blocks.

    ``used``: the time of its last use. ``num_holds``: how many holds protect it. ``among``: the checkpoints of the node
    in which it lies.
    """

    state_id: int
    depth: int
    used: int = 0
    num_holds: int = 0
    among: NodeCheckpoints = field(init=False, repr=False)


class NodeCheckpoints:
    """Checkpoints by depth. ``put``, ``take`` and ``last`` are O(log n) plus a short move in a list."""

    __slots__ = ("_depths", "all")

    def __init__(self) -> None:
        self.all: list[Checkpoint] = []  #: by ascending depth
        self._depths: list[int] = []

    def put(self, checkpoint: Checkpoint) -> bool:
        """Add ``checkpoint``; return False, adding nothing, if there is one at its depth."""
        index = bisect_left(self._depths, checkpoint.depth)
        if self._depths[index : index + 1] == [checkpoint.depth]:
            return False
        self._depths.insert(index, checkpoint.depth)
        self.all.insert(index, checkpoint)
        checkpoint.among = self
        return True

    def take(self, depth: int) -> None:
        """Remove the checkpoint at ``depth``."""
        index = bisect_left(self._depths, depth)
        del self._depths[index], self.all[index]

    def last(self, depth: int) -> Checkpoint | None:
        """Return the deepest checkpoint up to ``depth``, or None."""
        count = bisect_right(self._depths, depth)
        return self.all[count - 1] if count else None

    def split(self, depth: int) -> NodeCheckpoints:
        """Remove the checkpoints up to ``depth`` and return them. O(n)."""
        count, above = bisect_right(self._depths, depth), NodeCheckpoints()
        above.extend(self.all[:count])
        del self._depths[:count], self.all[:count]
        return above

    def extend(self, below: list[Checkpoint]) -> None:
        """Append the checkpoints ``below``, all deeper than those here. O(len(below))."""
        self._depths += [checkpoint.depth for checkpoint in below]
        self.all += below
        for checkpoint in below:
            checkpoint.among = self


class LeaseEnd(Protocol):
    """The part of a lease that the node in which it ends uses."""

    node: Node
    num_blocks: int
    tree: object
    is_open: bool


# Empty containers that nodes share and never write: most nodes are leaves, and cost less without their own.
_NO_CHILDREN: Children[Node] = Children()
_NO_LEASES: list[LeaseEnd] = []
NO_USES: list[tuple[int, int]] = []


class Node(EdgeArrays):
    """A run of whole blocks without a branch inside. A root has no blocks.

        root ──...── start ║ block │ block │ block ║ end ──< children      depths: in blocks from the root

    ``first``: the tokens of the first block as bytes, the key of this node in its parent. ``leases``: the leases that
    end in this node. ``pins``: the number of these leases plus the number of pinned children. ``num_pinned``: how many
    leading blocks leases cover. ``checkpoints``: those that lie in this node, or None if it never had one. ``used``,
    ``uses``, ``queued``: see ``LRUOrder``. ``leaf``: see ``PolicyOrder``. ``into``: the node that took over the blocks,
    after a merge. ``root``: the name (below 0) and the namespace of a root, else None.
    """

    __slots__ = (
        "checkpoints", "children", "first", "into", "leaf", "leases", "num_pinned", "parent", "pins", "queued", "root",
        "start", "used", "uses",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        start: int,
        block_size: int,
        tokens: Ids,
        ids: Ids,
        num_blocks: int,
        first: bytes = b"",
        root: tuple[int, bytes] | None = None,
    ) -> None:
        self.block_size = block_size
        self._tokens, self._ids = tokens, ids
        self._at, self.num_blocks = 0, num_blocks
        is_full = ids.shape[1] == num_blocks and len(tokens) == num_blocks * block_size
        self.tokens, self.ids = (tokens, ids) if is_full else (tokens[: num_blocks * block_size], ids[:, :num_blocks])
        self.parent, self.start, self.first, self.root = parent, start, first, root
        self.children, self.leases = _NO_CHILDREN, _NO_LEASES
        self.pins = self.num_pinned = 0
        self.checkpoints: NodeCheckpoints | None = None
        self.used, self.uses = 0, NO_USES
        self.queued, self.leaf = 0, -1
        self.into: Node | None = None

    @property
    def end(self) -> int:
        """Depth of the end, in blocks from the root."""
        return self.start + self.num_blocks

    @property
    def is_evictable(self) -> bool:
        """Whether the last block may be evicted: there are no children and no lease covers it."""
        return not self.children and self.num_blocks > self.num_pinned

    def up_to(self, depth: int) -> Node:
        """Return the node that now holds the block that ends at ``depth``, or the root for 0.

        The block was in this node or above it when the caller got the node. Splits and merges since then do not matter.
        """
        node = self
        while True:
            while node.into is not None:
                node = node.into
            if depth > node.start or node.parent is None:
                return node
            node = node.parent

    def covered(self) -> int:
        """Return ``num_pinned``, computed from scratch. O(leases).

        All blocks if a child is pinned, otherwise as far as the deepest lease ends.
        """
        if self.pins > len(self.leases):
            return self.num_blocks
        return max([lease.num_blocks for lease in self.leases], default=self.start) - self.start

    def put_child(self, child: Node) -> None:
        """Add ``child``, or replace the child with the same first block by it."""
        if self.children is _NO_CHILDREN:
            self.children = Children()
        self.children.put(child.first, child)

    def put_lease(self, lease: LeaseEnd) -> None:
        """Add ``lease``, which ends in this node."""
        if self.leases is _NO_LEASES:
            self.leases = []
        self.leases.append(lease)

    def split(self, depth: int) -> Node:
        """Move the blocks above ``depth`` to a new node between this one and its parent, and return the new node.

        Leases and checkpoints move with the blocks at their depth, and the parent's children are updated.
        O(smaller part). If this raises, nothing has changed.
        """
        count = depth - self.start
        first = self.block(count)
        above = Node(self.parent, self.start, self.block_size, *self.take_front(count), count, self.first)
        above.num_pinned = min(self.num_pinned, count)
        self.num_pinned -= above.num_pinned
        for lease in self.leases:
            if lease.num_blocks <= depth:
                lease.node = above
                above.put_lease(lease)
        if above.leases:
            self.leases = [lease for lease in self.leases if lease.num_blocks > depth]
        self.pins -= len(above.leases)
        above.pins = len(above.leases) + (self.pins > 0)
        if self.checkpoints is not None:
            above.checkpoints = self.checkpoints.split(depth)
        above.used = self.used
        if self.uses:
            reaching = bisect_left(self.uses, (depth,))  # the first stretch that ends at ``depth`` or deeper
            above.uses, self.uses = self.uses[:reaching], self.uses[reaching:]
            if self.uses:
                end, above.used = self.uses[0]
                del self.uses[: end == depth]
        if self.parent is not None:
            self.parent.put_child(above)
        self.parent, self.start, self.first = above, depth, first
        above.put_child(self)
        return above

    def merge(self, above: Node) -> None:
        """Take over everything of the parent ``above``, which has no other child; update the parent of ``above``.

        Costs what ``put_front`` does. If this raises, nothing has changed.
        """
        end = above.end
        self.put_front(above)
        if above.used:
            self.uses = [*above.uses, (end, above.used), *self.uses]
        self.parent, self.start, self.first = above.parent, above.start, above.first
        self.num_pinned += above.num_pinned
        for lease in above.leases:
            lease.node = self
            self.put_lease(lease)
        self.pins += len(above.leases)
        if above.checkpoints is not None:
            above.checkpoints.extend([] if self.checkpoints is None else self.checkpoints.all)
            self.checkpoints = above.checkpoints
        above.into = self
        if self.parent is not None:
            self.parent.put_child(self)


def nodes_below(root: Node) -> Iterator[Node]:
    """Yield ``root`` and every node below it, parents before children."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())


class Roots(dict[bytes, Node]):
    """Namespace in which something is cached or pinned -> its root.

    Blocks have ``block_size`` tokens and ``num_rows`` ids each.
    """

    def __init__(self, block_size: int, num_rows: int) -> None:
        self._block_size, self._num_rows = block_size, num_rows
        self._num_made = 0

    def new(self, namespace: bytes) -> Node:
        """Return a new root, which is not in this map yet. Raises BadInput.

        It is added when something is pinned or cached in its namespace.
        """
        if not isinstance(namespace, bytes):
            raise BadInput(f"a namespace is bytes, got {namespace!r}", needed=namespace)
        self._num_made += 1
        no_ids = np.empty((self._num_rows, 0), np.int32)
        return Node(None, 0, self._block_size, np.empty(0, np.int32), no_ids, 0, root=(-self._num_made, namespace))

    def drop(self, node: Node) -> bool:
        """Remove ``node`` if it is a root without children and pins; return whether it was."""
        is_bare = node.root is not None and not node.pins and not node.children
        if node.root is not None and is_bare:
            del self[node.root[1]]
        return is_bare

    def nodes(self) -> list[Node]:
        """Return all nodes, roots included, parents before children. O(nodes)."""
        return [node for root in self.values() for node in nodes_below(root)]


# -- results ---------------------------------------------------------------------------------------------------------

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Match:
    """The cached prefix of a text. Made by ``PrefixTree.match``. The text must not change while the match is in use.

    - ``num_tokens``: leading tokens that match.
    - ``num_blocks``: whole blocks among them.
    - ``ids``: int32 ``[num_groups, num_blocks]``, the ids of these blocks, 0 where a group keeps nothing.
    - ``checkpoint``: (num_tokens, state id) of the deepest checkpoint within these blocks, or None.
    - ``beyond``: the node of the block that begins with the matching tokens after the whole blocks, or None. This block
      can be copied, not shared (see ``PrefixTree.pin_partial``).
    """

    num_tokens: int
    num_blocks: int
    ids: Ids
    namespace: bytes
    tokens: Ids = field(repr=False)
    node: Node | None = field(repr=False)  # the node in which the whole blocks end
    removals: int = field(repr=False)  # the tree's count of removals at the time of the match
    beyond: Node | None = field(repr=False)
    checkpoint: tuple[int, int] | None = field(init=False, default=None)


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """A pin on the first blocks of one text: they stay cached until ``PrefixTree.unpin``. Made by ``PrefixTree.pin``.

    ``num_blocks``: how many. ``is_open`` is true until the lease is unpinned. Splits and merges of nodes do not affect
    a lease.
    """

    tree: object
    node: Node
    num_blocks: int
    is_open: bool = True

    def __repr__(self) -> str:
        return f"Lease({self.num_blocks} blocks{'' if self.is_open else ', unpinned'})"


class Inserted(NamedTuple):
    """Result of inserting n blocks.

    Args:
        ids: int32 ``[num_groups, n]``, the ids that the tree owns for these blocks; use them from now on.
        doubles: the mask that ``duplicates`` returns, or None if it is false everywhere.
        num_added: blocks that were not cached before.
        lease: covers all n blocks, if the caller asked for a lease.
    """

    ids: Ids
    doubles: Mask | None
    num_added: int
    lease: Lease | None

    @property
    def duplicates(self) -> Mask:
        """Mask of the given ids that the tree did not take, because it has a block there: bool ``[num_groups, n]``.

        The caller still owns these ids, and frees them.
        """
        return np.zeros(self.ids.shape, np.bool_) if self.doubles is None else self.doubles


@dataclass(slots=True, eq=False)
class Evicted:
    """Blocks and checkpoints that the tree removed. The caller owns their ids now, and frees them.

    Args:
        ids: int32 ``[num_groups, k]`` of k blocks, in the order of eviction, 0 where a group kept nothing.
        states: state ids of the checkpoints that were removed with them.
        shortfall: how many blocks were not evicted although requested, because all remaining blocks are pinned, or
            because the host ran out of memory on the way.
    """

    ids: Ids
    states: tuple[int, ...]
    shortfall: int


# -- descent along a text --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Descent:
    """Where a descent ended: in ``node``, at ``depth`` blocks from the root, ``num_tokens`` tokens after its start.

    ``path``: the nodes of the descent; it began in the first of them, at depth ``begin``. ``beyond``: the node of the
    block whose first tokens match after ``depth``, or None.
    """

    node: Node
    begin: int
    depth: int
    num_tokens: int
    path: list[Node]
    beyond: Node | None = None

    def ids(self, num_groups: int) -> Ids:
        """Return the ids of all blocks on the path, int32 ``[num_groups, blocks]``, a copy."""
        count = self.depth - self.begin
        if not count:
            return np.empty((num_groups, 0), np.int32)
        first = self.begin - self.path[0].start
        if len(self.path) == 1:
            alone: Ids = self.node.ids[:num_groups, first : first + count].copy()
            return alone
        ids: Ids = np.concatenate([node.ids[:num_groups] for node in self.path], axis=1)
        return ids[:, first : first + count]

    def put_ids(self, ids: Ids) -> None:
        """Write the leading columns of ``ids`` into the blocks on the path."""
        for node in self.path:
            first, end = max(node.start, self.begin), min(node.end, self.depth)
            node.ids[: len(ids), first - node.start : end - node.start] = ids[:, first - self.begin : end - self.begin]


def descend(node: Node, depth: int, tokens: Ids, *, to_the_token: bool = True) -> Descent:
    """Descend from ``depth``, which lies in ``node``, as long as whole blocks match ``tokens``.

    One dictionary probe for each node on the path, then one compare of all their tokens. ``to_the_token``: also find
    the block whose first tokens match after the whole blocks; this is O(log children) if the whole blocks end at the
    end of a node.
    """
    size, length, block = node.block_size, len(tokens), b""
    at = (node.start + node.num_blocks - depth) * size  # tokens on the path so far
    path, keys = ([node], [node.tokens[(depth - node.start) * size :]]) if at else ([], [])
    while at < length:
        block = tokens[at : at + size].tobytes()
        below = node.children.get(block)
        if below is None:
            break
        node = below
        path.append(node)
        keys.append(node.tokens)
        at += node.num_blocks * size
    same = _num_same(keys[0] if len(keys) == 1 else np.concatenate(keys), tokens) if keys else 0
    end = depth + same // size
    if same < at:  # the match ends inside a node: drop the nodes behind it from the path
        while path[-1].start >= end and len(path) > 1:
            path.pop()
        node = path[-1]
        return Descent(node, depth, end, same, path, node if same % size else None)
    beyond, longest = None, 0
    if to_the_token and at < length and size > 1:
        for child in node.children.nearest(block):
            more = _num_same_bytes(child.first, block) // 4
            if more > longest:
                beyond, longest = child, more
    return Descent(node, depth, end, same + longest, path, beyond)


def read_ids_above(node: Node, end: int, begin: int, first: int, out: Ids) -> None:
    """Read into ``out``, int32 ``[k, n]``, the ids of k groups from ``first`` on in blocks ``begin .. end - 1``.

    Depth ``end`` lies in ``node``.
    """
    if begin >= node.start:  # as most do
        out[:] = node.ids[first : first + len(out), begin - node.start : end - node.start]
        return
    for one, some in _slices_above(node, end, begin):
        from_begin = one.start - begin
        out[:, some.start + from_begin : some.stop + from_begin] = one.ids[first : first + len(out), some]


def put_ids_above(node: Node, end: int, begin: int, first: int, ids: Ids) -> None:
    """Write ``ids`` over the ids that ``read_ids_above`` would read."""
    for one, some in _slices_above(node, end, begin):
        from_begin = one.start - begin
        one.ids[first : first + len(ids), some] = ids[:, some.start + from_begin : some.stop + from_begin]


def _slices_above(node: Node, end: int, begin: int) -> Iterator[tuple[Node, slice]]:
    """Yield the nodes that hold the blocks ``begin .. end - 1``, deepest first, each with the slice of its blocks.

    Depth ``end`` lies in ``node``.
    """
    while end > begin:
        yield node, slice(max(begin, node.start) - node.start, end - node.start)
        end = node.start
        if node.parent is None:
            return
        node = node.parent


def _num_same(a: Ids, b: Ids) -> int:
    """Return how many leading tokens are equal. O(the shorter)."""
    length = len(a) if len(a) < len(b) else len(b)
    if not length:
        return 0
    same = a[:length] == b[:length]
    first = int(same.argmin())
    return length if same[first] else first


def _num_same_bytes(a: bytes, b: bytes) -> int:
    """Return how many leading bytes are equal. O(the shorter)."""
    length = min(len(a), len(b))
    differ = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return length - (differ.bit_length() + 7) // 8


# -- proofs ----------------------------------------------------------------------------------------------------------


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
