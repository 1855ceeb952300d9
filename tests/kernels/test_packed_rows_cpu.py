"""The loops that numba compiles give the bytes of the reference, whatever the rows hold."""

import pytest
import torch
from packed_cases import EVERY, IDS, PAGE, SLOTS, heads_of, pool, rows_with_odd_ones

from kvpagoda.kernels.dispatch import VARIABLE
from kvpagoda.kernels.packed_rows import append_rows, gather_rows
from kvpagoda.layouts.dialects import dialect_of

pytest.importorskip("numba", reason="numba is not installed")
every = pytest.mark.parametrize(("format", "dialect"), EVERY, ids=IDS)


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
