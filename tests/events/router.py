"""A router of one's own, written from ``docs/events.md`` alone: it keeps what messages say as they say it, and works out
anew, for each question, where a text can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

Name = int | bytes


@dataclass
class Block:
    """A block of a text, by the tokens that it ends with; a medium's digest in place of its first token. ``groups``: those
    that have it, beside the one of the text."""

    parent: Name
    tokens: list[int | str]
    groups: set[int] = field(default_factory=set)


@dataclass
class Router:
    """``asks_from``: the number of the first message that it lacks, None if it lacks none that it has heard of."""

    instance: int = -1
    info: dict[str, Any] = field(default_factory=dict)
    expected: int = 0
    newest: int = -1
    blocks: dict[Name, Block] = field(default_factory=dict)
    knows_all: bool = False

    @property
    def asks_from(self) -> int | None:
        return self.expected if self.expected <= self.newest else None

    def hear(self, number: int, payload: bytes) -> None:
        """A message came. One that is not the next is of no use to it, unless it says all that there is."""
        _, events, _ = msgspec.msgpack.decode(payload)
        if events[0]["instance"] != self.instance:
            self.instance, self.expected, self.newest, self.knows_all = events[0]["instance"], 0, -1, False
        self.newest = max(self.newest, number)
        says_all = events[0]["type"] == "AllBlocksCleared"
        is_alive = not any(event.get("block_hashes", True) for event in events)
        if is_alive or (number > self.expected and not says_all) or number < self.expected:
            return
        self.expected = number + 1
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                self.info, self.knows_all = event["cache"], True
            elif self.knows_all and event["type"] == "BlockStored":
                self._stored(event)
            elif self.knows_all:
                self._removed(event)

    def _is_text(self, group: int | None) -> bool:
        return (-1 if group is None else group) == self.info["full"]

    def _stored(self, event: dict[str, Any]) -> None:
        group, size, names = event.get("group_idx"), event["block_size"], event["block_hashes"]
        above = event["parent_block_hash"]
        for at, name in enumerate(names):
            if self._is_text(group):
                above = event["namespace"] if above is None else above
                tokens = event["token_ids"][at * size : (at + 1) * size]
                for extra in (event.get("extra_keys") or {at: None})[at] or ():
                    if not isinstance(extra, str):
                        tokens[extra[1]] = extra[0]
                self.blocks[name] = Block(above, tokens)
                above = name
            else:
                self.blocks[name].groups.add(group)

    def _removed(self, event: dict[str, Any]) -> None:
        group = event.get("group_idx")
        for name in event["block_hashes"]:
            if self._is_text(group):
                del self.blocks[name]
            else:
                self.blocks[name].groups.discard(group)

    def resumable(
        self, tokens: list[int], namespace: bytes, media: Mapping[int, bytes] | None = None
    ) -> tuple[int, int]:
        """How many tokens of a text are there, and behind how many of them a request can begin."""
        above: Name = namespace
        digests = {at: digest.hex() for at, digest in (media or {}).items()}
        known, path = [digests.get(at, token) for at, token in enumerate(tokens)][:-1], list[Block]()
        size = self.info["block_size"]
        partial = 0
        while True:
            rest = known[len(path) * size : (len(path) + 1) * size]
            below = {name: block for name, block in self.blocks.items() if block.parent == above}
            whole = [name for name, block in below.items() if len(rest) == size and block.tokens == rest]
            if not whole:
                partial = max((_alike(block.tokens, rest) for block in below.values()), default=0)
                break
            (above,) = whole
            path.append(self.blocks[above])
        cached = len(path) * size + partial
        grid = self.info["hit_grid"]
        bounded = [(i, kind, n) for i, (_, kind, n) in enumerate(self.info["groups"]) if kind != "full"]
        if not bounded:
            return cached, cached // grid * grid
        for depth in range(len(path), 0, -1):
            if (depth * size) % max(grid, size) == 0 and all(_has(path[:depth], *one, size) for one in bounded):
                return cached, depth * size
        return cached, 0


def _has(path: list[Block], group: int, kind: str, span: int | None, size: int) -> bool:
    """Whether a group has what the token behind ``path`` reads."""
    end = len(path) * size
    if kind == "state":
        return group in path[-1].groups
    assert span is not None
    first = end - span + 1 if kind == "window" else end // span * span
    return all(group in block.groups for block in path[max(0, first) // size :])


def _alike(one: list[int | str], other: list[int | str]) -> int:
    """How many leading tokens are the same."""
    for at, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return at
    return min(len(one), len(other))
