"""The workloads of replays: public traces with every token written out, and the order in which requests are served."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpagoda.replay import Trace, synthetic

Tokens = npt.NDArray[np.int32]
TRACES = Path(os.environ.get("KVPAGODA_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
VOCABULARY = 128_000
AT_ONCE, SHARE = 64, 0.9
"""Most requests that run at the same time; the share of the cache that they may fill."""


@dataclass(frozen=True)
class Source:
    """A trace file. Each id in it stands for ``per_id`` tokens. ``read``: how many requests are read (None: all).
    ``take``: how many of these, first arrivals first, are served (None: all, in the order of the file)."""

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


def cut_to_ids(trace: Trace, per_id: int) -> Trace:
    """Return ``trace`` with prompts that end with a whole id: what follows the last one is not in a trace, so that no later
    prompt has it, though in the conversation it has."""
    return replace(trace, input_lengths=np.maximum(trace.input_lengths // per_id * per_id, 1))


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests with their tokens. The tokens depend on the ids of the trace alone.

    ``trace``: chains of ids, input and output lengths. ``per_id``: how many tokens an id stands for.
    """

    name: str
    trace: Trace
    per_id: int

    def __len__(self) -> int:
        return len(self.trace)

    def prompt(self, i: int) -> Tokens:
        """Return the prompt of request ``i``, int32. Equal ids give equal tokens."""
        ids = self.trace.chain(i).astype(np.uint64)
        tokens = ids[:, None] * np.uint64(self.per_id) + np.arange(self.per_id, dtype=np.uint64)
        known = tokens.ravel()[: self.input_length(i)]
        own = self.input_length(i) - len(known)  # tokens after the last whole id: unique to this prompt
        return _scattered(np.concatenate((known, _own(2 * i, own))))

    def output(self, i: int) -> Tokens:
        """Return the output of request ``i``, int32. No other request has the same output."""
        return _scattered(_own(2 * i + 1, self.output_length(i)))

    def input_length(self, i: int) -> int:
        """Return the number of prompt tokens of request ``i``, at least 1."""
        return max(1, int(self.trace.input_lengths[i]))

    def output_length(self, i: int) -> int:
        """Return the number of output tokens of request ``i``, at least 1."""
        return max(1, int(self.trace.output_lengths[i]))

    def length(self, i: int) -> int:
        """Return the number of all tokens of request ``i``."""
        return self.input_length(i) + self.output_length(i)

    def steps(self, capacity: int, at_once: int = AT_ONCE) -> list[int]:
        """Return the order of work in a cache of ``capacity`` tokens: ``i`` admits request ``i``, ``~i`` ends it.

        Requests are admitted in the order of the trace. At most ``at_once`` run at a time, and only as many as would
        fit ``SHARE`` of the cache if they shared no block, at any block size. So no engine ever has to make a request
        wait, and all engines do the same work. Requests that are larger than this share are left out.
        """
        steps: list[int] = []
        running: list[tuple[int, int]] = []
        used, limit = 0, capacity * SHARE
        for i in range(len(self)):
            need = (-(-self.length(i) // 64) + 1) * 64
            if need > limit:
                continue
            while len(running) >= at_once or used + need > limit:
                ended, freed = running.pop(0)
                used -= freed
                steps.append(~ended)
            running.append((i, need))
            used += need
            steps.append(i)
        return steps + [~i for i, _ in running]


@cache
def workload(name: str, limit: int | None = None) -> Workload:
    """Return the first ``limit`` requests (None: all; 200 if generated) of a workload of ``SOURCES``, or of
    ``GENERATED``, which needs no file. Raises OSError if the trace cannot be read."""
    if name == GENERATED:
        return Workload(name, synthetic(limit or 200), 64)
    source = SOURCES[name]
    trace = Trace.read(TRACES / source.file, source.read)
    if source.take is not None:
        trace = trace.take(np.arange(source.take))
    return Workload(name, trace.take(np.arange(min(limit or len(trace), len(trace)))), source.per_id)


def _own(number: int, n: int) -> npt.NDArray[np.uint64]:
    """Return ``n`` numbers that no trace id and no other ``number`` gives."""
    return np.arange(n, dtype=np.uint64) + (np.uint64(1 << 40) + np.uint64(number) * np.uint64(1 << 18))


def _scattered(numbers: npt.NDArray[np.uint64]) -> Tokens:
    """Return the SplitMix64 hash of each number as a token id below ``VOCABULARY``."""
    x = numbers + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(VOCABULARY)).astype(np.int32)
