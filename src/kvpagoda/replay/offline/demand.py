"""What each reuse takes from the memory, and for how long.

A request that resumes after its first ``d`` tokens reads, in the memory when it is admitted:

    full attention   the rows of all ``d`` tokens
    a window of w    the rows of the last ``w - 1`` of them
    states           one copy, made after exactly ``d`` tokens

All of it was made by earlier requests that have these tokens in common with it. From the moment at which the last of these
has ended nobody computes it again and no running request holds it; so it lies in the memory from then until the admission.
Neighbouring tokens with the same last user are a *stretch*; a request has few.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput
from kvpagoda.replay.offline.lives import Lives
from kvpagoda.replay.trace import Floats, Ints, Trace
from kvpagoda.schema import Schema
from kvpagoda.schema.kinds import Compressed, Recurrent


@dataclass(frozen=True)
class Needs:
    """The least bytes that a text needs in order to go on: ``full`` for each token, ``windows``: (tokens that are read,
    bytes of each), ``state``: bytes of one copy of all recurrent states.

    A row for several tokens counts by the token: while it is not complete, its tokens wait in rows that take more. These
    rows, attention sinks, chunks, what is optional and padding count nothing."""

    full: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    state: float = 0.0

    @classmethod
    def of(cls, schema: Schema) -> Needs:
        """Return the needs of the layers of ``schema``, with copies of states as running requests have them.

        >>> Needs.of(Schema.from_hf_config("gpt-oss-120b"))
        Needs(full=36864.0, windows=((127, 36864.0),), state=0.0)
        """
        unit = schema.block_size()
        groups = [(group.growth, group.block_layout(unit).payload_nbytes / unit) for group in schema.groups]
        windows = defaultdict[int, float](float)
        for growth, nbytes in groups:
            if growth.window is not None and not growth.is_optional:
                windows[growth.window - 1] += nbytes
        state = 0.0
        for kind in (kind for layer in schema.layers for kind in layer.kinds):
            if isinstance(kind, Recurrent):
                state += sum(rows.count * rows.row_nbytes for rows in kind.states)
            elif isinstance(kind, Compressed):
                windows[kind.window - 1] += sum(rows.row_nbytes for rows in kind.state_rows() if rows.name == "swa")
        full = sum(nbytes for growth, nbytes in groups if not growth.is_bounded)
        return cls(full, tuple(windows.items()), state)


@dataclass(frozen=True, eq=False)
class TraceDemand:
    """The stretches of a trace, in the order of the requests, from the root on, and what it takes to resume at their ends.

    Int64 ``[stretches]``: ``request``; ``first`` and ``last``, the steps from and up to which its tokens have to lie in the
    memory (``first > last``: other requests that run hold them anyway); ``end``, the tokens up to its end. To resume at the
    end of stretch ``option[k]`` takes ``nbytes[k]`` of stretch ``part[k]``: arrays ``[n]``."""

    request: Ints
    first: Ints
    last: Ints
    end: Ints
    option: Ints
    part: Ints
    nbytes: Floats


class Texts:
    """The prompts of ``trace`` as paths of a tree: ``paths[i]``, intp ``[n]``, are the nodes of request ``i``. Two requests
    have a node in common if they have its id and all before it in common. A node stands for ``tokens_per_id`` tokens.
    Raises BadInput for a trace whose ids have different numbers of tokens."""

    def __init__(self, trace: Trace, tokens_per_id: int) -> None:
        check_ids(trace)
        self.tokens_per_id = tokens_per_id
        self.prompts = np.maximum(1, trace.input_lengths)
        nodes: dict[tuple[int, int], int] = {}
        self.paths: list[npt.NDArray[np.intp]] = []
        for i in range(len(trace)):
            path, at = [], -1
            for name in trace.chain(i).tolist():
                at = nodes.setdefault((at, name), len(nodes))
                path.append(at)
            self.paths.append(np.array(path, np.intp))

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.paths)


def check_ids(trace: Trace) -> None:
    """Raise BadInput if the ids of ``trace`` have different numbers of tokens."""
    if trace.block_tokens is not None:
        least, most = int(trace.block_tokens.min()), int(trace.block_tokens.max())
        raise BadInput.with_hint(
            f"the ids of {trace.name} stand for {least:,} to {most:,} tokens, and the bound needs ids of one number of tokens",
            "replay without opt, or give the trace other ids", needed=least, available=most,
        )  # fmt: skip


def demand_of(texts: Texts, lives: Lives, needs: Needs) -> TraceDemand:
    """Return what the reuses of ``texts`` take if its requests have these ``lives``. O(references) Python."""
    rows = _stretches(texts, lives)
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    request, first, last, begin, end = columns
    counts = np.arange(len(request)) - np.searchsorted(request, request) + 1  # stretches of an option
    option = np.repeat(np.arange(len(request)), counts)
    part = (
        np.arange(len(option)) - np.repeat(np.cumsum(counts) - counts, counts) + option - np.repeat(counts - 1, counts)
    )
    nbytes = needs.full * (end - begin)[part].astype(np.float64)
    for tokens, of_each in needs.windows:
        nbytes += of_each * np.maximum(0, end[part] - np.maximum(begin[part], end[option] - tokens))
    nbytes += needs.state * (part == option)
    return TraceDemand(request, first, last, end, option, part, nbytes)


def _stretches(texts: Texts, lives: Lives) -> list[tuple[int, int, int, int, int]]:
    """Return (request, first step, last step, first token, end) of each stretch of tokens that an earlier request has
    computed when the request is admitted."""
    free: dict[int, int] = {}  # node -> when the last of its users so far ends
    there, size = _first_computed(texts, lives), texts.tokens_per_id
    rows: list[tuple[int, int, int, int, int]] = []
    for j in np.flatnonzero(lives.is_served()).tolist():
        path, now = texts.paths[j].tolist(), int(lives.admitted[j])
        longest = int(texts.prompts[j]) - 1  # the last token of a prompt is always computed
        known = next((k for k, node in enumerate(path) if node not in free or there[node] >= now), len(path))
        cuts = [k for k in range(1, known) if free[path[k]] != free[path[k - 1]]]
        for begin, end in pairwise([0, *cuts, known]):
            tokens = min(end * size, longest)
            if begin * size < tokens:
                rows.append((j, free[path[begin]] + 1, now, begin * size, tokens))
        ended = int(lives.ended[j])
        for node in path:
            free[node] = max(free.get(node, -1), ended)
    return rows


def _first_computed(texts: Texts, lives: Lives) -> dict[int, int]:
    """Return the step in which the first token of each node is computed first."""
    there: dict[int, int] = {}
    order = np.lexsort((lives.step, lives.number))
    starts = np.searchsorted(lives.number[order], np.arange(len(texts) + 1))
    for j in np.flatnonzero(lives.is_served()).tolist():
        mine = order[starts[j] : starts[j + 1]]  # before step[k], and so after the step before it, there are length[k]
        path = texts.paths[j]
        at = np.searchsorted(lives.length[mine], np.arange(len(path)) * texts.tokens_per_id, side="right")
        done = np.append(lives.step[mine] - 1, lives.ended[j])[at]
        for node, step in zip(path.tolist(), done.tolist()):
            there[node] = min(there.get(node, step), step)
    return there


def held_by_running(texts: Texts, lives: Lives, needs: Needs) -> Floats:
    """Return the least bytes that the requests hold in each step that were admitted before it, float64 ``[steps]``. Rows of
    full attention that several have in common count once. Of windows count those beyond the tokens that a request has in
    common with others that run, or are admitted in this step; states count for each."""
    held, size = np.zeros(lives.num_steps), texts.tokens_per_id
    bounds = np.searchsorted(lives.step, np.arange(lives.num_steps + 1))
    fresh: dict[int, list[int]] = {}
    for number, step in enumerate(lives.admitted.tolist()):
        fresh.setdefault(step, []).append(number)
    for step in np.flatnonzero(np.diff(bounds)).tolist():
        numbers, lengths = (column[bounds[step] : bounds[step + 1]] for column in (lives.number, lives.length))
        paths = [texts.paths[i] for i in (*numbers.tolist(), *fresh.get(step, ()))]
        depths = np.concatenate([np.arange(len(path)) for path in paths])
        who = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
        nodes, index, count = np.unique(np.concatenate(paths), return_inverse=True, return_counts=True)
        there = np.append(lengths, np.zeros(len(paths) - len(numbers), np.int64))
        most = np.zeros(len(nodes), np.int64)
        np.maximum.at(most, index, np.clip(there[who] - depths * size, 0, size))
        own = np.maximum(0, lengths - size * np.array([len(path) for path in paths[: len(numbers)]]))
        shared = size * np.bincount(who[count[index] > 1], minlength=len(paths))[: len(numbers)]
        held[step] = needs.full * (most.sum() + own.sum()) + needs.state * len(numbers)
        for tokens, nbytes in needs.windows:
            held[step] += nbytes * np.clip(lengths - shared, 0, tokens).sum()
    return held
