"""The blocks of a trace at the block size of an engine: which blocks of which requests hold the same tokens after the same
tokens."""

from __future__ import annotations

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.replay.trace import Ints, Trace
from kvpagoda.units import ceil_div, whole_number


class Chains:
    """The requests of ``trace`` in blocks of ``block_size`` tokens. An id of the trace stands for the tokens that the trace
    gives it; the rest of a prompt and every output are tokens that no other request has.

    ``prompts``, ``totals`` int64 ``[requests]``: the tokens of each prompt, at least 1, and those of which keys and values
    are computed: prompt and output but for the last token of the output, which no later token reads. A whole block has a
    key, 0 to ``num_keys``: two blocks have the same key if they hold the same tokens after the same tokens. Raises BadInput
    if one chain of ids stands for several numbers of tokens.
    """

    def __init__(self, trace: Trace, block_size: int) -> None:
        self.trace, self.block_size = trace, whole_number(block_size, "block_size", at_least=1)
        self.prompts: Ints = np.maximum(trace.input_lengths, 1)
        self.totals: Ints = self.prompts + np.maximum(trace.output_lengths - 1, 0)
        each = trace.block_tokens
        longest = trace.block_size if each is None else int(each.max(initial=1))
        self._per_id = ceil_div(longest, self.block_size)
        self._upto = None if each is None else np.concatenate([np.zeros(1, np.int64), np.cumsum(each, dtype=np.int64)])
        if self._upto is not None:
            self._check_starts(self._upto)
        known = trace.tokens_of(np.diff(trace.starts)) if each is not None else np.diff(trace.starts) * trace.block_size
        self._known: Ints = np.minimum(known, self.prompts) // self.block_size  # blocks that other requests may have
        own = self.totals // self.block_size - self._known
        shared = (int(trace.blocks.max(initial=-1)) + 1) * self._per_id
        self._first_own: Ints = shared + np.cumsum(own) - own
        self.num_keys = shared + int(own.sum())

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.trace)

    def keys(self, request: int) -> Ints:
        """Return the keys of the whole blocks of ``request``, prompt and output: int64 ``[totals[request] //
        block_size]``. O(blocks)."""
        begin, end = self.trace.starts[request : request + 2].tolist()
        known, total = int(self._known[request]), int(self.totals[request]) // self.block_size
        lasts = self.block_size * np.arange(1, known + 1, dtype=np.int64) - 1  # the last token of each block
        if self._upto is None:
            refs, offsets = np.divmod(lasts, self.trace.block_size)
        else:
            firsts = self._upto[begin : end + 1] - self._upto[begin]
            refs = np.searchsorted(firsts, lasts, "right") - 1
            offsets = lasts - firsts[refs]
        shared = self.trace.blocks[begin + refs].astype(np.int64) * self._per_id + offsets // self.block_size
        own = np.arange(total - known, dtype=np.int64) + self._first_own[request]
        return np.concatenate((shared, own))

    def _check_starts(self, upto: Ints) -> None:
        """Raise BadInput if a block of the trace begins after different numbers of tokens."""
        trace = self.trace
        counts = np.diff(trace.starts)
        starts = upto[:-1] - np.repeat(upto[trace.starts[:-1]], counts)
        seen = np.zeros(int(trace.blocks.max(initial=-1)) + 1, np.int64)
        seen[trace.blocks] = starts
        odd = np.flatnonzero(seen[trace.blocks] != starts)
        if len(odd):
            request = int(np.searchsorted(trace.starts, odd[0], "right")) - 1
            raise BadInput(
                f"{trace.name}: an id of request {request} follows the same ids as in another request, which stand for "
                "another number of tokens there; blocks of tokens cannot be told apart by them",
                needed=request,
            )
