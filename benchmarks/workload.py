"""What is replayed: public traces with every token written out, and the order in which an engine would serve them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpagoda.replay import Trace, synthetic

Tokens = npt.NDArray[np.int32]
TRACES = Path(os.environ.get("KVPAGODA_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
VOCABULARY = 128_000
AT_ONCE, SHARE = 64, 0.9


@dataclass(frozen=True)
class Source:
    """A trace file: one id of it stands for ``per_id`` tokens; ``read`` requests are read (None: all), and the first
    ``take`` of them in the order of their arrival are served."""

    file: str
    per_id: int
    read: int | None = None
    take: int | None = None


SOURCES = {
    "conversation": Source("mooncake_conversation.jsonl.gz", 512),
    "synthetic": Source("mooncake_synthetic.jsonl.gz", 512),
    "agent": Source("weka_agentic_rle.jsonl.gz", 64, read=3000, take=1500),
}
GENERATED = "generated"


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests with their tokens, which depend on the ids of the trace only.

    ``trace``: chains of ids, input and output lengths. ``per_id``: tokens that an id stands for.
    """

    name: str
    trace: Trace
    per_id: int

    def __len__(self) -> int:
        return len(self.trace)

    def prompt(self, i: int) -> Tokens:
        """The prompt of request ``i``: int32. Equal ids give equal tokens."""
        ids = self.trace.chain(i).astype(np.uint64)
        tokens = ids[:, None] * np.uint64(self.per_id) + np.arange(self.per_id, dtype=np.uint64)
        known = tokens.ravel()[: self.input_length(i)]
        own = self.input_length(i) - len(known)  # of a prompt that does not end with a whole id
        return _scattered(np.concatenate((known, _own(2 * i, own))))

    def output(self, i: int) -> Tokens:
        """The output of request ``i``: int32, nobody else's."""
        return _scattered(_own(2 * i + 1, self.output_length(i)))

    def input_length(self, i: int) -> int:
        return max(1, int(self.trace.input_lengths[i]))

    def output_length(self, i: int) -> int:
        return max(1, int(self.trace.output_lengths[i]))

    def length(self, i: int) -> int:
        return self.input_length(i) + self.output_length(i)

    def steps(self, capacity: int) -> list[int]:
        """The order of work in a cache of ``capacity`` tokens: ``i`` admits request ``i`` and lets it run, ``~i`` ends it.

        First come, first served, at most ``AT_ONCE`` at a time and as long as all of them would fit ``SHARE`` of the
        cache without sharing anything, whatever the block size: so nobody ever has to wait, and all do the same work.
        Requests that are larger than that are left out.
        """
        steps: list[int] = []
        running: list[tuple[int, int]] = []
        used, limit = 0, capacity * SHARE
        for i in range(len(self)):
            need = (-(-self.length(i) // 64) + 1) * 64
            if need > limit:
                continue
            while len(running) >= AT_ONCE or used + need > limit:
                ended, freed = running.pop(0)
                used -= freed
                steps.append(~ended)
            running.append((i, need))
            used += need
            steps.append(i)
        return steps + [~i for i, _ in running]


@cache
def workload(name: str, limit: int | None = None) -> Workload:
    """A workload of ``SOURCES``, or ``generated``, which needs no file; the first ``limit`` requests. Raises OSError."""
    if name == GENERATED:
        return Workload(name, synthetic(limit or 200), 64)
    source = SOURCES[name]
    trace = Trace.read(TRACES / source.file, source.read)
    if source.take is not None:
        trace = trace.by_arrival().take(np.arange(source.take))
    return Workload(name, trace.take(np.arange(min(limit or len(trace), len(trace)))), source.per_id)


def _own(number: int, n: int) -> npt.NDArray[np.uint64]:
    """Numbers that nothing else has."""
    return np.arange(n, dtype=np.uint64) + (np.uint64(1 << 40) + np.uint64(number) * np.uint64(1 << 18))


def _scattered(numbers: npt.NDArray[np.uint64]) -> Tokens:
    """SplitMix64 of each number, as token ids."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(VOCABULARY)).astype(np.int32)
