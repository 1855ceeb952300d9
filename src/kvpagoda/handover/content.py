"""What a rank's blocks contain, as plain data: where each field lies in a record, and which heads of it the rank has.

Two caches can hand requests over if their *content* is equal: layers, rows, dtypes, encodings, growth laws. Where the fields
lie (page size, layout, order, padding), and how many ranks share the heads, may differ. An optional group, whose rows a
request can do without, has a content of its own: it goes along where both sides have it.

    runs of a field    (axis, ((heads of this rank, elements of each), ..))      None: every rank has all of it
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from kvpagoda.errors import TicketRefused
from kvpagoda.schema import Plan, Schema
from kvpagoda.schema.fields import Rows
from kvpagoda.units import whole_number

Runs = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class FieldPlace:
    """One field of one layer in the records of a group: its first byte, its strides in bytes (row to row, then along each
    axis of ``shape``), and the ``runs`` of heads on one of these axes."""

    layer: int
    name: str
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    runs: Runs | None

    def is_like(self, other: FieldPlace) -> bool:
        """Return whether a row has the same axes and elements as one of ``other``, whatever the number of heads."""
        at = -1 if other.runs is None else other.runs[0]
        if (self.itemsize, len(self.shape), self.runs is None) != (
            other.itemsize,
            len(other.shape),
            other.runs is None,
        ):
            return False
        if any(a != b for axis, (a, b) in enumerate(zip(self.shape, other.shape)) if axis != at):
            return False
        if self.runs is None or other.runs is None:
            return True
        widths = [[width for _, width in runs[1]] for runs in (self.runs, other.runs)]
        sizes = sum(heads * width for heads, width in self.runs[1])
        return self.runs[0] == at and widths[0] == widths[1] and sizes == self.shape[at] and min(self.runs[1])[0] > 0

    def is_inside(self, rows: int, nbytes: int) -> bool:
        """Return whether ``rows`` rows lie within the first ``nbytes`` bytes."""
        if rows < 1 or self.offset < 0 or len(self.strides) != 1 + len(self.shape) or min(self.strides) < 0:
            return False
        last = sum((size - 1) * step for size, step in zip((rows, *self.shape), self.strides))
        return self.offset + last + self.itemsize <= nbytes


@dataclass(frozen=True)
class GroupPlace:
    """The records of one group: ``tokens`` of a block (0: a state), bytes of a record, and its ``pages`` equal kernel
    pages, each with the ``fields``, of which field i has ``rows[i]`` rows. ``content``: what these rows are, as of a cache in
    ``content_of``."""

    name: str
    content: str
    tokens: int
    nbytes: int
    pages: int
    rows: tuple[int, ...]
    fields: tuple[FieldPlace, ...]

    def to_json(self) -> list[Any]:
        """Return it as lists, numbers and text."""
        fields = [[f.layer, f.name, f.offset, f.strides, f.shape, f.itemsize, f.runs] for f in self.fields]
        return [self.name, self.content, self.tokens, self.nbytes, self.pages, self.rows, fields]

    @classmethod
    def from_json(cls, data: Any) -> GroupPlace:
        """Return what ``to_json`` wrote. Raises ValueError, TypeError or IndexError for anything else, and for fields that
        lie outside of their pages."""
        name, content, tokens, nbytes, pages, rows, fields = data
        fields = tuple(
            FieldPlace(
                _int(layer), str(field), _int(offset), _ints(strides), _ints(shape), _int(itemsize),
                None if runs is None else (_int(runs[0]), tuple((_int(n), _int(width)) for n, width in runs[1])),
            )
            for layer, field, offset, strides, shape, itemsize, runs in fields
        )  # fmt: skip
        group = cls(str(name), str(content), _int(tokens), _int(nbytes), _int(pages), _ints(rows), fields)
        if group.pages < 1 or len(group.rows) != len(fields) or group.nbytes % group.pages:
            raise ValueError(f"{group.nbytes} bytes are not {group.pages} pages of {len(fields)} fields")
        for count, one in zip(group.rows, fields):
            if not one.is_inside(count, group.nbytes // group.pages):
                raise ValueError(f"layer {one.layer} {one.name!r} lies outside of a page of group {group.name!r}")
        return group

    def differs_from(self, other: GroupPlace) -> str:
        """Return why records of ``other`` cannot be recut into these, in words; "" if they can. Names the first field."""
        if (self.name, self.content, bool(self.tokens)) != (other.name, other.content, bool(other.tokens)):
            return f"it has other rows, of {other.name!r}"
        theirs = {(field.layer, field.name): (rows, field) for rows, field in zip(other.rows, other.fields)}
        for rows, field in zip(self.rows, self.fields):
            known, found = theirs.get((field.layer, field.name), (0, None))
            if found is None or not found.is_like(field):
                return f"layer {field.layer} {field.name!r} is missing, or has another shape"
            if (
                known != rows
                if not self.tokens
                else self.tokens * known * other.pages != other.tokens * rows * self.pages
            ):
                return f"layer {field.layer} {field.name!r} has {known} rows a page of {other.tokens} tokens"
        return ""


def _int(value: Any) -> int:
    return whole_number(value, "a number of a ticket")


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(_int, values))


def content_of(schema: Schema, block_size: int) -> str:
    """Return 16 bytes of BLAKE2b, in hex, over what the layers of ``schema`` keep that are not optional, whatever the layout
    and the number of ranks, and how far a window or a state can go back (``slack``): equal for caches that can hand requests
    over. With an encoder also over ``block_size``: the decoder's text begins at a whole block."""
    kept = (layer for layer in schema.layers if not (layer.growth and layer.growth.is_optional))
    rows = [
        (layer.index, layer.growth and replace(layer.growth, slack=0), [_whole(one) for one in layer.block_rows()],
         [_whole(one) for one in layer.state_rows()])
        for layer in kept
    ]  # fmt: skip
    whole = [] if schema.encoder_positions is None else [block_size]
    return _digest([rows, replace(schema.state_growth, slack=0), *whole])


def _digest(content: Any) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def _whole(rows: Rows) -> tuple[Any, ...]:
    """Return what ``rows`` are without the number of heads that this rank has."""
    runs, shape = _runs(rows, rows.shape), list(rows.shape)
    if runs is not None:
        shape[runs[0]] = -1
    widths = None if runs is None else [width for _, width in runs[1]]
    return rows.name, shape, widths, rows.dtype, rows.encoding, rows.tokens_per_row, rows.count, rows.fill


def _runs(rows: Rows, shape: tuple[int, ...]) -> Runs | None:
    """Return the runs of heads of ``rows`` on the axes of ``shape``, of the rows or of a part of their encoding. In packed
    rows of heads these are the last axis but one."""
    if rows.heads:
        return 0, rows.heads
    if rows.encoding.is_packed and len(shape) >= 2:
        return len(shape) - 2, ((shape[-2], 1),)
    return None


def places_of(schema: Schema, plan: Plan) -> tuple[GroupPlace, ...]:
    """Return where the fields of each group of ``plan`` lie in its records, less the group of checkpoints at rest (the last),
    of which requests hold nothing. O(fields)."""
    of_rows = {(layer.index, rows.name + suffix): rows
               for layer in schema.layers for rows in layer.rows()
               for suffix, _, _ in rows.encoding.parts(rows.shape, rows.dtype)}  # fmt: skip
    groups = []
    for group in (group for group in plan.groups if not group.growth.is_at_rest):
        fields, counts, content = [], [], set()
        for place in group.layout.places:
            field, rows = place.field, of_rows[place.layer, place.field.name]
            itemsize = place.nbytes // max(1, field.count * _product(field.shape))
            runs = _runs(rows, field.shape)
            fields.append(FieldPlace(place.layer, field.name, place.offset, place.strides, field.shape, itemsize, runs))
            counts.append(field.count)
            content.add((place.layer, field.name, repr(_whole(rows))))
        tokens = 0 if group.growth.is_state else group.block_size
        nbytes, pages = group.layout.nbytes, group.layout.kernel_pages
        groups.append(
            GroupPlace(group.name, _digest(sorted(content)), tokens, nbytes, pages, tuple(counts), tuple(fields))
        )
    return tuple(groups)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True)
class Piece:
    """Elements ``begin .. begin + count - 1`` of an axis of a field on the target rank, and where they begin on rank
    ``giver`` of the source."""

    giver: int
    source: int
    begin: int
    count: int


def pieces_of(source: FieldPlace, target: FieldPlace, ranks: tuple[int, int], rank: int) -> list[Piece]:
    """Return from which of ``ranks[0]`` source ranks target rank ``rank`` of ``ranks[1]`` takes the heads of a field.

    Heads are divided as ``Schema.split`` says: equal runs, or one head on several ranks if there are fewer. Where all ranks
    have the same, target ranks spread over the sources. Raises TicketRefused if the numbers of heads do not agree."""
    many, ways = ranks
    if source.runs is None or target.runs is None:
        return [Piece(rank * many // ways, 0, 0, 1)]
    found, begins = list[Piece](), [0, 0]
    for (held, width), (wanted, _) in zip(source.runs[1], target.runs[1]):
        heads = held * many if held > 1 else wanted * ways if wanted > 1 else min(many, ways)
        if wanted != max(1, heads // ways) or held != max(1, heads // many) or (heads % ways and ways % heads):
            raise TicketRefused(
                f"layer {target.layer} {target.name!r}: {many} ranks with {held} heads each cannot give {ways} ranks "
                f"{wanted} each; both sides must split one model",
                needed=wanted * ways, available=held * many,
            )  # fmt: skip
        first, done = rank * heads // ways, 0
        while done < wanted:
            giver = (first + done) * many // heads
            inside = first + done - giver * heads // many
            count = min(wanted - done, held - inside)
            found.append(Piece(giver, begins[0] + inside * width, begins[1] + done * width, count * width))
            done += count
        begins[0] += held * width
        begins[1] += wanted * width
    return found
