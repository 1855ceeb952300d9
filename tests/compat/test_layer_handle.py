"""The layer handle against a plain oracle: per request, a dict of everything that was ever computed at each position.

Random traffic of several slots, chunks of every size, recycled slots over poisoned memory, padded rows anywhere, and
tokens taken back where the rings are deep enough.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from kvpagoda.compat.layer_handle import ClosedWindows, LayerCacheHandle, dequantize_entries, dequantize_swa
from kvpagoda.core.batch.step import Step
from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.pool import Pool
from kvpagoda.errors import BadInput
from kvpagoda.formats import decode, encode
from kvpagoda.schema import MXFP4, NVFP4, Compressed, Encoding, IndexKeys, RowLayout
from raises import raises

Tensor = torch.Tensor
BLOCK, SLOTS, COLUMNS = 16, 4, 12
LONGEST = BLOCK * COLUMNS

KINDS = {
    "swa": Compressed(8, 6, "float32"),
    "overlap": Compressed(8, 6, "float32", ratio=4, indexer=IndexKeys(4)),
    "wide_ring": Compressed(8, 24, "float32", ratio=2, indexer=IndexKeys(4)),
    "plain": Compressed(8, 7, "float32", ratio=8),
    "one_entry_a_block": Compressed(8, 3, "float32", ratio=16),
    "fp8": Compressed(48, 6, "bfloat16", 4, IndexKeys(32, MXFP4), Encoding("fp8", kept=16), "float32"),
    "fp8_in_groups": Compressed(48, 6, "bfloat16", 4, IndexKeys(32, MXFP4), Encoding("fp8", 16, 16)),
    "ue8m0": Compressed(48, 6, "bfloat16", 4, IndexKeys(32, NVFP4), Encoding("fp8_ue8m0", 16, 16)),
}  # fmt: skip
WIDTHS = [
    ("swa", 2),
    ("overlap", 1),
    ("overlap", 4),
    ("overlap", 9),
    ("plain", 3),
    ("plain", 11),
    ("fp8", 5),
    ("ue8m0", 3),
]
DEEP = {f"{name}_verify_{width}": replace(KINDS[name], verify_width=width) for name, width in WIDTHS}


@dataclass
class Request:
    """What a request computed so far, by position, and its entries, by window."""

    length: int = 0
    written: int = 0
    """One past the highest position ever written."""
    counted: int = 0
    """What ``num_entries`` says: the entries after the request's last step."""
    rows: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in ("kv", "k", "z", "ik", "iz")})
    entries: list[Tensor] = field(default_factory=list)
    index_keys: list[Tensor] = field(default_factory=list)

    def take_back(self, n: int, ratio: int) -> None:
        self.length -= n
        for history in self.rows.values():
            del history[self.length :]
        for kept in (self.entries, self.index_keys):
            del kept[self.length // ratio :]


class OneWriter(Pool):
    """A pool that fails if one write names a row twice: the order of such writes is undefined on a GPU."""

    def write(self, name: str, index: tuple[Tensor, ...], values: Tensor) -> None:
        records, rows = torch.broadcast_tensors(*index)
        live = [pair for pair in zip(records.flatten().tolist(), rows.flatten().tolist()) if pair[0] >= 0]
        assert len(set(live)) == len(live), name
        super().write(name, index, values)


class Traffic:
    """Pools of one layer, the requests that use them and the oracle beside them."""

    def __init__(self, kind: Compressed, seed: int, order: str = "layer") -> None:
        self.kind, self.rng = kind, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        state = RowLayout.build((0, f) for rows in kind.state_rows() for f in rows.fields(rows.count))
        blocks = RowLayout.build(
            (0, f) for rows in kind.block_rows() for f in rows.fields(BLOCK // rows.tokens_per_row)
        )
        self.state = OneWriter(Arena(state, SLOTS + 1, device="cpu", order=order), 0, kind.state_rows(), num_hidden=1)
        num_blocks = SLOTS * COLUMNS
        self.paged, self.table = None, None
        if kind.ratio:
            arena = Arena(blocks, num_blocks + 1, device="cpu", order=order)
            self.paged = OneWriter(arena, 0, kind.block_rows(), num_hidden=1)
            owned = torch.randperm(num_blocks, generator=self.generator).int().view(SLOTS, COLUMNS)
            self.table = torch.cat([owned, torch.full((1, COLUMNS), -1, dtype=torch.int32)])
        self.requests = [Request() for _ in range(SLOTS)]
        for slot in range(SLOTS + 1):
            self.admit(slot)

    def admit(self, slot: int) -> None:
        """A new request over memory full of NaN; only what says "nothing here" is reset."""
        for name, tensor in self.state.fields.items():
            if tensor.is_floating_point():
                tensor[slot] = float("nan")
            else:
                tensor[slot] = {"swa_pos": -1, "swa_head": 0}.get(name, 255)
        if slot < SLOTS:
            self.requests[slot] = Request()

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def make_step(self) -> tuple[Step, list[tuple[int, int]]]:
        """Chunks of random requests in random order, runs of padded rows before, between and after them."""
        ratio, window = self.kind.ratio or 4, self.kind.window
        sizes = [1, 1, 1, 2, 3, ratio - 1, ratio, ratio + 1, 2 * ratio + 1, window, window + 1, 2 * window + 3]
        tokens: list[tuple[int, int]] = []
        for slot in self.rng.sample(range(SLOTS), self.rng.randint(1, SLOTS)):
            request = self.requests[slot]
            count = min(max(1, self.rng.choice(sizes)), LONGEST - request.length)
            tokens += [(-1, self.rng.choice([-1, 0, 3, 1000]))] * self.rng.choice([0, 0, 1, 9])
            tokens += [(slot, request.length + i) for i in range(count)]
        slots, positions = torch.tensor(tokens or [(-1, 0)], dtype=torch.int32).T.contiguous()
        return Step(slots, positions, torch.zeros_like(slots), slots, dummy=-1), tokens or [(-1, 0)]

    def handle(self, step: Step) -> LayerCacheHandle:
        return LayerCacheHandle(self.kind, self.paged, self.state, self.table, step)

    def run(self) -> None:
        """One step, every result compared."""
        step, tokens = self.make_step()
        handle, kind = self.handle(step), self.kind
        streams = 2 if kind.overlap else 1
        dtype = torch.bfloat16 if kind.dtype == "bfloat16" else torch.float32
        new = {"kv": self.randn(len(tokens), kind.dim, dtype=dtype)}
        if kind.ratio:
            new["k"], new["z"] = self.randn(2, len(tokens), streams * kind.dim)
        if kind.index_dim is not None:
            new["ik"], new["iz"] = self.randn(2, len(tokens), streams * kind.index_dim)
        for name, rows in new.items():
            for (slot, _), row in zip(tokens, rows):
                if slot >= 0:
                    self.requests[slot].rows[name].append(row)
        dummy = {
            name: tensor[:-1].clone() for name, tensor in self.state.fields.items() if all(s < 0 for s, _ in tokens)
        }
        self.check_window(handle, new["kv"], tokens)
        handle.write_swa(new["kv"])
        if kind.ratio:
            closed = handle.close_windows(new["k"], new["z"])
            self.check_closed(closed, tokens, "k", "z", kind.dim)
            index_closed = None
            if kind.index_dim is not None:
                index_closed = handle.close_windows(new["ik"], new["iz"], prefix="idx_")
                self.check_closed(index_closed, tokens, "ik", "iz", kind.index_dim)
            self.write_entries(handle, closed, index_closed, tokens)
        for slot, position in tokens:
            if slot >= 0:
                request = self.requests[slot]
                request.length, request.counted = position + 1, len(request.entries)
                request.written = max(request.written, request.length)
        self.check_views(handle)
        if kind.ratio:
            self.check_entries(handle, tokens)
        for name, before in dummy.items():
            assert same(before, self.state[name][:-1])

    def stored(self, row: Tensor) -> Tensor:
        """The row as it reads back."""
        return decode(self.kind.encoding, encode(self.kind.encoding, row), row.dtype)

    def check_window(self, handle: LayerCacheHandle, kv: Tensor, tokens: list[tuple[int, int]]) -> None:
        rows, valid = handle.read_window(kv)
        assert rows.dtype == kv.dtype and valid.dtype == torch.bool
        expected = torch.zeros(len(tokens), self.kind.window, self.kind.dim, dtype=kv.dtype)
        for i, (slot, position) in enumerate(tokens):
            for j in range(self.kind.window):
                at = position - self.kind.window + 1 + j
                assert bool(valid[i, j]) == (slot >= 0 and at >= 0)
                if slot >= 0 and at >= 0:
                    expected[i, j] = self.requests[slot].rows["kv"][at]
        assert torch.equal(rows, self.stored(expected))

    def check_closed(
        self, closed: ClosedWindows, tokens: list[tuple[int, int]], keys: str, scores: str, dim: int
    ) -> None:
        ratio = self.kind.ratio
        closing = [i for i, (slot, position) in enumerate(tokens) if slot >= 0 and (position + 1) % ratio == 0]
        assert closed.tokens.tolist() == closing
        assert closed.windows.tolist() == [tokens[i][1] // ratio for i in closing]
        for got, name, nothing in ((closed.keys, keys, 0.0), (closed.scores, scores, float("-inf"))):
            assert tuple(got.shape) == (len(closing), ratio * (2 if self.kind.overlap else 1), dim)
            for rows, i in zip(got, closing):
                slot, position = tokens[i]
                history, first = self.requests[slot].rows[name], position + 1 - ratio
                expected = [history[p][-dim:] for p in range(first, first + ratio)]
                if self.kind.overlap:
                    before = [
                        history[p][:dim] if p >= 0 else torch.full((dim,), nothing) for p in range(first - ratio, first)
                    ]
                    expected = before + expected
                assert torch.equal(rows, torch.stack(expected))

    def write_entries(
        self,
        handle: LayerCacheHandle,
        closed: ClosedWindows,
        index_closed: ClosedWindows | None,
        tokens: list[tuple[int, int]],
    ) -> None:
        dtype = torch.bfloat16 if self.kind.dtype == "bfloat16" else torch.float32
        entries = self.randn(len(closed.tokens), self.kind.dim, dtype=dtype)
        handle.write_entries(closed, entries)
        for i, token in enumerate(closed.tokens.tolist()):
            request = self.requests[tokens[token][0]]
            assert len(request.entries) == int(closed.windows[i])
            request.entries.append(self.stored(entries[i]))
        if index_closed is not None:
            assert self.kind.index_dim is not None
            keys = self.randn(len(closed.tokens), self.kind.index_dim, dtype=dtype)
            handle.write_indexer_keys(index_closed, keys)
            back = decode(self.kind.index_encoding, encode(self.kind.index_encoding, keys), dtype)
            for i, token in enumerate(closed.tokens.tolist()):
                self.requests[tokens[token][0]].index_keys.append(back[i])

    def check_views(self, handle: LayerCacheHandle) -> None:
        view, window, ring = handle.read_swa_view(), self.kind.window, self.kind.window + self.kind.verify_width
        assert tuple(view.swa_pos.shape) == (SLOTS, ring)
        rows = dequantize_swa(view)
        for slot, request in enumerate(self.requests):
            for p in range(max(0, request.length - window), request.length):
                assert int(view.swa_pos[slot, p % ring]) == p
                assert torch.equal(rows[slot, p % ring], self.stored(request.rows["kv"][p]))
            for r in range(request.written, ring):
                assert int(view.swa_pos[slot, r]) == -1
                assert not rows[slot, r].any()

    def check_entries(self, handle: LayerCacheHandle, tokens: list[tuple[int, int]]) -> None:
        view = handle.read_classical_view()
        assert view.num_entries.tolist() == [request.counted for request in self.requests]
        blocks, per_block = dequantize_entries(view), BLOCK // self.kind.ratio
        assert tuple(blocks.shape) == (SLOTS * COLUMNS, per_block, self.kind.dim)
        for slot, request in enumerate(self.requests):
            for w in range(max(0, len(request.entries) - 6), len(request.entries)):
                block = int(view.block_table[slot, w // per_block])
                assert torch.equal(blocks[block, w % per_block], request.entries[w])
                assert torch.equal(
                    dequantize_entries(view, torch.tensor([block]))[0, w % per_block], request.entries[w]
                )
        wanted = torch.full((len(tokens), 5), -1)
        for i, (slot, _) in enumerate(tokens):
            if slot >= 0 and self.requests[slot].entries:
                count = len(self.requests[slot].entries)
                wanted[i] = torch.tensor(
                    [-1 if self.rng.random() < 0.2 else self.rng.randrange(count) for _ in range(5)]
                )
        reads = [(handle.read_entries(wanted), "entries", self.kind.dim)]
        if self.kind.index_dim is not None:
            reads.append((handle.read_indexer_keys(wanted), "index_keys", self.kind.index_dim))
            index_view = handle.read_indexer_view()
            assert torch.equal(index_view.num_entries, view.num_entries)
            assert same(index_view.block_table, view.block_table)
        for got, name, dim in reads:
            expected = torch.zeros(len(tokens), 5, dim, dtype=got.dtype)
            for i, (slot, _) in enumerate(tokens):
                for j in range(5):
                    if wanted[i, j] >= 0:
                        expected[i, j] = getattr(self.requests[slot], name)[int(wanted[i, j])]
            assert torch.equal(got, expected)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", [*KINDS, *DEEP])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_against_the_oracle(name: str, seed: int) -> None:
    kind = {**KINDS, **DEEP}[name]
    traffic = Traffic(kind, seed, order=("layer", "block")[seed % 2])
    for _ in range(25):
        traffic.run()
        for request in traffic.requests:
            most = request.length - max(0, request.written - kind.verify_width)
            request.take_back(traffic.rng.choice([0, traffic.rng.randint(0, most), most]), kind.ratio or 1)
        if traffic.rng.random() < 0.15:
            traffic.admit(traffic.rng.randrange(SLOTS))
        for slot, request in enumerate(traffic.requests):
            if request.length == LONGEST:
                traffic.admit(slot)


def step_of(*chunks: tuple[int, int, int]) -> Step:
    """Chunks of (slot, first position, count)."""
    tokens = [(slot, first + i) for slot, first, count in chunks for i in range(count)]
    slots, positions = torch.tensor(tokens, dtype=torch.int32).T.contiguous()
    return Step(slots, positions, torch.zeros_like(slots), slots, dummy=-1)


def test_a_chunk_longer_than_every_ring_closes_many_windows() -> None:
    traffic = Traffic(KINDS["overlap"], 0)
    handle = traffic.handle(step_of((1, 0, 41)))
    k, z = traffic.randn(2, 41, 16)
    closed = handle.close_windows(k, z)
    assert closed.windows.tolist() == list(range(10))
    assert torch.equal(closed.keys[0, :4], torch.zeros(4, 8)) and (closed.scores[0, :4] == float("-inf")).all()
    assert torch.equal(closed.keys[9, :4], k[32:36, :8]) and torch.equal(closed.keys[9, 4:], k[36:40, 8:])
    more, zmore = traffic.randn(2, 3, 16)
    closed = traffic.handle(step_of((1, 41, 3))).close_windows(more, zmore)
    assert torch.equal(closed.keys[0, :4], k[36:40, :8])
    assert torch.equal(closed.keys[0, 4:], torch.cat([k[40:, 8:], more[:, 8:]]))
    assert torch.equal(closed.scores[0, 4:], torch.cat([z[40:, 8:], zmore[:, 8:]]))


@pytest.mark.parametrize("name", ["overlap", "fp8", "plain"])
def test_chunking_does_not_change_what_is_pooled(name: str) -> None:
    """The same text whole, token by token and in odd chunks: the same windows and the same state, bit for bit."""
    kind, length = KINDS[name], 37
    results = []
    for chunks in ([37], [1] * 37, [3, 5, 1, 4, 11, 13], [2, 35]):
        traffic = Traffic(kind, 0)
        traffic.state.arena.reset(torch.arange(SLOTS + 1))
        generator = torch.Generator().manual_seed(5)
        streams = 2 if kind.overlap else 1
        kv = torch.randn(length, kind.dim, generator=generator).to(getattr(torch, kind.dtype))
        k, z = torch.randn(2, length, streams * kind.dim, generator=generator)
        at, keys, seen = 0, [], []
        for count in chunks:
            handle = traffic.handle(step_of((2, at, count)))
            seen.append(handle.read_window(kv[at : at + count])[0])
            handle.write_swa(kv[at : at + count])
            closed = handle.close_windows(k[at : at + count], z[at : at + count])
            keys.append(torch.cat([closed.keys, closed.scores], dim=1))
            at += count
        rings = {n: t[:SLOTS].clone() for n, t in traffic.state.fields.items()}
        results.append((torch.cat(keys), torch.cat(seen), rings))
    for pooled, windows, rings in results[1:]:
        assert torch.equal(pooled, results[0][0]) and torch.equal(windows, results[0][1])
        assert all(same(tensor, results[0][2][n]) for n, tensor in rings.items())


@pytest.mark.parametrize("name", KINDS)
def test_padded_rows_touch_no_request(name: str) -> None:
    traffic = Traffic(KINDS[name], 3)
    for _ in range(6):
        traffic.run()
    kind, before = traffic.kind, traffic.state.arena.buffer.clone()
    live = {n: t[:SLOTS].clone() for n, t in traffic.state.fields.items()}
    blocks = None if traffic.paged is None else traffic.paged.arena.buffer.clone()
    slots = torch.full((9,), -1, dtype=torch.int32)
    step = Step(slots, torch.tensor([0, 3, 7, 15, 31, -1, 127, 5, 6], dtype=torch.int32), slots, slots, -1)
    handle, streams = traffic.handle(step), 2 if kind.overlap else 1
    kv = traffic.randn(9, kind.dim, dtype=getattr(torch, kind.dtype))
    rows, valid = handle.read_window(kv)
    assert not rows.any() and not valid.any()
    handle.write_swa(kv)
    if kind.ratio:
        closed = handle.close_windows(*traffic.randn(2, 9, streams * kind.dim))
        assert closed.tokens.numel() == 0
        handle.write_entries(closed, traffic.randn(0, kind.dim))
        assert not handle.read_entries(torch.full((9, 2), -1)).any()
    assert all(same(t[:SLOTS], live[n]) for n, t in traffic.state.fields.items())
    assert blocks is None or (traffic.paged is not None and torch.equal(blocks, traffic.paged.arena.buffer))
    assert not torch.equal(before, traffic.state.arena.buffer), "the dummy row absorbs them"


def test_rewritten_positions_replace_the_rejected_ones() -> None:
    """Rollback by length alone: the tokens after a rejected draft land on the same ring rows."""
    traffic = Traffic(KINDS["wide_ring"], 0)
    kv = traffic.randn(30, 8)
    traffic.handle(step_of((0, 0, 20))).write_swa(kv[:20])
    traffic.handle(step_of((0, 20, 4))).write_swa(kv[20:24] + 1)
    again = traffic.handle(step_of((0, 21, 1)))
    traffic.handle(step_of((0, 20, 1))).write_swa(kv[20:21])
    rows, valid = again.read_window(kv[21:22])
    assert bool(valid[0, -22:].all()) and not bool(valid[0, :-22].any())
    assert torch.equal(rows[0, -22:], kv[:22])


def test_the_window_is_read_in_the_dtype_of_the_step() -> None:
    """A bfloat16 step over a float32 pool, and the other way round."""
    for kind, dtype in ((KINDS["swa"], torch.bfloat16), (KINDS["ue8m0"], torch.float32)):
        traffic = Traffic(kind, 0)
        first, second = traffic.randn(2, 3, kind.dim).to(dtype)
        traffic.handle(step_of((0, 0, 3))).write_swa(first)
        rows, _ = traffic.handle(step_of((0, 3, 3))).read_window(second)
        assert rows.dtype == dtype
        stored = decode(kind.encoding, encode(kind.encoding, torch.cat([first, second])), dtype)
        assert torch.equal(rows[2], stored[-6:])


def test_views_alias_the_pools() -> None:
    traffic = Traffic(KINDS["fp8"], 0)
    assert traffic.paged is not None and traffic.table is not None
    handle = traffic.handle(step_of((0, 0, 1)))
    swa, classical, indexer = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()
    assert swa.swa_fp8.data_ptr() == traffic.state["swa_fp8"].data_ptr()
    assert swa.swa_rope.data_ptr() == traffic.state["swa_rope"].data_ptr()
    assert swa.swa_inv_scale.data_ptr() == traffic.state["swa_inv_scale"].data_ptr()
    assert classical.entries_fp8.data_ptr() == traffic.paged["entries_fp8"].data_ptr()
    assert classical.entries_rope.data_ptr() == traffic.paged["entries_rope"].data_ptr()
    assert classical.inv_scale.data_ptr() == traffic.paged["entries_inv_scale"].data_ptr()
    assert classical.block_table.data_ptr() == indexer.block_table.data_ptr() == traffic.table.data_ptr()
    assert indexer.keys_fp4.data_ptr() == traffic.paged["indexer_keys_fp4"].data_ptr()
    assert indexer.key_scales.data_ptr() == traffic.paged["indexer_keys_scales"].data_ptr()
    assert swa.request_slots is handle.request_slots and swa.positions is handle.positions
    assert tuple(classical.entries_fp8.shape) == (SLOTS * COLUMNS, 4, 32)
    assert tuple(indexer.keys_fp4.shape) == (SLOTS * COLUMNS, 4, 16)


def test_a_window_layer_has_no_entries_and_hca_no_indexer() -> None:
    window = Traffic(KINDS["swa"], 0).handle(step_of((0, 0, 1)))
    assert window.paged is None
    for read in (window.read_classical_view, window.read_indexer_view):
        with raises(BadInput, needed="compressed entries"):
            read()
    with raises(BadInput, needed="compressed entries"):
        window.close_windows(torch.zeros(1, 8), torch.zeros(1, 8))
    plain = Traffic(KINDS["plain"], 0).handle(step_of((0, 0, 1)))
    with raises(BadInput, needed="indexer_keys"):
        plain.read_indexer_view()
    with raises(BadInput, needed="indexer_keys"):
        plain.read_indexer_keys(torch.zeros(1, 1, dtype=torch.int64))


def test_rows_of_the_wrong_shape_are_refused_and_change_nothing() -> None:
    traffic = Traffic(KINDS["overlap"], 0)
    handle, before = traffic.handle(step_of((0, 0, 4))), traffic.state.arena.buffer.clone()
    with raises(BadInput, field="kv", needed=(4, 8), available=(3, 8)):
        handle.write_swa(torch.zeros(3, 8))
    with raises(BadInput, field="kv", needed=(4, 8), available=(4, 7)):
        handle.read_window(torch.zeros(4, 7))
    for keys, scores in (((4, 8), (4, 16)), ((3, 16), (3, 16)), ((4, 16), (4, 8))):
        field, wrong = ("scores", scores) if keys == (4, 16) else ("keys", keys)
        with raises(BadInput, field=field, needed=(4, 16), available=wrong):
            handle.close_windows(torch.zeros(*keys), torch.zeros(*scores))
    closed = handle.close_windows(torch.zeros(4, 16), torch.zeros(4, 16))
    after = traffic.state.arena.buffer.clone()
    with raises(BadInput, field="entries", needed=(1, 8), available=(2, 8)):
        handle.write_entries(closed, torch.zeros(2, 8))
    with raises(BadInput, field="indexer_keys", needed=(1, 4), available=(1, 8)):
        handle.write_indexer_keys(closed, torch.zeros(1, 8))
    assert not torch.equal(before, after) and torch.equal(after, traffic.state.arena.buffer)


@pytest.mark.parametrize("name", ["overlap", "plain"])
def test_negative_slots_are_padded_rows_whatever_the_number(name: str) -> None:
    traffic = Traffic(KINDS[name], 0)
    live = {n: t[:SLOTS].clone() for n, t in traffic.state.fields.items()}
    handle = traffic.handle(step_of((-2, 0, 9)))
    handle.write_swa(traffic.randn(9, 8))
    handle.close_windows(*traffic.randn(2, 9, 16 if traffic.kind.overlap else 8))
    assert all(same(t[:SLOTS], live[n]) for n, t in traffic.state.fields.items())
