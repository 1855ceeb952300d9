"""The order in which vLLM's free blocks are reused, for groups that keep a window or a state of a text.

    no content | cold, oldest first | warm, least recently used first and ends of texts before their beginnings

A block of such a group is *warm* if it is needed at a position where a text stays resumable (``kvpagoda.retention``):
marked by ``keep``. Any other one with content is *cold*. Blocks of full attention are warm. ``ColdAging`` says whether the
oldest cold block is used again before the oldest warm one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    get_group_id,
    make_block_hash_with_group_id,
)

from kvpagoda.arrays import Ids
from kvpagoda.errors import CheckFailed
from kvpagoda.free_list import IdPool
from kvpagoda.policies import EvictionPolicy
from kvpagoda.retention import ColdAging

_ONCE = 1
"""The mark of a block at a position that is kept until it is found: where a text ended, which one other text continues."""
_ALWAYS = 2
"""The mark of a block at a position that is kept as long as it is used: where texts part."""
_FOUND = (_ALWAYS, 0, _ALWAYS)
"""Mark before a block was found -> its mark from then on."""


class EvictionQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's queue of free blocks in the order that the top of this file describes.

    ``free``: the free blocks of a pool of ``num_blocks``, which have no content yet. ``bounded``: the block size of each
    group that keeps a window or a state, by number of the group.
    """

    def __init__(self, free: list[KVCacheBlock], num_blocks: int, bounded: dict[int, int]) -> None:
        super().__init__(free)
        self._bounded = bounded
        self._groups = tuple(make_block_hash_with_group_id(b"", group) for group in bounded)  # ends of hashes
        self._kept = bytearray(num_blocks)
        self.clock = 0
        """How many blocks with content became free."""
        self.cold_aging = ColdAging()
        self._freed = [0] * num_blocks  # block id -> the time at which a block with content became free
        self._empty: KVCacheBlock = free[-1] if free else self.fake_free_list_head
        """The last block without content; the head of the list if there is none."""
        self._cold: KVCacheBlock = self._empty
        """The last block that is not warm, in the same way."""

    def keep(self, blocks: Iterable[KVCacheBlock], *, once: bool = False) -> None:
        """Mark ``blocks`` as needed at a position where a text stays resumable, until they are used for something else.

        ``once``: also until they are found, because the text that goes on there has a position of its own further on.
        """
        mark, kept = _ONCE if once else _ALWAYS, self._kept
        for block in blocks:
            if kept[block.block_id] < mark:
                kept[block.block_id] = mark

    def found(self, blocks: Iterable[KVCacheBlock]) -> bool:
        """Note that a request begins with ``blocks`` of windows or states. Return whether they stay as long as
        they are used."""
        kept, mark = self._kept, 0
        for block in blocks:
            if not block.is_null:
                number = block.block_id
                kept[number] = mark = _FOUND[kept[number]]
        return mark == _ALWAYS

    def is_cold(self, block: KVCacheBlock) -> bool:
        """Return whether ``block``, which is free or becomes so, has content that resuming no text is known to need."""
        name = block.block_hash
        if name is None or self._kept[block.block_id] or not name.endswith(self._groups):
            return False
        # A block that ends inside itself holds the state at the end of a prompt: a position too.
        return bool(block.block_hash_num_tokens % self._bounded[int(get_group_id(name))] == 0)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        self.clock += len(blocks)
        now, freed, kept = self.clock, self._freed, self._kept
        cold: list[KVCacheBlock] = []
        warm: list[KVCacheBlock] = []
        for block in blocks:
            number = block.block_id
            freed[number] = now
            (warm if kept[number] or not self.is_cold(block) else cold).append(block)
        super().append_n(warm)
        if cold:
            before, after = self._cold, self._cold.next_free_block
            for block in cold:
                before.next_free_block, block.prev_free_block = block, before
                before = block
            before.next_free_block, after.prev_free_block = after, before
            self._cold = before
            self.num_free_blocks += len(cold)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        super().prepend_n(blocks)
        if blocks and self._empty is self.fake_free_list_head:
            if self._cold is self._empty:
                self._cold = blocks[-1]
            self._empty = blocks[-1]

    def remove(self, block: KVCacheBlock) -> None:
        if block is self._cold:
            self._cold = block.prev_free_block
        if block is self._empty:
            self._empty = block.prev_free_block
        super().remove(block)

    def popleft(self) -> KVCacheBlock:
        (block,) = self.popleft_n(1)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """As vLLM's. One call compares the oldest cold and the oldest warm block once."""
        blocks = self._warm(n) if self._is_warm_next() else []
        if len(blocks) < n:
            blocks += super().popleft_n(n - len(blocks))
            if self._cold.next_free_block is None:  # it was among them
                self._cold = self.fake_free_list_head
            if self._empty.next_free_block is None:
                self._empty = self.fake_free_list_head
        kept = self._kept
        for block in blocks:
            kept[block.block_id] = 0
        return blocks

    def _is_warm_next(self) -> bool:
        """Return whether the oldest warm block is used again before the oldest cold one."""
        head = self.fake_free_list_head
        if self._empty is not head or self._cold is head:
            return False
        warm, now = self._cold.next_free_block, self.clock
        if warm is self.fake_free_list_tail:
            return False
        cold_age = now - self._freed[head.next_free_block.block_id]
        warm_age = now - self._freed[warm.block_id]
        return self.cold_aging.is_warm_next(cold_age, warm_age)

    def _warm(self, n: int) -> list[KVCacheBlock]:
        """Take up to ``n`` warm blocks, the oldest first."""
        blocks: list[KVCacheBlock] = []
        before, block = self._cold, self._cold.next_free_block
        while len(blocks) < n and block is not self.fake_free_list_tail:
            blocks.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        before.next_free_block, block.prev_free_block = block, before
        self.num_free_blocks -= len(blocks)
        return blocks

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Called when a request begins with the cached ``blocks``. The list itself is the order: nothing to note."""

    def check(self) -> None:
        """Prove that the list is whole, and that its parts are in order. Raises CheckFailed. O(blocks)."""
        blocks, head = self.get_all_free_blocks(), self.fake_free_list_head
        if len(blocks) != self.num_free_blocks or len({block.block_id for block in blocks}) != len(blocks):
            raise CheckFailed(f"the list of free blocks has {len(blocks)}, its count says {self.num_free_blocks}")
        empty, cold = (0 if end is head else blocks.index(end) + 1 for end in (self._empty, self._cold))
        late = [block.block_id for block in blocks[cold:] if self.is_cold(block)]
        if late or empty > cold:
            raise CheckFailed(
                f"the first {empty} blocks are empty, the first {cold} not warm; cold ones after: {late[:16]}"
            )


class PolicyQueue(EvictionQueue):
    """The same, with an eviction policy of ours choosing among the warm blocks.

    Each block with content has a key for the policy. A key that the policy remembers after the block was evicted belongs
    to its hash: if the text is cached again, it comes back. What vLLM lists as its order is least recently used.
    """

    def __init__(
        self, free: list[KVCacheBlock], num_blocks: int, bounded: dict[int, int], policy: EvictionPolicy
    ) -> None:
        super().__init__(free, num_blocks, bounded)
        self.policy, self._numbers = policy, IdPool()
        self._key_of: dict[int, int] = {}  # block id -> key, of blocks that the policy knows
        self._in_use: set[int] = set()  # these keys
        self._leaves: dict[int, KVCacheBlock] = {}  # key -> block, of those that are free
        self._keys: dict[bytes, int] = {}  # hash -> key, also of ghosts
        self._hash_of: dict[int, bytes] = {}  # the same, the other way

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)
        for block in blocks:
            if block.block_hash is not None and not self.is_cold(block):
                key = self._key(block)
                self._leaves[key] = block
                self.policy.set_leaf(key, True)

    def remove(self, block: KVCacheBlock) -> None:
        self._left(block)
        super().remove(block)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        taken: list[KVCacheBlock] = []
        while len(taken) < n:
            if self._cold is self.fake_free_list_head and self._leaves:
                key = int(self.policy.choose(_alone)[0])
                block = self._leaves[key]
                self.remove(block)
                self._kept[block.block_id] = 0
            else:
                (block,) = super().popleft_n(1)
                self._left(block)
            self._evicted(block)
            taken.append(block)
        return taken

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        known = [self._key_of[block.block_id] for block in blocks if block.block_id in self._key_of]
        if known:
            self.policy.touch(np.array(known, np.int32), 0)

    def check(self) -> None:
        super().check()
        if self._in_use != {*self._key_of.values()}:
            raise CheckFailed(f"{len(self._key_of)} blocks have keys, {len(self._in_use)} keys are counted")
        self.policy.check(np.array([*self._in_use], np.int32), set(self._leaves))

    def _key(self, block: KVCacheBlock) -> int:
        """Return the key of ``block``; the policy learns of one that it does not know."""
        key = self._key_of.get(block.block_id)
        if key is None:
            name = bytes(block.block_hash)
            ghost = self._keys.get(name)
            if ghost is not None and ghost not in self._in_use:
                key = ghost
            else:
                key = int(self._numbers.peek(1)[0])
                self._numbers.advance(1)
                if ghost is None:
                    self._keys[name], self._hash_of[key] = key, name
            self.policy.add(np.array([key], np.int32), 0)
            self._key_of[block.block_id] = key
            self._in_use.add(key)
        return key

    def _left(self, block: KVCacheBlock) -> None:
        """Note that ``block`` is not free any more."""
        key = self._key_of.get(block.block_id)
        if key is not None and self._leaves.pop(key, None) is not None:
            self.policy.set_leaf(key, False)

    def _evicted(self, block: KVCacheBlock) -> None:
        """Note that the content of ``block`` is gone."""
        key = self._key_of.pop(block.block_id, None)
        if key is None:
            return
        self._in_use.discard(key)
        for forgotten in map(int, self.policy.remove(np.array([key], np.int32), evicted=True)):
            name = self._hash_of.pop(forgotten, None)
            if name is not None:
                del self._keys[name]
            self._numbers.give(np.array([forgotten], np.int32))


def _alone(leaf: int) -> Ids:
    """Return what is evicted with ``leaf``: nothing else, because the list has no tree."""
    return np.array([leaf], np.int32)
