"""The typed view of one compressed-attention layer for one step, and torch functions that decode its views.

A step is a list of tokens, each with the slot of its request and its position; the tokens of one request are adjacent,
in ascending order. Slot -1 is a padded row: it writes to the last row of the state pool, and reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpagoda.errors import BadInput
from kvpagoda.formats.codec import decode
from kvpagoda.formats.encoding import Encoding
from kvpagoda.id_tensors import IdsLike, integers
from kvpagoda.kernels import append_swa, warm_up_swa
from kvpagoda.pools import Pool, Step
from kvpagoda.schema import Compressed

Tensor = torch.Tensor


def _part(number: int) -> property:
    """Return a property that reads ``parts[number]`` of a view."""
    return property(lambda view: view.parts[number])


@dataclass(frozen=True)
class SWAView:
    """The sliding-window rings of all requests, as views of the pool.

    FP8 forms have ``swa_fp8`` ``[requests, ring, dim - rope]`` uint8, ``swa_rope`` ``[.., rope]`` bfloat16 and scales;
    the raw form has ``swa`` ``[requests, ring, dim]``. A ring has ``window + verify_width`` rows. It may also hold rows
    of older tokens and of tokens that were rewound: the token at position p reads only rows with ``swa_pos`` in p -
    window + 1 .. p.

    Args:
        encoding: of the rows.
        dtype: to which they are decoded.
        parts: the tensors of the encoding.
        swa_pos: int32 ``[requests, ring]``; -1 where nothing was ever written.
        request_slots: int32 ``[n]``, of the step.
        positions: int32 ``[n]``, of the step.

    Examples:
        >>> from kvpagoda.schema import RAW
        >>> rows, slots = torch.ones(1, 4, 8), torch.zeros(2, dtype=torch.int32)
        >>> view = SWAView(RAW, torch.float32, (rows,), torch.tensor([[0, 1, -1, -1]]), slots, torch.arange(2))
        >>> dequantize_swa(view)[0, :, 0].tolist()
        [1.0, 1.0, 0.0, 0.0]
    """

    encoding: Encoding
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    swa_pos: Tensor
    request_slots: Tensor
    positions: Tensor

    swa_fp8, swa_rope, swa_inv_scale = _part(0), _part(1), _part(-1)


@dataclass(frozen=True)
class BlockView:
    """The blocks of a layer, as views of its pools.

    Row w of request i is row ``w % per_block`` of block ``block_table[i, w // per_block]``. ``parts``: the fields
    ``[blocks, per_block, ...]`` of ``encoding``, in its order. ``block_table``: int32 ``[requests, max_blocks]`` by
    slot, or in a batch of a ``KVCache`` by the rows of the batch. ``swa_head``: int32 ``[state rows]``, of the
    requests of the step exact after ``write_swa``: one more than their newest position. ``ratio``: tokens of an entry.
    """

    encoding: Encoding
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    block_table: Tensor
    swa_head: Tensor
    ratio: int

    @property
    def num_entries(self) -> Tensor:
        """int32 ``[state rows]``: the entries of each request; those after them belong to tokens that were rewound. A
        new tensor."""
        return self.swa_head // self.ratio


class ClassicalView(BlockView):
    """The compressed entries of a layer: codes, bfloat16 RoPE part and scales (the raw form has one part, the entries).

    Examples:
        >>> from kvpagoda.schema import RAW
        >>> entries, table = torch.arange(24.0).view(3, 4, 2), torch.tensor([[2, 0]], dtype=torch.int32)
        >>> view = ClassicalView(RAW, torch.float32, (entries,), table, torch.tensor([23], dtype=torch.int32), ratio=4)
        >>> view.num_entries.tolist()
        [5]
        >>> dequantize_entries(view, view.block_table[0]).flatten(0, 1)[:5].tolist()    # the 5 entries of request 0
        [[16.0, 17.0], [18.0, 19.0], [20.0, 21.0], [22.0, 23.0], [0.0, 1.0]]
    """

    entries_fp8, entries_rope, inv_scale = _part(0), _part(1), _part(-1)


class IndexerView(BlockView):
    """The indexer's keys of a layer: packed codes and their scales (in the raw form both attributes are the keys).

    Examples:
        >>> from kvpagoda.formats import encode
        >>> from kvpagoda.schema import MXFP4
        >>> parts, table = tuple(encode(MXFP4, torch.ones(2, 32, 128))), torch.tensor([[1]], dtype=torch.int32)
        >>> view = IndexerView(MXFP4, torch.bfloat16, parts, table, torch.tensor([128], dtype=torch.int32), ratio=4)
        >>> view.keys_fp4.shape, view.key_scales.shape
        (torch.Size([2, 32, 64]), torch.Size([2, 32, 4]))
    """

    keys_fp4, key_scales = _part(0), _part(-1)


@dataclass(frozen=True)
class ClosedWindows:
    """The compression windows that close in a step: of each its closing token, its number, and the rows it pools."""

    tokens: Tensor
    """int64 ``[c]``: index of the closing token in the step."""
    windows: Tensor
    """int64 ``[c]``: window number, position // ratio."""
    keys: Tensor
    """``[c, rows, dim]``: with overlap the window before (stream a), then the window itself (stream b)."""
    scores: Tensor
    """``[c, rows, dim]``: -inf if there is no window before."""


class LayerCacheHandle:
    """The view of one layer for one step, with which its kernels read and write. Making one allocates no device memory.

    It is valid for that step. ``paged`` and ``block_table`` are None on layers without compressed entries. All writes
    go to rows of the requests of ``step``, whose ``request_slots``, ``positions`` and ``request_ids`` are attributes of
    the handle too.

    Args:
        kind: of the layer.
        paged: its entries.
        state: its rings and tails.
        block_table: int32 ``[requests, max_blocks]``.
        step: the tokens.

    Examples:
        >>> from kvpagoda import DSV4Config, KVCache
        >>> config = DSV4Config((4,), head_dim=64, rope_dim=16, window=8, index_dim=32)     # one CSA layer
        >>> cache = KVCache(config.schema(), num_blocks=4, max_requests=2, device="cpu")
        >>> sequence = cache.open(range(9))
        >>> sequence.extend(8)
        >>> handle = LayerCacheHandle.of(cache.batch([sequence], [8]).layer(0))
        >>> handle.write_swa(torch.ones(8, 64, dtype=torch.bfloat16))
        >>> closed = handle.close_windows(keys=torch.randn(8, 128), scores=torch.randn(8, 128))
        >>> closed.windows.tolist(), closed.keys.shape          # 2 windows, each with the rows of the one before
        ([0, 1], torch.Size([2, 8, 64]))
        >>> handle.write_entries(closed, torch.ones(2, 64, dtype=torch.bfloat16))
        >>> handle.read_entries(torch.tensor([[0, 1, -1]] * 8))[7].sum(dim=-1).tolist()
        [64.0, 64.0, 0.0]
    """

    def __init__(self, kind: Compressed, paged: Pool | None, state: Pool, block_table: Any, step: Step) -> None:
        self.kind, self.paged, self.state, self.block_table, self.step = kind, paged, state, block_table, step
        self.request_slots, self.positions, self.request_ids = step.request_slots, step.positions, step.request_ids

    @classmethod
    def of(cls, view: Any) -> LayerCacheHandle:
        """Return the handle of a layer in a batch. It is valid as long as the batch.

        Args:
            view: the ``LayerView`` of a compressed-attention layer.

        Raises:
            BadInput: a layer of another kind.
        """
        kind = next((kind for kind in view.layer.kinds if isinstance(kind, Compressed)), None)
        if kind is None or view.state is None:
            raise BadInput(f"layer {view.layer.index} ({view.layer.label}) has no compressed attention")
        return cls(kind, view.blocks, view.state, view.block_table if kind.ratio else None, view.step)

    # -- the sliding window -----------------------------------------------------------------------------------------

    def write_swa(self, kv: Tensor) -> None:
        """Store the rows of this step at position mod ring.

        If a request has more tokens in the step than the ring has rows, its last ones are stored. Call ``read_window``
        first, because this overwrites older rows.

        Args:
            kv: ``[n, dim]``, RoPE dims last (bfloat16 for the FP8 form).
        """
        _check_rows("kv", kv, len(self.positions), self.kind.dim)
        if self._has_kernel:
            rows, is_ordered = self.step.state_rows, self.step.is_by_id
            codes, rope, scale, pos, dummy, head = self._rings
            append_swa(kv, rows, self.positions, codes, rope, scale, pos, dummy, head, is_ordered)
            return
        self._write_ring("swa", kv)
        self._write_ring("swa_pos", self.positions)
        self._write_ring("swa_head", self.positions + 1)

    def warm_up(self) -> None:
        """Compile what ``write_swa`` launches on a GPU; ``KVCache.warm_up`` compiles the rest. Writes the dummy row."""
        if self._has_kernel:
            warm_up_swa(*self._rings)

    @property
    def _has_kernel(self) -> bool:
        return self.kind.encoding == Encoding("fp8", kept=self.kind.encoding.kept)

    @property
    def _rings(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, Tensor]:
        """The pools of the rings, their dummy row and their heads, as ``append_swa`` takes them."""
        codes, rope, scale = self.state.parts("swa")
        return codes, rope, scale, self.state["swa_pos"], self.step.dummy % len(codes), self.state["swa_head"][:, 0]

    def read_window(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the uncompressed rows that each token attends to: its window, itself included.

        Args:
            kv: ``[n, dim]``, this step's rows, not yet written.

        Returns:
            rows ``[n, window, dim]`` in ``kv``'s dtype, as they read back from storage (0 where there is none), and
            their validity, bool ``[n, window]``.
        """
        _check_rows("kv", kv, len(self.positions), self.kind.dim)
        window, step = self.kind.window, self.step
        wanted = step.positions.long()[:, None] + torch.arange(1 - window, 1, device=kv.device)
        rows = self._gather("swa", self.state.stored("swa", kv), wanted)
        valid = (wanted >= 0) & (step.slots >= 0)[:, None]
        return rows.masked_fill(~valid[..., None], 0).to(kv.dtype), valid

    def read_swa_view(self) -> SWAView:
        """Return the rings of all requests, as views of the pool; ``request_slots`` maps tokens to rings.

        The dummy row is left out if it is the last one.
        """
        rows, (positions,) = self.state.shown("swa"), self.state.shown("swa_pos")
        dtype = getattr(torch, self.kind.dtype)
        return SWAView(self.kind.encoding, dtype, rows, positions, self.step.state_rows, self.positions)

    # -- the compressor and the indexer's own (prefix "idx_") --------------------------------------------------------

    def close_windows(self, keys: Tensor, scores: Tensor, prefix: str = "") -> ClosedWindows:
        """Return the rows that the windows closing in this step pool over; store this step's rows for later windows.

        With overlap the first half is stream a (for the next window) and the second half stream b.

        Args:
            keys: ``[n, streams * dim]``, this step's projections.
            scores: ``[n, streams * dim]``; they include the position bias.
            prefix: "idx_" for the indexer's own compressor.
        """
        ratio, step, overlap = self.kind.ratio, self.step, self.kind.overlap
        name = "indexer_keys" if prefix else "entries"
        dim = self._blocks(name).rows[name].shape[0]
        for what, rows in (("keys", keys), ("scores", scores)):
            _check_rows(what, rows, len(self.positions), 2 * dim if overlap else dim)
        positions = step.positions.long()
        closing = (((positions + 1) % ratio == 0) & (step.slots >= 0)).nonzero()[:, 0]
        closed_at = positions[closing][:, None]
        current = closed_at + torch.arange(1 - ratio, 1, device=keys.device)
        pooled: list[Tensor] = []
        for stream, rows, nothing in (("k", keys, 0.0), ("z", scores, float("-inf"))):
            parts = rows.chunk(2, dim=-1) if overlap else (rows,)
            tails = [f"{prefix}tail_{stream}{letter}" for letter in "ab"[: len(parts)]]
            window = [self._gather(tail, part, current, closing) for tail, part in zip(tails, parts)]
            if overlap:
                kept, before = f"{prefix}overlap_{stream}", current - ratio
                closed_earlier = (closed_at - ratio < step.starts[closing][:, None])[..., None]
                older = self._gather(kept, parts[0], before, closing)
                older = torch.where(closed_earlier, older, self._gather(tails[0], parts[0], before, closing))
                ring = self._ring(kept)
                writers = step.writers(ring // ratio, closing)[:, None]
                self.state.write(kept, (writers, current % ring), window[0])
                window[0] = older.masked_fill((before < 0)[..., None], nothing)
            pooled.append(torch.cat(window, dim=1))
            for tail, part in zip(tails, parts):
                self._write_ring(tail, part)
        return ClosedWindows(closing, closed_at[:, 0] // ratio, *pooled)

    def write_entries(self, closed: ClosedWindows, entries: Tensor) -> None:
        """Store one compressed entry for every closed window in its request's blocks.

        Args:
            closed: what ``close_windows`` returned.
            entries: ``[c, dim]``.
        """
        self._write_blocks("entries", closed, entries)

    def write_indexer_keys(self, closed: ClosedWindows, keys: Tensor) -> None:
        """Store one indexer key for every closed window in its request's blocks.

        Args:
            closed: what ``close_windows`` returned.
            keys: ``[c, index_dim]``.
        """
        self._write_blocks("indexer_keys", closed, keys)

    def read_entries(self, windows: Tensor) -> Tensor:
        """Return entries of each token's request: ``[n, k, dim]``; 0 where there is none.

        Args:
            windows: int64 ``[n, k]``; -1: none.
        """
        return self._read_blocks("entries", windows)

    def read_indexer_keys(self, windows: Tensor) -> Tensor:
        """Return indexer keys of each token's request: ``[n, k, index_dim]``; 0 where there is none.

        Args:
            windows: int64 ``[n, k]``; -1: none.
        """
        return self._read_blocks("indexer_keys", windows)

    def read_classical_view(self) -> ClassicalView:
        """Return the blocks of entries and the block table.

        Raises:
            BadInput: on a layer without compressed entries.
        """
        return ClassicalView(self.kind.encoding, *self._shown("entries"))

    def read_indexer_view(self) -> IndexerView:
        """Return the blocks of indexer keys and the block table.

        Raises:
            BadInput: on a layer without an indexer.
        """
        return IndexerView(self.kind.index_encoding, *self._shown("indexer_keys"))

    # -- addresses ---------------------------------------------------------------------------------------------------

    def _blocks(self, name: str) -> Pool:
        """Return the pool with rows ``name`` by block. Raises BadInput if this layer has none."""
        if self.paged is None:
            text = "this layer keeps a sliding window only; it has no compressed entries"
            raise BadInput(text, needed="compressed entries")
        if name not in self.paged:
            raise BadInput("this layer has no indexer; only layers with index_dim keep indexer keys", needed=name)
        return self.paged

    def _shown(self, name: str) -> tuple[torch.dtype, tuple[Tensor, ...], Tensor, Tensor, int]:
        """Return the fields of a ``BlockView`` of rows ``name``, without the encoding.

        The dummy row is left out if it is the last one.
        """
        parts, (heads,) = self._blocks(name).shown(name), self.state.shown("swa_head")
        table = self.block_table if self.step.is_by_id else self.block_table[:-1]
        return getattr(torch, self.kind.dtype), parts, table, heads[:, 0], self.kind.ratio

    def _block_rows(self, pool: Pool, slots: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block and the row in it of entry ``windows`` of the requests in rows ``slots`` of the table."""
        per_page = pool.parts("entries")[0].shape[1]
        page, many = self.block_table[slots, windows // per_page].long(), pool.arena.layout.kernel_pages
        return page // many, page % many * per_page + windows % per_page

    def _write_blocks(self, name: str, closed: ClosedWindows, rows: Tensor) -> None:
        pool = self._blocks(name)
        _check_rows(name, rows, len(closed.tokens), pool.rows[name].shape[0])
        pool.write(name, self._block_rows(pool, self.step.table_rows[closed.tokens], closed.windows), rows)

    def _read_blocks(self, name: str, windows: Tensor) -> Tensor:
        pool = self._blocks(name)
        rows = pool.read(name, self._block_rows(pool, self.step.table_rows[:, None], windows.clamp(min=0)))
        return rows.masked_fill((windows < 0)[..., None], 0)

    def _ring(self, name: str) -> int:
        return self.state.parts(name)[0].shape[1]

    def _write_ring(self, name: str, values: Tensor) -> None:
        ring = self._ring(name)
        self.state.write(name, (self.step.writers(ring), self.step.positions.long() % ring), values)

    def _gather(self, name: str, rows: Tensor, wanted: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return rows at positions ``wanted`` ``[m, j]`` of the requests of ``tokens`` (default: all tokens).

        Positions of this step come from ``rows``, ``[n, ...]``; earlier ones from the ring ``name``.
        """
        step = self.step
        if tokens is None:
            tokens = torch.arange(len(rows), device=rows.device)
        kept = self.state.read(name, (step.rows[tokens][:, None], wanted % self._ring(name)))
        back = step.positions.long()[tokens][:, None] - wanted
        fresh = rows[(tokens[:, None] - back).clamp(min=0)]
        in_step = wanted >= step.starts[tokens][:, None]
        return torch.where(in_step.view(*in_step.shape, *(1,) * (fresh.ndim - 2)), fresh, kept)


def _check_rows(what: str, rows: Tensor, count: int, dim: int) -> None:
    if not isinstance(rows, Tensor) or tuple(rows.shape) != (count, dim):
        text = f"{what} must be a tensor [{count}, {dim}], got {list(getattr(rows, 'shape', [])) or rows!r}"
        raise BadInput(text, field=what, needed=(count, dim), available=tuple(getattr(rows, "shape", ())))


def dequantize_swa(view: SWAView) -> Tensor:
    """Decode rings in plain torch: ``[requests, ring, head_dim]`` in the rows' dtype.

    Rows are 0 where nothing was written. ``swa_pos`` says which rows a token reads: see ``SWAView``.

    Args:
        view: of the layer.
    """
    return decode(view.encoding, view.parts, view.dtype).masked_fill((view.swa_pos < 0)[..., None], 0)


def dequantize_entries(view: ClassicalView, block_ids: IdsLike | None = None) -> Tensor:
    """Decode entries in plain torch.

    Args:
        view: of the layer.
        block_ids: of the blocks; None: all.

    Returns:
        ``[blocks, entries_per_block, head_dim]``; 0 for -1, an empty cell of a block table.

    Raises:
        BadInput: ids out of range; waits for ids on a GPU.
    """
    if block_ids is None:
        return decode(view.encoding, view.parts, view.dtype)
    ids, num_blocks = integers(block_ids, "block ids").to(view.parts[0].device).long(), len(view.parts[0])
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < num_blocks:
        raise BadInput(f"block ids {int(ids.min())}..{int(ids.max())} are not all in -1..{num_blocks - 1}")
    rows = decode(view.encoding, [part[ids] for part in view.parts], view.dtype)
    return rows.masked_fill((ids < 0).view(*ids.shape, *(1,) * (rows.ndim - ids.ndim)), 0)
