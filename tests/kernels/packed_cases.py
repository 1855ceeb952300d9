"""Launches of ``append_rows`` and ``gather_rows`` for every packed dialect, and what they must leave behind, by ``pack``."""

import functools

import torch

from kvpagoda.formats.dialects import DIALECTS, dialect_of
from kvpagoda.layouts import pack

CANARY = 0xA5
EVERY = [(format, dialect) for format, dialects in DIALECTS.items() for dialect in dialects]
IDS = [f"{format}__{dialect}" for format, dialect in EVERY]
PAGE, PAGES = 4, 3
SLOTS = [5, -1, 0, 11, 12, 3, 2, 1 << 30, 7, -9]
"""Slots of three pages of four rows, some of no page."""


def heads_of(format):
    return 2 if format.startswith("gqa") else 1


def rows_for(format, seed=0, wide=True):
    """bfloat16 rows of many magnitudes: zeros, small negatives, ties and the largest number among them."""
    n, width = len(SLOTS), dialect_of(format).packing.width * heads_of(format)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator)
    if wide:
        x *= torch.exp2(8 * torch.randn(n, width // 16, 1, generator=generator).expand(-1, -1, 16).reshape(n, width))
        x[0, : width // 2] = 0
        x[2, ::3] = -1e-3
        x[3] = torch.tensor([0.25, -0.75, 1.25, -1.75, 2.5, 3.5, -5.0, 6.0]).repeat(width // 8)
        x[5, 7], x[8] = torch.finfo(torch.bfloat16).max, 2e-5
    return x.bfloat16()


def rows_with_odd_ones(format):
    """The rows of the tests, and some with inf, NaN of both signs, subnormals and zeros of both signs in places."""
    rows = torch.cat([rows_for(format), rows_for(format, seed=1, wide=False)])
    rows[11, 3], rows[12, 5], rows[13, 9] = torch.nan, torch.inf, -torch.inf
    rows.view(torch.int16)[14, 2] = -64  # 0xFFC0, a negative NaN
    rows.view(torch.int16)[15] = torch.arange(rows.shape[1], dtype=torch.int16) % 128 - (1 << 15)
    rows[16] = -0.0
    rows[17, -3:] = torch.tensor([torch.nan, torch.inf, 500.0])
    return rows


def pool(format, dialect, pages=PAGES):
    """Pages full of canaries, each followed by a few more: uint8 ``[pages, stride]``."""
    packing = dialect_of(format, dialect).packing
    stride = packing.page_stride(PAGE, heads_of(format)) + 32
    return torch.full((pages, stride), CANARY, dtype=torch.uint8)


@functools.cache
def expected(format, dialect, slots=tuple(SLOTS)):
    """The pool after ``rows_for`` were appended to ``slots``: ``pack`` one row after the other, moved byte by byte to its
    slot. Whoever asks again gets the same tensor.
    """
    packing, heads = dialect_of(format, dialect).packing, heads_of(format)
    pages = pool(format, dialect)
    for row, slot in zip(rows_for(format), slots):
        if 0 <= slot < PAGES * PAGE:
            alone = pack(row[None, None], format, page_size=1, dialect=dialect)[0]
            one, many = packing.places(1, heads), packing.places(PAGE, heads)
            for part in one:
                for head in range(heads):
                    for cell in range(packing.cells):
                        here = one[part].base + head * one[part].head + cell * one[part].cell
                        there = many[part].base + head * many[part].head + slot % PAGE * many[part].row
                        there += cell * many[part].cell
                        pages[slot // PAGE, there : there + many[part].nbytes] = alone[here : here + one[part].nbytes]
    return pages
