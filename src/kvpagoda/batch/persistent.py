"""Sequences that run together, step after step, and pay for what changed."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from kvpagoda.batch.batch import Batch
from kvpagoda.batch.step import StepRows
from kvpagoda.batch.step_buffers import StepBuffers
from kvpagoda.cache.guard import either_way, exclusive
from kvpagoda.cache.lifecycle import Lifecycle
from kvpagoda.cache.request import DecodeRows, Request, State
from kvpagoda.cache.sequence import Sequence, requests_of
from kvpagoda.errors import BadInput, StaleHandle
from kvpagoda.prefix.tokens import as_tokens
from kvpagoda.schema import Schema
from kvpagoda.units import whole_number


class PersistentBatch:
    """Decode steps of a set of sequences. Made by ``KVCache.persistent_batch``.

        batch = running.extend()     room for one more token of each, and the index arrays of the step
        ...                          compute it
        running.commit(tokens)       one token of each is written

    Row ``i`` of all arrays is ``sequences[i]``; further rows, up to ``num_rows``, are padded. A step costs a few operations
    on arrays of ``num_rows``, and some work for each sequence that completes a block or lets one slide out. The arrays
    have addresses of their own, which stay the same for the life of this object.

    Every sequence stays exact by itself: it takes over its tokens when it needs them, and what it does alone
    (``extend``, ``commit``, ``rewind``) counts from the next call on. One that was closed must be removed, one that was
    suspended removed or resumed.
    """

    def __init__(self, lifecycle: Lifecycle, schema: Schema, num_rows: int) -> None:
        core = lifecycle.core
        self.num_rows, self._lifecycle, self._core, self._schema = num_rows, lifecycle, core, schema
        self._guard = core.guard
        self._buffers = StepBuffers(core.memory.arrays)
        self._members: tuple[Sequence, ...] = ()
        self._requests: list[Request] = []
        self._rows = DecodeRows(num_rows, core.block_size)
        self._steps: dict[int, StepRows] = {}  # of steps that compute so many tokens of each
        self._slots, self._one = np.full(num_rows, -1, np.int64), np.zeros(num_rows, np.int64)
        self._first_of = np.arange(num_rows) * core.block_size
        self._batch: Batch | None = None
        self._due: list[Request] = []  # whose blocks are to be published, or slide
        self._sliding = [group.growth for group in core.groups if group.growth.span is not None]

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequence of each row that is not padded."""
        return self._members

    @exclusive
    def add(self, *sequences: Sequence) -> None:
        """Give each of ``sequences`` the next padded row. Raises BadInput, adding none, without rows for them, for one that is
        here already or whose prompt is not committed; StaleHandle for one that is closed."""
        members = (*self._members, *sequences)
        if len(members) > self.num_rows or len({*members}) < len(members):
            raise BadInput(
                f"{len(sequences)} sequences beside {len(self._members)}, each once, do not go into {self.num_rows} rows"
            )
        requests = requests_of(sequences, self._core)
        for request in requests:
            request.check_running()
            if request.length < request.prompt_length:
                raise BadInput(
                    f"slot {request.slot} has {request.length} of {request.prompt_length} prompt tokens; commit them first"
                )
        self._steps.clear()
        self._rows.alone.update(requests)
        self._rows.row_of.update(zip(requests, range(len(self._members), len(members))))
        self._requests, self._members = [*self._requests, *requests], members

    @either_way
    def remove(self, *sequences: Sequence) -> None:
        """Let go of ``sequences``, open or closed; the last ones move to their rows. Raises BadInput, removing none, for one
        that is not here."""
        if len({*sequences} & {*self._members}) < len(sequences):
            raise BadInput(f"not all {len(sequences)} sequences to be removed are among the {len(self._members)} here")
        rows, members = self._rows, [*self._members]
        for sequence in sequences:
            members[members.index(sequence)] = members[-1]
            del members[-1]
        requests = requests_of(members, self._core)
        row_of = {request: row for row, request in enumerate(requests)}
        for request, row in rows.row_of.items():
            if request.rows is rows and row_of.get(request) != row:
                rows.detach(request)
        self._steps.clear()
        rows.alone.intersection_update(row_of)
        rows.row_of, self._members, self._requests = row_of, tuple(members), requests

    @exclusive
    def extend(self, n: SupportsIndex = 1) -> Batch:
        """Make room for the next ``n`` tokens of every sequence, in every group, or for none; returns the batch of a step that
        computes them, as ``KVCache.batch`` does: valid until the next ``extend``.

        Raises OutOfBlocks, BadInput past the cache's longest context, StaleHandle if a sequence was closed or suspended and
        is still here; nothing changed then.
        """
        n = whole_number(n, "the number of tokens that a step computes of each sequence", 1)
        self._publish_due()
        self._read()
        rows = self._rows
        after = rows.lengths + (self._one if n == 1 else n * self._one)
        short = np.flatnonzero(after > rows.capacity)
        if len(short):
            ends, size = after[short], self._core.block_size
            self._lifecycle.extend(dict(zip(self._slots[short].tolist(), ends.tolist())))
            rows.capacity[short] = np.minimum(-(-ends // size) * size, self._core.max_context)
        np.maximum(rows.written, after, out=rows.written)
        if n not in self._steps:
            counts = np.where(self._one, n, 1)
            self._steps = {n: StepRows(self._slots, counts, len(self._members))}
        steps = self._steps[n]
        self._batch = Batch(self._core, self._buffers, self._schema, self._requests, steps, rows.lengths)
        return self._batch

    @exclusive
    def commit(self, token_ids: Any) -> None:
        """Say that the row of one more token of each sequence is written: ``token_ids`` int32 ``[len(sequences)]``. Otherwise
        as ``Sequence.commit``. Raises BadInput (no room, other ids), StaleHandle; nothing changed then."""
        self._publish_due()
        self._read()
        rows, n = self._rows, len(self._members)
        tokens, size = as_tokens(token_ids, self._core.vocab_size), rows.newest.shape[1]
        before, batch = rows.lengths, self._batch
        if batch is not None and batch.before is before and batch.rows.one_each:  # what it made room for
            within, after, full = batch.within[:n], batch.lengths, 0
        else:
            within, after = before[:n] % size, before + self._one
            full = int(np.count_nonzero(after > rows.capacity))
        if len(tokens) != n or full:
            raise BadInput(
                f"{len(tokens)} tokens for {n} sequences, of which {full} have no room for one more; extend first"
            )
        is_due = within == size - 1
        for growth in self._sliding:
            is_due |= growth.first_kept(after[:n]) // size > growth.first_kept(before[:n]) // size
        due = [self._requests[row] for row in np.flatnonzero(is_due).tolist()]
        rows.newest.ravel()[self._first_of[:n] + within] = tokens
        rows.lengths, self._due = after, due
        self._publish_due()

    def _publish_due(self) -> None:
        """Publish what the last commit completed; what an interrupt left is done with the next call."""
        while self._due:
            request = self._due[-1]
            if request.rows is self._rows:
                self._rows.flush(request)
                self._lifecycle.settle(request)
            self._due.pop()

    def _read(self) -> None:
        """Bring the rows of those that did something alone up to date. Raises StaleHandle, changing nothing."""
        rows = self._rows
        if not rows.alone and self._steps:
            return
        for what, gone in (
            ("were closed; remove", [one for one in rows.alone if one.state in (State.CLOSED, State.CLOSING)]),
            ("are suspended; resume or remove", [one for one in rows.alone if one.state is State.SUSPENDED]),
        ):
            if gone:
                raise StaleHandle(f"the sequences of rows {sorted(rows.row_of[one] for one in gone)} {what} them")
        n = len(self._members)
        slots, lengths = self._slots.copy(), rows.lengths.copy()  # the last batch has the old ones
        slots[n:], lengths[n:] = -1, 0
        for request in rows.alone:
            request.detach()
            row = rows.row_of[request]
            slots[row], lengths[row] = request.slot, request.own_length
            rows.capacity[row], rows.written[row] = self._lifecycle.capacity_of(request), 0
        rows.capacity[n:], self._one[:n], self._one[n:] = 0, 1, 0
        if (slots != self._slots).any():
            self._steps.clear()
            self._slots = slots
        rows.lengths = lengths
        for request in rows.alone:
            request.rows = rows
        rows.alone.clear()
