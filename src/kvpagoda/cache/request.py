"""What a cache knows of one request, and what a persistent batch knows of it before that."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np

from kvpagoda.blocks.ids import Ids
from kvpagoda.cache.counters import Tally
from kvpagoda.cache.namespace import with_media
from kvpagoda.cache.prefix_match import PrefixMatch
from kvpagoda.errors import StaleHandle
from kvpagoda.prefix import Lease
from kvpagoda.prefix.tokens import NO_TOKEN

Tokens = Ids
TextPart = tuple[Tokens, Tokens | None]
"""Keys of whole blocks, and the text that has them at their place, for ``PrefixCache.publish``."""


class State(Enum):
    """Where a request is in its life."""

    NEW = "new"
    RUNNING = "running"
    CLOSING = "closing"
    """Closed inside a fence: it ends when the last one is lifted."""
    SUSPENDED = "suspended"
    CLOSED = "closed"


class Request:
    """A text that is being computed, and its share of the cache.

    ``tokens``: the buffer of the text, int32; the first ``prompt_length`` were given, the first ``length`` are committed.
    ``lease``: what it has published or started from. ``written``: the highest length that a batch or a commit went up to;
    rings and states hold what came last. ``block_hashes``: names of its beginnings below the device, as far as anybody asked.
    ``num_fences``: steps and copies in flight. ``is_settled``: whether everything committed was published; if not, that is
    done when the last fence is lifted, or with the next commit. ``opened_at``: when its prompt began to be computed
    (``perf_counter``), 0.0 once that is measured. ``rows``: the persistent batch that is ahead of it, if any.
    ``resumed_at``: the cache's count of stopped requests when it got its slot. ``due``: behind how many blocks of its prompt a
    checkpoint is still to be kept, ascending. ``kept``: checkpoints that it uses; ``tail``: the one that moves along with it.
    ``publishes``: whether others may find what it computes; not once it went on with other weights than it began with.
    ``epochs``: (first position, epoch of the weights), ascending. ``stays``: whether on the epoch that it began with.
    ``tally``: the counters of its namespace.
    """

    __slots__ = (
        "block_hashes", "due", "epochs", "is_settled", "kept", "lease", "match", "media_ids", "namespace", "num_fences",
        "opened_at", "own_length", "priority", "prompt_length", "publishes", "resumed_at", "rows", "slot", "state", "stays",
        "tail", "tally", "tokens", "written",
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
        self.tokens, self.prompt_length, self.own_length, self.written = tokens, prompt_length, 0, 0
        self.namespace, self.priority, self.media_ids = namespace, priority, media_ids
        self.match = PrefixMatch(0, 0, "nothing")
        self.lease: Lease
        self.tally: Tally
        self.slot, self.state, self.resumed_at = -1, State.NEW, 0
        self.num_fences, self.is_settled = 0, True
        self.publishes, self.stays, self.epochs = publishes, False, [(0, 0)]
        self.due: list[int] = []
        self.kept: list[int] = []
        self.tail = -1
        self.block_hashes: list[bytes] = []
        self.opened_at = 0.0
        self.rows: DecodeRows | None = None

    @property
    def length(self) -> int:
        """Tokens whose rows are written."""
        return self.own_length if self.rows is None else self.rows.length_of(self)

    def keys(self, first: int, end: int) -> Tokens:
        """Tokens ``first .. end - 1`` as texts are compared: with media ids."""
        tokens = self.tokens[first:end]
        return with_media(tokens, first, self.media_ids) if self.media_ids else tokens

    def committed_keys(self, first: int, end: int) -> Tokens:
        """As ``keys``, of committed tokens alone: ``NO_TOKEN`` where ``end`` is behind them."""
        keys = self.keys(first, min(end, self.own_length))
        return keys if end <= self.own_length else np.append(keys, np.full(end - self.own_length, NO_TOKEN, np.int32))

    def last_keys(self, first: int, end: int) -> TextPart:
        """As ``committed_keys`` and ``text``, of a text that ends: what stands behind it in its array is overwritten."""
        if end <= self.own_length:
            return self.keys(first, end), self.text
        if self.media_ids or self.own_length < self.prompt_length or end > len(self.tokens):
            return self.committed_keys(first, end), None
        self.tokens[self.own_length : end] = NO_TOKEN
        return self.tokens[first:end], self.tokens

    @property
    def text(self) -> Tokens | None:
        """The array in which ``keys`` lie, which may be kept: nobody writes again where it was published. None with media."""
        return None if self.media_ids else self.tokens

    def raw_tokens(self, first: int, end: int) -> Tokens:
        """Tokens ``first .. end - 1`` as they are; a view."""
        return self.tokens[first:end]

    def append(self, ids: Ids) -> None:
        """Append tokens to the committed ones. Amortised O(n)."""
        length, end = self.own_length, self.own_length + len(ids)
        if end > len(self.tokens):
            grown = np.empty(max(end, 2 * len(self.tokens)), np.int32)
            grown[:length] = self.tokens[:length]
            self.tokens = grown
        self.tokens[length:end] = ids
        self.own_length = end

    def start_at(self, found: PrefixMatch, block_size: int) -> None:
        """It begins, or begins again, with the tokens that were ``found``. Of one that begins again the prompt ends with what
        was committed, so that what is named or shown behind that is forgotten."""
        if self.state is State.SUSPENDED:
            self.prompt_length = self.own_length
            del self.block_hashes[self.own_length // block_size + 1 :]
            self.media_ids = {at: one for at, one in self.media_ids.items() if at < self.own_length}
            self.epochs = self.epochs_until(found.resumable)
        self.match = found
        self.own_length = self.written = found.resumable

    def enter_epoch(self, epoch: int) -> None:
        """What it computes from now on is computed with the weights of ``epoch``: a text that nobody else may go on with."""
        length, self.publishes = self.length, False
        if self.epochs[-1][0] == length:
            del self.epochs[-1]
        self.epochs.append((length, epoch))

    def epochs_until(self, length: int) -> list[tuple[int, int]]:
        """Its epochs if only ``length`` tokens were left: what follows is computed with the newest weights that it knows."""
        newest = self.epochs[-1][1]
        epochs = [one for one in self.epochs if one[0] < length] or [(0, newest)]
        return epochs if epochs[-1][1] == newest else [*epochs, (length, newest)]

    def detach(self) -> None:
        """Let it have the tokens that a persistent batch committed for it; what it does from now on is its own."""
        if self.rows is not None:
            self.rows.detach(self)

    def check_running(self) -> None:
        """Raises StaleHandle."""
        if self.state is not State.RUNNING:
            is_aside = self.state is State.SUSPENDED
            raise StaleHandle(
                f"this sequence is {'suspended; resume it first' if is_aside else 'closed; open a new one'}"
            )


def buffer_of(prompt: Tokens, num_tokens: int, block_size: int) -> Tokens:
    """An array of whole blocks for ``num_tokens`` tokens, of which the first are those of ``prompt``."""
    tokens = np.empty(num_tokens + -num_tokens % block_size, np.int32)
    tokens[: len(prompt)] = prompt
    return tokens


class DecodeRows:
    """Row ``i`` of the arrays is that of one request.

    ``lengths``, ``capacity``, ``written`` int64 ``[num_rows]``: tokens committed, tokens that there is room for, the highest
    length that a step went up to. ``newest`` int32 ``[num_rows, width]``: the tokens that each request lacks, of which it has
    the first ``known``, int64 ``[num_rows]``. ``row_of``: request -> row. ``alone``: requests whose rows must be read again
    before they are used, because they are new or did something by themselves.
    """

    def __init__(self, num_rows: int, width: int) -> None:
        self.lengths, self.capacity, self.written, self.known = np.zeros((4, num_rows), np.int64)
        self.newest = np.zeros((num_rows, width), np.int32)
        self.row_of: dict[Request, int] = {}
        self.alone: set[Request] = set()

    def length_of(self, request: Request) -> int:
        """Tokens of ``request`` that are written."""
        return int(self.lengths[self.row_of[request]])

    def flush(self, request: Request) -> None:
        """Give ``request`` the tokens that it lacks. Does no harm twice."""
        row = self.row_of[request]
        known, length = int(self.known[row]), int(self.lengths[row])
        if request.own_length < length:
            request.append(self.newest[row, request.own_length - known : length - known])
        self.known[row] = length

    def detach(self, request: Request) -> None:
        """``request`` goes on by itself: its row is read again before it is used."""
        self.flush(request)
        self.alone.add(request)
        request.written = max(request.written, int(self.written[self.row_of[request]]))
        request.rows = None
