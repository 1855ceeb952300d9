"""A whole trace in memory, as columns."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput, BadLine
from kvpagoda.replay.readers import Ids as Ids64
from kvpagoda.replay.readers import Source, read_requests
from kvpagoda.replay.readers.sessions import AGENT_TIMES, AgentTimes
from kvpagoda.units import whole_number

Ids32 = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 512  # tokens per id in the public form (kvcache-ai/Mooncake, FAST25-release)
_CHUNK = 1 << 22  # references that are processed at once: temporary arrays of some 32 MB
FIRST_BAD = 3  # bad lines whose errors are kept


@dataclass
class Skipped:
    """Bad lines that were left out: how many ``lines``, and the errors of the ``first`` few."""

    lines: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: BadLine) -> None:
        """Count a bad line."""
        self.lines += 1
        if len(self.first) < FIRST_BAD:
            self.first.append(str(error))


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace in the order in which they run. The arrays are shared and never changed.

    Args:
        name: of the trace.
        ids: int32 ``[refs]``, the chains of block ids, one after another; request ``i`` has ``ids[starts[i]:starts[i +
            1]]``. The source's own numbers if those are small, else renumbered.
        starts: int64 ``[requests + 1]``.
        arrivals: float64 ``[requests]``, seconds.
        input_lengths: int64 ``[requests]``, tokens.
        output_lengths: int64 ``[requests]``, tokens.
        block_size: tokens of an id.
        block_tokens: int32 ``[refs]``, tokens of each id, if the source gives each its own number.
        out_of_order: how many requests the source named after one that arrived later; ``read`` ordered them, unless it
            was told to keep the order.
        sessions: int64 ``[requests]``, the number of each request's conversation, -1 where the source does not say;
            None if it says nothing.
        calls_tool: bool ``[requests]``, see ``Request``; None if the source says nothing.
        skipped: the bad lines that ``read`` was told to leave out.
        agent_times: from when the times of the requests of agents counted, the "agent"'s entry or the beginning of the
            "conversation"; None without agents that tell it.
    """

    name: str
    ids: Ids32
    starts: Ints
    arrivals: Floats
    input_lengths: Ints
    output_lengths: Ints
    block_size: int = DEFAULT_BLOCK_SIZE
    block_tokens: Ids32 | None = None
    out_of_order: int = 0
    sessions: Ints | None = None
    calls_tool: npt.NDArray[np.bool_] | None = None
    skipped: Skipped = field(default_factory=Skipped)
    agent_times: str | None = None

    @classmethod
    def read(
        cls,
        source: Source | Trace,
        limit: int | None = None,
        block_size: int | None = None,
        *,
        keep_order: bool = False,
        skip_bad: bool = False,
        agent_times: str | None = None,
    ) -> Trace:
        """Read a source of ``read_requests`` and order its requests by arrival. A Trace is left as it is.

        ``out_of_order`` counts requests that were not in order, and a log line says it. O(refs); the ids are in memory
        once, and a second time while they are ordered.

        Args:
            source: see ``read_requests``.
            limit: the most requests that are read.
            block_size: tokens per id if the source does not say; None: 512.
            keep_order: leave the requests in the order of the source.
            skip_bad: leave out lines that cannot be read, which ``skipped`` counts.
            agent_times: see there; None: what most agents of the trace say. Where some conversations say otherwise the
                source is read a second time, so it must be a path or a list.

        Raises:
            BadInput: ``limit`` or ``block_size`` is below 1, an unknown ``agent_times``, or a ``source`` that is none
                or that cannot be read twice where that is needed.
            BadLine: the first line that cannot be read, without ``skip_bad``.
        """
        if limit is not None:
            whole_number(limit, "a limit of requests", at_least=1)
        if isinstance(source, Trace):
            return source if limit is None or limit >= len(source) else source.take(np.arange(limit))
        times = AgentTimes(agent_times)
        trace = cls._read(source, limit, block_size, keep_order, skip_bad, times)
        if times.is_mixed:
            if not isinstance(source, str | Path) and iter(source) is source:
                raise BadInput(
                    f"the agents of {trace.name} do not agree from when their times count, most from the {times.most}: give "
                    f"agent_times, {' or '.join(map(repr, AGENT_TIMES))}, or a list of records",
                    needed="agent_times",
                )
            trace = cls._read(source, limit, block_size, keep_order, skip_bad, AgentTimes(times.most))
        return replace(trace, agent_times=times.most)

    @classmethod
    def _read(
        cls,
        source: Source,
        limit: int | None,
        block_size: int | None,
        keep_order: bool,
        skip_bad: bool,
        times: AgentTimes,
    ) -> Trace:
        name = str(source) if isinstance(source, str | Path) else "records"
        arrivals, inputs, outputs, counts, tokens = [], [], [], [0], []
        sessions, tools = [], []
        ids, skipped = _GrowingIds(), Skipped()
        for request in islice(read_requests(source, on_bad=skipped.add if skip_bad else None, times=times), limit):
            arrivals.append(request.arrival)
            inputs.append(request.input_length)
            outputs.append(request.output_length)
            counts.append(len(request.block_ids))
            tokens.append(request.block_tokens)
            sessions.append(request.session)
            tools.append(request.calls_tool)
            ids.add(request.block_ids)
        made = cls(
            name, _small(ids.array()), np.cumsum(counts, dtype=np.int64), np.array(arrivals, np.float64),
            np.array(inputs, np.int64), np.array(outputs, np.int64),
            sessions=np.array(sessions, np.int64) if max(sessions, default=-1) >= 0 else None,
            calls_tool=np.array(tools, np.bool_) if any(tools) else None,
        )  # fmt: skip
        default = DEFAULT_BLOCK_SIZE if block_size is None else whole_number(block_size, "block_size", at_least=1)
        return replace(made._with_tokens(tokens, default)._ordered(keep_order), skipped=skipped)

    def _ordered(self, keep_order: bool) -> Trace:
        """Return this trace with ``out_of_order`` counted, in order of arrival unless ``keep_order``."""
        late = int(np.count_nonzero(self.arrivals < np.maximum.accumulate(self.arrivals)))
        if not late:
            return self
        if keep_order:
            return replace(self, out_of_order=late)
        _log.info("%s: %d of %d requests were not in order of arrival; ordered", self.name, late, len(self))
        return replace(self.by_arrival(), out_of_order=late)

    def _with_tokens(self, said: list[int | Ids64 | None], default: int) -> Trace:
        """Return this trace with the tokens per id of each request: ``said[i]``, or ``default`` if it is None."""
        sizes = {default if size is None else size for size in said if not isinstance(size, np.ndarray)}
        if len(sizes) <= 1 and not any(isinstance(size, np.ndarray) for size in said):
            return replace(self, block_size=min(sizes, default=default))
        each = [np.empty(0, np.int32)]
        for size, length, count in zip(said, self.input_lengths.tolist(), np.diff(self.starts).tolist()):
            if isinstance(size, np.ndarray):
                each.append(size.astype(np.int32))
            else:
                each.append(tokens_of_blocks(length, count, default if size is None else size))
        return replace(self, block_size=min(sizes, default=default), block_tokens=np.concatenate(each))

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.arrivals)

    def chain(self, i: int) -> Ids32:
        """Return the block ids of a request, int32 ``[n]``: a view.

        Args:
            i: its number.
        """
        return self.ids[self.starts[i] : self.starts[i + 1]]

    @property
    def num_refs(self) -> int:
        """The number of block references: the sum of the lengths of all chains."""
        return len(self.ids)

    def tokens_of(self, blocks: Ints) -> Ints:
        """Return the tokens of the first blocks of each request: int64 ``[requests]``.

        O(requests), and O(refs) if each id has its own number of tokens.

        Args:
            blocks: int64 ``[requests]``, how many.
        """
        if self.block_tokens is not None:
            upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.block_tokens, dtype=np.int64)])
            found: Ints = upto[self.starts[:-1] + blocks] - upto[self.starts[:-1]]
            return found
        whole = np.minimum(blocks, self.input_lengths // self.block_size)
        rest = self.input_lengths - whole * self.block_size
        more = blocks - whole  # the last, partial block of the prompt, and one token for each block after it
        tokens: Ints = whole * self.block_size + np.where(more > 0, np.maximum(rest, 1) + more - 1, 0)
        return tokens

    @cached_property
    def blocks(self) -> Ids32:
        """The block number of each reference, int32 ``[refs]``. Two references have the same number if they name the
        same id after the same chain of ids. If ids are hashes of a whole prefix, the numbers are the ids. O(refs)."""
        if not self.num_refs or self._ids_name_chains():
            return self.ids
        numbers: dict[tuple[int, int], int] = {}
        found = np.empty_like(self.ids)
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist()):
            block = -1
            for index, block_id in enumerate(self.ids[start:end].tolist(), start):
                block = found[index] = numbers.setdefault((block, block_id), len(numbers))
        return found

    def _ids_name_chains(self) -> bool:
        """Whether each id always follows the same id: then it always follows the same chain."""
        roots = self.starts[:-1][np.diff(self.starts) > 0]
        parent_of = np.empty(int(self.ids.max()) + 1, np.int32)

        def parents(begin: int, end: int) -> Ids32:
            found = np.empty(end - begin, np.int32)
            found[:1] = self.ids[begin - 1]
            found[1:] = self.ids[begin : end - 1]
            found[roots[np.searchsorted(roots, begin) : np.searchsorted(roots, end)] - begin] = -1
            return found

        chunks = [(first, min(first + _CHUNK, self.num_refs)) for first in range(0, self.num_refs, _CHUNK)]
        for begin, end in chunks:
            parent_of[self.ids[begin:end]] = parents(begin, end)
        return all(np.array_equal(parent_of[self.ids[begin:end]], parents(begin, end)) for begin, end in chunks)

    @cached_property
    def num_distinct(self) -> int:
        """The number of distinct blocks: a cache of this capacity evicts nothing. O(refs)."""
        if not self.num_refs:
            return 0
        is_used = np.zeros(int(self.blocks.max()) + 1, np.bool_)
        for begin in range(0, self.num_refs, _CHUNK):
            is_used[self.blocks[begin : begin + _CHUNK]] = True
        return int(np.count_nonzero(is_used))

    def by_arrival(self) -> Trace:
        """Return the requests in the order of their arrivals; requests that arrive together keep their order."""
        return self.take(np.argsort(self.arrivals, kind="stable"))

    def take(self, which: Iterable[int] | Ints) -> Trace:
        """Return some requests as a new trace.

        Args:
            which: their numbers, in the new order.
        """
        chosen = np.asarray(which, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(self.starts)[chosen])])
        bounds = list(zip(self.starts[chosen].tolist(), self.starts[chosen + 1].tolist()))

        def taken(column: Ids32) -> Ids32:
            return np.concatenate([column[:0], *(column[begin:end] for begin, end in bounds)])

        return Trace(
            self.name, taken(self.ids), starts, self.arrivals[chosen], self.input_lengths[chosen],
            self.output_lengths[chosen], self.block_size, None if self.block_tokens is None else taken(self.block_tokens),
            sessions=None if self.sessions is None else self.sessions[chosen],
            calls_tool=None if self.calls_tool is None else self.calls_tool[chosen], agent_times=self.agent_times,
        )  # fmt: skip


def tokens_of_blocks(length: int, count: int, block_size: int) -> Ids32:
    """Return the tokens of each of ``count`` blocks of a prompt of ``length`` tokens, int32 ``[count]``:
    ``block_size``, the rest in the last block, and 1 for each block beyond the prompt."""
    left = length - block_size * np.arange(count, dtype=np.int64)
    return np.clip(left, 1, block_size).astype(np.int32)


def readable(trace: Source | Trace) -> Trace:
    """Read ``trace``. Raises BadInput if it names no blocks, so that nothing could be looked up."""
    columns = Trace.read(trace)
    if len(columns) and not columns.num_refs:
        text = f"{columns.name} names no blocks (lengths and arrivals only): there is nothing to look up"
        raise BadInput(text, needed="blocks")
    return columns


class _GrowingIds:
    """A growing array of ids, one chain after another: int32 as long as all ids fit, else int64."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._dtype: np.dtype[Any] = np.dtype(np.int32)

    def add(self, ids: Ids64) -> None:
        if self._dtype.itemsize == 4 and len(ids) and (ids.min() < 0 or ids.max() >= 2**31):
            self._bytes = bytearray(self.array().astype(np.int64).tobytes())
            self._dtype = np.dtype(np.int64)
        self._bytes += ids.astype(self._dtype).tobytes()

    def array(self) -> npt.NDArray[Any]:
        """Return all ids, without a copy: ``add`` must not be called while the array is in use."""
        return np.frombuffer(self._bytes, self._dtype)


def _small(ids: npt.NDArray[np.signedinteger]) -> Ids32:
    """Return the ids as int32. Negative ids, and ids much larger than their count, are renumbered: tables by id stay
    small."""
    if len(ids) and (ids.min() < 0 or ids.max() > max(2**20, 4 * len(ids))):
        ids = np.unique(ids, return_inverse=True)[1]
    return ids.astype(np.int32, copy=False)
