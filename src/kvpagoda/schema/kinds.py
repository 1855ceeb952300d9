"""The layer kinds: what attention, latent, compressed and recurrent layers keep. To add a kind, add a class here.

Each kind is a frozen dataclass with eight methods:

    growth()        the growth law of its block rows (None: it has no block rows)
    block_rows()    the rows that it keeps for every token, or every few tokens
    state_rows()    the rows that it keeps once per request
    state_places()  how many places a request has for these rows, in turn
    rewinds()       how many of the newest tokens ``rewind`` may remove (None: any number)
    split(ways)     the same kind on one of ``ways`` tensor-parallel ranks
    laid_out(..)    the same kind with its rows in other layouts
    scaled(..)      the same kind with other scales in its encodings

A layer is a tuple of kinds. Most layers have one; a layer that has attention and a state beside it has two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvpagoda.errors import LayoutError, SchemaError
from kvpagoda.formats.encoding import RAW, Encoding
from kvpagoda.layouts.pages import PageChoice, page_choice
from kvpagoda.schema.fields import FULL, Growth, Rows
from kvpagoda.units import ceil_div


class LayerKind(Protocol):
    """The methods that the rest of the library calls on a layer kind. Implementations are frozen dataclasses.

    The methods of this class return what holds for a layer that keeps nothing. A subclass overrides those that differ.
    """

    def growth(self) -> Growth | None:
        """Return the growth law of its block rows; None if it has none."""
        return None

    def block_rows(self) -> tuple[Rows, ...]:
        """Return the rows that it keeps in blocks, for every token or every few tokens."""
        return ()

    def state_rows(self) -> tuple[Rows, ...]:
        """Return the rows that it keeps once per request."""
        return ()

    def state_places(self) -> int:
        """Return how many places a request has for ``state_rows``: 1, which every step overwrites; or ``rewinds() + 1``
        in turn, if a token replaces these rows by new ones and the old ones are needed for a rewind."""
        return 1

    def rewinds(self) -> int | None:
        """Return how many of the newest tokens ``rewind`` may remove; None: any number."""
        return None

    def split(self, ways: int) -> LayerKind:
        """Return this kind on one tensor-parallel rank.

        Args:
            ways: how many ranks there are.

        Raises:
            SchemaError: heads do not divide.
        """
        return self

    def laid_out(self, choices: Choices) -> LayerKind:
        """Return this kind with its rows in other layouts.

        Args:
            choices: kind of rows -> layout.
        """
        return self

    def scaled(self, scales: tuple[float, float]) -> LayerKind:
        """Return this kind with other scales, if its rows have one scale a tensor.

        Args:
            scales: of K and of V.

        Raises:
            SchemaError: a scale is not finite or not above 0.
        """
        return self


Choices = Mapping[str, PageChoice]
"""Kind of rows (``kvpagoda.layouts.pages.KINDS``) -> the named layout chosen for rows of that kind."""


def split_heads(what: str, count: int, ways: int) -> int:
    """Return how many of ``count`` heads or channels each of ``ways`` ranks keeps: 1, replicated, if there are fewer.

    Raises SchemaError, with ``what`` as the name of the heads, if they do not divide evenly.
    """
    if count % ways and ways % count:
        text = f"{count} {what} cannot be divided over {ways} tensor-parallel ranks"
        raise SchemaError(text, field=what, needed=ways, available=count)
    return max(1, count // ways)


@dataclass(frozen=True)
class IndexKeys:
    """The keys of an indexer, which selects the tokens that a layer reads.

    There is one key of ``dim`` elements for each K/V row, latent row or compressed entry.

    Args:
        dim: elements of a key.
        encoding: of the keys.
        dtype: of the keys; "" means the dtype of the layer.
        pool: one key is made of so many tokens. The keys of tokens whose pool is still open are rows ``index_tail`` of
            the request's state, at their position modulo the number of rows.
        parts: how many rows of ``dim`` elements a token has there, for example its key and a gate.
        verify_width: the newest tokens that ``rewind`` may remove, for which there are more of these rows.
        projected: keys of compressed entries are made of the entries themselves, without a compressor of their own.

    Examples:
        >>> Latent(512, 64, "bfloat16", indexer=IndexKeys(128)).block_rows()[-1].shape
        (128,)
        >>> pooled = Latent(512, 0, "bfloat16", indexer=IndexKeys(128, pool=4, parts=2))
        >>> pooled.block_rows()[-1].tokens_per_row, pooled.state_rows()[0].count, pooled.state_rows()[0].shape
        (4, 4, (2, 128))
    """

    dim: int
    encoding: Encoding = RAW
    dtype: str = ""
    pool: int = 1
    parts: int = 1
    verify_width: int = 0
    projected: bool = False

    def row(self, dtype: str) -> Rows:
        """Return the rows that hold the key of each token, or of each pool.

        Args:
            dtype: of the layer.
        """
        return Rows("index_key", (self.dim,), self.dtype or dtype, self.encoding, tokens_per_row=self.pool)

    def tail(self, dtype: str) -> tuple[Rows, ...]:
        """Return the rows of the state that hold the keys of the open pool.

        Args:
            dtype: of the layer.
        """
        if self.pool == 1:
            return ()
        shape = (self.parts, self.dim)
        return (Rows("index_tail", shape, self.dtype or dtype, count=self.pool + self.verify_width),)

    def rewinds(self) -> int | None:
        """Return how many of the newest tokens ``rewind`` may remove; None: any number."""
        return None if self.pool == 1 else self.verify_width

    def laid_out(self, choices: Choices) -> IndexKeys:
        """Return these keys in the layout that is chosen for "indexer" rows, if there is one.

        Args:
            choices: kind of rows -> layout.
        """
        return replace(self, encoding=choices["indexer"].encoding()) if "indexer" in choices else self


@dataclass(frozen=True)
class Attention(LayerKind):
    """Multi-head attention: one K row and one V row for every token.

    Args:
        num_kv_heads: heads of a row.
        k_dim: elements of a head of K.
        v_dim: elements of a head of V.
        dtype: of the rows.
        law: which tokens stay in the cache (all, a sliding window, or a chunk).
        encoding: of K, and of V unless ``v_encoding`` says otherwise.
        num_sinks: how many first tokens of a request stay readable beside the window (arXiv 2309.17453, section 3.2).
            Their rows are written twice: into blocks, and at their own positions into the rows ``sink_k`` and
            ``sink_v`` ``[num_sinks]`` of the request's state. A query reads its window from blocks, and the sinks that
            lie before the window from the state.
        layout: name of the layout of K and V in a page ("": each dense, ``[rows, heads, dim]``). If ``encoding`` is
            packed, both share one row, ``kv`` ``[2, heads, dim]``, and sinks are ``sink_kv``; K and V of different
            widths are packed apart, as rows ``k`` and ``v``.
        indexer: its keys, stored beside K and V, unencoded.
        v_encoding: of V, where it differs from that of K in its scale alone (None: it does not differ).

    Raises:
        SchemaError: sinks without a window.

    Examples:
        >>> layer = Attention(8, 128, 128, "bfloat16", Growth(window=4096))
        >>> [(rows.name, rows.shape, rows.row_nbytes) for rows in layer.block_rows()]
        [('k', (8, 128), 2048), ('v', (8, 128), 2048)]
        >>> layer.split(4).num_kv_heads, layer.split(16).num_kv_heads  # fewer heads than ranks: each rank keeps one
        (2, 1)
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    law: Growth = FULL
    encoding: Encoding = RAW
    num_sinks: int = 0
    layout: str = ""
    indexer: IndexKeys | None = None
    v_encoding: Encoding | None = None

    def __post_init__(self) -> None:
        if self.num_sinks < 0 or (self.num_sinks and self.law.window is None):
            text = f"num_sinks is {self.num_sinks} with {self.law.name}; at least 0, and 0 without a window"
            raise SchemaError(text, field="num_sinks", needed=self.num_sinks)
        if self.v_encoding is not None and replace(self.v_encoding, scale=self.encoding.scale) != self.encoding:
            raise SchemaError(
                f"K is encoded as {self.encoding.name!r} and V as {self.v_encoding.name!r}; they may differ in their scale "
                f"alone",
                needed=self.v_encoding.name, available=self.encoding.name,
            )  # fmt: skip
        if self.layout and not (self.encoding.keeps_shape or self.encoding.is_packed):
            raise SchemaError(
                f"layout {self.layout!r} places raw rows and those with a scale a tensor; {self.encoding.name!r} has codes "
                f"and scales in arrays of their own; choose another kv_format, or no layout",
                needed=self.layout, available=self.encoding.name,
            )  # fmt: skip

    def growth(self) -> Growth:
        return self.law

    def block_rows(self) -> tuple[Rows, ...]:
        return self._rows() if self.indexer is None else (*self._rows(), self.indexer.row(self.dtype))

    def _rows(self) -> tuple[Rows, ...]:
        """Return the rows for K and V, without the indexer's."""
        if self.encoding.is_packed:
            sides: dict[str, tuple[int, ...]] = {"kv": (2, self.num_kv_heads, self.k_dim)}
            if self.k_dim != self.v_dim:
                sides = {"k": (self.num_kv_heads, self.k_dim), "v": (self.num_kv_heads, self.v_dim)}
            return tuple(
                Rows(name, shape, self.dtype, replace(self.encoding, head_dim=shape[-1]))
                for name, shape in sides.items()
            )
        heads, pages = ((self.num_kv_heads, 1),), page_choice(self.layout).pages if self.layout else {}
        return tuple(
            Rows(
                name, (self.num_kv_heads, dim), self.dtype, encoding,
                heads=heads, page=pages.get(name, ""), axes=("H", axis),
            )
            for name, dim, encoding, axis in (
                ("k", self.k_dim, self.encoding, "D"), ("v", self.v_dim, self.v_encoding or self.encoding, "Dv"),
            )
        )  # fmt: skip

    def state_rows(self) -> tuple[Rows, ...]:
        tail = self.indexer.tail(self.dtype) if self.indexer is not None else ()
        if not self.num_sinks:
            return tail
        sinks = (replace(row, name=f"sink_{row.name}", count=self.num_sinks, page="") for row in self._rows())
        return *sinks, *tail

    def rewinds(self) -> int | None:
        return None if self.indexer is None else self.indexer.rewinds()

    def laid_out(self, choices: Choices) -> Attention:
        """Return this kind in another layout. A packed layout decides the encoding too; others keep raw rows and those
        with a scale a tensor as they are encoded.

        Args:
            choices: kind of rows -> layout.

        Raises:
            LayoutError: heads of a width that a packed layout does not hold.
            SchemaError: K and V of different widths in one: its kernels read both from one row.
        """
        laid = replace(self, indexer=self.indexer and self.indexer.laid_out(choices))
        if (choice := choices.get("attention")) is None:
            return laid
        is_packed = choice.format != "raw"
        if not is_packed and not self.encoding.is_packed:
            return replace(laid, layout=choice.name)
        if is_packed and self.k_dim != self.v_dim:
            raise SchemaError(
                f"layout {choice.name!r} has K and V of one width in a row; this layer has K of {self.k_dim} and V of "
                f"{self.v_dim}; leave the layout out, and give the layer the encoding, which packs K and V apart",
                needed=self.k_dim, available=self.v_dim,
            )  # fmt: skip
        return replace(laid, layout=choice.name, encoding=choice.encoding(self.k_dim), v_encoding=None)

    def scaled(self, scales: tuple[float, float]) -> Attention:
        if not self.encoding.is_scaled:
            return self
        k, v = (self.encoding.with_scale(scale) for scale in scales)
        return replace(self, encoding=k, v_encoding=None if k == v else v)

    def split(self, ways: int) -> Attention:
        return replace(self, num_kv_heads=split_heads("KV heads", self.num_kv_heads, ways))


@dataclass(frozen=True)
class Latent(LayerKind):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): one latent row and one RoPE key for every token.

    A model without position embeddings has no RoPE key: ``rope_dim`` is 0. All heads share the latent, so every
    tensor-parallel rank keeps all of it.

    Args:
        latent_dim: elements of the latent.
        rope_dim: elements of the RoPE key.
        dtype: of both.
        law: which tokens stay in the cache.
        encoding: of both.
        indexer: the keys of an indexer, in models that select tokens.
        layout: name of the layout of latent and RoPE key in a page; most kernels read both as one row. If ``encoding``
            is packed, both share one row, ``latent`` ``[1, latent_dim + rope_dim]``.

    Examples:
        >>> layer = Latent(512, 64, "bfloat16")
        >>> [(rows.name, rows.shape, rows.row_nbytes) for rows in layer.block_rows()]
        [('latent', (1, 512), 1024), ('k_rope', (1, 64), 128)]
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    law: Growth = FULL
    encoding: Encoding = RAW
    indexer: IndexKeys | None = None
    layout: str = "flashmla-dense"

    def growth(self) -> Growth:
        return self.law

    def block_rows(self) -> tuple[Rows, ...]:
        rows: tuple[Rows, ...]
        if self.encoding.is_packed:
            rows = (Rows("latent", (1, self.latent_dim + self.rope_dim), self.dtype, self.encoding),)
        else:
            pages = page_choice(self.layout).pages if self.encoding == RAW else {}
            rows = tuple(
                Rows(name, (1, dim), self.dtype, encoding, page=pages.get(name, ""), axes=("", f"{name}.0"))
                for name, dim, encoding in (("latent", self.latent_dim, self.encoding), ("k_rope", self.rope_dim, RAW))
                if dim
            )
        if self.indexer is None:
            return rows
        return (*rows, self.indexer.row(self.dtype))

    def state_rows(self) -> tuple[Rows, ...]:
        return () if self.indexer is None else self.indexer.tail(self.dtype)

    def rewinds(self) -> int | None:
        return None if self.indexer is None else self.indexer.rewinds()

    def laid_out(self, choices: Choices) -> Latent:
        """Return this kind in another layout.

        Args:
            choices: kind of rows -> layout.

        Raises:
            LayoutError: packed rows of other sizes.
        """
        laid = replace(self, indexer=self.indexer and self.indexer.laid_out(choices))
        if (choice := choices.get("latent")) is None:
            return laid
        packed = choice.encoding()
        if packed.is_packed and (packed.kept, packed.rules.packing.coded) != (self.rope_dim, self.latent_dim):
            raise LayoutError.of(
                "size", f"rows of {choice.name!r} have {packed.rules.packing.coded} elements and {packed.kept} RoPE dims, not "
                f"{self.latent_dim} and {self.rope_dim}; choose another layout for this model",
                needed=(self.latent_dim, self.rope_dim), available=(packed.rules.packing.coded, packed.kept),
            )  # fmt: skip
        return replace(laid, layout=choice.name, encoding=packed)


@dataclass(frozen=True)
class Recurrent(LayerKind):
    """Recurrent layers: state tensors of fixed size, for example convolution tails and recurrent matrices.

    A state covers the whole request, so no token can be removed from it. ``rewind`` goes back to an older state
    instead: with ``verify_width`` v a request has v + 1 places for its states, and each new token writes the next one.

    Args:
        states: the tensors of one request.
        verify_width: the newest tokens that can be removed again.

    Examples:
        >>> layer = Recurrent((Rows("recurrent", (32, 128, 128), "float32", heads=((32, 1),)),), verify_width=3)
        >>> layer.split(4).state_rows()[0].shape, layer.rewinds(), layer.state_places()
        ((8, 128, 128), 3, 4)
    """

    states: tuple[Rows, ...]
    verify_width: int = 0

    def state_rows(self) -> tuple[Rows, ...]:
        return self.states

    def state_places(self) -> int:
        return 1 + self.verify_width

    def rewinds(self) -> int:
        return self.verify_width

    def laid_out(self, choices: Choices) -> Recurrent:
        """Return this kind in other layouts.

        Only states whose axes are exactly those of the layout change; other states stay as they are.

        Args:
            choices: kind of rows -> layout.
        """

        def laid(rows: Rows) -> Rows:
            page = choices[rows.name].pages[rows.name] if rows.name in choices else ""
            letters = {*re.findall(r"\b[A-Z]\w*", page)}
            return replace(rows, page=page) if letters and letters == {*rows.axes} else rows

        return replace(self, states=tuple(map(laid, self.states)))

    def split(self, ways: int) -> Recurrent:
        def part(rows: Rows) -> Rows:
            if not rows.heads:
                return rows
            what = f"channels of {rows.name!r}"
            heads = tuple((split_heads(what, number, ways), width) for number, width in rows.heads)
            return replace(rows, shape=(sum(n * width for n, width in heads), *rows.shape[1:]), heads=heads)

        return replace(self, states=tuple(part(rows) for rows in self.states))


@dataclass(frozen=True)
class Shared(LayerKind):
    """A layer that reads the rows of layer ``owner`` and keeps no rows itself.

    Args:
        owner: index of that layer.

    Examples:
        >>> Shared(owner=3).block_rows()
        ()
    """

    owner: int


@dataclass(frozen=True)
class Compressed(LayerKind):
    """DeepSeek-V4 attention: a ring of the last ``window`` raw rows, and compressed entries.

    If ``ratio`` > 0 there is one compressed entry for every ``ratio`` tokens (an entry window). With an ``indexer``
    (the CSA layers) an entry also covers the entry window before its own, through a second stream, and the indexer
    keeps a smaller compressor of its own (arXiv 2606.19348, sections 2.3.1 and 2.3.2).

    State of one request; a row of a ring is addressed by position modulo the number of rows:

        swa        [window+v]  the raw K = V rows, RoPE dims last     swa_pos [window+v]  their positions, -1 = never
        tail_ka/za [ratio-1+v] key and score of tokens of the open entry window; stream a feeds the *next* entry,
        tail_kb/zb [ratio-1+v] stream b the *current* one (without overlap there is one stream, called a)
        overlap_k/z [ratio*c]  stream a of the last c closed entry windows; scores include their position bias
        idx_...                the same for the indexer             swa_head [1]  one more than the newest position

    v = ``verify_width``: the newest v tokens can be removed again (speculative decoding). The rings therefore have v
    rows more than the least size, and streams a of c = 1 + ceil(v / ratio) closed entry windows are kept, because a
    rewind may reopen some of them.

    Args:
        dim: elements of a row, RoPE dims included.
        window: tokens whose raw rows are kept.
        dtype: of the raw rows.
        ratio: tokens of an entry; 0: no entries.
        indexer: its keys, one for each entry.
        encoding: of raw rows and entries.
        tail_dtype: of what waits for an entry.
        verify_width: the newest tokens that can be removed again.

    Examples:
        >>> layer = Compressed(512, 128, "bfloat16", ratio=4, indexer=IndexKeys(128))
        >>> [(rows.name, rows.tokens_per_row) for rows in layer.block_rows()]
        [('entries', 4), ('indexer_keys', 4)]
        >>> {rows.name: rows.count for rows in layer.state_rows()}["swa"]
        128
    """

    dim: int
    window: int
    dtype: str
    ratio: int = 0
    indexer: IndexKeys | None = None
    encoding: Encoding = RAW
    tail_dtype: str = "float32"
    verify_width: int = 0

    @property
    def overlap(self) -> bool:
        """Whether an entry also covers the entry window before its own: if the indexer has a compressor of its own."""
        return self.indexer is not None and not self.indexer.projected

    @property
    def index_dim(self) -> int | None:
        """Elements of one indexer key; None without an indexer."""
        return None if self.indexer is None else self.indexer.dim

    @property
    def index_encoding(self) -> Encoding:
        """Encoding of indexer keys; ``RAW`` without an indexer."""
        return RAW if self.indexer is None else self.indexer.encoding

    def growth(self) -> Growth | None:
        return FULL if self.ratio else None

    def block_rows(self) -> tuple[Rows, ...]:
        if not self.ratio:
            return ()
        entries = Rows("entries", (self.dim,), self.dtype, self.encoding, tokens_per_row=self.ratio)
        if self.indexer is None:
            return (entries,)
        return entries, replace(entries, name="indexer_keys", shape=(self.indexer.dim,), encoding=self.indexer.encoding)

    def state_rows(self) -> tuple[Rows, ...]:
        rows = [
            Rows("swa", (self.dim,), self.dtype, self.encoding, count=self.window + self.verify_width),
            Rows("swa_pos", (), "int32", count=self.window + self.verify_width, fill=-1),
            Rows("swa_head", (), "int32"),
        ]
        if self.ratio > 1:
            rows += self._tail("", self.dim)
        if self.indexer is not None and self.overlap:
            rows += self._tail("idx_", self.indexer.dim)
        return tuple(rows)

    def _tail(self, prefix: str, dim: int) -> list[Rows]:
        """Return the tail and the overlap rows of one compressor, with rows of ``dim`` elements."""
        streams = ("ka", "za", "kb", "zb") if self.overlap else ("ka", "za")
        count = self.ratio - 1 + self.verify_width
        rows = [Rows(f"{prefix}tail_{s}", (dim,), self.tail_dtype, count=count) for s in streams]
        if self.overlap:
            count = self.ratio * (1 + ceil_div(self.verify_width, self.ratio))
            rows += [Rows(f"{prefix}overlap_{s}", (dim,), self.tail_dtype, count=count) for s in ("k", "z")]
        return rows

    def laid_out(self, choices: Choices) -> Compressed:
        laid = replace(self, indexer=self.indexer and self.indexer.laid_out(choices))
        return replace(laid, encoding=choices["entries"].encoding()) if "entries" in choices else laid

    def rewinds(self) -> int:
        return self.verify_width
