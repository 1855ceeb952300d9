"""``append_swa`` by its torch reference, and the launch of its kernel without running it."""

import importlib

import pytest
import torch
from ring_cases import CASES, Pools, check_ordered, compare, expected, expected_heads, launch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpagoda.core.kernels import append_swa
from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.errors import BadInput
from kvpagoda.formats import decode
from kvpagoda.schema import Encoding

module = importlib.import_module("kvpagoda.core.kernels.append_swa")


@pytest.mark.parametrize("order", ["layer", "block"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference_is_a_loop_over_the_rows(case, order):
    pools, wanted = case.pools(order), expected(case, case.pools(order))
    append_swa(case.kv, case.slots, case.positions, *pools.views)
    compare(pools, wanted)
    heads = torch.full((case.requests + 1,), 7, dtype=torch.int32)
    append_swa(case.kv, case.slots, case.positions, *pools.views, swa_head=heads)  # a replay
    compare(pools, wanted)
    assert torch.equal(heads, expected_heads(case))


ORDERED = ["decode", "one_row", "wrap", "longer_than_the_ring", "longer_than_an_odd_ring", "odd_rows", "padded_nan"]


@pytest.mark.parametrize("name", ORDERED)
def test_ordered_rows_need_no_search(name):
    check_ordered(CASES[name])


def test_rows_come_back():
    case = launch(4, 16, [(2, 30, 16), (0, 3, 5)], dim=512, rope=64)
    fp8, rope, inv_scale, pos = (pools := case.pools()).views
    append_swa(case.kv, case.slots, case.positions, *pools.views)
    back = decode(Encoding("fp8", kept=64), (fp8, rope, inv_scale), torch.float32)
    for i, (slot, position) in enumerate(zip(case.slots.tolist(), case.positions.tolist())):
        given, kept = case.kv[i, :448].float(), back[slot, position % 16, :448]
        assert (kept - given).norm() / given.norm() < 0.036
        assert ((kept - given).abs() <= (given.abs() * 0.0625).maximum(inv_scale[slot, position % 16] * 2.0**-9)).all()
        assert torch.equal(rope[slot, position % 16], case.kv[i, 448:]), "the RoPE half is bit-exact"
        assert pos[slot, position % 16] == position


def test_requests_are_isolated_and_padding_goes_to_the_dummy_row():
    case = launch(3, 8, [(1, 5, 6), (-1, 5, 4)])
    pools = case.pools("block")
    fp8, rope, _, pos = pools.views
    fp8.fill_(9)
    append_swa(case.kv, case.slots, case.positions, *pools.views)
    assert (fp8[[0, 2]] == 9).all() and (pos[[0, 2]] == -1).all() and not rope[[0, 2]].any()
    assert (pos[3] == -1).all(), "nothing in the dummy row ever counts as written"
    assert pos[1].tolist() == [8, 9, 10, -1, -1, 5, 6, 7]


def test_decode_token_by_token_equals_one_prefill():
    whole = launch(2, 8, [(1, 0, 21)])
    at_once, stepwise = whole.pools(), whole.pools()
    append_swa(whole.kv, whole.slots, whole.positions, *at_once.views)
    for i in range(21):
        append_swa(whole.kv[i : i + 1], whole.slots[i : i + 1], whole.positions[i : i + 1], *stepwise.views)
    for a, b in zip(at_once.views, stepwise.views):
        assert torch.equal(a[:2], b[:2])


def test_strided_kv_and_empty_launches():
    case = CASES["wrap"]
    pools = case.pools()
    wide = torch.zeros(len(case.kv), case.kv.shape[1] + 8, dtype=torch.bfloat16)
    wide[:, : case.kv.shape[1]] = case.kv
    append_swa(wide[:, : case.kv.shape[1]], case.slots, case.positions, *pools.views)
    append_swa(case.kv[:0], case.slots[:0], case.positions[:0], *pools.views)
    compare(pools, expected(case, case.pools()))


def arguments():
    case = CASES["decode"]
    names = ("kv", "slots", "positions", "swa_fp8", "swa_rope", "swa_inv_scale", "swa_pos")
    return dict(zip(names, (case.kv, case.slots, case.positions, *case.pools().views)))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("kv", lambda t: t.float()),
        ("kv", lambda t: t[:, :-1]),
        ("kv", lambda t: t[0]),
        ("kv", lambda t: t.t().contiguous().t()),
        ("kv", lambda t: t.to("meta")),
        ("slots", lambda t: t.long()),
        ("slots", lambda t: t[:-1]),
        ("positions", lambda t: t.repeat_interleave(2)[::2]),
        ("positions", lambda t: t[:, None]),
        ("swa_fp8", lambda t: t[0]),
        ("swa_fp8", lambda t: t[:, :-1]),
        ("swa_fp8", lambda t: t[:0]),
        ("swa_rope", lambda t: t.half()),
        ("swa_inv_scale", lambda t: t[:-1]),
        ("swa_inv_scale", lambda t: t[..., None]),
        ("swa_pos", lambda t: t.long()),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(name, spoil):
    given = arguments()
    bad = {**given, name: spoil(given[name])}
    with pytest.raises(BadInput):
        append_swa(**bad)
    assert not given["swa_fp8"].any() and (given["swa_pos"] == -1).all()


class NoOperations(TorchDispatchMode):
    """Fails on every torch operation: nothing is allocated, copied or read back."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called on the launch path")


class Recorder:
    """Stands for the kernel and keeps what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def test_launch_allocates_nothing_and_is_the_same_every_step(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(module, "append_swa_kernel", recorder)
    monkeypatch.setattr(module, "backend", lambda device_type: "triton")
    kv, slots = torch.zeros(6, 96, dtype=torch.bfloat16), torch.full((6,), -1, dtype=torch.int32)
    positions, pools = torch.zeros(6, dtype=torch.int32), Pools(4, 8, 64, 32, "block")
    for step in range(3):
        slots[: step + 1], positions[: step + 1] = torch.arange(step + 1), step
        with NoOperations():
            append_swa(kv, slots, positions, *pools.views)

    def addresses(entry):
        grid, args, kwargs = entry
        return grid, [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args], kwargs

    assert len(recorder.launches) == 3
    assert all(addresses(entry) == addresses(recorder.launches[0]) for entry in recorder.launches)
    assert recorder.launches[0][0] == (1,), "a program takes several rows"


def test_forcing_the_reference(monkeypatch):
    monkeypatch.setenv(VARIABLE, "reference")
    case = CASES["decode"]
    pools = case.pools()
    append_swa(case.kv, case.slots, case.positions, *pools.views)
    compare(pools, expected(case, case.pools()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestDevice:
    @pytest.mark.parametrize("kind", ["triton", "reference"])
    @pytest.mark.parametrize("order", ["layer", "block"])
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_same_bytes_as_on_the_cpu(self, case, order, kind, monkeypatch):
        if kind == "triton":
            pytest.importorskip("triton")
        monkeypatch.setenv(VARIABLE, kind)
        pools = case.pools(order, "cuda")
        append_swa(*case.to("cuda"), *pools.views)
        compare(pools, expected(case, case.pools(order)))

    def test_captured_launch_follows_its_buffers(self):
        pytest.importorskip("triton")
        kv, slots, positions = launch(8, 16, [(-1, 0, 8)], dim=512, rope=64).to("cuda")
        pools, wanted = Pools(8, 16, 448, 64, "layer", "cuda"), Pools(8, 16, 448, 64)
        append_swa(kv, slots, positions, *pools.views)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            append_swa(kv, slots, positions, *pools.views)
        for step in range(1, 9):
            runs = [(slot, 10 + step, 1) for slot in range(step)] + [(-1, 0, 1)] * (8 - step)
            case = launch(8, 16, runs, dim=512, rope=64, seed=step)
            for buffer, value in zip((kv, slots, positions), case.to("cuda")):
                buffer.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            append_swa(case.kv, case.slots, case.positions, *wanted.views)
            assert all(torch.equal(a[:8], b[:8]) for a, b in zip(map(torch.Tensor.cpu, pools.views), wanted.views))

    def test_pools_beyond_two_gib(self):
        pytest.importorskip("triton")
        if torch.cuda.mem_get_info()[0] < 8 << 30:
            pytest.skip("needs 8 GiB of device memory")
        case = launch(2, 8, [(1, 5, 6), (0, 2, 3)], dim=512, rope=64)
        pools = case.pools("layer", "cuda")
        stride = 5 << 29
        buffer = torch.zeros(2 * stride + 8 * 448, dtype=torch.uint8, device="cuda")
        fp8 = buffer.as_strided((3, 8, 448), (stride, 448, 1))
        append_swa(*case.to("cuda"), fp8, *pools.views[1:])
        wanted = expected(case, case.pools())
        assert torch.equal(fp8.cpu(), wanted.views[0])
