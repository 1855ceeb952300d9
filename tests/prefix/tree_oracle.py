"""A prefix tree in plain dictionaries: one entry for each cached block; its key is all tokens up to the block's end.

Every answer comes from a search of all entries. Evicts by LRU, like the replay model. Shares nothing with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Block:
    """One cached block: its ids by group, the clock of its last use, its pins, and the state id of its checkpoint."""

    ids: list[int]
    stamp: int = 0
    pins: int = 0
    state: int | None = None
    below: set[bytes] = field(default_factory=set)  # keys of the child blocks


class Oracle:
    def __init__(self, block_size: int, num_groups: int) -> None:
        self.nbytes, self.num_groups = 4 * block_size, num_groups
        self.roots: dict[bytes, Block] = {}
        self.blocks: dict[bytes, dict[bytes, Block]] = {}  # namespace -> all tokens up to the end of the block -> block
        self.states: dict[int, tuple[bytes, bytes]] = {}  # oldest use first
        self.clock = 0
        self.num_pinned = 0

    @property
    def num_cached(self) -> int:
        return sum(len(blocks) for blocks in self.blocks.values())

    def path(self, text: bytes) -> list[bytes]:
        """Return the keys of the whole blocks of ``text``, from the root on."""
        return [text[:end] for end in range(self.nbytes, len(text) + 1, self.nbytes)]

    def at(self, namespace: bytes, key: bytes) -> Block:
        """Return the block with that key; for an empty key the root of ``namespace``."""
        return self.blocks[namespace][key] if key else self.roots.setdefault(namespace, Block([]))

    def match(self, namespace: bytes, text: bytes) -> tuple[int, list[bytes], list[int] | None]:
        """Return (matching tokens, keys of the whole blocks, ids of each child block with the most matching tokens)."""
        cached = self.blocks.get(namespace, {})
        keys = []
        for key in self.path(text):
            if key not in cached:
                break
            keys.append(key)
        done = keys[-1] if keys else b""
        longest, partial = 0, []
        for key in self.at(namespace, done).below if namespace in self.roots else ():
            same = 0
            while same < self.nbytes and text[len(done) + same : len(done) + same + 4] == key[len(done) + same :][:4]:
                same += 4
            if same > longest:
                longest, partial = same, []
            if same == longest and same:
                partial.append(tuple(cached[key].ids))
        return (len(done) + longest) // 4, keys, partial

    def insert(self, namespace: bytes, covered: bytes, text: bytes, ids: list[list[int]]) -> tuple[list, list, int]:
        """Return (ids that the tree has now, duplicates, number of blocks added). ``ids``: a list for each block."""
        cached = self.blocks.setdefault(namespace, {})
        own, duplicates, fresh = [], [], []
        for key, given in zip(self.path(covered + text)[len(covered) // self.nbytes :], ids):
            if key in cached:
                block = cached[key]
                duplicates.append([bool(g and b and g != b) for g, b in zip(given, block.ids)])
                block.ids = [b or g for g, b in zip(given, block.ids)]
            else:
                block = cached[key] = Block(list(given))
                self.at(namespace, key[: -self.nbytes]).below.add(key)
                duplicates.append([False] * self.num_groups)
                fresh.append(block)
            own.append(block.ids)
        for block in reversed(fresh):
            self.clock += 1
            block.stamp = self.clock
        return own, duplicates, len(fresh)

    def touch(self, namespace: bytes, covered: bytes) -> None:
        """Count a use of all blocks of ``covered``, the deepest first, and of the last checkpoint there."""
        used = None
        for key in reversed(self.path(covered)):
            block = self.at(namespace, key)
            self.clock += 1
            block.stamp = self.clock
            used = block.state if used is None else used
        if used is not None:
            self.states[used] = self.states.pop(used)

    def pin(self, namespace: bytes, covered: bytes, change: int) -> None:
        """Add ``change`` (1 or -1) to the pins of all blocks of ``covered``."""
        for key in self.path(covered):
            block = self.at(namespace, key)
            self.num_pinned -= block.pins > 0
            block.pins += change
            self.num_pinned += block.pins > 0

    def evict(self, count: int) -> tuple[list[list[int]], list[int]]:
        """Evict up to ``count`` leaves that are not pinned. Returns (ids by block, state ids)."""
        ids, states = [], []
        while len(ids) < count:
            leaves = [
                (block.stamp, namespace, key)
                for namespace, cached in self.blocks.items()
                for key, block in cached.items()
                if not block.below and not block.pins
            ]
            if not leaves:
                break
            _, namespace, key = min(leaves)
            block = self.blocks[namespace].pop(key)
            self.at(namespace, key[: -self.nbytes]).below.remove(key)
            ids.append(block.ids)
            if block.state is not None:
                states.append(block.state)
                del self.states[block.state]
        return ids, states

    def clear(self, namespace: bytes) -> tuple[set, set]:
        """Remove a namespace. Returns (ids by block, state ids)."""
        removed = self.blocks.pop(namespace, {})
        self.roots.pop(namespace, None)
        states = {block.state for block in removed.values() if block.state is not None}
        for state in states:
            del self.states[state]
        return {tuple(block.ids) for block in removed.values()}, states


def as_bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int32).tobytes()
