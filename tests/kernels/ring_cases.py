"""Launches of ``append_swa`` for every way of running it, and what they must leave behind, by a plain loop."""

from dataclasses import dataclass, replace

import torch

from kvpagoda.core.kernels import append_swa
from kvpagoda.formats import encode
from kvpagoda.schema import Encoding
from kvpagoda.units import align_up

CANARY = 0xA5
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int32)


class Pools:
    """The four pools of ``requests`` rings (and the dummy) inside one buffer whose other bytes are canaries."""

    def __init__(self, requests, window, coded, rope, order="layer", device="cpu"):
        rows = requests + 1
        shapes = ((rows, window, coded), (rows, window, rope), (rows, window), (rows, window))
        record = [align_up(64 + s[1:].numel() * d.itemsize, 64) for s, d in zip(map(torch.Size, shapes), DTYPES)]
        if order == "layer":
            starts = [64 + rows * sum(record[:k]) for k in range(4)]
            strides = [torch.Size(s[1:]).numel() * d.itemsize for s, d in zip(shapes, DTYPES)]
        else:
            starts, strides = [64 + sum(record[:k]) for k in range(4)], [sum(record)] * 4
        self.buffer = torch.full((align_up(128 + rows * sum(record), 64),), CANARY, dtype=torch.uint8, device=device)
        self.views = tuple(self._view(*where) for where in zip(shapes, DTYPES, starts, strides))
        for view in self.views:
            view.fill_(-1 if view.dtype == torch.int32 else 0)

    def _view(self, shape, dtype, start, stride):
        inner = torch.empty(shape[1:], device="meta").stride()
        size = dtype.itemsize
        return self.buffer.view(dtype).as_strided(shape, (stride // size, *inner), start // size)

    def bytes(self):
        """Everything in the pools, on the CPU, comparable bit by bit."""
        return [view.cpu().contiguous().view(torch.uint8) for view in self.views]

    def check_canaries(self):
        inside = torch.zeros_like(self.buffer, dtype=torch.bool)
        for view in self.views:
            size = view.element_size()
            start, step = view.storage_offset() * size, view.stride(0) * size
            for row in range(len(view)):
                inside[start + row * step : start + row * step + view[row].numel() * size] = True
        assert (self.buffer[~inside] == CANARY).all(), "a byte outside of the pools was written"


@dataclass
class Launch:
    """Shape of the pools and the rows of one launch."""

    requests: int
    window: int
    rope: int
    kv: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor

    @property
    def coded(self):
        return self.kv.shape[1] - self.rope

    def pools(self, order="layer", device="cpu"):
        return Pools(self.requests, self.window, self.coded, self.rope, order, device)

    def to(self, device):
        return self.kv.to(device), self.slots.to(device), self.positions.to(device)


def launch(requests, window, runs, dim=128, rope=32, seed=0, kv=None):
    """``runs``: (slot, first position, number of rows), in the order of the launch."""
    slots = [slot for slot, _, count in runs for _ in range(count)]
    positions = [first + k for _, first, count in runs for k in range(count)]
    if kv is None:
        generator = torch.Generator().manual_seed(seed)
        size = torch.exp2(4 * torch.randn(len(slots), 1, generator=generator))
        kv = (torch.randn(len(slots), dim, generator=generator) * size).bfloat16()
    ids = (torch.tensor(slots, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32))
    return Launch(requests, window, rope, kv, *ids)


def every_finite_bf16():
    """All finite bfloat16 values as rows of 448 (near in size), and rows that mix large and small; 64 more for RoPE."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    x = torch.cat([x, x[: -len(x) % 448]])
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    coded = torch.cat([x.view(-1, 448), shuffled.view(-1, 448)[:46]])
    return torch.cat([coded, coded[:, :64]], 1)


def odd_rows(dim=128):
    """Rows of zeros, negative zeros, subnormals, the largest finite number, and rows with inf and NaN in each half."""
    kv = torch.randn(11, dim, generator=torch.Generator().manual_seed(5)).bfloat16()
    kv[0] = 0.0
    kv[1] = -0.0
    kv[2] = 1e-40
    kv[3] = kv[3] * 3e-11
    kv[4, 7] = torch.finfo(torch.bfloat16).max
    kv[5, 0] = torch.nan
    kv[6, 3] = torch.inf
    kv[7, 9] = -torch.inf
    kv[8] = torch.tensor([0x7F81], dtype=torch.int16).view(torch.bfloat16)  # a signalling NaN
    kv[9, -1] = torch.nan
    kv[10, -2] = -torch.inf
    return kv


def shuffled(case, seed=0):
    """The same rows in a random order."""
    order = torch.randperm(len(case.kv), generator=torch.Generator().manual_seed(seed))
    return replace(case, kv=case.kv[order], slots=case.slots[order], positions=case.positions[order])


CASES = {
    "decode": launch(5, 8, [(3, 17, 1), (0, 0, 1), (4, 7, 1), (1, 8, 1), (2, 1000003, 1)]),
    "one_row": launch(1, 8, [(0, 5, 1)], dim=512, rope=64),
    "wrap": launch(3, 8, [(1, 6, 5), (0, 15, 2)]),
    "longer_than_the_ring": launch(3, 8, [(2, 3, 27), (0, 100, 9), (1, 8, 8)]),
    "longer_than_an_odd_ring": launch(2, 7, [(1, 0, 16), (0, 12, 3)]),
    "interleaved": launch(3, 8, [(slot, 4 + at, 1) for at in range(21) for slot in (2, 0)]),
    "descending": launch(2, 8, [(1, 30 - at, 1) for at in range(19)]),
    "shuffled": shuffled(launch(3, 8, [(2, 3, 27), (-1, 5, 3), (0, 100, 9), (1, 8, 8)])),
    "repeated_and_far_apart": launch(2, 8, [(0, 5, 1), (1, 3, 2), (0, 29, 1), (0, 21, 1), (0, 29, 1), (1, 4, 1)]),
    "more_than_one_scan": shuffled(launch(2, 8, [(0, 0, 500), (1, 50, 40)], dim=16, rope=4)),
    "padded": launch(
        4, 8, [(0, 4, 2), (-1, 4, 9), (1, 5, 1), (-1, 0, 3), (4, 1, 1), (99, 2, 1), (2, -5, 3), (-7, 3, 1)]
    ),
    "all_padded": launch(2, 4, [(-1, 0, 6)]),
    "odd_rows": launch(2, 16, [(1, 9, 11)], kv=odd_rows()),
    "padded_nan": launch(2, 16, [(-1, 9, 11)], kv=odd_rows()),
    "odd_widths": launch(3, 5, [(1, 3, 4), (2, 0, 1)], dim=75, rope=12),
    "every_bf16": launch(1, 200, [(0, 50, 192)], rope=64, kv=every_finite_bf16()),
}


def expected(case, pools):
    """Write ``case`` to ``pools`` in order of position: the last writer of a ring slot wins."""
    codes, kept, inverse = encode(Encoding("fp8", kept=case.rope), case.kv)
    nothing = encode(Encoding("fp8", kept=case.rope), torch.zeros_like(case.kv[0]))
    last = {}
    for i in case.positions.argsort(stable=True).tolist():
        slot, position = int(case.slots[i]), int(case.positions[i])
        has_place = 0 <= slot < case.requests and position >= 0
        if has_place and (slot, position % case.window) in last:
            last[case.requests, 0] = None
        last[(slot, position % case.window) if has_place else (case.requests, 0)] = i if has_place else None
    for (row, ring), i in last.items():
        parts = nothing if i is None else (codes[i], kept[i], inverse[i])
        for view, value in zip(pools.views, (*parts, -1 if i is None else case.positions[i])):
            view[row, ring] = value
    return pools


def expected_heads(case):
    """``swa_head`` after ``case``, where it was 7 before."""
    heads = torch.full((case.requests + 1,), 7, dtype=torch.int32)
    for slot in range(case.requests):
        written = case.positions[(case.slots == slot) & (case.positions >= 0)]
        heads[slot] = int(written.max()) + 1 if len(written) else 7
    return heads


def compare(given, wanted):
    for name, a, b in zip(("fp8", "rope", "inv_scale", "pos"), given.bytes(), wanted.bytes()):
        assert torch.equal(a, b), f"{name} differs"
    given.check_canaries()


def check_ordered(case):
    """Append the rows of ``case``, which are in order, without a search."""
    pools, heads = case.pools(), torch.full((case.requests + 1,), 7, dtype=torch.int32)
    append_swa(case.kv, case.slots, case.positions, *pools.views, swa_head=heads, is_ordered=True)
    compare(pools, expected(case, case.pools()))
    assert torch.equal(heads, expected_heads(case))
