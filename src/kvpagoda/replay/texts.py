"""The tokens of a trace's requests. A trace has ids of blocks and numbers of tokens; tokens are made up from these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpagoda.replay.trace import Trace

Tokens = npt.NDArray[np.int32]
_OWN = 2**30  # the first token id that is used for tokens of a single request; ids of the trace are below


def text_of(trace: Trace, number: int, tokens_per_id: int, own: int | None = None) -> tuple[Tokens, int]:
    """Return the tokens of request ``number``, prompt and output, int32 ``[n]``, and the number of prompt tokens.

    An id stands for ``tokens_per_id`` tokens, or for the number of tokens that the trace gives for it. The rest of the
    prompt, and the output, are tokens that no request has but those of the same ``own`` (None: ``number``). O(n) array
    work."""
    ids, each = trace.chain(number), trace.block_tokens
    begin, end = trace.starts[number : number + 2]
    sizes = np.full(len(ids), tokens_per_id) if each is None else each[begin:end]
    num_prompt = max(1, int(trace.input_lengths[number]))
    firsts = np.cumsum(sizes, dtype=np.int64) - sizes
    ids, firsts = ids[firsts < num_prompt], firsts[firsts < num_prompt]
    sizes = np.minimum(sizes[: len(ids)], num_prompt - firsts)
    tokens = np.arange(sizes.sum(), dtype=np.int32) - np.repeat(firsts, sizes).astype(np.int32)
    tokens[firsts] = ids
    rest = np.arange(num_prompt + int(trace.output_lengths[number]) - len(tokens), dtype=np.int32)
    rest[:1] = _OWN + (number if own is None else own)
    return np.concatenate((tokens, rest)), num_prompt
