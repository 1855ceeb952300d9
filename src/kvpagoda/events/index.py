"""An index of the blocks that a cache has, by name, and of the blocks after which a text can be resumed.

    root of a namespace ── block ── block ── block ── ...     full: is in the index
                                    └─── block ── ...         a window, a chunk, a state: a flag of the block

Publisher and follower have one each: the publisher fills it with the changes of the cache, the follower with messages.
It shares no code with the cache: a look-up is computed from single blocks, so that a test can compare both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from kvpagoda.arrays import NO_TOKEN, Ids, are_media
from kvpagoda.core.prefix.node import Children
from kvpagoda.events.event_log import Followed
from kvpagoda.events.wire import Name
from kvpagoda.namespace import LEAST_MEDIA, MOST_MEDIA, with_media
from kvpagoda.schema.fields import Growth

_UNKNOWN = NO_TOKEN + 1
"""The id of a medium that is in no block."""
_NO_CHILDREN: Children[Block] = Children()


class Resumable(NamedTuple):
    """How many tokens of a text a cache has, at most all but the last; the numbers of ``KVCache.lookup``."""

    cached: int
    """Leading tokens that are cached."""
    resumable: int
    """The leading tokens among these that a new request need not compute."""


class Block:
    """A block of a text.

    ``name``: as events name it. ``digest``, set by a publisher: the hash of all of the text up to its end, or of a root the
    ``namespace_key``. ``key``: its tokens, int32, with media ids. ``depth``: 1 for the first block of a text, 0 for a root,
    whose ``name`` is that of its namespace. ``groups``: a bit for each group that keeps it. ``missing``: for each window
    the depth of the last block up to this one that the group lacks, or less if the window no longer reads it.
    ``is_usable``: whether a text can be resumed after this block.
    """

    __slots__ = ("children", "depth", "digest", "groups", "is_usable", "key", "missing", "name", "parent", "root")

    def __init__(self, name: Name, key: bytes, parent: Block | None, missing: list[int]) -> None:
        self.name, self.key, self.parent, self.missing = name, key, parent, missing
        self.digest = b""
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.root: Block = self if parent is None else parent.root
        self.groups, self.is_usable = 0, False
        self.children: Children[Block] = _NO_CHILDREN


class PrefixIndex:
    """The blocks of one cache. ``blocks``: by name. ``roots``: by the name of their namespace.

    ``add``, ``remove`` and setting a flag of states are O(1). Setting a flag of a window is O(blocks of the window) for
    each text that continues after the block.
    """

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self._media: dict[bytes, int] = {}  # digest -> the number that stands for it in keys
        self._taken: set[int] = set()  # these numbers
        self._last_media, self._most_media = 0, LEAST_MEDIA
        self._windows: list[tuple[int, Growth]] = []  # group, growth
        self._state = -1
        for number, (_, growth) in enumerate(followed.groups):
            if growth.is_state:
                self._state = number
            elif growth.is_bounded:
                self._windows.append((number, growth))
        self._is_bounded = bool(self._windows) or self._state >= 0
        self._grid = max(1, followed.hit_grid // followed.block_size)
        self.blocks: dict[Name, Block] = {}
        self.roots: dict[Name, Block] = {}

    def clear(self) -> None:
        """Remove everything."""
        self.blocks.clear()
        self.roots.clear()
        self._media.clear()
        self._taken.clear()
        self._most_media = LEAST_MEDIA

    # -- blocks and flags --------------------------------------------------------------------------------------------

    def root(self, namespace: bytes) -> Block:
        """Return the root of the texts of ``namespace``."""
        if namespace not in self.roots:
            self.roots[namespace] = Block(namespace, b"", None, [0] * len(self._windows))
        return self.roots[namespace]

    def add(self, parent: Block, name: Name, key: bytes) -> Block:
        """Add block ``name`` after ``parent`` and return it; no group with bounded growth has it yet. O(1)."""
        block = Block(name, key, parent, [parent.depth + 1] * len(self._windows))
        if parent.children is _NO_CHILDREN:
            parent.children = Children()
        parent.children.put(key, block)
        self.blocks[name] = block
        if self._is_bounded:
            self._judge(block)
        else:
            block.is_usable = True
        return block

    def remove(self, block: Block) -> bool:
        """Remove ``block``, which has no children; return whether a text could be resumed after it. O(1)."""
        parent = block.parent
        assert parent is not None and not block.children
        parent.children.take(block.key)
        if parent is block.root and not parent.children:
            del self.roots[parent.name]
        del self.blocks[block.name]
        block.parent, was_usable = None, block.is_usable
        return was_usable

    def set_flag(self, group: int, blocks: Iterable[Block], *, is_there: bool) -> list[Name]:
        """Set whether ``group``, whose growth is bounded, has ``blocks``.

        Returns the names of the blocks after which a text could be resumed until now, and no longer can.
        """
        bit, lost = 1 << group, list[Name]()
        blocks = sorted(blocks, key=_depth)
        for block in blocks:
            block.groups = block.groups | bit if is_there else block.groups & ~bit
        for number, (window_group, growth) in enumerate(self._windows):
            if window_group == group:
                self._spread(number, growth, bit, blocks, lost)
        if group == self._state:
            for block in blocks:
                if self._judge(block):
                    lost.append(block.name)
        return lost

    def _spread(self, window: int, growth: Growth, bit: int, blocks: list[Block], lost: list[Name]) -> None:
        """Compute ``missing`` of ``window`` again for ``blocks`` and those after them, as far as it matters there."""
        size, waiting = self.followed.block_size, blocks[::-1]
        while waiting:
            block = waiting.pop()
            assert block.parent is not None
            last = block.parent.missing[window] if block.groups & bit else block.depth
            needed, before = self._first_needed(growth, block.depth, size), block.missing[window]
            if max(last, needed) == max(before, needed):
                continue
            block.missing[window] = last
            if self._judge(block):
                lost.append(block.name)
            waiting.extend(block.children.values())

    def _judge(self, block: Block) -> bool:
        """Compute again whether a text can be resumed after ``block``; return True if that was so and no longer is."""
        size, is_usable = self.followed.block_size, self._state < 0 or bool(block.groups >> self._state & 1)
        for last, (_, growth) in zip(block.missing, self._windows):
            is_usable = is_usable and last <= self._first_needed(growth, block.depth, size)
        was_usable, block.is_usable = block.is_usable, is_usable
        return was_usable and not is_usable

    @staticmethod
    def _first_needed(growth: Growth, depth: int, block_size: int) -> int:
        """Return how many leading blocks of a text are no longer read after ``depth`` blocks."""
        return int(growth.first_needed(depth * block_size)) // block_size

    # -- look-up -----------------------------------------------------------------------------------------------------

    def media_id(self, digest: bytes) -> int:
        """Return the negative number that stands for a medium in keys, until ``forget_media``."""
        if (number := self._media.get(digest)) is not None:
            return number
        while not self._last_media or self._last_media in self._taken:
            self._last_media = -1 - -self._last_media % (MOST_MEDIA - 1)  # never _UNKNOWN
        self._media[digest] = self._last_media
        self._taken.add(self._last_media)
        return self._last_media

    def forget_media(self) -> None:
        """Forget the media that no block has, once there are twice as many as the last time: O(tokens cached) then. Not
        while a block that is not in the index yet has the number of one."""
        if len(self._media) < self._most_media:
            return
        keys = np.frombuffer(b"".join(block.key for block in self.blocks.values()), np.int32)
        self._taken = {*keys[are_media(keys)].tolist()}
        self._media = {digest: number for digest, number in self._media.items() if number in self._taken}
        self._most_media = 2 * len(self._media) + max(LEAST_MEDIA, len(self.blocks))

    def look_up(self, tokens: Ids, namespace: bytes, media: Mapping[int, bytes]) -> Resumable:
        """Return how much of a text, int32 ``[n]``, is cached; ``media``: offset -> digest of a medium. O(n)."""
        block, size = self.roots.get(namespace), self.followed.block_size
        if block is None or len(tokens) < 2:
            return Resumable(0, 0)
        keys = with_media(tokens, 0, {at: self._media.get(digest, _UNKNOWN) for at, digest in media.items()})
        text, step, offset, usable = keys[:-1].tobytes(), 4 * size, 0, 0
        while (child := block.children.get(text[offset : offset + step])) is not None:
            block, offset = child, offset + step
            if block.is_usable and block.depth % self._grid == 0:
                usable = block.depth
        cached = offset // 4 + self._num_alike(block, text[offset : offset + step])
        if self._is_bounded:
            return Resumable(cached, usable * size)
        return Resumable(cached, cached // self.followed.hit_grid * self.followed.hit_grid)

    @staticmethod
    def _num_alike(block: Block, rest: bytes) -> int:
        """Return the most leading tokens that ``rest`` shares with a child of ``block``."""
        most, tokens = 0, np.frombuffer(rest, np.int32)
        for child in block.children.nearest(rest) if rest else ():
            differ = np.flatnonzero(np.frombuffer(child.key, np.int32, len(tokens)) != tokens)
            most = max(most, int(differ[0]) if len(differ) else len(tokens))
        return most


def _depth(block: Block) -> int:
    return block.depth
