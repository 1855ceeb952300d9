"""Rows of an arena as records: the same bytes in either memory order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvpagoda.core.memory.arena import Arena
from kvpagoda.core.memory.host_copy import copy_from_host, copy_to_host


def records_of(arena: Arena, ids: Any) -> torch.Tensor:
    """Return a copy of rows ``ids`` (ints ``[n]``) as uint8 ``[n, layout.nbytes]`` on the host."""
    records = torch.zeros((len(ids), arena.layout.nbytes), dtype=torch.uint8)
    copy_to_host(arena, np.asarray(ids), records, range(len(ids)))
    return records


def put_records(arena: Arena, ids: Any, records: torch.Tensor) -> None:
    """Write ``records``, uint8 ``[n, layout.nbytes]``, to rows ``ids`` (ints ``[n]``)."""
    copy_from_host(arena, np.asarray(ids), records, range(len(ids)))
