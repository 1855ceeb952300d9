"""A router of one's own, written from ``docs/events.md`` alone: it keeps what messages say as they say it, and works out
anew, for each question, where a text can be resumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

Name = bytes


@dataclass
class Block:
    """A block of a text, by the tokens that it ends with. ``groups``: those that have it, beside the one of the text."""

    parent: Name
    tokens: list[int]
    groups: set[int] = field(default_factory=set)


@dataclass
class Router:
    """``asks_from``: the number of the first message that it lacks, None if it lacks none that it has heard of."""

    instance: bytes = b""
    info: list[Any] = field(default_factory=list)
    expected: int = 0
    newest: int = -1
    blocks: dict[Name, Block] = field(default_factory=dict)
    knows_all: bool = False

    @property
    def asks_from(self) -> int | None:
        return self.expected if self.expected <= self.newest else None

    def hear(self, number: int, payload: bytes) -> None:
        """A message came. One that is not the next is of no use to it, unless it says all that there is."""
        _, events, _, info = msgspec.msgpack.decode(payload)
        if info[0] != self.instance:
            self.instance, self.info, self.expected, self.newest, self.knows_all = info[0], info, 0, -1, False
        self.newest = max(self.newest, number)
        says_all = bool(events) and events[0][0] == "AllBlocksCleared"
        if not events or (number > self.expected and not says_all) or number < self.expected:
            return
        self.expected = number + 1
        for tag, *fields in events:
            if tag == "AllBlocksCleared":
                self.blocks.clear()
                self.knows_all = True
            elif self.knows_all and tag == "BlockStored":
                self._stored(*fields)
            elif self.knows_all:
                self._removed(*fields)

    def _is_text(self, group: int | None) -> bool:
        return (-1 if group is None else group) == self.info[4]

    def _stored(self, names: list[Name], parent: Name | None, tokens: list[int], size: int, *rest: Any) -> None:
        group, namespace = rest[4], rest[8]
        for at, name in enumerate(names):
            if self._is_text(group):
                above = (parent or namespace) if at == 0 else names[at - 1]
                self.blocks[name] = Block(above, tokens[at * size : (at + 1) * size])
            else:
                self.blocks[name].groups.add(group)

    def _removed(self, names: list[Name], *rest: Any) -> None:
        group = rest[1] if len(rest) > 1 else None
        for name in names:
            if self._is_text(group):
                del self.blocks[name]
            else:
                self.blocks[name].groups.discard(group)

    def resumable(self, tokens: list[int], namespace: bytes) -> tuple[int, int]:
        """How many tokens of a text are there, and behind how many of them a request can begin."""
        known, path, above = tokens[:-1], list[Block](), namespace
        size = self.info[1]
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
        grid = self.info[2]
        bounded = [(i, kind, n) for i, (_, kind, n) in enumerate(self.info[3]) if kind != "full_attention"]
        if not bounded:
            return cached, cached // grid * grid
        for depth in range(len(path), 0, -1):
            if (depth * size) % max(grid, size) == 0 and all(_has(path[:depth], *one, size) for one in bounded):
                return cached, depth * size
        return cached, 0


def _has(path: list[Block], group: int, kind: str, span: int | None, size: int) -> bool:
    """Whether a group has what the token behind ``path`` reads."""
    end = len(path) * size
    if kind == "mamba":
        return group in path[-1].groups
    assert span is not None
    first = end - span + 1 if kind == "sliding_window" else end // span * span
    return all(group in block.groups for block in path[max(0, first) // size :])


def _alike(one: list[int], other: list[int]) -> int:
    """How many leading tokens are the same."""
    for at, (left, right) in enumerate(zip(one, other)):
        if left != right:
            return at
    return min(len(one), len(other))
