"""The blocks of an engine's layers as rows of bytes, and copies between them and records on the host.

payload of a record   | block 0: layer 0, layer 1, .. | block 1: layer 0, layer 1, .. | ..
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvpagoda.arrays import Int64s
from kvpagoda.core.kernels.copy_rows import FEW, Regions, copy_gathered, copy_regions, copy_rows
from kvpagoda.core.kernels.dispatch import backend
from kvpagoda.core.memory.page_locks import PageLocks
from kvpagoda.core.memory.staging import Staging

Tensor = torch.Tensor


class BlockRows:
    """The blocks of one group: those of its layers.

    Args:
        layers: name -> uint8 ``[num_blocks, nbytes]``.
        locks: what is page-locked of the memory of records; None on a CPU.
    """

    def __init__(self, layers: dict[str, Tensor], locks: PageLocks | None = None) -> None:
        self.layers, self.nbytes = {}, 0  # type: dict[str, tuple[Tensor, slice]], int
        self._locks = locks
        self._staging = Staging(next((rows.device for rows in layers.values()), torch.device("cpu")))
        known = set[tuple[int, int]]()
        for name, rows in layers.items():
            place = rows.data_ptr(), rows.shape[1]
            if place in known:  # a layer that reads another one's memory
                continue
            known.add(place)
            self.layers[name] = rows, slice(self.nbytes, self.nbytes + rows.shape[1])
            self.nbytes += rows.shape[1]

    def to_records(self, ids: Int64s, payloads: Any, rows: Sequence[int]) -> None:
        """Copy blocks to records on the host. On a GPU the current stream does it, and this does not wait for page-locked
        rows.

        Args:
            ids: int64 ``[records, blocks]``.
            payloads: uint8 ``[M, n]``.
            rows: of ``payloads``, one for each record.
        """
        self._copy(ids, payloads, np.asarray(rows, np.int64), [*self.layers], is_out=True)

    def from_records(
        self, ids: Int64s, payloads: Any, rows: Sequence[int], layers: Sequence[str] | None = None
    ) -> None:
        """Copy records to blocks, but not to id 0.

        Args:
            ids: int64 ``[records, blocks]``.
            payloads: uint8 ``[M, n]``.
            rows: of ``payloads``, one for each record.
            layers: only to these; None: to all.
        """
        names = [*self.layers] if layers is None else layers
        self._copy(ids, payloads, np.asarray(rows, np.int64), names, is_out=False)

    def _copy(self, ids: Int64s, payloads: Any, rows: Int64s, names: Sequence[str], *, is_out: bool) -> None:
        table, copy = torch.from_numpy(payloads), copy_rows
        if self._locks is not None and len(rows):
            are_reached = rows < self._locks.num_rows(payloads, int(rows.max()))
            if are_reached.any() and backend("cuda") == "triton":
                self._launch(ids[are_reached], table, rows[are_reached], names, is_out=is_out)
                ids, rows = ids[~are_reached], rows[~are_reached]
            copy = copy_gathered  # slices could begin in memory that is locked and end in memory that is not
        for place, column in enumerate(ids.T if len(ids) else ()):
            wanted = column != 0
            pairs = torch.from_numpy(np.stack((column[wanted], rows[wanted]), axis=1))
            for name in names:
                memory, inside = self.layers[name]
                start = place * self.nbytes
                part = table[:, start + inside.start : start + inside.stop]
                if is_out:
                    copy(memory, part, pairs)
                else:
                    copy(part, memory, pairs.flip(1))

    def _launch(self, ids: Int64s, table: Tensor, rows: Int64s, names: Sequence[str], *, is_out: bool) -> None:
        """Copy all layers of all blocks in one launch, by few programs: ``rows`` are page-locked."""
        pairs = np.stack((ids.T, np.broadcast_to(rows, ids.T.shape)), axis=-1)
        pairs[ids.T == 0] = -1
        regions = list[tuple[int, ...]]()
        for place in range(ids.shape[1]):
            for name in names:
                memory, inside = self.layers[name]
                device = memory.data_ptr(), memory.stride(0)
                host = table.data_ptr() + place * self.nbytes + inside.start, table.stride(0)
                source, target = (device, host) if is_out else (host, device)
                regions.append((source[0], target[0], source[1], target[1], memory.shape[1], place))
        device_pairs = np.ascontiguousarray(pairs if is_out else pairs[..., ::-1])
        copy_regions(*Regions.of(np.array(regions, np.int64), device_pairs, self._staging.to_device), FEW)
