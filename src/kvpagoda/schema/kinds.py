"""The layer kinds. Each is frozen data that answers five questions; to add one, add a class here.

    growth()      how its block rows grow with the text (None: it has none)
    block_rows()  what it keeps for every token, or every few tokens
    state_rows()  what it keeps once per request
    rewinds()     how many of the newest tokens it can take back (None: any number)
    split(ways)   the same kind on one of ``ways`` tensor-parallel ranks

A layer is a tuple of kinds: most layers have one, a layer with attention and a state beside it has two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from kvpagoda.errors import SchemaError
from kvpagoda.schema.fields import FULL, RAW, Encoding, Growth, Rows
from kvpagoda.units import ceil_div


class LayerKind(Protocol):
    """What the rest of the library needs to know about a layer. Implementations are frozen dataclasses."""

    def growth(self) -> Growth | None: ...

    def block_rows(self) -> tuple[Rows, ...]: ...

    def state_rows(self) -> tuple[Rows, ...]: ...

    def rewinds(self) -> int | None: ...

    def split(self, ways: int) -> LayerKind: ...


def split_count(what: str, count: int, ways: int) -> int:
    """``count`` heads or channels over ``ways`` ranks; fewer heads than ranks are replicated. Raises SchemaError."""
    if count % ways and ways % count:
        raise SchemaError(f"{count} {what} cannot be divided over {ways} tensor-parallel ranks")
    return max(1, count // ways)


@dataclass(frozen=True)
class Attention:
    """K and V rows of every token: full, sliding window or chunked, by ``law``. ``num_kv_heads`` of K and of V,
    ``k_dim`` and ``v_dim`` elements each."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    law: Growth = FULL
    encoding: Encoding = RAW

    def growth(self) -> Growth:
        return self.law

    def block_rows(self) -> tuple[Rows, ...]:
        return (
            Rows("k", (self.num_kv_heads, self.k_dim), self.dtype, self.encoding, split_axis=0),
            Rows("v", (self.num_kv_heads, self.v_dim), self.dtype, self.encoding, split_axis=0),
        )

    def state_rows(self) -> tuple[Rows, ...]:
        return ()

    def rewinds(self) -> None:
        return None

    def split(self, ways: int) -> Attention:
        return replace(self, num_kv_heads=split_count("KV heads", self.num_kv_heads, ways))


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one compressed row and one RoPE key for every token, with an indexer key where the
    model selects tokens (``index_dim``). The latent is shared by all heads, so every tensor-parallel rank keeps it."""

    latent_dim: int
    rope_dim: int
    dtype: str
    law: Growth = FULL
    encoding: Encoding = RAW
    index_dim: int | None = None
    index_encoding: Encoding = RAW

    def growth(self) -> Growth:
        return self.law

    def block_rows(self) -> tuple[Rows, ...]:
        rows = (
            Rows("latent", (1, self.latent_dim), self.dtype, self.encoding),
            Rows("k_rope", (1, self.rope_dim), self.dtype),
        )
        if self.index_dim is None:
            return rows
        return (*rows, Rows("index_key", (self.index_dim,), self.dtype, self.index_encoding))

    def state_rows(self) -> tuple[Rows, ...]:
        return ()

    def rewinds(self) -> None:
        return None

    def split(self, ways: int) -> Latent:
        return self


@dataclass(frozen=True)
class Recurrent:
    """State tensors of fixed size: convolution tails, recurrent matrices, any number of either."""

    states: tuple[Rows, ...]

    def growth(self) -> None:
        return None

    def block_rows(self) -> tuple[Rows, ...]:
        return ()

    def state_rows(self) -> tuple[Rows, ...]:
        return self.states

    def rewinds(self) -> int:
        return 0

    def split(self, ways: int) -> Recurrent:
        def one(rows: Rows) -> Rows:
            if rows.split_axis is None:
                return rows
            shape = list(rows.shape)
            what = f"channels of {rows.name!r}"
            parts = rows.split_parts or ((shape[rows.split_axis], 1),)
            parts = tuple((split_count(what, heads, ways), width) for heads, width in parts)
            shape[rows.split_axis] = sum(heads * width for heads, width in parts)
            return replace(rows, shape=tuple(shape), split_parts=parts if rows.split_parts else ())

        return Recurrent(tuple(one(rows) for rows in self.states))


@dataclass(frozen=True)
class Shared:
    """A layer that reads what layer ``owner`` wrote and keeps nothing itself."""

    owner: int

    def growth(self) -> None:
        return None

    def block_rows(self) -> tuple[Rows, ...]:
        return ()

    def state_rows(self) -> tuple[Rows, ...]:
        return ()

    def rewinds(self) -> None:
        return None

    def split(self, ways: int) -> Shared:
        return self


@dataclass(frozen=True)
class Compressed:
    """DeepSeek-V4 attention: a ring of the last ``window`` raw rows, and, for ``ratio`` > 0, one compressed entry for
    every ``ratio`` tokens. With ``overlap`` each entry also takes in the window before it, through a second stream;
    with ``index_dim`` an indexer keeps a smaller compressor of its own (arXiv 2606.19348, sections 2.3.1 and 2.3.2).

    State of one request, every ring addressed by position modulo its number of rows:

        swa        [window+v]  the raw K = V rows, RoPE dims last     swa_pos [window+v]  their positions, -1 = never
        tail_ka/za [ratio-1+v] key and score of tokens whose window is still open; stream a feeds the *next* entry,
        tail_kb/zb [ratio-1+v] stream b the *current* one (without overlap there is one stream, called a)
        overlap_k/z [ratio*c]  stream a of the last c closed windows; scores are kept with their position bias added
        idx_...                the same for the indexer             num_entries [1]  entries of the tokens so far

    v = ``verify_width`` tokens can be taken back (speculative decoding): what they pushed out of a ring of the least
    size is still there, and c = 1 + ceil(v / ratio) windows, for some of those closed may be taken back too.
    """

    dim: int
    window: int
    dtype: str
    ratio: int = 0
    overlap: bool = False
    index_dim: int | None = None
    encoding: Encoding = RAW
    index_encoding: Encoding = RAW
    tail_dtype: str = "float32"
    verify_width: int = 0

    def growth(self) -> Growth | None:
        return FULL if self.ratio else None

    def block_rows(self) -> tuple[Rows, ...]:
        if not self.ratio:
            return ()
        rows = [Rows("entries", (self.dim,), self.dtype, self.encoding, tokens_per_row=self.ratio)]
        if self.index_dim is not None:
            keys = Rows("indexer_keys", (self.index_dim,), self.dtype, self.index_encoding, tokens_per_row=self.ratio)
            rows.append(keys)
        return tuple(rows)

    def state_rows(self) -> tuple[Rows, ...]:
        rows = [
            Rows("swa", (self.dim,), self.dtype, self.encoding, count=self.window + self.verify_width),
            Rows("swa_pos", (), "int32", count=self.window + self.verify_width, fill=-1),
        ]
        if self.ratio:
            rows += self._tail("", self.dim)
            rows.append(Rows("num_entries", (), "int32"))
        if self.index_dim is not None:
            rows += self._tail("idx_", self.index_dim)
        return tuple(rows)

    def _tail(self, prefix: str, dim: int) -> list[Rows]:
        streams = ("ka", "za", "kb", "zb") if self.overlap else ("ka", "za")
        count = self.ratio - 1 + self.verify_width
        rows = [Rows(f"{prefix}tail_{s}", (dim,), self.tail_dtype, count=count) for s in streams]
        if self.overlap:
            count = self.ratio * (1 + ceil_div(self.verify_width, self.ratio))
            rows += [Rows(f"{prefix}overlap_{s}", (dim,), self.tail_dtype, count=count) for s in ("k", "z")]
        return rows

    def rewinds(self) -> int:
        return self.verify_width

    def split(self, ways: int) -> Compressed:
        return self
