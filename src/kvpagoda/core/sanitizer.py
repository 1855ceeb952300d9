"""Where every row comes from, kept beside the memory: ``KVCache(sanitize=True)``.

    commit, settle   rows of committed tokens get a provenance: namespace, epoch, position, and the text up to there
    copy, move ..    provenance goes along with the bytes; what is freed or handed to another group loses it
    batch            every row and state that the step reads has the provenance that its request expects, or CheckFailed

A row depends on all tokens up to its own, so the provenance has a hash of them: a block of another text, an older weight
epoch, a shifted window or a state of another length is found before a kernel reads it. It is a record of 20 bytes for
each row, in host memory; nothing is read from the device, except that bytes which go below it are hashed, so that a load
of the wrong record is found too. Each step costs O(tokens of its requests).
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
from kvpagoda.core.groups.state import StateGroup
from kvpagoda.core.memory.no_memory import NoMemory, Part
from kvpagoda.errors import CheckFailed
from kvpagoda.pages import Bytes
from kvpagoda.schema import Plan
from kvpagoda.units import ceil_div

Words = npt.NDArray[Any]
"""Structured arrays of ``WORD``."""
WORD = np.dtype([("text", np.uint64), ("position", np.int32), ("epoch", np.int32), ("namespace", np.int32)])
FREE, UNKNOWN = -1, -2
"""Positions of rows that belong to nobody, and of rows that were loaded and whose provenance is not known."""
_MOST_RECORDS = 1 << 20
"""Records below the device whose provenance is remembered."""


class Sanitizer:
    """The provenance of all rows of a cache with ``plan``. ``memory``: what the cache uses instead of ``own``, its memory."""

    def __init__(self, plan: Plan, own: NoMemory) -> None:
        # a state in one place is taken back by so many
        ahead = min((tokens for _, _, tokens in plan.rewinds), default=0)
        num_states = 1 if any(group.places > 1 for group in plan.groups) else 1 + ahead
        self._words = [
            np.zeros((group.num_rows, num_states if group.growth.is_state else plan.block_size), WORD)
            for group in plan.groups
        ]
        for words in self._words:
            words["position"] = FREE
        self.memory = Watched(own, plan, self._words, self._follow_all)
        self._namespaces: dict[bytes, int] = {}
        self._epochs: dict[bytes, int] = {}  # by name: equal names mean equal weights
        self._core: Core | None = None
        #: request -> the provenance of its first tokens, as far as their rows are known to be written
        self._written: dict[RequestState, Words] = {}

    def attach(self, core: Core) -> None:
        """Watch the requests of ``core``, whose memory is ``memory``."""
        self._core = core
        core.sanitizer = self
        self.memory.is_swap = core.swap.is_table

    def _follow_all(self) -> None:
        """Note what running requests committed since the last call."""
        if self._core is not None:
            self.follow([*self._core.running.values()])

    def follow(self, requests: Iterable[RequestState]) -> None:
        """Note what ``requests`` committed: their rows, and their states after the last tokens."""
        core = self._core
        assert core is not None
        if len(self._written) > 2 * len(core.running) + len(core.suspended):
            self._written = {
                request: words for request, words in self._written.items() if request.state is not State.CLOSED
            }
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
            self._written[request] = words
            if begin >= length:
                continue
            for group in core.groups:
                if group.growth.is_state:
                    self._follow_states(request, group, words, begin)
                else:
                    self._rows(group, request, begin, length, words[begin:])

    def _rows(self, group: BlockGroup, request: RequestState, begin: int, end: int, words: Words) -> None:
        """Give the rows of tokens ``begin .. end - 1`` that ``request`` has in ``group`` their ``words``."""
        begin, words = self._held(group, request, begin, words)
        positions = np.arange(begin, begin + len(words))
        cells = group.table.cells[request.slot, positions // group.block_size]
        self._words[group.index][cells, positions % group.block_size] = words

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
        lengths = np.arange(max(begin, length - group.places) + 1, length + 1)
        cells = group.table.cells[request.slot, lengths % group.places]
        states["position"][cells] = FREE
        states[cells, 0] = _states(words, lengths)
        if (num_states := states.shape[1]) > 1:  # one place, whose state holds what its last tokens added apart
            lengths = np.arange(length, max(request.match.resumable, length - num_states + 1) - 1, -1)
            states[cells, : len(lengths)] = _states(words, lengths)
        assert isinstance(group, StateGroup)
        for depth in group.wrote.get(request, ()):
            if depth * core.block_size > begin:
                place = group.places_of(group.named[request][depth])
                states["position"][place] = FREE
                states[place, 0] = _states(words, np.array([depth * core.block_size]))

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
                    mixed[index] = int.from_bytes(
                        blake2b(core.media.digest(media_id), digest_size=8).digest(), "little"
                    )
            mixed *= np.uint64(0x9E3779B97F4A7C15)
            mixed ^= positions.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
            mixed ^= mixed >> np.uint64(29)
            words["text"] = np.cumsum(mixed * np.uint64(0xBF58476D1CE4E5B9), dtype=np.uint64)
        words["position"] = positions
        words["namespace"] = self._namespaces.setdefault(request.namespace, len(self._namespaces))
        firsts = np.array([first for first, _ in request.epochs])
        names = [core.namespaces.name_of(epoch) for _, epoch in request.epochs]
        epochs = np.array([self._epochs.setdefault(name, len(self._epochs)) for name in names])
        words["epoch"] = epochs[np.searchsorted(firsts, positions, side="right") - 1]
        return words

    def check(self, requests: Many[RequestState], before: Many[int]) -> None:
        """Raise CheckFailed unless a step of ``requests`` after their first ``before[i]`` tokens would read the rows and
        states of these tokens. O(tokens)."""
        core = self._core
        assert core is not None
        self.follow(requests)
        for request, length in zip(requests, before):
            words = self._written[request]
            if length != len(words):  # a draft's step, which reads rows of its own group alone
                continue
            for group in core.groups:
                if group.growth.is_state:
                    self._check_state(request, group, words)
                elif not group.growth.is_optional:
                    self._check_rows(request, group, words)

    def _check_rows(self, request: RequestState, group: BlockGroup, words: Words) -> None:
        first = int(group.growth.first_needed(len(words)))
        begin, words = self._held(group, request, first, words[first:])
        positions = np.arange(begin, begin + len(words))
        cells = group.table.cells[request.slot, positions // group.block_size]
        found = self._words[group.index][cells, positions % group.block_size]
        unknown = found["position"] == UNKNOWN
        if unknown.any():
            self._words[group.index][cells[unknown], positions[unknown] % group.block_size] = words[unknown]
        wrong = ((found != words) & ~unknown).nonzero()[0]
        if begin > first and len(words):
            raise self._failed(request, group, f"row of position {first}", self._written[request][first], None)
        if len(wrong):
            at = wrong[0]
            raise self._failed(
                request, group, f"row of position {begin + at} in block {cells[at]}", words[at], found[at]
            )

    def _check_state(self, request: RequestState, group: BlockGroup, words: Words) -> None:
        if not group.places:
            return
        place = int(group.table.cells[request.slot, len(words) % group.places])
        found, expected = self._words[group.index][place], _state(words)
        if (found["position"] == UNKNOWN).all():
            found[0] = expected
        elif not (found == expected).any():
            raise self._failed(request, group, f"state after {len(words)} tokens in block {place}", expected, found[0])

    def _failed(self, request: RequestState, group: BlockGroup, what: str, expected: Any, found: Any) -> CheckFailed:
        names = {number: key for key, number in self._namespaces.items()}

        def told(word: Any) -> str:
            if word is None or word["position"] == FREE:
                return "nobody's"
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
        self._own, self._words, self._follow = own, words, follow
        self._nbytes = [group.layout.nbytes for group in plan.groups]
        self.is_swap: Callable[[Bytes], bool] = lambda _: False
        self._swapped: dict[tuple[int, int], Words] = {}  # row of the swap, block in it -> provenance of a block
        self._records: dict[bytes, Words] = {}  # digest of a record below the device -> its provenance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def copy(self, group: int, sources: Ids, targets: Ids, rows: int | None = None) -> None:
        self._moved(group, sources, group, targets)
        self._own.copy(group, sources, targets, rows)

    def move(self, group: int, sources: Ids, targets: Ids) -> None:
        self._moved(group, sources, group, targets)
        self._words[group]["position"][sources] = FREE  # another group gets their memory
        self._own.move(group, sources, targets)

    def convert(self, group: int, sources: Ids, other: int, targets: Ids) -> None:
        self._moved(group, sources, other, targets)
        self._own.convert(group, sources, other, targets)

    def _moved(self, group: int, sources: Ids, other: int, targets: Ids) -> None:
        self._follow()
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
        elif self._own.has_memory:
            if layer is not None:  # the last such copy finds the whole record, before its tokens are committed
                words, rows = _unknown(words), range(len(ids))
                table = np.zeros((len(ids), self._nbytes[group]), np.uint8)
                self._own.to_host(group, ids, table, rows)
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
        elif self._own.has_memory:
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
        for words in self._words:
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
    """Return ``words`` as of rows that were loaded."""
    words = words.copy()
    words["position"] = UNKNOWN
    return words
