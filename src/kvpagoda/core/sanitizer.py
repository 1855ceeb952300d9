"""Where every row comes from, kept beside the memory: ``KVCache(sanitize=True)``.

    batch            every row and state that the step reads has the provenance that its request expects, or CheckFailed;
                     what the step is to write is nobody's, and has the bytes of free memory
    commit, settle   rows of committed tokens get a provenance: namespace, epoch, position, and the text up to there;
                     those that still have the bytes of free memory do not, as nobody wrote them
    copy, move ..    provenance goes along with the bytes; what is freed or handed to another group loses it

A row depends on all tokens up to its own, so the provenance has a hash of them: a block of another text, an older weight
epoch, a shifted window or a state of another length is found before a kernel reads it. It is a record of 20 bytes for
each row, in host memory. Of the device new rows are read once and compared there (a byte for each comes to the host), and
bytes which go below it are hashed, so that a load of the wrong record is found too. Each step costs O(tokens of its requests).

With a worker the scheduler's copies have two more kinds, so that the worker keeps the same provenance beside its memory:

    wrote    codes of 31 bits, for the words of rows that the step before was to write
    reads    a digest of all words of each block that the step reads, which must be that of the worker's own
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.arrays import Ids
from kvpagoda.core.blocks.group import BlockGroup
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import RequestState, State, TextPart
from kvpagoda.core.cache.settling import Settler
from kvpagoda.core.groups.base import NO_IDS
from kvpagoda.core.groups.state import StateGroup
from kvpagoda.core.memory.copies import Copy, word_columns
from kvpagoda.core.memory.no_memory import NoMemory, Part
from kvpagoda.core.memory.remote_memory import RemoteMemory
from kvpagoda.errors import CheckFailed, shown
from kvpagoda.pages import Bytes
from kvpagoda.schema import Plan
from kvpagoda.units import ceil_div

Words = npt.NDArray[Any]
"""Structured arrays of ``WORD``."""
WORD = np.dtype([("text", np.uint64), ("position", np.int32), ("epoch", np.int32), ("namespace", np.int32)])
FREE, UNKNOWN, UNWRITTEN = -1, -2, -3
"""Positions of rows that belong to nobody, of rows that were loaded and whose provenance is not known, and of rows that were
committed and that nobody wrote."""
_NOBODYS = np.array((0, FREE, 0, 0), WORD)
_MIX, _ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_MOST_RECORDS = 1 << 20
"""Records below the device whose provenance is remembered."""


class Sanitizer:
    """The provenance of all rows of a cache with ``plan``. ``memory``: what the cache uses instead of ``own``, its memory."""

    def __init__(self, plan: Plan, own: NoMemory) -> None:
        self._words = [np.full((group.num_rows, n), _NOBODYS) for group, n in zip(plan.groups, word_columns(plan))]
        self.memory = Watched(own, plan, self._words, self._follow_all)
        self._namespaces: dict[bytes, int] = {}
        self._epochs: dict[bytes, int] = {}  # by name: equal names mean equal weights
        self._core: Core | None = None
        #: request -> the provenance of its first tokens, as far as their rows are known to be written
        self._written: dict[RequestState, Words] = {}
        self._reached: dict[RequestState, int] = {}  # the tokens for which there were steps, since it was rewound

    def attach(self, core: Core) -> None:
        """Watch the requests of ``core``, whose memory is ``memory``."""
        self._core = core
        core.sanitizer = self
        self.memory.is_swap, levels = core.swap.is_table, core.tiers.levels
        self.memory.is_tier = lambda table: any(np.may_share_memory(table, one.buffer.payloads) for one in levels)

    def _follow_all(self) -> None:
        """Note what running requests committed since the last call."""
        if self._core is not None:
            self.follow([*self._core.running.values()])

    def follow(self, requests: Iterable[RequestState]) -> None:
        """Note what ``requests`` committed: their rows, and their states after the last tokens."""
        core = self._core
        assert core is not None
        if len(self._written) > 2 * len(core.running) + len(core.suspended):
            for closed in [one for one in self._written if one.state is State.CLOSED]:
                del self._written[closed]
                self._reached.pop(closed, None)
        for request in requests:
            if request.slot < 0:
                continue
            words = self._expected(request)
            before = self._written.get(request)
            begin, length = request.match.resumable, len(words)
            if before is not None:
                both = min(len(before), length)
                differs = (before[:both] != words[:both]).nonzero()[0]
                begin = int(differs[0]) if len(differs) else both
                if begin < len(before):
                    self._reached[request] = begin
            self._written[request] = words
            for group in core.groups if begin < length else ():
                if group.growth.is_state:
                    self._follow_states(request, group, words, begin)
                else:
                    self._rows(group, request, begin, words[begin:])

    def _rows(self, group: BlockGroup, request: RequestState, begin: int, words: Words) -> None:
        """Give the rows of tokens ``begin ..`` that ``request`` has in ``group`` their ``words``."""
        begin, words = self._held(group, request, begin, words)
        size = group.block_size
        columns = slice(begin // size, ceil_div(begin + len(words), size))
        self.memory.wrote(group.index, group.table.cells[request.slot, columns], begin % size, words)

    @staticmethod
    def _held(group: BlockGroup, request: RequestState, begin: int, words: Words) -> tuple[int, Words]:
        """Return ``begin`` and ``words`` without the tokens before those that ``group`` still holds."""
        first = group.first[request.slot] * group.block_size
        return (begin, words) if begin >= first else (first, words[first - begin :])

    def _follow_states(self, request: RequestState, group: BlockGroup, words: Words, begin: int) -> None:
        core, states, length = self._core, self._words[group.index], len(words)
        assert core is not None
        if not group.places:  # copies in checkpoints, which requests do not hold
            return
        written = self._reached.get(request, 0) if group.places > 1 else length  # a place has the state that came last
        lengths = np.arange(max(begin, max(length, written) - group.places) + 1, length + 1)
        cells = group.table.cells[request.slot, lengths % group.places]
        if (num_states := states.shape[1]) > 1:  # one place, whose state holds what its last tokens added apart
            lengths = np.arange(length, max(request.match.resumable, length - num_states + 1) - 1, -1)
        self.memory.wrote(group.index, cells, 0, _padded(_states(words, lengths), num_states))
        assert isinstance(group, StateGroup)
        for depth in group.wrote.get(request, ()):
            if depth * core.block_size > begin:
                place = group.places_of(group.named[request][depth])
                own = _states(words, np.array([depth * core.block_size]))
                self.memory.wrote(group.index, place, 0, _padded(own, num_states))

    def _expected(self, request: RequestState) -> Words:
        """Return the provenance of the committed tokens of ``request``. O(tokens)."""
        if request.rows is not None:
            request.rows.flush(request)
        length, core = request.own_length, self._core
        assert core is not None
        words = np.zeros(length, WORD)
        positions = np.arange(length)
        with np.errstate(over="ignore"):
            mixed = request.raw_tokens(0, length).astype(np.uint64)
            for index, media_id in request.media_ids.items():  # by digest: ids may begin anew
                if index < length:
                    digest = blake2b(core.media.digest(media_id), digest_size=8).digest()
                    mixed[index] = int.from_bytes(digest, "little")
            mixed *= _MIX
            mixed ^= positions.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
            mixed ^= mixed >> np.uint64(29)
            words["text"] = np.cumsum(mixed * _ODD, dtype=np.uint64)
        words["position"] = positions
        words["namespace"] = self._namespaces.setdefault(request.namespace, len(self._namespaces))
        firsts = np.array([first for first, _ in request.epochs])
        names = [core.namespaces.name_of(epoch) for _, epoch in request.epochs]
        epochs = np.array([self._epochs.setdefault(name, len(self._epochs)) for name in names])
        words["epoch"] = epochs[np.searchsorted(firsts, positions, side="right") - 1]
        return words

    def check(self, requests: Many[RequestState], before: Many[int], counts: Many[int]) -> None:
        """Raise CheckFailed unless a step of ``counts[i]`` tokens of ``requests[i]`` after their first ``before[i]`` would
        read the rows and states of these tokens. What it is to write is nobody's then. O(tokens)."""
        core = self._core
        assert core is not None
        self.follow(requests)
        read: list[list[Ids]] = [[] for _ in core.groups]
        for request, length, count in zip(requests, before, counts):
            words = self._written[request]
            if length != len(words):  # a draft's step, which reads rows of its own group alone
                continue
            for group, blocks in zip(core.groups, read):
                if group.growth.is_state and group.places:  # not the copies in checkpoints
                    blocks.append(self._check_state(request, group, words, count))
                elif not (group.growth.is_state or group.growth.is_optional):
                    blocks.append(self._check_rows(request, group, words, count))
            self._reached[request] = max(self._reached.get(request, 0), length + count)
        for group, blocks in zip(core.groups, read):
            self.memory.reads(group.index, np.unique(np.concatenate((NO_IDS, *blocks))))  # a shared one once

    def _check_rows(self, request: RequestState, group: BlockGroup, words: Words, count: int) -> Ids:
        """Return the blocks of ``group`` that a step of ``request`` reads. Raises CheckFailed."""
        first, length = int(group.growth.first_needed(len(words))), len(words)
        begin, words = self._held(group, request, first, words[first:])
        positions = np.arange(begin, length + count)
        cells: Ids = group.table.cells[request.slot, positions // group.block_size]
        found = self._words[group.index][cells, positions % group.block_size]
        if (found["position"][len(words) :] > FREE).any():  # rewound, or copied with the block
            self._rows(group, request, length, np.full(count, _NOBODYS))
        found = found[: len(words)]
        unknown = (found["position"] == UNKNOWN).nonzero()[0]
        self._words[group.index][cells[unknown], positions[unknown] % group.block_size] = words[unknown]
        found[unknown] = words[unknown]
        wrong = (found != words).nonzero()[0]
        if begin > first and len(words):
            raise self._failed(request, group, f"row of position {first}", self._written[request][first], None)
        if len(wrong):
            at, wrong_ones = wrong[0], shown(positions[wrong].tolist())
            what = f"row of position {begin + at} in block {cells[at]} (wrong are {wrong_ones})"
            raise self._failed(request, group, what, words[at], found[at])
        return cells[: len(words)]

    def _check_state(self, request: RequestState, group: BlockGroup, words: Words, count: int) -> Ids:
        """Return the block of ``group`` with the state that a step of ``request`` reads. Raises CheckFailed."""
        length, table = len(words), self._words[group.index]
        cells: Ids = group.table.cells[request.slot, [length % group.places]]
        found, expected = table[cells[0]], _state(words)
        if not (found == expected).any():
            unknown = (found["position"] == UNKNOWN).nonzero()[0]
            if not len(unknown):
                what = f"state after {length} tokens in block {cells[0]}"
                raise self._failed(request, group, what, expected, found[0])
            found[unknown[0]] = expected  # the others may be those of fewer tokens, to which it may be rewound
        end = length + count  # the places for new states, but that which is read: nobody's when they are first shown
        ends = np.arange(max(length, self._reached.get(request, 0), end - group.places) + 1, end + 1)
        new = group.table.cells[request.slot, ends[(ends - length) % group.places > 0] % group.places]
        if (table[new, 0]["position"] > FREE).any():
            self.memory.wrote(group.index, new, 0, np.full(len(new), _NOBODYS))
        return cells

    def apply(self, one: Copy) -> None:
        """Do in a worker what its scheduler's sanitizer noted. Raises CheckFailed."""
        if one.kind == "wrote":
            words = np.zeros(len(one.source), WORD)
            words["position"] = one.source - 1
            self.memory.wrote(one.group, one.target, one.rows, words)
            return
        own, name = self._words[one.group][one.target], self.memory.groups[one.group].name
        digests = _digests(own)
        for at in (digests != one.source).nonzero()[0]:
            rows = (own[at]["position"] == UNWRITTEN).nonzero()[0].tolist()
            why = f"nobody wrote rows {shown(rows)} of it" if rows else "a copy was not applied"
            text = f"block {one.target[at]} of {name} has not what the step would read of it: {why}"
            hint = "do not run this step; apply all copies in order, and write all rows before they are committed"
            raise CheckFailed.with_hint(text, hint, needed=int(one.source[at]), available=int(digests[at]), group=name)

    def _failed(self, request: RequestState, group: BlockGroup, what: str, expected: Any, found: Any) -> CheckFailed:
        names = {number: key for key, number in self._namespaces.items()}

        def told(word: Any) -> str:
            if word is None or word["position"] < 0:
                return "nobody's" if word is None or word["position"] == FREE else "nobody: no step wrote it"
            same = "" if names.get(int(word["namespace"])) == request.namespace else ", another namespace"
            return f"position {word['position']}, epoch {word['epoch']}, text {int(word['text']):016x}{same}"

        text = f"slot {request.slot}, {group.name}: {what} is of {told(found)}; expected {told(expected)}"
        return CheckFailed.with_hint(
            text, "do not run this step; report how the cache came here",
            needed=told(expected), available=told(found), group=group.plan.name,
        )  # fmt: skip


def _states(words: Words, lengths: npt.NDArray[Any]) -> Words:
    """Return the provenance of states after ``lengths`` tokens of a text with ``words``: that of the last token, at the
    position after it; of an empty text, zeros."""
    states: Words = words[lengths - 1].copy()
    states["position"] = lengths
    states[lengths == 0] = np.zeros(1, WORD)
    return states


def _padded(words: Words, width: int) -> Words:
    """Return ``words``, and words of nobody up to a multiple of ``width``."""
    return np.concatenate((words, np.full(-len(words) % width, _NOBODYS)))


def _codes(words: Words) -> Words:
    """Return a code of 31 bits for each word: 0 of nobody's, and of a word with nothing but a position the next number."""
    mixed = words["text"] ^ words["epoch"].astype(np.uint64) * _MIX ^ words["namespace"].astype(np.uint64) * _ODD
    mixed = (mixed * _MIX >> np.uint64(33)) + words["position"].astype(np.uint64) + np.uint64(1)
    mixed[words["position"] < 0] = 0
    codes: Words = (mixed & np.uint64(0x7FFFFFFF)).astype(np.int32)
    return codes


def _digests(words: Words) -> Words:
    """Return a digest of 31 bits of the codes of each block: ``words`` ``[n, width]``."""
    mixed = (_codes(words) + np.arange(1, words.shape[1] + 1) * (1 << 31)).astype(np.uint64) * _MIX
    digests: Words = (((mixed ^ mixed >> np.uint64(29)) * _ODD).sum(1) >> np.uint64(33)).astype(np.int32)
    return digests


def _state(words: Words) -> Any:
    """Return the provenance of the state after a text with ``words``."""
    return _states(words, np.array([len(words)]))[0] if len(words) else np.zeros(1, WORD)[0]


class FollowedSettler(Settler):
    """Has ``sanitizer`` follow what requests committed before that is published, slid out or copied."""

    def __init__(self, core: Core, sanitizer: Sanitizer) -> None:
        super().__init__(core)
        self._sanitizer = sanitizer

    def settle(self, *requests: RequestState) -> None:
        self._sanitizer.follow(requests)
        super().settle(*requests)

    def last_blocks(self, request: RequestState) -> TextPart | None:
        self._sanitizer.follow([request])
        return super().last_blocks(request)


class Watched:
    """The memory ``own``, with the provenance ``words`` of its rows, which goes where the bytes go. ``follow``: called before
    anything moves."""

    is_poisoning = True
    """So that it is told of all that is freed."""

    def __init__(self, own: NoMemory, plan: Plan, words: list[Words], follow: Callable[[], None]) -> None:
        self._own, self._words, self._follow, self.groups = own, words, follow, plan.groups
        self._remote = own if isinstance(own, RemoteMemory) else None
        self._nbytes = [group.layout.nbytes for group in plan.groups]
        self.is_swap: Callable[[Bytes], bool] = lambda _: False
        # not what is handed over: it is cut anew, so that equal bytes name nobody
        self.is_tier: Callable[[Bytes], bool] = self.is_swap
        self._swapped: dict[tuple[int, int], Words] = {}  # row of the swap, block in it -> provenance of a block
        self._records: dict[bytes, Words] = {}  # digest of a record below the device -> its provenance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def wrote(self, group: int, blocks: Ids, first: int, words: Words) -> None:
        """Give the rows from ``first`` of the first of ``blocks`` on, which a step was to write, their ``words``; if they are
        nobody's, because a step is to write them, the bytes of free memory."""
        width, growth = self._words[group].shape[1], self.groups[group].growth
        at = first + np.arange(len(words))
        ids, rows = blocks[at // width], at % width
        if self._own.has_memory and len(words) and not growth.is_optional:
            self._own.finish_copies(group)
            arena: Any = self._own.arenas[group]  # type: ignore[attr-defined]
            is_new, words = bool((words["position"] == FREE).all()), words.copy()
            still = arena.is_poisoned(ids, None if growth.is_state else rows, width, again=is_new)
            words["position"][still] = FREE if is_new else UNWRITTEN
        self._words[group][ids, rows] = words
        if self._remote is not None:
            self._remote.note("wrote", group, _codes(words), blocks, first)

    def reads(self, group: int, blocks: Ids) -> None:
        """Tell the worker, if there is one, what a step reads."""
        if self._remote is not None and len(blocks):
            self._remote.note("reads", group, _digests(self._words[group][blocks]), blocks)

    def copy(self, group: int, sources: Ids, targets: Ids, rows: int | None = None) -> None:
        self._follow()
        self._own.copy(group, sources, targets, rows)
        self._words[group][targets] = self._words[group][sources]

    def move(self, group: int, sources: Ids, targets: Ids) -> None:
        self._follow()
        self._own.move(group, sources, targets)
        self._words[group][targets] = self._words[group][sources]
        self._words[group]["position"][sources] = FREE  # another group gets their memory

    def convert(self, group: int, sources: Ids, other: int, targets: Ids) -> None:
        self._follow()
        self._own.convert(group, sources, other, targets)
        self._words[other][targets] = self._words[group][sources]

    def reset(self, group: int, ids: Ids) -> None:
        self._words[group][ids] = np.zeros(1, WORD)
        self._own.reset(group, ids)

    def freed(self, group: int, ids: Ids) -> None:
        self._words[group]["position"][ids] = FREE
        self._own.freed(group, ids)

    def to_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int], layer: int | None = None) -> None:
        self._follow()
        self._own.to_host(group, ids, table, rows, layer)
        words = self._words[group][ids].copy()
        if self.is_swap(table):
            for index, cell in enumerate(self._cells(group, len(ids), table, rows)):
                self._swapped[cell] = words[index]
        elif self.is_tier(table):
            self._own.wait_for_copies()
            for index, digest in enumerate(self._digests(group, len(ids), table, rows)):
                known = self._records.setdefault(digest, words[index])
                if (known != words[index]).any():  # two blocks with equal bytes
                    self._records[digest] = _unknown(words[index])
            while len(self._records) > _MOST_RECORDS:
                del self._records[next(iter(self._records))]

    def from_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        self._came(group, ids, table, rows)
        self._own.from_host(group, ids, table, rows)

    def from_host_later(self, group: int, parts: Many[Part], done: Callable[[], None]) -> None:
        for part in parts:
            self._came(group, *part)
        self._own.from_host_later(group, parts, done)

    def _came(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        """Give blocks ``ids`` the provenance of what lies in ``rows`` of ``table``, as far as that is known."""
        words = self._words[group]
        words[ids] = _unknown(words[ids])
        if self.is_swap(table):
            known = [self._swapped.get(cell) for cell in self._cells(group, len(ids), table, rows)]
        elif self.is_tier(table):
            known = [self._records.get(digest) for digest in self._digests(group, len(ids), table, rows)]
        else:
            return
        for block, one in zip(ids, known):
            if one is not None and one.shape == words[block].shape:
                words[block] = one

    def run_of(self, group: int, ids: Ids) -> Bytes | None:
        """None: what is written past this class would have no provenance."""
        return None

    def forget_copies(self) -> None:
        self._swapped.clear()
        self._own.forget_copies()

    def get_again(self) -> None:
        self._own.get_again()
        for words in self._words if self._own.has_memory else ():  # a worker's is not given back
            words["position"] = UNKNOWN

    def _cells(self, group: int, count: int, table: Bytes, rows: Many[int]) -> list[tuple[int, int]]:
        """Return where each of ``count`` blocks of ``group`` begins in ``rows`` of ``table``: the row, and which of its
        blocks it is."""
        nbytes, width = self._nbytes[group], table.shape[1]
        if nbytes > width:
            each = ceil_div(nbytes, width)
            return [(rows[index * each], 0) for index in range(count)]
        each = width // nbytes
        return [(rows[index // each], index % each) for index in range(count)]

    def _digests(self, group: int, count: int, table: Bytes, rows: Many[int]) -> list[bytes]:
        """Return a digest of the bytes of each of ``count`` blocks of ``group`` in ``rows`` of ``table``."""
        nbytes, width = self._nbytes[group], table.shape[1]
        each = ceil_div(nbytes, width)
        found = []
        for index, (row, at) in enumerate(self._cells(group, count, table, rows)):
            of = table[row, at * nbytes : (at + 1) * nbytes]
            if each > 1:
                of = table[list(rows[index * each : (index + 1) * each])].reshape(-1)[:nbytes]
            found.append(blake2b(of.tobytes(), digest_size=16, salt=group.to_bytes(2, "little")).digest())
        return found


def _unknown(words: Words) -> Words:
    """Return ``words`` as of rows that were loaded; what nobody wrote stays so, as it has the same bytes everywhere."""
    words = words.copy()
    words["position"][words["position"] != UNWRITTEN] = UNKNOWN
    return words
