"""The loops that numba compiles give the bytes of the reference, whatever the rows hold."""

import json
import os
import subprocess
import sys

import numpy as np
import parts_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy
from packed_cases import EVERY, IDS, PAGE, SLOTS, heads_of, pool, rows_with_odd_ones

from kvpagoda.core.kernels.dispatch import VARIABLE
from kvpagoda.core.kernels.packed_rows import (
    Form,
    Grid,
    append_parts,
    append_rows,
    constants_of,
    gather_parts,
    gather_rows,
)
from kvpagoda.errors import LayoutError
from kvpagoda.formats import decode, encode
from kvpagoda.formats.dialects import dialect_for_heads, dialect_of
from kvpagoda.formats.encoding import Encoding
from raises import raises

pytest.importorskip("numba", reason="numba is not installed")
every = pytest.mark.parametrize(("format", "dialect"), EVERY, ids=IDS)
NOWHERE = Grid(1, 1, 1, *[(0, 0, 0, 0)] * 3)


def append_constants(rules):
    return vars(constants_of(Form(Encoding(), rules, NOWHERE, 0, 0), "append"))


def both(monkeypatch, run):
    for name in ("numba", "reference"):
        monkeypatch.setenv(VARIABLE, name)
        yield run()


@every
def test_append_writes_the_bytes_of_the_reference(format, dialect, monkeypatch):
    rows = rows_with_odd_ones(format)
    rows = torch.stack([rows, rows], 1)[:, 0]  # strided
    for chunk in (rows[:10], rows[10:]):

        def run(chunk=chunk):
            pages = pool(format, dialect)
            append_rows(chunk, torch.tensor(SLOTS), pages, format, page_size=PAGE, dialect=dialect)
            return pages

        given, wanted = both(monkeypatch, run)
        assert torch.equal(given, wanted), (given != wanted).nonzero()[:8]


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_gives_the_numbers_of_the_reference(format, dialect, dtype, monkeypatch):
    packing, pages = dialect_of(format, dialect).packing, pool(format, dialect)
    generator = torch.Generator().manual_seed(3)
    pages[:] = torch.randint(
        0, 256, pages.shape, dtype=torch.uint8, generator=generator
    )  # every code and scale there is
    slots = torch.tensor([0, -1, 11, 5, 5, 12, 3], dtype=torch.int32)

    def run():
        out = torch.full((len(slots), packing.width * heads_of(format) + 4), 7, dtype=dtype)
        gather_rows(pages, slots, out[:, :-4], format, page_size=PAGE, dialect=dialect)
        return out

    given, wanted = both(monkeypatch, run)
    assert torch.equal(given.isnan(), wanted.isnan()), "NaN in the same places; its bits are the device's"
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(given.nan_to_num(3.0).view(bits), wanted.nan_to_num(3.0).view(bits))


@every
def test_padded_rows_alone_write_nothing_and_read_zeros(format, dialect, monkeypatch):
    packing, slots = dialect_of(format, dialect).packing, torch.tensor([-1, 10**6])
    width = packing.width * heads_of(format)

    def run():
        pages, out = pool(format, dialect), torch.ones(2, width)
        before = pages.clone()
        append_rows(torch.ones(2, width).bfloat16(), slots, pages, format, page_size=PAGE, dialect=dialect)
        gather_rows(pages, slots, out, format, page_size=PAGE, dialect=dialect)
        return torch.equal(pages, before) and not out.any()

    assert all(both(monkeypatch, run))


@pytest.mark.parametrize("case", parts_cases.IDS)
def test_rows_in_arrays_of_their_own_are_those_of_the_codec(case, monkeypatch):
    """Bytes as ``encode`` gives them, and numbers as ``decode`` does, in both dtypes; other bytes stay."""
    encoding, dim = parts_cases.CASES[case]
    rows, slots = parts_cases.rows_of(dim), torch.tensor(SLOTS)

    def run():
        parts, memory = parts_cases.parts_of(encoding, dim)
        append_parts(rows, slots, parts)
        outs = [torch.full(rows.shape, 7, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
        for out in outs:
            gather_parts(out, slots, parts)
        return memory, outs

    (memory, outs), (wanted, others) = both(monkeypatch, run)
    assert torch.equal(memory, wanted), (memory != wanted).nonzero()[:8]
    vectors, live = rows.view(len(rows), parts_cases.HEADS, dim), (slots >= 0) & (slots < 12)
    for out, other in zip(outs, others):
        back = decode(encoding, encode(encoding, vectors), out.dtype).flatten(1).masked_fill_(~live[:, None], 0)
        for one in (out, other):
            assert torch.equal(one.nan_to_num(3.0), back.nan_to_num(3.0)) and torch.equal(one.isnan(), back.isnan())


def test_rows_of_float32_are_encoded_exactly_in_arrays_of_their_own():
    encoding = parts_cases.CASES["fp8-80"][0]
    parts, _ = parts_cases.parts_of(encoding, 80)
    rows = torch.randn(1, 160, generator=torch.Generator().manual_seed(2))
    out = torch.zeros(1, 160)
    append_parts(rows, torch.tensor([3]), parts)
    gather_parts(out, torch.tensor([3]), parts)
    wanted = decode(encoding, encode(encoding, rows.view(1, 2, 80)), torch.float32)
    assert torch.equal(out, wanted.flatten(1))
    assert not torch.equal(wanted, decode(encoding, encode(encoding, rows.bfloat16().view(1, 2, 80)), torch.float32))


@pytest.mark.parametrize("case", ["fp8-80", "nvfp4-112"])
@settings(deadline=None, max_examples=40)
@given(bits=numpy.arrays(np.int16, (len(SLOTS), parts_cases.HEADS * 112)))
def test_any_bits_of_rows_give_the_bytes_of_the_reference(case, bits):
    """inf, NaN, subnormals and zeros of both signs are among them."""
    encoding, dim = parts_cases.CASES[case]
    rows = torch.from_numpy(bits).view(torch.bfloat16)[:, : parts_cases.HEADS * dim]
    found = []
    for backend in ("numba", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, backend)
            parts, memory = parts_cases.parts_of(encoding, dim)
            append_parts(rows, torch.tensor(SLOTS), parts)
            out = torch.zeros(rows.shape)
            gather_parts(out, torch.tensor(SLOTS), parts)
            found.append((memory, out.isnan(), out.nan_to_num(3.0)))
    assert all(map(torch.equal, *found))


def test_every_number_in_units_of_every_scale_of_nvfp4_has_the_code_of_the_reference(monkeypatch):
    """A group begins with six times its scale; all bfloat16 up to that follow, 15 in a group, with alternate signs."""
    encoding, sizes = Encoding("nvfp4", group=16), torch.arange(0, 0x4800, dtype=torch.int16).view(torch.bfloat16)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for top in 6 * scales:
        below = sizes[: (sizes <= top).sum() // 15 * 15].view(-1, 15)
        # of numbers less than 2^-13 of the largest, whose codes are all 0, one in 256
        below = torch.cat([below[(below[:, 0] < top / 8192)][::256], below[below[:, 0] >= top / 8192]])
        below[:, ::2] *= -1
        rows = torch.cat([top.expand(len(below), 1).bfloat16(), below], 1)
        slots, pages = torch.arange(len(rows)), -(-len(rows) // parts_cases.PAGE)

        def run(rows=rows, slots=slots, pages=pages):
            parts, memory = parts_cases.parts_of(encoding, 16, heads=1, pages=pages)
            append_parts(rows, slots, parts)
            return memory

        given, wanted = both(monkeypatch, run)
        assert torch.equal(given, wanted), float(top)


WIDTHS = (64, 80, 96, 112, 128, 192, 256, 512)
"""Elements of a head, of models that there are."""


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("format", ["gqa_fp8_head", "gqa_int8_head", "gqa_int4_group", "gqa_nvfp4"])
def test_heads_of_every_model_are_written_and_read(format, head_dim, monkeypatch):
    """The bytes of the reference; or, if groups do not divide a head, an error that says which sizes there are."""
    how = {"page_size": PAGE, "head_dim": head_dim}
    rows = torch.randn(len(SLOTS), 2 * 2 * head_dim, generator=torch.Generator().manual_seed(head_dim)).bfloat16()
    pages, out = torch.zeros(3, PAGE * 2 * 2 * (head_dim + 4), dtype=torch.uint8), torch.zeros(rows.shape)
    if format == "gqa_int4_group" and head_dim % 32:
        with raises(LayoutError, needed=head_dim, available=32, rule="size"):
            append_rows(rows, torch.tensor(SLOTS), pages, format, **how)
        return

    def run():
        append_rows(rows, torch.tensor(SLOTS), pages.zero_(), format, **how)
        gather_rows(pages, torch.tensor(SLOTS), out, format, **how)
        return pages.clone(), out.clone()

    given, wanted = both(monkeypatch, run)
    assert all(map(torch.equal, given, wanted))
    live = [i for i, slot in enumerate(SLOTS) if 0 <= slot < 12]
    error = (given[1][live] - rows[live].float()).norm() / rows[live].float().norm()
    assert error < {"gqa_int8_head": 0.01, "gqa_fp8_head": 0.04}.get(format, 0.15)


@pytest.mark.parametrize("head_dim", [6, 5], ids=["no power of two", "odd: the reference"])
def test_heads_of_any_width_are_written_and_read(head_dim, monkeypatch):
    rows = torch.randn(len(SLOTS), 4 * head_dim, generator=torch.Generator().manual_seed(head_dim)).bfloat16()

    def run():
        pages, out = torch.zeros(3, 256, dtype=torch.uint8), torch.zeros(len(SLOTS), 4 * head_dim)
        how = {"page_size": PAGE, "head_dim": head_dim}
        append_rows(rows, torch.tensor(SLOTS), pages, "gqa_int8_head", **how)
        gather_rows(pages, torch.tensor(SLOTS), out, "gqa_int8_head", **how)
        return pages, out

    given, wanted = both(monkeypatch, run)
    assert all(map(torch.equal, given, wanted)) and (given[1][2] - rows[2]).abs().max() < 0.02


def test_a_loop_is_found_on_disk_until_what_it_is_made_of_changes(monkeypatch, tmp_path):
    import numba

    from kvpagoda.core.lanes import rows as lanes

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    constants = json.dumps(append_constants(dialect_for_heads("gqa_int8_head", None, 2)))

    def found():
        loop = lanes.vector_loop.__wrapped__(constants)
        memory, strides = np.zeros(64, np.uint8), lanes.Strides(1, 1, 4, (0, 2, 0), (12, 12, 12), (12, 12, 12))
        loop(np.zeros(4, np.uint16), memory, np.zeros(1, np.int32), strides, np.array([[0, 0, 0], [6, 6, 6]]))
        return sum(loop.stats.cache_hits.values()), sum(loop.stats.cache_misses.values())

    assert [found(), found()] == [(0, 1), (1, 0)]
    monkeypatch.setattr(lanes.inspect, "getsource", lambda module: f"{module.__name__}, changed")
    assert found() == (0, 1)


APPEND = """
import hashlib, sys, torch
from kvpagoda.core.kernels.packed_rows import append_rows
for dialect in sys.argv[1:]:
    pages = torch.zeros(1, 656, dtype=torch.uint8)
    rows = torch.randn(1, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    append_rows(rows, torch.tensor([0]), pages, "v32_656", page_size=1, dialect=dialect)
    print(hashlib.sha256(pages.numpy()).hexdigest())
"""


TWO = ["flashmla", "sglang_raw"]


def test_loops_have_names_of_their_own():
    """numba names what it compiles by the function and by how many came before it in its process. Two dialects that were
    compiled in two processes once had one name in a third, which could not use the second."""
    from kvpagoda.core.lanes import rows as lanes

    constants = [append_constants(dialect_of("v32_656", dialect)) for dialect in TWO]
    loops = [lanes.vector_loop.__wrapped__(json.dumps(one)).py_func for one in constants]
    assert loops[0].__qualname__ != loops[1].__qualname__
    assert loops[0].__name__ != loops[1].__name__


@pytest.mark.slow
def test_loops_that_several_processes_compiled_are_told_apart_in_one(tmp_path):
    def digests(*dialects, **environment):
        given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **environment}
        command = [sys.executable, "-c", APPEND, *dialects]
        return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.split()

    wanted = digests(*TWO, **{VARIABLE: "reference"})
    assert digests(TWO[0]) == wanted[:1]
    assert digests(*TWO) == digests(*TWO) == wanted  # the second was compiled beside one from the disk
