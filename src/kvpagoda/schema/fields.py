"""What a layer keeps, as data: its rows, the encoding of each row, and how the rows grow with the request.

``Rows`` describes what is kept ("one K row of 8 heads by 128 elements for each token, bfloat16"). Its ``Encoding``
describes how one row is stored in memory. ``Rows.fields()`` lists the arrays that a pool must allocate for the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from kvpagoda.errors import SchemaError, unknown_name
from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.units import ceil_div

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""dtype name -> bytes of one element, for every dtype that a field may have."""


def dtype_name(dtype: object) -> str:
    """Return the name of ``dtype``: a name ("bfloat16"), or a dtype of torch or numpy. Raises SchemaError, which lists the
    known names."""
    is_dtype = type(dtype).__module__.partition(".")[0] in ("torch", "numpy")
    name = str(dtype).removeprefix("torch.") if is_dtype or isinstance(dtype, str) else None
    if name not in ITEMSIZE:
        raise unknown_name("dtype", dtype, ITEMSIZE, SchemaError)
    return name


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of ``dtype`` ("bfloat16"). Raises SchemaError, which lists the known names."""
    if dtype not in ITEMSIZE:
        raise unknown_name("dtype", dtype, ITEMSIZE, SchemaError)
    return ITEMSIZE[dtype]


@dataclass(frozen=True)
class Field:
    """One array of a record.

    Args:
        name: of the rows and the part of their encoding.
        count: rows.
        shape: of a row.
        dtype: of its elements.
        fill: what a reset writes.
        may_fill: whether a sound row may have all bits set, as integers that are not codes: -1, or the most. Of floats these
            are NaN, and of codes no row is made.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    fill: float = 0.0
    may_fill: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of this field in one record, without padding."""
        return self.count * math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Rows:
    """Rows of one shape and dtype that a layer keeps, for example its K rows.

    In a block there is one row for every ``tokens_per_row`` tokens. In a state there are ``count`` rows per request,
    which ``reset`` sets to ``fill``.

    Args:
        name: in layouts, pools and kernels.
        shape: of a row.
        dtype: of its elements.
        encoding: how a row is stored.
        tokens_per_row: tokens of a row in a block.
        count: rows of a state.
        fill: to which a reset sets a state.
        heads: the runs of heads on the first axis, each (number of heads, elements of that axis per head). Tensor
            parallelism divides each run separately, because a run of few heads is replicated while another is divided.
            Without ``heads`` every rank keeps the whole row.
        page: an expression of ``kvpagoda.layouts.pages`` for the place of these rows in a page. Rows of a layer with
            the same expression share the page; "" means a dense page of their own.
        axes: the names of ``shape``'s axes in the expression.

    Examples:
        >>> latent = Rows("latent", (1, 512), "bfloat16")
        >>> latent.row_nbytes, [field.nbytes for field in latent.fields(16)]
        (1024, [16384])
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding = RAW
    tokens_per_row: int = 1
    count: int = 1
    fill: float = 0.0
    heads: tuple[tuple[int, int], ...] = ()
    page: str = ""
    axes: tuple[str, ...] = ()

    def fields(self, count: int) -> tuple[Field, ...]:
        """Return the arrays that store some of these rows, one for each part of the encoding.

        Args:
            count: rows.
        """
        is_integer = self.encoding.name == "raw" and "float" not in self.dtype
        return tuple(
            Field(self.name + suffix, count, shape, dtype, self.fill, is_integer)
            for suffix, shape, dtype in self.encoding.parts(self.shape, self.dtype)
        )

    @property
    def row_nbytes(self) -> int:
        """Bytes of one encoded row, without padding."""
        return sum(field.nbytes for field in self.fields(1))


WHOLE_TEXT = 2**40
"""Block size, in tokens, of a state: one block for a whole request, so more tokens than any request has."""


@dataclass(frozen=True)
class FullSpec:
    """The next token reads every token before it."""


@dataclass(frozen=True)
class WindowSpec:
    """The next token reads the last ``window`` tokens, itself included, or those of its ``chunk``, or all (None and None: an
    optional group alone). ``slack``, ``is_optional``: see ``Growth``."""

    window: int | None
    chunk: int | None
    slack: int
    is_optional: bool


@dataclass(frozen=True)
class StateSpec:
    """One state of all tokens together, which a step overwrites, in ``places`` blocks in turn."""

    places: int


@dataclass(frozen=True)
class CopySpec:
    """Copies of states in another encoding, one for each checkpoint; requests hold none."""


Spec = FullSpec | WindowSpec | StateSpec | CopySpec
"""What a kind of layers keeps: each has its own class in the cache."""


@dataclass(frozen=True)
class Growth:
    """Which cached tokens the next token of a request reads: all, the last ``window``, or those of its ``chunk``.

    A *state* does not grow: it is one block of ``WHOLE_TEXT`` tokens, which every step overwrites. With ``slack`` it is
    ``slack + 1`` such blocks, its *places*: the state after ``n`` tokens is in place ``n % places``, so that the states
    after each of the last ``slack + 1`` lengths are there, and a rewind chooses another place.

    Args:
        window: the last tokens that are read; None: no window.
        chunk: tokens of a chunk; None: no chunks.
        is_state: a state, which does not grow.
        slack: how many of the newest tokens a rewind may remove. Blocks are kept for ``slack`` tokens more than the
            window, so that the window is still complete after such a rewind.
        is_optional: a request can go on without these rows, because whoever reads them can compute them again. So a hit
            never ends earlier for lack of them, no checkpoint keeps them, and what no request reads is evicted before
            all else.
        is_at_rest: copies of states in another encoding; requests hold none, checkpoints one each.

    Examples:
        >>> window = Growth(window=4)
        >>> window.name, window.first_needed(10), window.most_blocks(block_size=16, step=512)
        ('window(4)', 7, 34)
        >>> state = Growth(is_state=True, slack=3)
        >>> state.places, state.most_blocks(WHOLE_TEXT, step=512), state.checkpoint_blocks(WHOLE_TEXT)
        (4, 4, 1)
    """

    window: int | None = None
    chunk: int | None = None
    is_state: bool = False
    slack: int = 0
    is_optional: bool = field(default=False, repr=False)
    is_at_rest: bool = field(default=False, repr=False)

    @property
    def spec(self) -> Spec:
        """The kind, with its own numbers."""
        if self.is_state:
            return CopySpec() if self.is_at_rest else StateSpec(self.places)
        if self.span is None and not self.is_optional:
            return FullSpec()
        return WindowSpec(self.window, self.chunk, self.slack, self.is_optional)

    @property
    def name(self) -> str:
        """``full``, ``window(1024)``, ``chunk(8192)`` or ``state``; with ``optional`` before it if it is."""
        if self.is_optional:
            return f"optional {replace(self, is_optional=False).name}"
        if self.is_state:
            return "checkpoint" if self.is_at_rest else "state"
        if self.window is not None:
            return f"window({self.window})"
        return "full" if self.chunk is None else f"chunk({self.chunk})"

    @property
    def word(self) -> str:
        """``full``, ``window``, ``chunk`` or ``state``: the name without its number."""
        return self.name.partition("(")[0]

    def first_needed(self, position: Any) -> Any:
        """Return the lowest position that a token reads; lower ones may be freed.

        Args:
            position: of the token: an int or an array.
        """
        if self.window is not None:
            first = position - self.window + 1
            return first * (first > 0)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def first_kept(self, length: Any) -> Any:
        """Return the lowest position that is kept after some tokens are written.

        Args:
            length: how many: an int or an array.
        """
        position = length - self.slack
        return self.first_needed(position * (position > 0))

    def reads(self, query: Any, key: Any) -> Any:
        """Return whether a token reads a row.

        Args:
            query: position of the token: an int or an array.
            key: position of the row: an int or an array.
        """
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    @property
    def span(self) -> int | None:
        """The most tokens that one token reads, itself included; None if there is no bound."""
        return self.window if self.window is not None else self.chunk

    @property
    def is_bounded(self) -> bool:
        """Whether a text may be cached without all of these blocks: they slide out, are copied or are optional."""
        return self != FULL

    @property
    def places(self) -> int:
        """How many blocks the states of one request have in turn; 1 for what is no state."""
        if self.is_at_rest:
            return 0
        return 1 + self.slack if self.is_state else 1

    def most_blocks(self, block_size: int, step: int) -> int | None:
        """Return the most blocks that a request holds; None: no bound.

        Args:
            block_size: tokens of a block.
            step: tokens that are written at once.
        """
        if self.is_state:
            return self.places
        return None if self.span is None else ceil_div(self.span - 1 + self.slack + step, block_size) + 1

    def checkpoint_blocks(self, block_size: int) -> int | None:
        """Return the most blocks that a checkpoint keeps: one state, or a whole window; None: no bound.

        Args:
            block_size: tokens of a block.
        """
        return 1 if self.is_state else self.most_blocks(block_size, 1)


FULL = Growth()
STATE = Growth(is_state=True)
CHECKPOINT = Growth(is_state=True, is_at_rest=True)
