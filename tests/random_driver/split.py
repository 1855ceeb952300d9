"""A cache in two halves: a scheduler without memory, and a worker that gets its copies as JSON and has the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvpagoda import KVCache, Worker
from kvpagoda.core.batch.batch import StepCheckpoints
from kvpagoda.core.memory.copies import Copies


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def text_of(copies: Copies, without: str = "") -> str:
    """Return ``copies`` as JSON, without those of the kind ``without``."""
    left = tuple(one for one in copies if one.kind != without)
    return replace(copies, operations=left).to_json()


class SplitView:
    """A view of a layer: its fields in the memory of the worker, and the arrays of the scheduler, as tensors."""

    def __init__(self, memory: Any, arrays: Any) -> None:
        self._memory, self._arrays = memory, arrays

    def __getitem__(self, field: str) -> Any:
        return self._memory[field]

    def __getattr__(self, name: str) -> Any:
        return _tensor(getattr(self._arrays, name))


class SplitBatch:
    """A batch of the scheduler, whose copies the worker has applied. ``without``: the kind of copies that are left out."""

    without = ""

    def __init__(self, batch: Any, worker: Worker) -> None:
        self._batch, self._worker = batch, worker
        copies = text_of(batch.copies, self.without)
        while True:
            try:
                worker.apply(copies)
                break
            except MemoryError:  # a copy of the worker failed: it goes on with that one
                continue

    def __getattr__(self, name: str) -> Any:
        return _tensor(getattr(self._batch, name))

    @property
    def checkpoints(self) -> StepCheckpoints:
        return StepCheckpoints(*map(_tensor, self._batch.checkpoints))

    def layer(self, index: int) -> SplitView:
        return SplitView(self._worker.layer(index), self._batch.layer(index))


class SplitTogether:
    """A persistent batch of the scheduler."""

    def __init__(self, together: Any, worker: Worker) -> None:
        self._together, self._worker = together, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._together, name)

    def extend(self, n: int | None = None) -> SplitBatch:
        return SplitBatch(self._together.extend(n), self._worker)


class SplitCache:
    """The calls of a cache: those of ``scheduler``, and memory of ``worker``."""

    def __init__(self, scheduler: KVCache, worker: Worker) -> None:
        self._scheduler, self._worker = scheduler, worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def batch(self, *arguments: Any, **settings: Any) -> SplitBatch:
        return SplitBatch(self._scheduler.batch(*arguments, **settings), self._worker)

    def persistent_batch(self, *arguments: Any, **settings: Any) -> SplitTogether:
        return SplitTogether(self._scheduler.persistent_batch(*arguments, **settings), self._worker)

    def layer(self, index: int) -> Any:
        return self._worker.layer(index)
