"""The blocks that a vLLM engine has, from its own events, and its next hit by its own rules.

vLLM names a block by a hash of its whole text up to its end, so a name stands for one place of one text in every group:

    (name before, tokens) ──► name      learned from events that tell all blocks of their tokens
    group ──► names that it has         windows and states tell some of the blocks of their tokens, and not which

A look-up follows the tokens of a prompt from name to name, and asks each group which of these names it has. Where a group
has a name whose place was never told, a block may be there: one answer counts it, another does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import gcd, lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import Ids
from kvpagoda.events.wire import BlockRemoved, BlockStored, Name

_FULL, _WINDOW, _STATE = "full", "window", "state"
_LAWS = {
    "full_attention": _FULL, "mla_attention": _FULL, "sink_full_attention": _FULL, "mamba": _STATE,
    "sliding_window": _WINDOW, "sliding_window_mla": _WINDOW,
}  # fmt: skip
"""``kv_cache_spec_kind`` -> what a hit needs: all blocks, those of the window, the last one. Of others it is not told."""
_NO, _MAYBE, _YES = 0, 1, 2

_Key = tuple[bytes, tuple[Any, ...]]
"""The tokens of a block, int32, with those after it that are in its hash; what else is in its hash: adapter, media, salt."""
_Marks = npt.NDArray[np.uint8]


class NextHit(NamedTuple):
    """How many tokens of a prompt a vLLM engine would find, at most all but the last."""

    cached: int
    """Leading tokens whose blocks it has in the groups that keep all tokens."""
    resumable: int
    """The leading tokens that it need not compute."""
    at_most: bool
    """``resumable`` may be less: the events do not tell all that the hit depends on."""


class _Group:
    """A group of the engine. ``size``: tokens of its blocks; ``least``: of the smallest part of a block that it stored.
    ``held``: name -> how many blocks have it."""

    def __init__(self) -> None:
        self.law, self.window, self.size, self.least = "", 0, 0, 0
        self.held = dict[Name, int]()

    def learn(self, event: BlockStored) -> None:
        window = event.kv_cache_spec_sliding_window
        self.law = _LAWS.get(event.kv_cache_spec_kind or "", "")
        if self.law == _WINDOW:
            self.law, self.window = (_WINDOW, window) if window else ("", 0)
        self.size = max(self.size, event.block_size)
        self.least = min(self.least or event.block_size, event.block_size)


class _Block:
    """A name. ``edges``: what it comes after (name before, key). ``is_placed``: so do those before it, back to the begin of a
    text; otherwise ``loose`` are the tokens that its block may have. ``num_held``: groups that have it. ``num_after``: names
    after it."""

    __slots__ = ("edges", "is_placed", "loose", "num_after", "num_held")

    def __init__(self) -> None:
        self.edges: list[tuple[Name | None, _Key]] = []
        self.is_placed, self.loose = False, set[bytes]()
        self.num_held = self.num_after = 0


class VllmIndex:
    """``store`` and ``remove`` are O(tokens) and O(1) a block; ``look_up`` is O(n)."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._steps = set[tuple[int, int]]()  # tokens of a block, tokens after it in its hash
        self._blocks: dict[Name, _Block] = {}
        self._after: dict[tuple[Name | None, _Key], list[Name]] = {}
        self._loose: dict[bytes, set[Name]] = {}  # tokens of a block -> names that it may have

    def __len__(self) -> int:
        return sum(bool(block.num_held) for block in self._blocks.values())

    def clear(self) -> None:
        """Remove all blocks; what is known of the groups stays."""
        for group in self._groups.values():
            group.held.clear()
        self._blocks.clear()
        self._after.clear()
        self._loose.clear()

    def store(self, event: BlockStored) -> None:
        """Take the blocks of ``event``."""
        group = self._groups.setdefault(event.group_idx or 0, _Group())
        group.learn(event)
        for name in event.block_hashes:
            group.held[name] = group.held.get(name, 0) + 1
            if group.held[name] == 1:
                self._blocks.setdefault(name, _Block()).num_held += 1
        num_blocks = len(event.token_ids) // event.block_size
        if num_blocks == len(event.block_hashes):
            before = event.parent_block_hash
            for name, key in zip(event.block_hashes, self._keys(event)):
                self._place(before, key, name)
                before = name
            return
        text, size = np.asarray(event.token_ids, np.int32).tobytes(), 4 * event.block_size
        for first, name in enumerate(event.block_hashes):  # which of the blocks is not told, but the order is
            if not self._blocks[name].is_placed:
                for number in range(first, first + 1 + num_blocks - len(event.block_hashes)):
                    self._loosen(name, text[number * size : (number + 1) * size])

    def remove(self, event: BlockRemoved) -> bool:
        """Take away the blocks of ``event``; return whether all were known."""
        group, are_known = self._groups.get(event.group_idx or 0), True
        for name in event.block_hashes:
            if group is None or name not in group.held:
                are_known = False
                continue
            group.held[name] -= 1
            if not group.held[name]:
                del group.held[name]
                self._blocks[name].num_held -= 1
                self._release(name)
        return are_known

    # -- places ------------------------------------------------------------------------------------------------------

    def _keys(self, event: BlockStored) -> Iterator[_Key]:
        """Yield the key of each block of ``event``, which tells all blocks of its tokens."""
        size, text = 4 * event.block_size, np.asarray(event.token_ids, np.int32).tobytes()
        ahead, extras = event.lookahead_token_ids or [], event.extra_keys or []
        if event.block_hashes:
            self._steps.add((event.block_size, len(ahead[0]) if ahead else 0))
        for number in range(len(event.block_hashes)):
            own = text[number * size : (number + 1) * size]
            if number < len(ahead):
                own += np.asarray(ahead[number], np.int32).tobytes()
            extra = extras[number] if number < len(extras) else None
            yield own, tuple(tuple(one) if isinstance(one, list) else one for one in extra or ())

    def _place(self, before: Name | None, key: _Key, name: Name) -> None:
        """Note that ``name`` comes after ``before``."""
        names = self._after.setdefault((before, key), [])
        if name in names:
            return
        names.append(name)
        block = self._blocks[name]
        block.edges.append((before, key))
        above = None if before is None else self._blocks.setdefault(before, _Block())
        if above is not None:
            above.num_after += 1
        if above is None or above.is_placed:
            block.is_placed = True
            self._fasten(name, block)
        elif not block.is_placed:
            self._loosen(name, key[0])

    def _loosen(self, name: Name, tokens: bytes) -> None:
        self._blocks[name].loose.add(tokens)
        self._loose.setdefault(tokens, set()).add(name)

    def _fasten(self, name: Name, block: _Block) -> None:
        for tokens in block.loose:
            _drop(self._loose, tokens, name)
        block.loose.clear()

    def _release(self, name: Name) -> None:
        """Forget ``name`` if no group has it and no name comes after it, and then those before it."""
        waiting = [name]
        while waiting:
            name = waiting.pop()
            block = self._blocks.get(name)
            if block is None or block.num_held or block.num_after:
                continue
            del self._blocks[name]
            self._fasten(name, block)
            for before, key in block.edges:
                _drop(self._after, (before, key), name)
                if before is not None:
                    self._blocks[before].num_after -= 1
                    waiting.append(before)

    # -- look-up -----------------------------------------------------------------------------------------------------

    def look_up(self, tokens: Ids, salt: str | None, adapter: str | None, media: Mapping[int, str]) -> NextHit:
        """Return the engine's next hit for a prompt, int32 ``[n]``; ``media``: offset -> identifier. O(n)."""
        groups = [group for group in self._groups.values() if group.size]
        if len(tokens) < 2 or not groups:
            return NextHit(0, 0, at_most=False)
        prompt = _Prompt(self, tokens, salt, adapter, media)
        resumable, cached = surely, _ = prompt.hit(groups, _MAYBE)
        if self._loose or prompt.doubtful or not all(group.law for group in groups):
            surely, _ = prompt.hit(groups, _YES)
        is_untold = len(groups) <= max(self._groups)  # a group with a smaller number has told nothing yet
        return NextHit(max(cached, resumable), resumable, at_most=surely < resumable or (is_untold and resumable > 0))


class _Prompt:
    """A prompt that is looked up. ``names``: position -> the names of the text up to it; ``doubtful``: where they are several,
    because what tells them apart is not in the events, and all positions after."""

    def __init__(
        self, index: VllmIndex, tokens: Ids, salt: str | None, adapter: str | None, media: Mapping[int, str]
    ) -> None:
        self._index, self._text, self._limit = index, tokens.tobytes(), len(tokens) - 1
        self._salt, self._adapter, self._media = salt, adapter, media
        self.names: dict[int, list[Name | None]] = {0: [None]}
        self.doubtful = set[int]()
        steps = index._steps
        for at in range(0, self._limit, gcd(*(size for size, _ in steps)) if steps else self._limit):
            for size, ahead in steps:
                if at in self.names and at + size <= self._limit:
                    self._follow(at, size, ahead)

    def _follow(self, at: int, size: int, ahead: int) -> None:
        for key in self._keys_at(at, size, ahead):
            for before in self.names[at]:
                for name in self._index._after.get((before, key), ()):
                    names = self.names.setdefault(at + size, [])
                    if name not in names:
                        names.append(name)
                    if len(names) > 1 or at in self.doubtful:
                        self.doubtful.add(at + size)

    def _keys_at(self, at: int, size: int, ahead: int) -> Iterable[_Key]:
        """Return the keys that the block of ``size`` tokens at ``at`` may have: a medium that begins before it may end there
        or not."""
        text, end = self._text[4 * at : 4 * (at + size + ahead)], at + size + ahead
        first = () if self._adapter is None else (self._adapter,)
        last = (self._salt,) if at == 0 and self._salt else ()
        begun = [place for place in self._media if place < at]
        inside = tuple((self._media[place], place - at) for place in sorted(self._media) if at <= place < end)
        yield text, (*first, *inside, *last)
        if begun:
            place = max(begun)
            yield text, (*first, (self._media[place], place - at), *inside, *last)

    def hit(self, groups: list[_Group], least: int) -> tuple[int, int]:
        """Return the longest hit of which each group has what it needs, and the tokens that are cached in the groups that
        keep all. ``least``: from which mark on a block counts."""
        grid, is_fine = lcm(*(group.size for group in groups)), False
        part = min((group.least for group in groups if group.law == _STATE and group.least < group.size), default=0)
        if part and all(group.size == part for group in groups if group.law not in (_FULL, _STATE)):
            grid, is_fine = part, True  # `--prefix-match-unit`: hits end at multiples of a part of a block
        top, has_full = self._limit, False
        for group in groups:
            if group.law == _FULL:
                top, has_full = min(top, self._run(group, least, grid if is_fine else group.size)), True
        cached = top if has_full else max(self.names)
        ends = np.arange(grid, top + 1, grid)
        is_good = np.ones(len(ends), np.bool_)
        for group in groups:
            if group.law == _STATE:
                is_good &= self._marks(group, top, grid) >= least
            elif group.law == _WINDOW:
                need = max(1, -(-(group.window - 1) // group.size))
                is_good &= self._since_gap(group, top, least)[ends // group.size] >= np.minimum(
                    need, ends // group.size
                )
            elif group.law != _FULL and least == _YES:
                is_good &= self._since_gap(group, top, least)[ends // group.size] >= ends // group.size
        found = ends[is_good]
        return (int(found[-1]) if len(found) else 0), cached

    def _run(self, group: _Group, least: int, grid: int) -> int:
        """Return the leading tokens whose blocks ``group`` has; with a finer ``grid`` also a part of the block after them."""
        has = self._marks(group, self._limit, group.size) >= least
        end = group.size * (len(has) if has.all() else int(has.argmin()))
        for part in range(min(end + group.size - grid, self._limit // grid * grid), end, -grid):
            if self._mark(group, part) >= least:
                return part
        return end

    def _since_gap(self, group: _Group, top: int, least: int) -> npt.NDArray[np.int64]:
        """Return for each number of blocks how many before it ``group`` has without a gap."""
        has = np.concatenate(([False], self._marks(group, top, group.size) >= least))
        numbers = np.arange(len(has))
        gaps: npt.NDArray[np.int64] = np.maximum.accumulate(np.where(has, 0, numbers))
        return numbers - gaps

    def _marks(self, group: _Group, top: int, grid: int) -> _Marks:
        """Return uint8 ``[top // grid]``: whether ``group`` has the block that ends at each multiple of ``grid``."""
        marks = (self._mark(group, end) for end in range(grid, top + 1, grid))
        return np.fromiter(marks, np.uint8, top // grid)

    def _mark(self, group: _Group, end: int) -> int:
        names = self.names.get(end)
        if names is not None:
            is_held = any(name in group.held for name in names)
            return (_MAYBE if end in self.doubtful else _YES) if is_held else _NO
        loose = self._index._loose
        if loose:
            for size in {group.least, group.size}:
                for name in loose.get(self._text[4 * max(0, end - size) : 4 * end], ()):
                    if name in group.held:
                        return _MAYBE
        return _NO


def _drop(table: Any, key: Any, name: Name) -> None:
    """Take ``name`` out of ``table[key]``, and an empty collection out of ``table``."""
    if key in table and name in table[key]:
        table[key].remove(name)
        if not table[key]:
            del table[key]
