"""Sequences that run together, step after step, and pay for what changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from kvpagoda.batch import Batch, BatchSource, StepBuffers, StepRows
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.sequence import Sequence, as_tokens


class StepSource(BatchSource, Protocol):
    """What a persistent batch needs of its cache."""

    device: torch.device
    ledgers: tuple[BlockGroup, ...]
    vocab_size: int | None
    max_context: int

    def room_wanted(self, ends: Mapping[int, int]) -> None: ...

    def sequence_committed(self, sequence: Sequence) -> None: ...


class PersistentBatch:
    """Decode steps of a set of sequences. Made by ``KVCache.persistent_batch``.

        batch = running.extend()     room for one more token of each, and the index arrays of the step
        ...                          compute it
        running.commit(tokens)       one token of each is written

    Row ``i`` of all arrays is ``sequences[i]``; further rows, up to ``num_rows``, are padded. A step costs a few operations
    on arrays of ``num_rows``, and some work for each sequence that completes a block or lets one slide out. The arrays
    have addresses of their own, which stay the same for the life of this object.

    Every sequence stays exact by itself: tokens are handed over to it when it needs them, and what it does alone
    (``extend``, ``commit``, ``rewind``) counts from the next call on. One that was closed must be removed, one that was
    suspended removed or resumed.
    """

    def __init__(self, cache: StepSource, sequences: Iterable[Sequence], num_rows: int) -> None:
        if num_rows < 1:
            raise BadInput(f"a batch has at least one row, got {num_rows}")
        self.num_rows, self.sequences = num_rows, ()
        self._cache, self._buffers = cache, StepBuffers(cache.device)
        self._row_of: dict[Sequence, int] = {}
        self._alone: set[Sequence] = set()  # whose rows say nothing yet, or what is no longer true
        self._rows: dict[int, StepRows] = {}  # of steps that compute so many tokens of each
        self._slots, self._lengths, self._room, self._written, self._known = np.zeros((5, num_rows), np.int64)
        self._one = np.zeros(num_rows, np.int64)
        self._newest = np.zeros((num_rows, cache.block_size), np.int32)  # tokens of the block that each row is in
        self._first_of = np.arange(num_rows) * cache.block_size
        self._batch: Batch | None = None
        self._sliding = [ledger.growth for ledger in cache.ledgers if ledger.growth.span is not None]
        self.add(*sequences)

    sequences: tuple[Sequence, ...]
    """The sequence of each row that is not padded."""

    def add(self, *sequences: Sequence) -> None:
        """Give each of ``sequences`` the next padded row. Raises BadInput, adding none, without rows for them, for one that is
        here already or whose prompt is not committed; StaleHandle for one that is closed."""
        members = (*self.sequences, *sequences)
        if len(members) > self.num_rows or len({*members}) < len(members):
            raise BadInput(
                f"{len(sequences)} sequences beside {len(self.sequences)}, each once, do not go into {self.num_rows} rows"
            )
        for slot, sequence in [(sequence.slot, sequence) for sequence in sequences]:
            if sequence.length < sequence.prompt_length:
                raise BadInput(
                    f"slot {slot} has {sequence.length} of {sequence.prompt_length} prompt tokens; commit them first"
                )
        self._row_of.update(zip(sequences, range(len(self.sequences), len(members))))
        self._alone.update(sequences)
        self._rows.clear()
        self.sequences = members

    def remove(self, *sequences: Sequence) -> None:
        """Let go of ``sequences``, open or closed; the last ones move to their rows. Raises BadInput, removing none, for one
        that is not here."""
        if len({*sequences} & self._row_of.keys()) < len(sequences):
            raise BadInput(f"not all {len(sequences)} sequences to be removed are among the {len(self.sequences)} here")
        members = [*self.sequences]
        for sequence in sequences:
            last = members[-1]
            for one in (sequence, last):
                if one.stepper is self:
                    one.stepper = None
                    self.let_go(one)
            row = self._row_of[last] = self._row_of[sequence]
            members[row] = last
            del members[-1], self._row_of[sequence]
            self._alone.discard(sequence)
        self._rows.clear()
        self.sequences = tuple(members)

    def extend(self, n: int = 1) -> Batch:
        """Make room for the next ``n`` tokens of every sequence, in every group, or for none; returns the batch of a step that
        computes them, as ``KVCache.batch`` does: valid until the next ``extend``.

        Raises OutOfBlocks, BadInput past the cache's longest context, StaleHandle if a sequence was closed or suspended and
        is still here; nothing changed then.
        """
        if n < 1:
            raise BadInput(f"a step computes at least one token of each sequence, got {n}")
        self._read()
        after = self._lengths + (self._one if n == 1 else n * self._one)
        rows = np.flatnonzero(after > self._room)
        if len(rows):
            ends, size = after[rows], self._cache.block_size
            self._cache.room_wanted(dict(zip(self._slots[rows].tolist(), ends.tolist())))
            self._room[rows] = np.minimum(-(-ends // size) * size, self._cache.max_context)
        np.maximum(self._written, after, out=self._written)
        if n not in self._rows:
            counts = np.where(self._one, n, 1)
            self._rows = {n: StepRows(self._slots, counts, len(self.sequences))}
        self._batch = Batch(self._cache, self._buffers, self.sequences, self._rows[n], self._lengths)
        return self._batch

    def commit(self, token_ids: Any) -> None:
        """Say that the row of one more token of each sequence is written: ``token_ids`` int32 ``[len(sequences)]``. Otherwise
        as ``Sequence.commit``. Raises BadInput (no room, other ids), StaleHandle; nothing changed then."""
        self._read()
        tokens, n = as_tokens(token_ids, self._cache.vocab_size), len(self.sequences)
        size, before, batch = self._newest.shape[1], self._lengths, self._batch
        if batch is not None and batch.before is before and batch.rows.one_each:  # what it made room for
            within, after, full = batch.within[:n], batch.lengths, 0
        else:
            within, after = before[:n] % size, before + self._one
            full = int(np.count_nonzero(after > self._room))
        if len(tokens) != n or full:
            raise BadInput(
                f"{len(tokens)} tokens for {n} sequences, of which {full} have no room for one more; extend first"
            )
        self._newest.ravel()[self._first_of[:n] + within] = tokens
        self._lengths = after
        is_due = within == size - 1
        for growth in self._sliding:
            is_due |= growth.first_kept(after[:n]) // size > growth.first_kept(before[:n]) // size
        for row in np.flatnonzero(is_due).tolist():
            self.hand_over(self.sequences[row])
            self._cache.sequence_committed(self.sequences[row])

    # -- called by sequences -----------------------------------------------------------------------------------------

    def length_of(self, sequence: Sequence) -> int:
        """Tokens of ``sequence`` that are written."""
        return int(self._lengths[self._row_of[sequence]])

    def hand_over(self, sequence: Sequence) -> None:
        """Let ``sequence`` have the tokens that it lacks."""
        row = self._row_of[sequence]
        known, length = int(self._known[row]), int(self._lengths[row])
        if known < length:
            first = known % self._newest.shape[1]
            sequence.take_in(self._newest[row, first : first + length - known])
            self._known[row] = length

    def let_go(self, sequence: Sequence) -> None:
        """``sequence`` goes on alone: its row is read again before it is used."""
        self.hand_over(sequence)
        sequence.written = max(sequence.written, int(self._written[self._row_of[sequence]]))
        self._alone.add(sequence)

    def _read(self) -> None:
        """Bring the rows of those that did something alone up to date. Raises StaleHandle, changing nothing."""
        if not self._alone and self._rows:
            return
        for what, gone in (
            ("were closed; remove", [one for one in self._alone if not one.is_open]),
            ("are suspended; resume or remove", [one for one in self._alone if one.is_suspended]),
        ):
            if gone:
                raise StaleHandle(f"the sequences of rows {sorted(self._row_of[one] for one in gone)} {what} them")
        n = len(self.sequences)
        slots, self._lengths = self._slots.copy(), self._lengths.copy()  # the last batch has the old ones
        slots[n:], self._lengths[n:], self._room[n:], self._one[:n], self._one[n:] = -1, 0, 0, 1, 0
        for sequence in self._alone:
            if sequence.stepper is not None:
                sequence.stepper.let_go(sequence)
            row = self._row_of[sequence]
            sequence.stepper = None
            slots[row], self._written[row] = sequence.slot, 0
            self._room[row] = min(sequence.room, self._cache.max_context)
            self._lengths[row] = self._known[row] = sequence.length
            sequence.stepper = self
        self._alone.clear()
        if not self._rows:
            self._slots = slots
