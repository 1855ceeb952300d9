"""Writes rows and states through the views of a batch, as kernels do, and compares all that the batch shows of a text.

The schema alone says which text a row depends on. In a field of a block with one row for every m tokens, row r of block
c belongs to the text up to token (c * rows + r + 1) * m - 1, once that token is written. A field of a state with n rows
is a ring: row p % n belongs to the text up to token p; with one row, it is the state after the whole text. A state with
several places has a record for each of its last lengths, which belongs to the text of that length.

Some rows are not compared, because nothing says what they hold: rows before the first position that the layer's next
token reads; entries whose m tokens are not all written; rows of a ring that rewound tokens may have overwritten (of n
rows with ``rewinds`` v only the newest n - v count); places of longer texts; blocks that no request holds; padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpagoda.schema import Growth, Layer, Schema

from .faults import WrongBytes
from .fingerprints import Marks, Stamp
from .texts import Request

Array = np.ndarray[Any, np.dtype[Any]]
_UP = np.arange(4096)
FLASH_ATTENTION, FLASH_INFER = DIALECTS = ("FlashAttention", "FlashInfer")


@dataclass(frozen=True)
class Field:
    """One array of a layer. ``tokens_per_row``: for a block. ``count``: rows of a state, of which the newest ``kept``
    are always valid; all hold ``fill`` at first. ``places``: records in which the state of one request lies in turn."""

    name: str
    stamp: Stamp
    tokens_per_row: int = 1
    count: int = 1
    kept: int = 1
    fill: float = 0.0
    places: int = 1


@dataclass(frozen=True)
class Shown:
    """Rows of one field that a batch shows: ``array[first[i], second[i]]`` must be filled with ``expected[i]``. It
    belongs to row ``rows[i]`` of the batch and to token ``positions[i]`` of its text."""

    what: str
    array: Array
    first: Array
    second: Array
    expected: Array
    rows: Array
    positions: Array

    def verify(self, requests: list[Request], mask: Array | None = None) -> None:
        """Raise WrongBytes unless all rows, or those where ``mask`` (bool ``[n]``) is true, are as expected."""
        if not len(self.first):
            return
        found = self.array[self.first, self.second].reshape(len(self.first), -1)
        same = found == self.expected[:, None]
        if mask is not None:
            same |= ~mask[:, None]
        if not same.all():
            at = int(np.flatnonzero(~same.all(1))[0])
            raise WrongBytes(
                f"{self.what}: token {self.positions[at]} of {requests[int(self.rows[at])]} should read "
                f"{self.expected[at]} in block or state row {self.first[at]}, row {self.second[at]}; it reads "
                f"{found[at][:4].tolist()} ({int((~same.all(1)).sum())} of {len(same)} rows are wrong)"
            )


def _array(field: Any) -> Array:
    """The memory of a field; of 8-bit floats, which numpy lacks, their codes."""
    found: Array = (field.view(torch.uint8) if str(field.dtype).startswith("torch.float8") else field).numpy()
    return found


def left_states(batch: Any) -> list[tuple[int, int, int]]:
    """Return (row of the batch, position, state row) of each state that the step leaves at a position inside of it."""
    named, positions = batch.checkpoints, batch.positions.numpy()
    rows, tokens, places = (part.numpy() for part in named)
    starts = batch.qo_indptr.numpy()
    if not ((starts[rows] <= tokens) & (tokens < starts[rows + 1] - 1)).all():
        raise WrongBytes(f"states are left after tokens {tokens} of rows {rows}, whose tokens begin at {starts}")
    return [*zip(rows.tolist(), (positions[tokens] + 1).tolist(), places.tolist())]


class StepTexts:
    """The texts of a step's rows: ``counts[i]`` tokens after the committed ones of ``requests[i]``. If ``news[i]`` is
    not empty, these tokens count as written from now on."""

    def __init__(self, requests: list[Request], counts: list[int], news: list[Any]) -> None:
        self.requests = requests
        self.before = [request.length for request in requests]
        self.ends = [before + count for before, count in zip(self.before, counts)]
        for request, new in zip(requests, news):
            if len(new):
                request.write(new)
        self._parts: dict[tuple[int, ...], tuple[Array, Array, Marks]] = {}
        self.marks: list[Marks] = [request.marks(end) for request, end in zip(requests, self.ends)]

    def part(self, firsts: list[int], ends: list[int]) -> tuple[Array, Array, Marks]:
        """Return the rows, positions and marks of tokens ``firsts[i] .. ends[i] - 1`` of each row, concatenated."""
        key = (*firsts, *ends)
        if key not in self._parts:
            rows = np.repeat(np.arange(len(firsts)), [end - first for first, end in zip(firsts, ends)])
            positions = np.concatenate([_UP[first:end] for first, end in zip(firsts, ends)])
            marks = np.concatenate([marks[first:end] for marks, first, end in zip(self.marks, firsts, ends)])
            self._parts[key] = rows, positions, marks
        return self._parts[key]


class Oracle:
    """Fills and compares what the batches of one schema show."""

    def __init__(self, schema: Schema, page_size: int, is_rounded: bool = False) -> None:
        """``is_rounded``: states must be numbers that checkpoints in fewer bytes keep as they are."""
        self._is_rounded = is_rounded
        self._layers, self._size = schema.layers, page_size
        self._by_index = schema.by_index
        self._blocks = {layer.index: self._block_fields(layer) for layer in schema.layers}
        self._states = {layer.index: self._state_fields(layer) for layer in schema.layers}

    def _block_fields(self, layer: Layer) -> list[Field]:
        return [
            Field(field.name, Stamp(layer.index, field.name, field.dtype), rows.tokens_per_row)
            for rows in layer.block_rows()
            for field in rows.fields(self._size // rows.tokens_per_row)
        ]

    def _state_fields(self, layer: Layer) -> list[Field]:
        return [
            Field(
                field.name,
                Stamp(
                    layer.index, field.name, field.dtype,
                    is_rounded=self._is_rounded and field.dtype == "float32",
                ),
                1, rows.count,
                rows.count if kind.state_places() > 1 else max(0, rows.count - (kind.rewinds() or 0)), rows.fill,
                kind.state_places(),
            )
            for kind in layer.kinds
            for rows in kind.state_rows()
            for field in rows.fields(rows.count)
        ]  # fmt: skip

    # -- reading -----------------------------------------------------------------------------------------------------

    def shown(self, batch: Any, step: StepTexts, dialect: str, *, new: bool = False) -> list[Shown]:
        """Return all that the next tokens of the step's rows may read. ``new``: with what the step has just written."""
        found: list[Shown] = []
        places: dict[Growth, tuple[Array, ...]] = {}
        of_row, written = batch.state_indices.numpy(), batch.state_writes.numpy()
        for layer in self._layers:
            owner = self._by_index[layer.owner]
            view = batch.layer(layer.index)
            growth = owner.growth
            if growth is not None:
                if growth not in places:
                    places[growth] = self._places(view, growth, step, dialect, new)
                for field in self._blocks[owner.index]:
                    found.append(
                        self._rows(f"layer {layer.index} {field.name} by {dialect}", view, field, places[growth])
                    )
            if layer is owner:
                for field in self._states[owner.index]:
                    what, array = f"layer {layer.index} state {field.name}", _array(view[field.name])
                    if field.places == 1:
                        found += self._state(what, array, of_row, field, step, new)
                    elif new:
                        rows, positions, marks, at = self._left(field, step)
                        expected = field.stamp(marks)
                        found.append(Shown(what, array, written[rows, at], at * 0, expected, rows, positions))
                    else:
                        lengths = np.array(step.before)
                        found.append(self._after(what, array, field, step.marks, of_row[: len(lengths)], lengths))
        return found

    def older(self, cache: Any, requests: list[Request], firsts: list[int], places: list[Array]) -> list[Shown]:
        """Return the states of ``requests[i]`` after each of ``firsts[i]`` tokens to those that it has committed, which
        lie in ``places[i]`` in turn."""
        if not any(field.places > 1 for fields in self._states.values() for field in fields):
            return []
        rows = np.concatenate(
            [np.full(one.length + 1 - first, i) for i, (one, first) in enumerate(zip(requests, firsts))]
        )
        lengths = np.concatenate([_UP[first : one.length + 1] for one, first in zip(requests, firsts)])
        at = np.array([places[row][length % len(places[row])] for row, length in zip(rows, lengths)])
        marks = [requests[row].marks(requests[row].length) for row in rows]
        return [
            self._after(
                f"layer {index} older state {field.name}", _array(view[field.name]), field, marks, at, lengths, rows
            )
            for index, fields in self._states.items()
            if any(field.places > 1 for field in fields)
            for view in [cache.layer(index)]
            for field in fields
        ]

    @staticmethod
    def _after(
        what: str, array: Array, field: Field, marks: list[Marks], at: Array, lengths: Array, rows: Array | None = None
    ) -> Shown:
        """Return the states in records ``at`` of a field, those after ``lengths[i]`` tokens of the text of ``marks[i]``."""
        last = np.array([own[length - 1] if length else 0 for own, length in zip(marks, lengths)], np.uint64)
        expected = np.where(lengths > 0, field.stamp(last), np.array(field.fill, array.dtype))
        rows = np.arange(len(lengths)) if rows is None else rows
        return Shown(what, array, at, at * 0, expected, rows, lengths - 1)

    @staticmethod
    def _left(field: Field, step: StepTexts) -> tuple[Array, Array, Marks, Array]:
        """Return the tokens after which the step leaves states: rows, positions, marks, and columns of
        ``state_writes``."""
        firsts = [max(before, end - field.places) for before, end in zip(step.before, step.ends)]
        rows, positions, marks = step.part(firsts, step.ends)
        return rows, positions, marks, positions - np.array(firsts)[rows]

    def _places(self, view: Any, growth: Growth, step: StepTexts, dialect: str, new: bool) -> tuple[Array, ...]:
        """Return (blocks, rows of the batch, positions, marks) of the tokens that the step reads in one group."""
        ends = step.ends if new else step.before
        firsts = [min(int(growth.first_needed(before)), end) for before, end in zip(step.before, ends)]
        rows, positions, marks = step.part(firsts, ends)
        if dialect == FLASH_ATTENTION:
            blocks = view.block_table.numpy()[rows, positions // self._size]
        else:
            starts, indptr = view.kv_start.numpy(), view.kv_indptr.numpy()
            blocks = view.kv_indices.numpy()[indptr[rows] + (positions - starts[rows]) // self._size]
        return blocks, rows, positions, marks

    def _rows(self, what: str, view: Any, field: Field, places: tuple[Array, ...]) -> Shown:
        per = field.tokens_per_row
        if per > 1:
            whole = (places[2] + 1) % per == 0
            places = tuple(column[whole] for column in places)
        blocks, rows, positions, marks = places
        return Shown(
            what, _array(view[field.name]), blocks, positions % self._size // per, field.stamp(marks), rows, positions
        )

    def _state(self, what: str, array: Array, of_row: Array, field: Field, step: StepTexts, new: bool) -> list[Shown]:
        ends = step.ends if new else step.before
        firsts = [max(0, end - (field.count if new else field.kept)) for end in ends]
        if new:
            firsts = [max(first, before) for first, before in zip(firsts, step.before)]
        rows, positions, marks = step.part(firsts, ends)
        shown = [Shown(what, array, of_row[rows], positions % field.count, field.stamp(marks), rows, positions)]
        blank = [i for i, request in enumerate(step.requests) if request.is_blank and not new]
        if blank:
            rows, inner = np.repeat(blank, field.count), np.tile(np.arange(field.count), len(blank))
            fill = np.full(len(rows), field.fill, array.dtype)
            shown.append(Shown(f"{what} at first", array, of_row[rows], inner, fill, rows, inner))
        return shown

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, batch: Any, step: StepTexts) -> None:
        """Write the rows and states of the step's new tokens, and 77 where padded rows write."""
        _, positions, marks = step.part(step.before, step.ends)
        of_row, num_padded = batch.state_indices.numpy(), len(batch.state_indices) - len(step.before)
        written = batch.state_writes.numpy()
        for layer in self._layers:
            if layer.owner != layer.index:
                continue
            view = batch.layer(layer.index)
            if layer.growth is not None:
                where = view.slot_mapping.numpy()
                for field in self._blocks[layer.index]:
                    array, per = _array(view[field.name]), field.tokens_per_row
                    at, own = where[: len(positions)], marks
                    if per > 1:
                        whole = (positions + 1) % per == 0
                        at, own = at[whole], marks[whole]
                    self._put(array, at // self._size, at % self._size // per, field.stamp(own))
                    if num_padded:
                        array[where[len(positions) :] // self._size] = 77
            for field in self._states[layer.index]:
                array = _array(view[field.name])
                for row, position, place in left_states(batch):
                    newest = _UP[max(0, position - field.count) : position]
                    array[place] = field.fill
                    self._put(
                        array, np.full(len(newest), place), newest % field.count, field.stamp(step.marks[row][newest])
                    )
                if field.places > 1:
                    rows, _, state_marks, at = self._left(field, step)
                    self._put(array, written[rows, at], at * 0, field.stamp(state_marks))
                    if num_padded:
                        array[written[len(step.before) :]] = 77
                    continue
                firsts = [max(before, end - field.count) for before, end in zip(step.before, step.ends)]
                newest, at, state_marks = step.part(firsts, step.ends)
                self._put(array, of_row[newest], at % field.count, field.stamp(state_marks))
                if num_padded:
                    array[of_row[len(step.before) :]] = 77

    def write_optional(self, batch: Any, request: Request, first: int) -> None:
        """Write the rows of tokens ``first ..`` of ``request`` that its optional groups lack: ``batch`` is of these."""
        positions, marks = _UP[first : request.length], request.marks(request.length)[first:]
        for layer in self._layers:
            if layer.owner == layer.index and layer.growth is not None and layer.growth.is_optional:
                view = batch.layer(layer.index)
                where = view.slot_mapping.numpy()
                for field in self._blocks[layer.index]:
                    assert field.tokens_per_row == 1 and len(where) == len(positions)
                    self._put(view[field.name].numpy(), where // self._size, where % self._size, field.stamp(marks))

    @staticmethod
    def _put(array: Array, first: Array, second: Array, values: Array) -> None:
        array[first, second] = values.reshape(len(values), *(1,) * (array.ndim - 2))

    # -- what index arrays say ---------------------------------------------------------------------------------------

    def check_arrays(self, batch: Any, step: StepTexts, num_rows: int) -> None:
        """Compare the index arrays of all groups with the lengths and with each other. Raises WrongBytes."""
        padding = num_rows - len(step.before)
        rows, positions, _ = step.part(step.before, step.ends)
        num_padded = len(batch.positions) - len(rows)
        counts = [end - before for before, end in zip(step.before, step.ends)] + [
            num_padded // max(1, padding)
        ] * padding
        _same("qo_indptr", batch.qo_indptr, np.cumsum([0, *counts]))
        _same("positions", batch.positions, [*positions, *[0] * num_padded])
        states = batch.state_indices.numpy()
        _same("state_indices of padded rows", batch.state_indices[len(step.before) :], [0] * padding)
        if any(self._states.values()) and len({*states[: len(step.before)].tolist()} - {0}) < len(step.before):
            raise WrongBytes(f"two requests share a state row, or have the padding's: {states.tolist()}")
        self._check_writes(batch, states, step)
        seen: set[Growth] = set()
        for layer in self._layers:
            if layer.growth is None or layer.growth in seen:
                continue
            seen.add(layer.growth)
            view, size = batch.layer(layer.index), self._size
            _same("cache_seqlens", view.cache_seqlens, step.ends + [0] * padding)
            _same("kv_last_page_len", view.kv_last_page_len, [(e - 1) % size + 1 for e in step.ends] + [0] * padding)
            blocks = view.block_table.numpy()[rows, positions // size]
            _same(
                "slot_mapping",
                view.slot_mapping,
                [*(blocks.astype(np.int64) * size + positions % size), *[0] * num_padded],
            )
            columns = [-(-end // size) for end in step.ends]
            starts = view.kv_start.numpy()[: len(columns)] // size
            _same("kv_indptr", view.kv_indptr, np.cumsum([0, *(np.array(columns) - starts), *[0] * padding]))
            if len({*view.slot_mapping.numpy()[: len(rows)].tolist()}) < len(rows):
                raise WrongBytes("two new tokens go to the same place")

    def _check_writes(self, batch: Any, states: Array, step: StepTexts) -> None:
        """Compare ``state_writes`` with ``state_indices``: a row has as many records as places, one of which it reads."""
        written, n = batch.state_writes.numpy(), len(step.before)
        places = max([field.places for fields in self._states.values() for field in fields], default=1)
        if written.shape != (len(states), places) or written[n:].any():
            raise WrongBytes(f"state_writes of {n} rows with {places} places are {written.tolist()}")
        if any(self._states.values()) and len({*written[:n].flatten().tolist()} - {0}) < n * places:
            raise WrongBytes(f"two requests write one state, or the padding's: {written.tolist()}")
        for row, (before, end) in enumerate(zip(step.before, step.ends)):
            if states[row] not in written[row] or (end - before <= places and written[row, -1] != states[row]):
                raise WrongBytes(f"row {row} reads state {states[row]}, and writes {written[row].tolist()}")


def _same(what: str, found: Any, expected: Any) -> None:
    if found.tolist() != np.asarray(expected).tolist():
        raise WrongBytes(f"{what} is {found.tolist()}, not {np.asarray(expected).tolist()}")
