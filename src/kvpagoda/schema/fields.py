"""What a layer keeps, as data: rows, how each row is encoded, and how the rows of a layer grow with the text.

``Rows`` says what is kept ("one K row of 8 heads by 128 for each token, bfloat16"), its ``Encoding`` how one row lies in
memory, and ``Rows.fields()`` lists the arrays that a pool must have for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvpagoda.errors import SchemaError, unknown_name
from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.layouts.packed_row import PackedRow
from kvpagoda.units import ceil_div

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element of every dtype that a field may have."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype`` ("bfloat16"). Raises SchemaError with the known names."""
    if dtype not in ITEMSIZE:
        raise unknown_name("dtype", dtype, ITEMSIZE, SchemaError)
    return ITEMSIZE[dtype]


@dataclass(frozen=True)
class Field:
    """One array of a record: ``count`` rows of ``shape`` elements each."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of this field in one record, without padding."""
        return self.count * math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Rows:
    """A run of equal rows that a layer keeps.

    In a block there is one row for every ``tokens_per_row`` tokens; in a state there are ``count`` rows a request,
    which ``reset`` sets to ``fill``. ``heads`` are the runs of heads side by side on the first axis, as (number of heads,
    elements of that axis in each): tensor parallelism divides each run for itself, because runs of few heads are
    replicated while others are divided. Without ``heads`` every rank keeps the whole row.

    ``page``: an expression of ``kvpagoda.layouts.pages`` that says how they lie in a page, beside the other rows of the layer
    that name the same one; "": alone and dense. ``axes``: what the expression calls the axes of ``shape``.

    >>> latent = Rows("latent", (1, 512), "bfloat16")
    >>> latent.row_nbytes, [field.nbytes for field in latent.fields(16)]
    (1024, [16384])
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding | PackedRow = RAW
    tokens_per_row: int = 1
    count: int = 1
    fill: float = 0.0
    heads: tuple[tuple[int, int], ...] = ()
    page: str = ""
    axes: tuple[str, ...] = ()

    def fields(self, count: int) -> tuple[Field, ...]:
        """The arrays that ``count`` of these rows take."""
        return tuple(
            Field(self.name + suffix, count, shape, dtype, self.fill)
            for suffix, shape, dtype in self.encoding.parts(self.shape, self.dtype)
        )

    @property
    def row_nbytes(self) -> int:
        """Bytes of one encoded row, without padding."""
        return sum(field.nbytes for field in self.fields(1))


WHOLE_TEXT = 2**40
"""Tokens of a block that holds the state after a whole text: more than any text has."""


@dataclass(frozen=True)
class Growth:
    """Which of a request's tokens its next token still reads: all, the last ``window``, or its own ``chunk``.

    A *state* does not grow: it is one block of ``WHOLE_TEXT`` tokens, which every step overwrites. ``slack``: so many of the
    newest tokens may be taken back, so that the tokens that they pushed out of the window stay until then.

    >>> window = Growth(window=4)
    >>> window.name, window.first_needed(10), window.most_blocks(block_size=16, step=512)
    ('window(4)', 7, 34)
    """

    window: int | None = None
    chunk: int | None = None
    is_state: bool = False
    slack: int = 0

    @property
    def name(self) -> str:
        """``full``, ``window(1024)``, ``chunk(8192)`` or ``state``."""
        if self.is_state:
            return "state"
        if self.window is not None:
            return f"window({self.window})"
        return "full" if self.chunk is None else f"chunk({self.chunk})"

    def first_needed(self, position: Any) -> Any:
        """The lowest position that the token at ``position`` reads; everything below may be freed. An int, or an array."""
        if self.window is not None:
            beyond = position - self.window + 1
            return beyond * (beyond > 0)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def first_kept(self, length: Any) -> Any:
        """The lowest position that is kept when ``length`` tokens are written. An int, or an array."""
        left = length - self.slack
        return self.first_needed(left * (left > 0))

    def reads(self, query: Any, key: Any) -> Any:
        """Whether the token at position ``query`` reads the row at position ``key``: ints, or arrays of them."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    @property
    def span(self) -> int | None:
        """The most tokens that one token reads; None: no bound."""
        return self.window if self.window is not None else self.chunk

    @property
    def is_bounded(self) -> bool:
        """Whether a request holds a bounded number of blocks, however long it is."""
        return self != FULL

    def most_blocks(self, block_size: int, step: int) -> int | None:
        """The most blocks that one request holds while it writes at most ``step`` tokens at a time; None: no bound."""
        if self.is_state:
            return 1
        return None if self.span is None else ceil_div(self.span - 1 + self.slack + step, block_size) + 1


FULL = Growth()
STATE = Growth(is_state=True)
