"""One request's share of the cache, from ``open`` to ``close``."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.group import BlockGroup
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.namespace import with_stand_ins
from kvpagoda.prefix import Lease
from kvpagoda.reuse import PrefixMatch

Tokens = npt.NDArray[np.int32]
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


def as_tokens(token_ids: Any, vocab_size: int | None = None) -> Tokens:
    """``token_ids`` as a contiguous int32 vector. Raises BadInput for anything but integers inside the vocabulary."""
    array = np.asarray(token_ids)
    if array.dtype == _INT32 and array.ndim == 1 and array.flags.c_contiguous:
        unsigned = array.view(_UINT32)  # one pass: what is below 0 is large
        if not len(array) or unsigned.item(unsigned.argmax()) < (vocab_size or 2**31):
            return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadInput(f"token ids must be a vector of integers, got {array.dtype} of shape {list(array.shape)}")
    if array.size:
        low, high = int(array.min()), int(array.max())
        top = (vocab_size or 2**31) - 1
        if low < 0 or high > top:
            raise BadInput(f"token id {low if low < 0 else high} is outside the vocabulary 0..{top}")
    return np.ascontiguousarray(array, np.int32)


class Owner(Protocol):
    """What a sequence needs of the cache that opened it."""

    ledgers: tuple[BlockGroup, ...]
    vocab_size: int | None
    max_context: int
    num_stopped: int

    def room_wanted(self, ends: Mapping[int, int]) -> None: ...

    def sequence_committed(self, sequence: Sequence) -> None: ...

    def sequence_forked(self, sequence: Sequence, reserve: int) -> Sequence: ...

    def sequence_rewound(self, sequence: Sequence, length: int) -> None: ...

    def sequence_closed(self, sequence: Sequence) -> None: ...

    def sequence_suspended(self, sequence: Sequence, whole: bool) -> None: ...

    def sequence_resumed(
        self, sequence: Sequence, room: int | None, reserve: int | None
    ) -> tuple[int, Lease, PrefixMatch | None]: ...


class Stepper(Protocol):
    """Who runs a sequence with others, and has the tokens of it that the sequence has not taken in yet."""

    def length_of(self, sequence: Sequence) -> int: ...

    def hand_over(self, sequence: Sequence) -> None:
        """Let ``sequence`` take in the tokens that it lacks."""
        ...

    def let_go(self, sequence: Sequence) -> None:
        """``sequence``, which has all its tokens, is about to go its own way."""
        ...


class Sequence:
    """A request that is being computed. Made by ``KVCache.open``; closes itself at the end of a ``with`` block.

    ``length`` tokens have their rows written (committed). ``extend`` makes room for more, ``commit`` says that they
    were written. Every call either does all it says or raises and changes nothing; after ``close`` all raise StaleHandle.
    """

    def __init__(
        self,
        owner: Owner,
        slot: int,
        tokens: Tokens,
        prompt_length: int,
        match: PrefixMatch,
        lease: Lease,
        *,
        namespace: bytes = b"",
        priority: int = 0,
        stand_ins: Mapping[int, int] | None = None,
    ) -> None:
        self._owner, self._slot = owner, slot
        self._tokens, self.prompt_length, self._length = tokens, prompt_length, match.resumable
        self.namespace, self.priority, self.stand_ins = namespace, priority, stand_ins or {}
        self.match, self.lease = match, lease
        self.num_fences, self.is_settled = 0, True
        self.last_checkpoint = -1
        self.block_hashes: list[bytes] = []
        """The root of its text and a hash for each whole block: see ``Offloader.extend_hashes``. Empty without tiers."""
        self.opened_at = 0.0
        self.written = self._length
        """The highest length that a batch or a commit went up to; rings and states hold what came last."""
        self.stepper: Stepper | None = None
        """Who is ahead of this sequence, if anybody."""
        self._open = True
        self.is_suspended = False
        """Whether it is set aside, from ``suspend`` to ``resume``."""
        self._resumed = 0

    @property
    def slot(self) -> int:
        """The request slot: its row in block tables and state pools. Valid while the sequence is open and not suspended."""
        self._check_open()
        return self._slot

    @property
    def is_open(self) -> bool:
        return self._open or self.is_suspended

    @property
    def length(self) -> int:
        """Tokens whose rows are written."""
        return self._length if self.stepper is None else self.stepper.length_of(self)

    @property
    def cached_tokens(self) -> int:
        """Leading tokens of the prompt that need not be computed: at most ``len(prompt) - 1``."""
        return self.match.resumable

    @property
    def tokens(self) -> Tokens:
        """The committed token ids, int32 ``[length]``; a read-only view."""
        if self.stepper is not None:
            self.stepper.hand_over(self)
        view = self._tokens[: self._length]
        view.flags.writeable = False
        return view

    @property
    def room(self) -> int:
        """Tokens, the committed ones included, that every group has room for."""
        self._check_open()
        room, slot = self._owner.max_context, self._slot
        for ledger in self._owner.ledgers:
            here = ledger.end[slot] * ledger.block_size
            if here < room:
                room = here
        return room

    def keys(self, first: int, end: int) -> Tokens:
        """Tokens ``first .. end - 1`` as texts are compared: with the stand-ins of media."""
        tokens = self._tokens[first:end]
        return with_stand_ins(tokens, first, self.stand_ins) if self.stand_ins else tokens

    @property
    def text(self) -> Tokens | None:
        """The array of the whole text, in which ``keys`` lie; None with stand-ins. What was published of it stays as it is."""
        return None if self.stand_ins else self._tokens

    def raw_tokens(self, first: int, end: int) -> Tokens:
        """Tokens ``first .. end - 1`` as they are; a view."""
        return self._tokens[first:end]

    def extend(self, n: int) -> None:
        """Make room for the next ``n`` tokens after the committed ones, in every group or in none.

        Raises OutOfBlocks, and BadInput for a negative ``n`` or past the cache's longest context; nothing changed then.
        """
        self._check_open()
        if n < 0:
            raise BadInput(f"cannot extend by {n} tokens; to take tokens back is not what extend does")
        self._owner.room_wanted({self._slot: self.length + n})

    def commit(self, token_ids: Any) -> None:
        """Say that the rows of the next ``len(token_ids)`` tokens are written: whole blocks become shareable, window
        groups free what slid out.

        Inside the prompt the ids must be the prompt's own. Raises BadInput (no room, other ids), StaleHandle.
        """
        self._go_alone()
        length, left = self._length, self.prompt_length - self._length
        ids = np.asarray(token_ids)
        if left <= 0 or ids.dtype != _INT32 or ids.ndim != 1:
            ids = as_tokens(ids, self._owner.vocab_size)
        elif len(ids) > left:  # what the prompt has was looked at when it came
            as_tokens(ids[left:], self._owner.vocab_size)
        count = len(ids)
        end, room = length + count, self.room
        if end > room:
            raise BadInput(f"commit of {count} tokens after {length} passes the room of {room}; extend first")
        if left > 0 and count:
            known = self._tokens[length : length + left if left < count else end]
            same = known == (ids if count <= left else ids[:left])
            at = same.argmin()
            if not same[at]:
                raise BadInput(f"commit names token {ids[at]} at {length + at}, the prompt has {known[at]}")
        if count > left:
            self.take_in(ids)
        self._length = end
        self._owner.sequence_committed(self)

    def take_in(self, ids: Tokens) -> None:
        """Append committed tokens, and nothing more; ``commit`` is the way to call it."""
        length, end = self._length, self._length + len(ids)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens)), np.int32)
            grown[:length] = self._tokens[:length]
            self._tokens = grown
        self._tokens[length:end] = ids
        self._length = end

    def fork(self, *, reserve: int | None = None) -> Sequence:
        """A second request with the same committed tokens, to go another way: whole blocks are shared, the partial block,
        windows and state rows copied. ``reserve``: tokens that it may come to hold (default: those committed).

        Raises RetryLater if there is no slot or no room; nothing changed then.
        """
        self._check_open()
        return self._owner.sequence_forked(self, max(self.length, reserve or 0))

    def rewind(self, n: int) -> None:
        """Take back the last ``n`` committed tokens; others may follow them, after ``extend``.

        Raises BadInput for more tokens than there are, or where a layer keeps something that cannot go back so far: it
        names the layers. What a batch wrote counts too, committed or not, and what the request started from stays: a
        checkpoint, or the sequence it was forked from. Raises OutOfBlocks if a shared block must be copied and there is
        no room. Nothing changed then.
        """
        self._go_alone()
        if not 0 <= n <= self._length:
            raise BadInput(f"cannot rewind {n} of {self._length} tokens")
        if n:
            published = self.lease.num_blocks
            self._owner.sequence_rewound(self, self._length - n)
            if self.lease.num_blocks < published:  # what was published may not be written over
                self._tokens = self._tokens.copy()
            self._length -= n
            self.prompt_length = min(self.prompt_length, self._length)
            self.stand_ins = {at: stand_in for at, stand_in in self.stand_ins.items() if at < self._length}

    def suspend(self, whole: bool = True) -> None:
        """Set this request aside: what it holds goes to host memory, and its blocks, its slot and what was promised to it are
        free. Until ``resume`` or ``close`` everything but ``length``, ``tokens``, ``match`` raises StaleHandle.

        ``whole``: all rows that it needs, so that it goes on just as it was. Otherwise only those that nobody else has: what
        it published stays in the cache, where it may be evicted. Waits until the bytes are there. Raises OutOfBlocks if
        that does not fit in the ``swap`` of the cache, RetryLater while it is fenced, StaleHandle; nothing changed then.
        """
        self._go_alone()
        self._owner.sequence_suspended(self, whole)
        self._open, self.is_suspended = False, True

    def resume(self, *, room: int | None = None, reserve: int | None = None) -> int:
        """Go on after ``suspend``, byte for byte: what is still cached is shared again, the rest copied back. Returns how many
        tokens must be computed again: 0, or, if it was suspended in part and what it had published was evicted, those
        behind the longest beginning from which ``open`` could start; they are its prompt then, and ``length`` is less.

        ``room``: make room for so many first tokens (default: as before; only for what need not be computed, if anything
        must). ``reserve``: see ``open`` (default: what was promised before). Raises RetryLater if there is no slot or no
        room, NeverFits for a larger ``room`` or ``reserve`` than the cache, BadInput, StaleHandle; nothing changed then.
        """
        if not self.is_suspended:
            self._check_open()
            raise BadInput(f"the sequence in slot {self._slot} runs; suspend it first")
        length, given = self._length, self._owner.sequence_resumed(self, room, reserve)
        self._slot, self.lease, start = given
        self._open, self.is_suspended, self._resumed = True, False, self._owner.num_stopped
        if start is not None:
            self.match, self.prompt_length = start, length
            self._length = self.written = start.resumable
        return length - self._length

    def runs_since(self, number: int) -> bool:
        """Whether it has its slot since the cache's ``num_stopped`` was ``number``."""
        return self._open and self._resumed <= number

    def close(self) -> None:
        """Give everything back; whole blocks stay for others to find. Raises StaleHandle the second time."""
        if not self.is_suspended:
            self._go_alone()
        self._owner.sequence_closed(self)
        self._open = self.is_suspended = False

    def settle(self) -> None:
        """Do what waited for the last fence: the effects of a commit, and of a close."""
        self.is_settled, is_open, self._open = True, self._open, True
        self._go_alone()
        self._owner.sequence_committed(self)
        if not is_open:
            self.close()

    def __enter__(self) -> Sequence:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_open:
            self.close()

    def _go_alone(self) -> None:
        """What is known of this sequence elsewhere is about to be wrong. Raises StaleHandle."""
        self._check_open()
        if self.stepper is not None:
            stepper, self.stepper = self.stepper, None
            stepper.let_go(self)

    def _check_open(self) -> None:
        if not self._open:
            what = "suspended; resume it first" if self.is_suspended else "closed; open a new one"
            raise StaleHandle(f"this sequence is {what}")
