"""One request as its cache knows it, and the arrays of a persistent batch, whose commits reach the request later.

``Breakpoints`` are the positions of a prompt at which its caller wants it to be resumable, and what became of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from weakref import ref

import numpy as np

from kvpagoda.arrays import NO_TOKEN, Ids, TokenIds, Tokens, as_tokens
from kvpagoda.core.cache.counters import Tally
from kvpagoda.core.cache.prefix_cache import PrefixMatch
from kvpagoda.core.groups.base import Added
from kvpagoda.core.prefix import Entry, Lease
from kvpagoda.errors import BadInput, StaleHandle, shown
from kvpagoda.namespace import with_media

# -- positions that a caller asks for --------------------------------------------------------------------------------


class Breakpoint(NamedTuple):
    """A position that ``open(checkpoints=..)`` asked for: ``seq.checkpoints``."""

    asked: int
    """In tokens, as it was given."""
    position: int
    """Where a text can be resumed for it: ``asked``, rounded down to a whole block and to the hit grid."""
    state: str
    """``due``: it will be kept, some time after the tokens before it are committed. ``kept``: a checkpoint was kept there.
    ``cached``: it was there before. Either may be evicted later, as all checkpoints. ``always``: nothing must be kept for
    it, since the model has full attention alone, or it is the beginning of the text. ``beyond``: it lies behind the end of the
    prompt. ``skipped``: the request started behind it, so that what must be kept there is not computed. ``passed``: a step
    went past it, see ``KVCache.step_limit``. ``memory``: there was no room, or a window block was evicted. ``private``: the
    request publishes nothing."""


class Breakpoints:
    """The positions ``asked`` of one request, in tokens. ``granted``: asked position -> where a text can be resumed for it.
    ``states``: granted position -> its state, see ``Breakpoint``."""

    def __init__(self, asked: tuple[int, ...]) -> None:
        self.asked = asked
        self.granted: dict[int, int] = {}
        self.states: dict[int, str] = {}

    def told(self, due: list[int], block_size: int) -> tuple[Breakpoint, ...]:
        """Return what became of each position. ``due``: after how many blocks checkpoints are still to be kept."""
        found: list[Breakpoint] = []
        for position in self.asked:
            at = self.granted.get(position, 0)
            state = self.states[at] if position in self.granted else "beyond"
            if state == "due" and at // block_size not in due:
                state = "beyond"  # the prompt was shortened
            found.append(Breakpoint(position, at, state))
        return tuple(found)


def breakpoints_of(positions: TokenIds, max_context: int) -> Breakpoints:
    """Return ``positions``, whole numbers from 0 to ``max_context``, as ``open`` was given them. Raises BadInput."""
    asked = positions_of(positions)
    most = max(asked, default=0)
    if most > max_context:
        text = f"a checkpoint after {most} tokens lies behind the longest context of {max_context}"
        raise BadInput(text, needed=most, available=max_context)
    return Breakpoints(asked)


def positions_of(checkpoints: TokenIds) -> tuple[int, ...]:
    """Return ``checkpoints``, positions in tokens as a caller gives them, as whole numbers. Raises BadInput."""
    try:
        asked: tuple[int, ...] = tuple(as_tokens(checkpoints).tolist())
    except BadInput:
        text = f"checkpoints are positions in tokens, whole numbers of at least 0, got {shown(checkpoints)}"
        raise BadInput(text, needed=checkpoints) from None
    return asked


@dataclass(slots=True, eq=False)
class OwnCheckpoints:
    """The part of a request that ``Checkpointer`` writes.

    ``due``: after how many blocks of its prompt a checkpoint is still to be kept, ascending. ``asked``: the positions that its
    caller asked for; None: none. ``tail``: the name of the checkpoint that moves along with its end; -1: none."""

    due: list[int] = field(default_factory=list)
    asked: Breakpoints | None = None
    tail: int = -1


@dataclass(slots=True, eq=False)
class OwnStates:
    """The part of a request about its states. ``oldest``: how many tokens the states that it began with belong to, or those
    with which it was suspended; it has none of fewer tokens. ``rounded_at``: after how many tokens they were rounded last, see
    ``Retention.rounds_states``; -1: never."""

    oldest: int = 0
    rounded_at: int = -1


@dataclass(slots=True, eq=False)
class OwnRecords:
    """The part of a request that tiers write. ``block_hashes``: hashes that name its blocks there: the root, then one for each
    block that was needed so far. ``opened_at``: when its prompt began to be computed (``perf_counter``); 0.0 if that is not
    being measured."""

    block_hashes: list[bytes] = field(default_factory=list)
    opened_at: float = 0.0


# -- requests and their rows -----------------------------------------------------------------------------------------

TextPart = tuple[Tokens, Tokens | None]
"""(keys, text) for ``PrefixCache.publish``: the tokens of whole blocks, and the array in which they lie, or None."""
_NO_MATCH = PrefixMatch(0, 0, "nothing")


class State(Enum):
    """Where a request is in its life."""

    NEW = "new"
    RUNNING = "running"
    CLOSING = "closing"
    """Closed while a fence is around it: it ends with the last fence."""
    SUSPENDED = "suspended"
    CLOSED = "closed"


class RequestState:
    """A text that is being computed: its tokens, its slot, and its place in the prefix cache.

    Tokens. ``tokens``: the buffer, int32; the first ``prompt_length`` are the prompt, the first ``length`` are
    committed. ``own_length``: committed tokens without those that only ``rows`` has yet. ``capacity``: how many tokens,
    the committed ones included, every group has blocks for. ``written``: the most tokens that a batch or a commit
    reached; rings and states hold the last of these. ``rows``: the persistent batch that commits for it, if any.

    Prefix cache. ``lease``: the pin of the blocks that it started from or published. ``settle_at``: how many
    tokens it has when a commit settles it (``cache/settling.py``). ``publishes``: whether others may find what it computes;
    False once it continues with other weights than it started with.

    Parts that belong to others: ``checkpoints``, those that it will keep, ``states``, and ``records``, in tiers.

    Others. ``num_fences``: steps and copies in flight. ``resumed_at``: the cache's count of stopped requests when
    this one got its slot. ``epochs``: (first position, epoch of the weights), ascending. ``stays``: whether it keeps
    the epoch that it started with. ``tally``: the counters of its namespace. ``handle``: the ``Sequence`` by which a caller
    names it, until it ends; None if it never had one.
    """

    __slots__ = (
        "capacity", "checkpoints", "epochs", "handle", "lease", "match", "media_ids", "namespace", "num_fences",
        "own_length", "priority", "prompt_length", "publishes", "records", "resumed_at", "rows", "settle_at", "slot",
        "state", "states", "stays", "tally", "tokens", "written",
    )  # fmt: skip

    def __init__(
        self,
        tokens: Tokens,
        prompt_length: int,
        namespace: bytes,
        priority: int,
        media_ids: Mapping[int, int],
        *,
        publishes: bool = True,
    ) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length
        self.own_length = self.capacity = self.written = 0
        self.namespace, self.priority, self.media_ids = namespace, priority, media_ids
        self.match = _NO_MATCH
        self.lease: Lease
        self.tally: Tally
        self.slot, self.state, self.resumed_at = -1, State.NEW, 0
        self.num_fences, self.settle_at = 0, 0
        self.publishes, self.stays, self.epochs = publishes, False, [(0, 0)]
        self.checkpoints = OwnCheckpoints()
        self.records, self.states = OwnRecords(), OwnStates()
        self.handle: ref[object] | None = None
        self.rows: DecodeRows | None = None

    @property
    def length(self) -> int:
        """Number of tokens whose rows are written, those that only a persistent batch has yet included."""
        return self.own_length if self.rows is None else self.rows.length_of(self)

    @property
    def lacking_from(self) -> int | None:
        """The first token of which an optional group lacks the row that the request still reads: what it started with, until
        its first commit says that the row was computed. None: none is lacking."""
        return self.match.lacking_from if self.own_length <= self.match.resumable else None

    @property
    def most_written(self) -> int:
        """The most tokens that a batch or a commit reached, also in a persistent batch."""
        return self.written if self.rows is None else max(self.written, self.rows.written_of(self))

    @property
    def found(self) -> float:
        """The share of its prompt that it found, 0 to 1."""
        return self.match.resumable / self.prompt_length if self.prompt_length else 0.0

    def keys(self, first: int, end: int) -> Tokens:
        """Return tokens ``first .. end - 1`` as texts are compared: with media ids in place of image tokens. int32; a
        view if there are no media."""
        tokens = self.tokens[first:end]
        return with_media(tokens, first, self.media_ids) if self.media_ids else tokens

    def added(self, begin: int, end: int, block_size: int, *, has_entry: bool) -> Added:
        """Return its blocks ``begin .. end - 1``, whose tokens are committed, as it makes them shareable. ``has_entry``: they
        enter the eviction order by what they spare: of a prompt as all that it computes of it, of an answer as what there is
        of it."""
        first, entry = begin * block_size, None
        tokens = self.tokens[first : end * block_size]
        if has_entry:
            of_prompt = (self.prompt_length - 1) // block_size
            gain = of_prompt - self.match.resumable // block_size if begin < of_prompt else begin - of_prompt
            entry = Entry(gain, self.match.resumable / self.prompt_length if self.prompt_length else 0.0)
        if self.media_ids:
            return Added(self.lease, with_media(tokens, first, self.media_ids), None, self.priority, entry)
        return Added(self.lease, tokens, self.tokens, self.priority, entry)

    def committed_keys(self, first: int, end: int) -> Tokens:
        """Return ``keys`` of committed tokens only, with ``NO_TOKEN`` at the positions behind them."""
        keys = self.keys(first, min(end, self.own_length))
        return keys if end <= self.own_length else np.append(keys, np.full(end - self.own_length, NO_TOKEN, np.int32))

    def last_keys(self, first: int, end: int) -> TextPart:
        """Return ``committed_keys`` and ``text`` of a request that ends; what follows its tokens in the buffer is
        overwritten."""
        if end <= self.own_length:
            return self.keys(first, end), self.text
        if self.media_ids or self.own_length < self.prompt_length or end > len(self.tokens):
            return self.committed_keys(first, end), None
        self.tokens[self.own_length : end] = NO_TOKEN
        return self.tokens[first:end], self.tokens

    @property
    def text(self) -> Tokens | None:
        """The array in which ``keys`` lie; None with media. The prefix tree may keep it: published positions are never
        written again."""
        return None if self.media_ids else self.tokens

    def raw_tokens(self, first: int, end: int) -> Tokens:
        """Return tokens ``first .. end - 1`` without media ids; a view."""
        return self.tokens[first:end]

    def append(self, ids: Ids) -> None:
        """Append ``ids`` to the committed tokens. Amortised O(n)."""
        length, end = self.own_length, self.own_length + len(ids)
        if end > len(self.tokens):
            grown = np.empty(max(end, 2 * len(self.tokens)), np.int32)
            grown[:length] = self.tokens[:length]
            self.tokens = grown
        self.tokens[length:end] = ids
        self.own_length = end

    def start_at(self, found: PrefixMatch, block_size: int) -> None:
        """Start, or resume, after the first ``found.resumable`` tokens.

        For a resumed request the prompt becomes what was committed before. Hashes, media ids and epochs of positions
        behind that are dropped.
        """
        if self.state is State.SUSPENDED:
            self.prompt_length = self.own_length
            del self.records.block_hashes[self.own_length // block_size + 1 :]
            self.media_ids = {index: media for index, media in self.media_ids.items() if index < self.own_length}
            self.epochs = self.epochs_until(found.resumable)
        self.match = found
        self.own_length = self.written = self.states.oldest = found.resumable

    def enter_epoch(self, epoch: int) -> None:
        """Compute all further tokens with the weights of ``epoch``. The request stops publishing, since its text now
        mixes weights."""
        length, self.publishes = self.length, False
        if self.epochs[-1][0] == length:
            del self.epochs[-1]
        self.epochs.append((length, epoch))

    def epochs_until(self, length: int) -> list[tuple[int, int]]:
        """Return the epochs for the first ``length`` tokens, plus the newest epoch for tokens that follow."""
        newest = self.epochs[-1][1]
        epochs = [(first, epoch) for first, epoch in self.epochs if first < length] or [(0, newest)]
        return epochs if epochs[-1][1] == newest else [*epochs, (length, newest)]

    @property
    def is_dropped(self) -> bool:
        """Whether it has not ended, but its ``Sequence`` was collected, so that no caller can close it."""
        is_alive = self.state in (State.RUNNING, State.SUSPENDED)
        return is_alive and self.handle is not None and self.handle() is None

    def detach(self) -> None:
        """Copy the tokens that a persistent batch committed for this request, and continue outside of the batch."""
        if self.rows is not None:
            self.rows.detach(self)

    def check_running(self) -> None:
        """Raise StaleHandle if the request does not run."""
        if self.state is not State.RUNNING:
            is_aside = self.state is State.SUSPENDED
            text = f"this sequence is {'suspended; resume it first' if is_aside else 'closed; open a new one'}"
            raise StaleHandle(text, needed="sequence", available="suspended" if is_aside else "closed")


def buffer_of(prompt: Tokens, num_tokens: int, block_size: int) -> Tokens:
    """Return a buffer for ``num_tokens`` tokens, rounded up to whole blocks, that begins with ``prompt``; int32."""
    tokens = np.empty(num_tokens + -num_tokens % block_size, np.int32)
    tokens[: len(prompt)] = prompt
    return tokens


class DecodeRows:
    """The arrays in which a persistent batch counts the tokens of its requests, one row for each request.

    int64 ``[num_rows]``: ``lengths``: tokens committed. ``capacity``: tokens that there is room for. ``written``: the
    most tokens that a step reached. ``known``: the length up to which the request itself has the tokens. ``settle_at``: the
    length at which the request is settled. int32
    ``[num_rows, width]``: ``newest``: the tokens from position ``known`` on. ``row_of``: request -> row. ``alone``:
    requests whose rows must be read again before the next use, because they are new or changed outside of the batch.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.lengths, self.capacity, self.written, self.known, self.settle_at = np.zeros((5, num_rows), np.int64)
        self.newest = np.zeros((num_rows, width), np.int32)
        self.row_of: dict[RequestState, int] = {}
        self.alone: set[RequestState] = set()

    def length_of(self, request: RequestState) -> int:
        """Return the number of tokens of ``request`` that are written."""
        return int(self.lengths[self.row_of[request]])

    def written_of(self, request: RequestState) -> int:
        """Return the most tokens of ``request`` that a step reached."""
        return int(self.written[self.row_of[request]])

    def flush(self, request: RequestState) -> None:
        """Append to ``request`` the committed tokens that only this batch has. Idempotent."""
        row = self.row_of[request]
        known, length = int(self.known[row]), int(self.lengths[row])
        if request.own_length < length:
            request.append(self.newest[row, request.own_length - known : length - known])
        self.known[row] = length

    def detach(self, request: RequestState) -> None:
        """Flush ``request`` and let it continue outside of the batch; its row is read again before the next use."""
        self.flush(request)
        request.written = max(request.written, self.written_of(request))
        self.alone.add(request)
        request.rows = None
