"""How long are the runs of neighbouring blocks in the block tables of requests, when memory is full?

A run is one descriptor of a transfer, or one copy. The first 1,500 requests of the public conversation trace are served with
full attention, 16 at once, in blocks of 16 tokens. While the prompt of one is computed, 512 tokens a step, the others decode
16 tokens in each step. ``at once``: ``open`` allocates the blocks of the whole prompt. ``in pieces``: each step allocates its
own. The runs of a request are counted at the end of its prompt, from the 500th request on. Needs the traces, as ``hits`` does;
without them a synthetic mix is served.
"""

from __future__ import annotations

from collections import deque
from time import process_time

from benchmarks.bound import trace_for
from benchmarks.timing import Options, Row, tell
from kvpagoda import KVCache, NeverFits, RetryLater, Schema
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.replay import Trace
from kvpagoda.replay.texts import Tokens, text_of
from kvpagoda.schema import Attention, Layer

QUESTION = "How many neighbouring blocks are a run in the block tables of requests?"
FULL = Schema((Layer(0, "full", (Attention(1, 8, 8, "float16"),)),))
REQUESTS, AT_ONCE, STEP, DECODED = 1500, 16, 512, 16
"""Requests that are served, those that run at once, tokens of a prompt a step, and tokens of an answer a step."""


def measure(options: Options) -> list[Row]:
    trace, per_id = trace_for(options)
    rows = list[Row]()
    for num_blocks in (400,) if options.quick else (8000, 30000):
        for way in ("at once", "in pieces"):
            case = f"{num_blocks:,} blocks, {way}"
            if options.only in case:
                cache = KVCache(FULL, num_blocks=num_blocks, block_size=16, max_requests=AT_ONCE + 1, device="none")
                rows.append({"case": case, **_served(cache, trace, per_id, in_pieces=way == "in pieces")})
                cache.close()
    return rows


def _served(cache: KVCache, trace: Trace, per_id: int, *, in_pieces: bool) -> Row:
    """Serve ``trace`` and return what was counted."""
    running, number = deque[tuple[Sequence, Tokens]](), min(REQUESTS, len(trace))
    num_blocks = num_runs = found = 0
    (group,), begin = cache.core.groups, process_time()
    for i in range(number):
        text, num_prompt = text_of(trace, i, per_id)
        sequence = None
        while sequence is None:
            try:
                capacity = 0 if in_pieces else num_prompt
                sequence = cache.open(text[:num_prompt], capacity=capacity, reserve=len(text))
            except RetryLater:
                _decode(running)
            except NeverFits:
                break
        if sequence is None:
            continue
        cached = sequence.cached_tokens
        while sequence.length < num_prompt:
            _compute(sequence, text, min(num_prompt, sequence.length + STEP))
            _decode(running)
        if i >= number // 3:
            blocks, runs = group.runs((sequence.slot,))
            num_blocks += blocks
            num_runs += runs
            found += cached // cache.block_size
        running.append((sequence, text))
        while len(running) > AT_ONCE:
            _decode(running)
    seconds = process_time() - begin
    for sequence, _ in running:
        sequence.close()
    return {
        "blocks_per_run": num_blocks / max(1, num_runs), "mergeable_percent": 100 * (1 - num_runs / max(1, num_blocks)),
        "hit_percent": 100 * found / max(1, num_blocks), "us_a_request": 1e6 * seconds / number,
    }  # fmt: skip


def _compute(sequence: Sequence, text: Tokens, end: int) -> None:
    sequence.extend(end - sequence.length)
    sequence.commit(text[sequence.length : end])


def _decode(running: deque[tuple[Sequence, Tokens]]) -> None:
    """Compute a piece of each answer, and close those that are complete."""
    for _ in range(len(running)):
        sequence, text = running.popleft()
        _compute(sequence, text, min(len(text), sequence.length + DECODED))
        if sequence.length < len(text):
            running.append((sequence, text))
        else:
            sequence.close()


if __name__ == "__main__":
    tell("runs", QUESTION, measure)
