"""A whole trace in memory, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput
from kvpagoda.replay.readers import Source, read_requests

Ids32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order in which they run. The arrays are shared, never changed.

    ``ids`` int32 ``[refs]``: the chains one after another; request ``i`` has ``ids[starts[i]:starts[i + 1]]``. They are
    the source's own numbers where those are small, else renumbered. ``starts`` int64 ``[requests + 1]``; ``arrivals``
    float64 ``[requests]``, seconds; ``input_lengths``, ``output_lengths`` int64 ``[requests]``.
    """

    name: str
    ids: Ids32
    starts: Ints
    arrivals: Floats
    input_lengths: Ints
    output_lengths: Ints

    @classmethod
    def read(cls, source: Source | Trace, limit: int | None = None) -> Trace:
        """Read a source of ``read_requests``, at most ``limit`` requests of it. Raises BadInput. O(refs)."""
        if limit is not None and limit < 1:
            raise BadInput(f"a limit is at least 1 request, got {limit}")
        if isinstance(source, Trace):
            return source if limit is None or limit >= len(source) else source.take(np.arange(limit))
        name = str(source) if isinstance(source, str | Path) else "records"
        arrivals, inputs, outputs, chains = [], [], [], [np.empty(0, np.int64)]
        for request in islice(read_requests(source), limit):
            arrivals.append(request.arrival)
            inputs.append(request.input_length)
            outputs.append(request.output_length)
            ids = request.block_ids
            chains.append(ids.astype(np.int32) if len(ids) and ids.min() >= 0 and ids.max() < 2**31 else ids)
        starts = np.cumsum([len(ids) for ids in chains], dtype=np.int64)
        return cls(
            name, _small(np.concatenate(chains)), starts, np.array(arrivals, np.float64), np.array(inputs, np.int64),
            np.array(outputs, np.int64),
        )  # fmt: skip

    def __len__(self) -> int:
        """Requests."""
        return len(self.arrivals)

    def chain(self, i: int) -> Ids32:
        """The block ids of request ``i``: a view."""
        return self.ids[self.starts[i] : self.starts[i + 1]]

    @property
    def num_refs(self) -> int:
        """Block references: the chains' lengths summed."""
        return len(self.ids)

    @cached_property
    def blocks(self) -> Ids32:
        """int32 ``[refs]``: equal where two references name the same block, that is, the same id behind the same chain.

        Where ids are hashes of a whole prefix, these are the ids. O(refs).
        """
        if not self.num_refs:
            return self.ids
        parents = np.empty_like(self.ids)
        parents[1:] = self.ids[:-1]
        parents[self.starts[:-1][np.diff(self.starts) > 0]] = -1
        parent_of = np.empty(int(self.ids.max()) + 1, np.int32)
        parent_of[self.ids] = parents
        if np.array_equal(parent_of[self.ids], parents):
            return self.ids
        numbers: dict[tuple[int, int], int] = {}
        found = np.empty_like(self.ids)
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist()):
            block = -1
            for place, block_id in enumerate(self.ids[start:end].tolist(), start):
                block = found[place] = numbers.setdefault((block, block_id), len(numbers))
        return found

    @cached_property
    def num_distinct(self) -> int:
        """Different blocks: the capacity from which on nothing is evicted. O(refs)."""
        return int(np.count_nonzero(np.bincount(self.blocks))) if self.num_refs else 0

    @cached_property
    def request_of(self) -> Ids32:
        """int32 ``[refs]``: the request that makes each reference."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.starts))

    def by_arrival(self) -> Trace:
        """The same requests in the order of their arrivals; those that arrive together stay as they are."""
        return self.take(np.argsort(self.arrivals, kind="stable"))

    def take(self, which: Iterable[int] | Ints) -> Trace:
        """The requests ``which``, in that order, as a trace of its own."""
        chosen = np.asarray(which, np.int64)
        sizes = np.diff(self.starts)[chosen]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        places = np.repeat(self.starts[chosen] - starts[:-1], sizes) + np.arange(starts[-1])
        return Trace(
            self.name, self.ids[places], starts, self.arrivals[chosen], self.input_lengths[chosen],
            self.output_lengths[chosen],
        )  # fmt: skip


def _small(ids: npt.NDArray[np.signedinteger]) -> Ids32:
    """The ids as int32, none negative and none much larger than there are of them: tables by id stay small."""
    if len(ids) and (ids.min() < 0 or ids.max() > max(2**20, 4 * len(ids))):
        ids = np.unique(ids, return_inverse=True)[1]
    return ids.astype(np.int32, copy=False)
