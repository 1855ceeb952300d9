"""A manager without a prefix tree: blocks in one queue and found by key, as vLLM's is, without memory.

It is no second manager of this library: it allocates nothing and knows no tokens. A profile sets what it does. All groups
of layers take their blocks from one pool; a block belongs to one group while it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpagoda.replay.engines.block_queue import NO_BLOCK, BlockPool, Blocks
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.profiles import Profile
from kvpagoda.replay.trace import Ints
from kvpagoda.units import ceil_div

FULL = (Group(),)
_ALL = 1 << 62


@dataclass
class QueuedRequest:
    """A request that was looked up, and then runs. ``keys``: those of its whole blocks; ``units``: those of its whole units
    of tokens, of which a block has one or several. ``blocks`` int32 ``[groups, n]``: those of each group, ``NO_BLOCK`` where
    it needs none. ``length``: the tokens that are found or computed. ``junction``: up to where some group had more cached
    than all, in tokens; else 0. ``slid``: for each group how many leading blocks are freed; ``shared``: how many of all
    were looked at for others to find. ``is_copied``: before the next chunk its last blocks are copied: those that it found,
    of which it needs a part only, or its state, which others find."""

    keys: Ints
    units: Ints
    blocks: Blocks
    length: int
    junction: int
    slid: list[int]
    shared: int
    is_copied: bool = False


class QueuedManager:
    """Serves requests of ``chains`` with ``num_blocks`` blocks for all ``groups``. See ``driver.Manager``.

    ``retention``: see ``Group.kept``. ``step_tokens``: the most tokens of a request that a step computes; None: all.
    ``match_unit``: with states beside full attention, a prompt's last whole unit of so many tokens can be found too, within a
    block (None: whole blocks alone). Who finds a part of a block copies it, and so does who computes on from a state that
    others find; both blocks are held until the next step."""

    def __init__(
        self,
        chains: Chains,
        num_blocks: int,
        profile: Profile,
        groups: Sequence[Group] = FULL,
        retention: int | None = 0,
        step_tokens: int | None = None,
        match_unit: int | None = None,
    ) -> None:
        self.chains, self.profile, self.groups, self.retention = chains, profile, tuple(groups), retention
        self.size, self.step = chains.block_size, step_tokens or _ALL
        self.unit = match_unit or self.size
        self._units = chains if self.unit == self.size else Chains(chains.trace, self.unit)
        self.pool = BlockPool(num_blocks, self._units.num_keys * len(self.groups))
        self._copied: list[list[int]] = [
            [] for _ in self.groups
        ]  # blocks that are held until the copies of a step are made
        kinds = sorted({*self.groups}, key=lambda group: (group.kind != "full", self.groups.index(group)))
        self._kinds = [(kind, [i for i, group in enumerate(self.groups) if group == kind]) for kind in kinds]
        longest = int(chains.totals.max(initial=0)) + 1
        self._most = [group.most(self.size, self.step, longest) for group in self.groups]
        self._running: dict[int, QueuedRequest] = {}
        self._asked: dict[int, QueuedRequest] = {}  # the last one that was looked up
        self._fresh: set[int] = set()  # keys of states that are computed in this step
        self.finds_all = not profile.recomputes
        self._spare = int(profile.watermark * (num_blocks + 1))  # vLLM counts its block of zeros too

    def step_starts(self) -> None:
        """See ``driver.Manager``. A state can be resumed from the step after the one that computes it."""
        self._fresh.clear()
        self.pool.give_back([block for blocks in self._copied for block in blocks])
        self._copied = [[] for _ in self.groups]

    def find(self, request: int, known: int) -> int:
        """See ``driver.Manager``. Up to the last place at which all groups can be resumed. O(groups · units)."""
        units, most = self._units.keys(request), max(0, known - self.profile.recomputes)
        keys = units[self.size // self.unit - 1 :: self.size // self.unit]
        if self.unit < self.size:
            self._asked = {request: self._find_part(keys, units, most)}
            return self._asked[request].length
        asked = [self.pool.find(self._keys(keys[: most // self.size], i)) for i in range(len(self.groups))]
        cached = {kind: np.all([asked[i] != NO_BLOCK for i in members], axis=0) for kind, members in self._kinds}
        spans: dict[Group, tuple[int, int]] = {}
        hit, longest, before = most, 0, -1
        is_once = len(self.groups) == 1 or (len(self._kinds) == 2 and self._kinds[0][0].kind == "full")
        while hit != before and not (is_once and spans):
            before = hit
            for kind, _ in self._kinds:
                if kind.kind != "full" or kind not in spans:  # of full attention the beginning is there too: it is cut
                    spans[kind] = kind.find(cached[kind], hit, self.size)
                    longest = max(longest, spans[kind][1] * self.size)
                hit = min(hit, spans[kind][1] * self.size)
        found = np.zeros((len(self.groups), hit // self.size), np.int32)
        for row, blocks, kind in zip(found, asked, self.groups):
            needed = slice(max(spans[kind][0], kind.skipped(hit) // self.size), len(row))
            row[needed] = blocks[needed]
        junction = longest if longest > hit and len(self.groups) > 1 else 0
        slid = [group.skipped(hit) // self.size for group in self.groups]
        self._asked = {request: QueuedRequest(keys, units, found, hit, junction, slid, hit // self.size)}
        return hit

    def _find_part(self, keys: Ints, units: Ints, most: int) -> QueuedRequest:
        """Return the request of these keys: of full attention the longest run of whole blocks is found, and a part of the
        block after it; of states the last one within that."""
        per, asked = self.size // self.unit, []
        is_there = dict.fromkeys(("full", "state"), np.ones(most // self.unit, np.bool_))
        for i, group in enumerate(self.groups):
            asked.append(self.pool.find(self._keys(units[: most // self.unit], i)))
            is_there[group.kind] = is_there[group.kind] & (asked[-1] != NO_BLOCK)
        gaps = np.flatnonzero(~is_there["full"][per - 1 :: per])
        whole = int(gaps[0]) if len(gaps) else most // self.size
        parts = np.flatnonzero(is_there["full"][whole * per : whole * per + per - 1])
        longest = whole * per + (int(parts[-1]) + 1 if len(parts) else 0)
        states = np.flatnonzero(is_there["state"][:longest])
        count = int(states[-1]) + 1 if len(states) else 0
        hit = count * self.unit
        found = np.zeros((len(self.groups), ceil_div(hit, self.size)), np.int32)
        for row, blocks, group in zip(found, asked, self.groups):
            if group.kind == "full":
                row[:whole] = blocks[per - 1 :: per][: len(row)][:whole]
                row[whole:] = blocks[longest - 1 : longest]
            elif count:
                row[-1] = blocks[count - 1]
        slid = [group.skipped(hit) // self.size for group in self.groups]
        junction = longest * self.unit if longest > count else 0
        return QueuedRequest(keys, units, found, hit, junction, slid, hit // self.size, is_copied=hit % self.size > 0)

    def peek(self, request: int) -> int:
        """See ``driver.Manager``. O(groups · blocks)."""
        return self.find(request, int(self.chains.prompts[request]))  # it is looked up again before it starts

    @property
    def num_evicted(self) -> int:
        """See ``driver.Manager``."""
        return self.pool.num_evicted

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        """See ``driver.Manager``. With states, chunks of a prompt end at block boundaries, the last one before its last
        token, at the junction, and after its last whole unit."""
        prompt_end = max(int(self.chains.prompts[request]), known - 1)
        if begin >= prompt_end or all(group.kind != "state" for group in self.groups):
            return end
        size, junction = self.size, (self._asked | self._running)[request].junction
        aligned = end // size * size
        if end < prompt_end and (aligned > begin or size <= self.step):
            end = aligned
        last, tail = (known - 1) // size * size, (int(self.chains.prompts[request]) - 1) // self.unit * self.unit
        stops = [last, -(-begin // size) * size, junction // size * size if junction < end else 0]
        stops += [tail] * (self.unit < size and tail > last)
        return max(begin, min((stop for stop in stops if begin < stop < end), default=end))

    def start(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``."""
        new = self._asked.pop(request)
        spare = self.pool.queue.num_free - (self._spare if self._running else 0)
        most = self._needed(new, known, is_all=True) if self.profile.reserves == "prompt" else 0
        if self.profile.reserves == "total":
            most = self._needed(new, int(self.chains.totals[request]) + 1) + sum(map(self._due, self._running))
        if max(most, self._needed(new, end)) > spare:
            return False
        room = ceil_div(int(self.chains.totals[request]), self.size)
        for found in new.blocks:
            self.pool.hold(found)
        new.blocks = np.pad(new.blocks, ((0, 0), (0, room - new.blocks.shape[1])))
        self._extend(request, new, end)
        return True

    def _due(self, request: int) -> int:
        """Return how many more blocks a running request would hold with all of its output, the last token included."""
        total, held = int(self.chains.totals[request]) + 1, self._running[request].length
        return len(self.groups) * (ceil_div(total, self.size) - ceil_div(held, self.size))

    def _needed(self, new: QueuedRequest, end: int, is_all: bool = False) -> int:
        """Return how many free blocks ``new`` needs for its first ``end`` tokens. ``is_all``: a group counts no more than
        one request holds at most."""
        needed, hit, place = 0, ceil_div(new.length, self.size), new.length // self.unit
        for i, (group, found) in enumerate(zip(self.groups, new.blocks)):
            if group.kind == "state" and hit and int(self._keys(new.units, i)[place - 1]) in self._fresh:
                return _ALL
            count = min(ceil_div(end, self.size), self._most[i] if is_all else _ALL)
            needed += max(0, min(count - hit, 1 if group.kind == "state" else count)) + self.pool.num_idle(found)
            needed += new.is_copied
        return needed

    def grow(self, request: int, end: int, known: int) -> bool:
        """See ``driver.Manager``. What left its window is freed first, even if there is no room then."""
        state = self._running[request]
        held, more = ceil_div(state.length, self.size), ceil_div(end, self.size) - ceil_div(state.length, self.size)
        for i, (group, blocks) in enumerate(zip(self.groups, state.blocks)):
            first, stop = state.slid[i], min(group.skipped(state.length) // self.size, held)
            if stop > first:
                self.pool.release(blocks[first:stop][::-1])
                blocks[first:stop], state.slid[i] = NO_BLOCK, stop
        needed = [min(more, 1) + state.is_copied if group.kind == "state" else more for group in self.groups]
        if sum(needed) > self.pool.queue.num_free:
            return False
        self._extend(request, state, end)
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        """See ``driver.Manager``. The last block of a group is used again first."""
        state = self._running.pop(request)
        if self.profile.shares == "end" and is_complete:
            self._share(request, state)
        for blocks in state.blocks:
            self.pool.release(blocks[::-1])

    def _extend(self, request: int, state: QueuedRequest, end: int) -> None:
        """Give ``state`` the blocks of its first ``end`` tokens; whole ones can be found from now on."""
        held, count = ceil_div(state.length, self.size), ceil_div(end, self.size)
        is_new, is_copied, state.is_copied = request not in self._running, state.is_copied, False
        for i, (group, blocks) in enumerate(zip(self.groups, state.blocks)):
            if is_copied and (is_new or group.kind == "state"):
                self._copied[i] += self._copy(blocks, held - 1, is_new)
            first = max(held, count - 1) if group.kind == "state" else held
            if count > first:
                blocks[first:count] = self.pool.take(count - first)
        state.length, self._running[request] = end, state
        if self.profile.shares == "chunk":
            self._share(request, state)

    def _copy(self, blocks: Blocks, index: int, is_new: bool) -> tuple[int, int]:
        """Copy the block at ``index``; return both blocks, each held once more. A new request computes on in the copy of what
        it found; a running one in its own state, whose copy others find from the next step on."""
        source, copy = int(blocks[index]), int(self.pool.take(1)[0])
        if is_new:
            blocks[index] = copy  # the request holds the source no more, but the copy from it does
            self.pool.counts[copy] += 1
        else:
            self._fresh.add(self.pool.move(source, copy))
            self.pool.counts[source] += 1
        return source, copy

    def _share(self, request: int, state: QueuedRequest) -> None:
        """Let others find the whole blocks of the computed tokens that the groups keep for them, and the last whole unit of
        the prompt."""
        self._share_blocks(request, state)
        tail = (int(self.chains.prompts[request]) - 1) // self.unit
        place, is_whole = divmod(tail * self.unit, self.size)
        if self.unit == self.size or not is_whole or tail * self.unit > state.length:
            return
        for i, (group, blocks) in enumerate(zip(self.groups, state.blocks)):
            key = int(self._keys(state.units, i)[tail - 1])
            if group.kind == "full":
                self.pool.share_also(int(blocks[place]), key)
            elif tail * self.unit == state.length:
                self.pool.share_also(int(blocks[place]), key)
                self._fresh.add(key)
                state.is_copied = True

    def _share_blocks(self, request: int, state: QueuedRequest) -> None:
        """Let others find the whole blocks of the computed tokens that the groups keep for them."""
        new = slice(state.shared, state.length // self.size)
        if new.stop <= new.start:
            return
        places, state.shared = (int(self.chains.prompts[request]) - 1, state.junction), new.stop
        for i, (group, blocks) in enumerate(zip(self.groups, state.blocks)):
            kept = group.kept(new.start, new.stop, self.size, self.retention, places) & (blocks[new] != NO_BLOCK)
            keys = self._keys(state.keys[new], i)[kept]
            self.pool.share(blocks[new][kept], keys)
            if group.kind == "state":
                self._fresh.update(keys.tolist())

    def _keys(self, keys: Ints, group: int) -> Ints:
        """Return the keys of blocks in the group of that number."""
        return keys + group * self._units.num_keys
