"""Pages of one dialect as pages of another: decoded, and encoded anew. Needs torch."""

from __future__ import annotations

import torch

from kvpagoda.layouts.copying import Bytes
from kvpagoda.layouts.layout import Layout
from kvpagoda.layouts.packed import pack, unpack
from kvpagoda.layouts.recode import Recode


def encoded_anew(recode: Recode, stage: Layout, memory: Bytes) -> Bytes:
    """The bytes of ``stage`` in the other dialect: ``memory`` holds whole pages as ``Recode.stages`` lays them.

    Raises BadInput for rows that the other dialect has no bytes for (inf, NaN).
    """
    pages = torch.from_numpy(memory).view(-1, stage.strides("code")["B"])
    rows = unpack(pages, recode.format, page_size=stage.page_size, dialect=recode.source, dtype=torch.bfloat16)
    found: Bytes = pack(rows, recode.format, page_size=stage.page_size, dialect=recode.target).numpy().ravel()
    return found
