"""A prefix cache for engines that keep one contiguous slot per request: which slot holds which token sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import as_tokens, grown
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.free_list import IdPool
from kvpagoda.prefix import Lease, Match, PrefixTree
from kvpagoda.units import whole_number

Text = Sequence[int] | npt.NDArray[Any]


class PrefixCacheManager:
    """Stores, for each token of each cached sequence, the slot and slot version that last held the sequence up to it.

    A *reference* belongs to the exact ``token_ids`` with which ``insert`` or ``pin`` took it; ``release`` drops one
    reference on the same ``token_ids``: sequences of whole numbers, 0 to 2^31 - 1, or integer arrays. Calls are
    O(length).

    Args:
        max_capacity: cached tokens. Tokens without a reference are evicted down to it, least recently used first, from
            the ends of sequences; referenced ones count but are never evicted, and may together exceed it. No call
            waits, and ``insert`` never fails for lack of room.

    Examples:
        >>> cache = PrefixCacheManager(max_capacity=1000)
        >>> cache.insert([11, 12, 13, 14], slot=2, slot_ver=1)      # and takes a reference
        >>> cache.find([11, 12, 13, 99])                            # 3 tokens are in slot 2, if it still has version 1
        (3, 2, 1)
        >>> cache.release([11, 12, 13, 14])                         # from now on it may be evicted
    """

    def __init__(self, max_capacity: int = 1000) -> None:
        self.max_capacity = whole_number(max_capacity, "the capacity in tokens")
        self._tree = PrefixTree(block_size=1)
        self._entries = IdPool(first=1)  # an entry per cached token; they are the block ids of the tree
        self._places = np.zeros((2, 0), np.int64)  # by entry: slot, version
        self._leases: dict[bytes, list[Lease]] = {}

    @property
    def num_cached(self) -> int:
        """The number of cached tokens. O(1)."""
        return self._tree.num_cached

    @property
    def num_pinned(self) -> int:
        """The number of cached tokens that a reference covers. O(1)."""
        return self._tree.num_pinned

    @property
    def num_evictable(self) -> int:
        """The number of cached tokens that no reference covers. O(1)."""
        return self._tree.num_evictable

    def insert(self, token_ids: Text, slot: int, slot_ver: int) -> None:
        """Record that a slot holds the rows of all tokens of a text; take one reference.

        The slot replaces older ones on the whole path. Then evicts down to the capacity.

        Args:
            token_ids: the text.
            slot: that holds it.
            slot_ver: its version.

        Raises:
            BadInput: ``token_ids`` are no vector of integers, or a number is negative.
        """
        tokens = as_tokens(token_ids).copy()  # the tree keeps it
        slot = whole_number(slot, "a slot", below=2**63)
        version = whole_number(slot_ver, "a slot version", below=2**63)
        match = self._tree.match(tokens)
        entries = self._entries.take(len(tokens) - match.num_tokens)[None]
        path = np.concatenate((match.ids[0], entries[0]))
        self._places = grown(self._places, int(path.max(initial=0)) + 1)
        self._tree.insert(match, tokens[match.num_tokens :], entries)
        self._places[:, path] = [[slot], [version]]
        self.pin(tokens)
        self._shrink()

    def find(self, token_ids: Text) -> tuple[int, int, int]:
        """Return (prefix_len, slot, slot_ver) of the longest cached prefix of a text; it may end at any token.

        Counts as a use. The slot held all ``prefix_len`` tokens when it had version ``slot_ver``: compare the version
        before reading the slot. (0, -1, 0) when nothing is cached.

        Args:
            token_ids: the text.

        Raises:
            BadInput: ``token_ids`` are no vector of integers.
        """
        match = self._tree.match(as_tokens(token_ids))
        self._tree.touch(match)
        if not match.num_tokens:
            return 0, -1, 0
        return match.num_tokens, *self._place(match)

    def pin(self, token_ids: Text) -> None:
        """Take one more reference on a text; a use of it.

        Args:
            token_ids: the text.

        Raises:
            NotOwned: they are not all cached.
        """
        match = self._cached(token_ids)
        self._tree.touch(match)
        self._leases.setdefault(match.tokens.tobytes(), []).append(self._tree.pin(match))

    def release(self, token_ids: Text) -> None:
        """Drop one reference on exactly a text, then evict down to the capacity.

        Args:
            token_ids: the text.

        Raises:
            NotOwned: there is no such reference; nothing changed.
        """
        key = as_tokens(token_ids).tobytes()
        leases = self._leases.get(key)
        if not leases:
            text = f"no reference on these {len(key) // 4} tokens: released twice, or never pinned"
            raise NotOwned(text, needed=len(key) // 4)
        self._tree.unpin(leases.pop())
        if not leases:
            del self._leases[key]
        self._shrink()

    def copy_kv(self, token_ids: Text, target_slot: int, kv_cache: tuple[Any, Any], n_layers: int) -> None:
        """Copy the rows of a text from the slot that holds them to another, in both caches.

        Compare the slot version that ``find`` returned before you call this.

        Args:
            token_ids: the text.
            target_slot: the other slot.
            kv_cache: K and V, tensors or arrays ``[slot, position, layer, ...]``.
            n_layers: the first layers are copied.

        Raises:
            NotOwned: ``token_ids`` are not all cached.
            BadInput: a slot, length or layer that a cache does not have; nothing was copied then.
        """
        match = self._cached(token_ids)
        if not match.num_tokens:
            return
        slot, target = self._place(match)[0], whole_number(target_slot, "the target slot")
        wanted = max(slot, target) + 1, match.num_tokens, whole_number(n_layers, "the number of layers")
        caches = [
            getattr(cache, "detach", lambda cache=cache: cache)() for cache in kv_cache
        ]  # tensors without a graph
        if len(caches) != 2:
            text = f"kv_cache must be the K and the V cache, got {len(caches)}"
            raise BadInput(text, needed=2, available=len(caches))
        for cache in caches:
            if len(cache.shape) < 3 or any(size < least for size, least in zip(cache.shape, wanted)):
                raise BadInput(f"cache of shape {list(cache.shape)} lacks [slot, position, layer] below {list(wanted)}")
        if slot != target:
            for cache in caches:
                cache[target, : wanted[1], : wanted[2]] = cache[slot, : wanted[1], : wanted[2]]

    def evict(self, num_tokens: int) -> int:
        """Evict cached tokens, the least recently used first; return how many were evicted.

        Args:
            num_tokens: the most.
        """
        evicted = self._tree.evict(num_tokens).ids[0]
        self._entries.give(evicted)
        return len(evicted)

    def check(self) -> None:
        """Check the tree, and that its leases are exactly the references. O(cached tokens).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._tree.check()
        assert sum(map(len, self._leases.values())) == self._tree.num_leases, "references and leases differ"

    def _shrink(self) -> None:
        """Evict down to the capacity, as far as references allow."""
        surplus = self._tree.num_cached - self.max_capacity
        if surplus > 0:
            self.evict(surplus)

    def _cached(self, token_ids: Text) -> Match:
        """Return the match of ``token_ids``. Raises NotOwned unless all of them are cached."""
        tokens = as_tokens(token_ids)
        match = self._tree.match(tokens)
        if match.num_tokens < len(tokens):
            text = f"only {match.num_tokens} of these {len(tokens)} tokens are cached; find says how many are"
            raise NotOwned(text, needed=len(tokens), available=match.num_tokens)
        return match

    def _place(self, match: Match) -> tuple[int, int]:
        """Return the slot and the slot version of the last token of ``match``."""
        slot, version = self._places[:, match.ids[0, -1]].tolist()
        return slot, version
