"""Sequences that run together for many steps; a step costs only what changed since the one before."""

from __future__ import annotations

from contextlib import suppress
from typing import SupportsIndex

import numpy as np

from kvpagoda.arrays import MOST_TOKENS, TokenIds, as_tokens
from kvpagoda.core.batch.batch import Batch
from kvpagoda.core.batch.step import StepRows
from kvpagoda.core.batch.step_buffers import StepBuffers, cells_between
from kvpagoda.core.cache.guard import either_way, exclusive
from kvpagoda.core.cache.lifecycle import Lifecycle
from kvpagoda.core.cache.request import DecodeRows, RequestState, State
from kvpagoda.core.cache.sequence import Sequence, requests_of
from kvpagoda.core.memory.writes import Array
from kvpagoda.errors import BadInput, StaleHandle, shown
from kvpagoda.schema import Schema
from kvpagoda.text import in_brackets
from kvpagoda.units import whole_number

_AHEAD = 15
"""How many blocks more than it needs a sequence takes from its reservation, while enough blocks are free."""


class PersistentBatch:
    """Decode steps of a set of sequences. Made by ``KVCache.persistent_batch``.

        batch = running.extend()     room for one more token of each sequence, and the index arrays of the step
        ...                          compute it
        running.commit(tokens)       one token of each sequence is written

        batch = running.extend(4)            room for one token and three drafts of each sequence
        ...                                  verify them
        running.commit(tokens, counts)       counts[i] tokens of sequence i were accepted

    Blocks that a step completes are shareable at once. To publish the blocks of many sequences in one step would take
    longer than the rest of the step. So each step publishes the blocks of a few sequences, 64 blocks of a sequence at a
    time, 8 where it has windows. A search of the prefix tree, or a lack of blocks, publishes the rest first. Caches with
    states, tiers or events publish each block in the step that completes it.

    Row ``i`` of all arrays is ``sequences[i]``; the rows after those, up to ``num_rows``, are padded. A step costs a
    few operations on arrays of ``num_rows``, and some work for each sequence that completes a block or whose window
    moves past one. The index arrays do not share buffers with ``KVCache.batch``, and their addresses stay the same for
    the life of this object.

    Each sequence can still be used alone. It copies its tokens from here when it needs them, and the next call here
    sees what it did alone (``extend``, ``commit``, ``rewind``). A closed sequence must be removed, a suspended one
    removed or resumed. If ``resume`` lost tokens, the next steps compute those tokens again, a few at a time, unless
    the sequence commits them alone first.
    """

    def __init__(self, lifecycle: Lifecycle, schema: Schema, num_rows: int, tokens_per_row: int | None = None) -> None:
        core = lifecycle.core
        self.tokens_per_row = tokens_per_row
        self.num_rows, self._lifecycle, self._core, self._schema = num_rows, lifecycle, core, schema
        self._guard = core.guard
        self._buffers = StepBuffers(core.memory.arrays)
        self._members: tuple[Sequence, ...] = ()
        self._requests: list[RequestState] = []
        self._rows = DecodeRows(num_rows, (lifecycle.settler.patience + 2) * core.block_size)
        self._most_lacking = 0  # no request has more tokens than this in ``newest`` that it has not copied yet
        self._steps: dict[int, StepRows] = {}  # tokens that a step computes of each sequence -> its rows
        self._slots, self._one = np.full(num_rows, -1, np.int64), np.zeros(num_rows, np.int64)
        self._numbers = np.arange(0)  # of the rows that are not padded
        self._batch: Batch | None = None
        self._due: list[RequestState] = []  # requests to be settled
        self._in_prompt: dict[int, RequestState] = {}  # row -> request with prompt tokens that are not committed yet

    @in_brackets
    def __repr__(self) -> str:
        width = "" if self.tokens_per_row is None else f", {self.tokens_per_row} tokens a row"
        return f"of {self.num_rows:,} rows ({self.num_rows - len(self._members):,} padded){width}"

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequence of each row that is not padded."""
        return self._members

    @exclusive
    def add(self, *sequences: Sequence) -> None:
        """Give each of ``sequences`` the next padded row.

        Args:
            *sequences: their prompts are committed except for the last token, which may be missing (as after a prefix
                hit): the next step computes it.

        Raises:
            BadInput: there are too few rows, a sequence is here already, or more of its prompt is missing; none is
                added.
            StaleHandle: one is closed or suspended; none is added.
        """
        members, requests = (*self._members, *sequences), requests_of(sequences, self._core)
        if len(members) > self.num_rows or len({*members}) < len(members):
            raise BadInput(
                f"cannot add {len(sequences)} sequences to {len(self._members)}: {self.num_rows} rows, each sequence once",
                needed=len(members), available=self.num_rows,
            )  # fmt: skip
        for request in requests:
            request.check_running()
            if request.length < request.prompt_length - 1:
                raise BadInput(
                    f"slot {request.slot} has {request.length} of {request.prompt_length} prompt tokens; commit all but the "
                    f"last first",
                    needed=request.prompt_length - 1, available=request.length,
                )  # fmt: skip
        self._steps.clear()
        self._rows.alone.update(requests)
        self._rows.row_of.update(zip(requests, range(len(self._members), len(members))))
        self._requests, self._members = [*self._requests, *requests], members

    @either_way
    def remove(self, *sequences: Sequence) -> None:
        """Remove ``sequences``; the last sequences move to the rows that become free.

        Args:
            *sequences: open or closed.

        Raises:
            BadInput: one is not here; none is removed.
        """
        if len({*requests_of(sequences, self._core)} & {*self._requests}) < len(sequences):
            text = f"not all {len(sequences)} sequences to be removed are among the {len(self._members)} here"
            raise BadInput(text, needed=len(sequences), available=len(self._members))
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
    def extend(self, n: SupportsIndex | None = None) -> Batch:
        """Make room for the next ``n`` tokens of every sequence in every group, and return the batch of that step.

        If it raises, no sequence got room and nothing changed.

        Args:
            n: tokens of each sequence; None: ``tokens_per_row``, or one.

        Returns:
            The batch, as from ``KVCache.batch``, valid until the next ``extend``.

        Raises:
            OutOfBlocks: a group has too few blocks.
            BadInput: a sequence would pass the cache's longest context, or ``n`` differs from ``tokens_per_row``.
            StaleHandle: a closed or suspended sequence is still here.
        """
        width = self.tokens_per_row
        n = whole_number(
            (width or 1) if n is None else n, "the number of tokens that a step computes of each sequence", 1,
            bits=31,
        )  # fmt: skip
        if n != (width or n):
            text = f"a step computes {width} tokens of each row here, tokens_per_row, not {n}"
            raise BadInput(text, needed=n, available=width)
        if self._due:
            self._settle_due()
        self._read()
        rows = self._rows
        after = rows.lengths + (self._one if n == 1 else n * self._one)
        short = (after > rows.capacity).nonzero()[0]
        if len(short):
            ends, size, slots = after[short], self._core.block_size, self._slots[short]
            if all(group.have_outstanding(slots, _AHEAD + n) for group in self._core.groups):
                ends = np.minimum(ends + _AHEAD * size, self._core.max_context)
            self._lifecycle.extend(slots, ends)
            rows.capacity[short] = np.minimum(-(-ends // size) * size, self._core.max_context)
        np.maximum(rows.written, after, out=rows.written)
        if n not in self._steps:
            counts = np.where(self._one, n, width or 1)
            self._steps = {n: StepRows(self._slots, counts, len(self._members), width is not None)}
        steps = self._steps[n]
        self._batch = Batch(self._core, self._buffers, self._schema, self._requests, steps, rows.lengths)
        self._batch.noted = self._core.memory.take()
        return self._batch

    @exclusive
    def commit(self, token_ids: TokenIds, counts: TokenIds | None = None) -> None:
        """Declare the rows of the next tokens of each sequence written, as ``Sequence.commit``. If it raises, nothing
        changed.

        Args:
            token_ids: int32 ``[len(sequences)]``; with ``counts`` those of one row after another.
            counts: tokens of each sequence, 0 or more; None: one of each.

        Raises:
            BadInput: there is no room, or ids differ from the prompt's.
            StaleHandle: a closed or suspended sequence is still here.
        """
        if self._due:
            self._settle_due()
        self._read()
        rows, n, size, batch = self._rows, len(self._members), self._core.block_size, self._batch
        tokens, before = as_tokens(token_ids, self._core.vocab_size), rows.lengths
        if counts is None and batch is not None and batch.before is before and batch.rows.one_each:
            after, full, num_tokens = batch.lengths, 0, n  # the batch has made room for exactly these tokens
            is_whole = batch.within[:n] == size - 1
            most = 1
        else:
            each = self._one if counts is None else self._counted(counts)
            after, num_tokens = before + each, int(each.sum())
            full = int(np.count_nonzero(after > rows.capacity))
            is_whole = after[:n] // size > before[:n] // size
            most = int(each.max())
        if len(tokens) != num_tokens or full:
            raise BadInput(
                f"{len(tokens)} tokens for {n} sequences, {num_tokens} in all, of which {full} have no room; extend first",
                needed=num_tokens, available=len(tokens),
            )  # fmt: skip
        cells = self._cells(before, after, most)
        if self._in_prompt:
            self._check_prompts(tokens, before, after)
        reached = after[:n] >= rows.settle_at[:n]
        for row in (is_whole | reached).nonzero()[0].tolist():
            self._core.waiting[self._requests[row]] = None
        due = [self._requests[row] for row in reached.nonzero()[0].tolist()]
        if self._in_prompt:
            self._in_prompt = {row: one for row, one in self._in_prompt.items() if after[row] < one.prompt_length}
        rows.newest[cells] = tokens
        rows.lengths, self._due = after, due
        if due:
            self._settle_due()

    def _counted(self, counts: TokenIds) -> Array:
        """Return ``counts`` as int64 ``[num_rows]``, 0 for padded rows. Raises BadInput."""
        given, n = counts, len(self._members)
        if type(counts) is not np.ndarray:
            with suppress(BadInput):
                given = as_tokens(counts)
        if (
            type(given) is not np.ndarray
            or given.shape != (n,)
            or (n and (given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= MOST_TOKENS))
        ):
            text = f"counts are {n} whole numbers of at least 0, one for each sequence, got {shown(counts)}"
            raise BadInput(text, needed=n, available=counts)
        each = np.zeros(self.num_rows, np.int64)
        each[:n] = given
        return each

    def _cells(self, before: Array, after: Array, most: int) -> tuple[Array, Array]:
        """Return the rows and columns of ``newest`` in which the tokens ``before .. after - 1`` of each row are stored,
        int64, in the order of ``commit``. ``most``: the most tokens of a row.

        Flushes rows of ``newest``, or adds columns to it, first where there are too few.
        """
        rows, n = self._rows, len(self._members)
        self._most_lacking += most
        if self._most_lacking > rows.newest.shape[1]:
            self._most_lacking = self._make_room(after)
        lacking = (before - rows.known)[:n]
        if self._batch is not None and after is self._batch.lengths:  # one token each
            return self._numbers, lacking
        return cells_between(lacking, (after - rows.known)[:n])

    def _make_room(self, after: Array) -> int:
        """Make sure that ``newest`` has columns for the tokens up to ``after - 1`` of each row. Return the most tokens
        that a request will then lack."""
        rows, n, width = self._rows, len(self._members), self._rows.newest.shape[1]
        for row in np.flatnonzero((after - rows.known)[:n] > width).tolist():
            rows.flush(self._requests[row])
        most = int((after - rows.known)[:n].max(initial=0))
        if most > width:
            rows.newest = np.concatenate((rows.newest, np.zeros((self.num_rows, most - width), np.int32)), axis=1)
        return most

    def _check_prompts(self, tokens: Array, before: Array, after: Array) -> None:
        """Raise BadInput if ``tokens`` of a sequence that is still in its prompt differ from the prompt."""
        ends = np.cumsum(after - before)
        for row, request in self._in_prompt.items():
            at, end = before[row], min(after[row], request.prompt_length)
            first = ends[row] - after[row] + at
            differs = (tokens[first : first + end - at] != request.tokens[at:end]).nonzero()[0]
            if len(differs):
                i = differs[0]
                named, known = int(tokens[first + i]), int(request.tokens[at + i])
                text = f"commit names token {named} at {at + i} of row {row}, the prompt has {known}"
                raise BadInput(text, needed=named, available=known)

    def _settle_due(self) -> None:
        """Settle the requests that the last commit brought to ``settle_at``. If an interrupt stops this, the next call
        does it again, which changes nothing where it was done."""
        rows = self._rows
        due = [request for request in self._due[::-1] if request.rows is rows]
        if due:
            self._lifecycle.settler.settle(*due)
        self._due.clear()

    def _read(self) -> None:
        """Read again the rows of the requests that were used alone. Raises StaleHandle; nothing changed then."""
        rows = self._rows
        if not rows.alone and self._steps:
            return
        for what, stopped in (
            ("were closed; remove", [one for one in rows.alone if one.state in (State.CLOSED, State.CLOSING)]),
            ("are suspended; resume or remove", [one for one in rows.alone if one.state is State.SUSPENDED]),
        ):
            if stopped:
                text = f"the sequences of rows {sorted(rows.row_of[one] for one in stopped)} {what} them"
                raise StaleHandle(text, needed=sorted(rows.row_of[one] for one in stopped))
        n = len(self._members)
        slots, lengths = self._slots.copy(), rows.lengths.copy()  # copies: the last batch keeps the old arrays
        slots[n:], lengths[n:] = -1, 0
        for request in rows.alone:
            request.detach()
            row = rows.row_of[request]
            slots[row], lengths[row] = request.slot, request.own_length
            rows.capacity[row], rows.written[row] = request.capacity, 0
            rows.known[row], rows.settle_at[row] = request.own_length, request.settle_at
        rows.capacity[n:], self._one[:n], self._one[n:] = 0, 1, 0
        self._numbers = np.arange(n)
        if (slots != self._slots).any():
            self._steps.clear()
            self._slots = slots
        rows.lengths = lengths
        self._in_prompt = {row: one for row, one in enumerate(self._requests) if lengths[row] < one.prompt_length}
        for request in rows.alone:
            request.rows = rows
        rows.alone.clear()
