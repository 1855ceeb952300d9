"""A trace served with the layers of hybrid models, compared with full attention in the same blocks and chunks."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

from benchmarks.one_budget import MODELS, schema_of
from benchmarks.peers.ours import FULL
from benchmarks.peers.tasks import TOGETHER
from benchmarks.timing import Options, Row, tell
from benchmarks.workload import GENERATED, Tokens, Workload, workload
from kvpagoda import KVCache, Limits
from kvpagoda.core.cache.sequence import Sequence
from kvpagoda.schema import Schema

QUESTION = "What do windows, states and compressed layers cost the host, beside full attention?"
CAPACITY, STEP_TOKENS = 3_000_000, 8192


def schemas() -> dict[str, Schema]:
    """Return the schema of each model of ``MODELS``, without limits on token ids."""
    return {name: replace(schema_of(config), vocab_size=None) for name, config, _ in MODELS}


def serve(schema: Schema, block_size: int, work: Workload, capacity: int) -> tuple[float, float]:
    """Serve the whole trace. Return the CPU seconds, and the percentage of prompt tokens that are reused.

    Prompts are computed in chunks that end where a checkpoint is due. ``capacity``: tokens of full attention that fit
    the budget next to the memory of the other layers."""
    size: dict[str, int] = {"num_blocks": capacity // block_size}
    plan = schema.plan(max_requests=80, block_size=block_size, step_tokens=STEP_TOKENS, **size)
    if len(plan.groups) > 1:
        size = {"budget": plan.nbytes}
    books = KVCache(
        schema, max_requests=80, block_size=block_size, device="none", **size,
        limits=Limits(max(map(work.length, range(len(work)))), STEP_TOKENS),
    )  # fmt: skip
    running: dict[int, Sequence] = {}
    taken, hits, prompts = 0.0, 0, 0
    gc.collect()
    gc.freeze()
    steps = work.steps(capacity)
    for first in range(0, len(steps), TOGETHER):
        batch = steps[first : first + TOGETHER]
        texts = {i: (work.prompt(i), work.output(i)) for i in batch if i >= 0}
        start = time.process_time()
        for i in batch:
            if i < 0:
                running.pop(~i).close()
            else:
                prompt, output = texts[i]
                running[i] = books.open(prompt, capacity=0, reserve=len(prompt) + len(output))
                hits += running[i].length
                _compute(books, running[i], prompt, output)
        taken += time.process_time() - start
        prompts += sum(len(prompt) for prompt, _ in texts.values())
    books.check()
    gc.unfreeze()
    return taken, 100 * hits / prompts


def _compute(books: KVCache, sequence: Sequence, prompt: Tokens, output: Tokens) -> None:
    """Compute the prompt in chunks, then the output up to its last block boundary, then the rest. A checkpoint is due
    at that boundary."""
    while sequence.length < len(prompt):
        end = min(sequence.length + min(STEP_TOKENS, books.step_limit(sequence)), len(prompt))
        sequence.extend(end - sequence.length)
        sequence.commit(prompt[sequence.length : end])
    whole = (len(prompt) + len(output)) // books.block_size * books.block_size
    first = max(0, whole - len(prompt))
    for part in (output[:first], output[first:]):
        if len(part):
            sequence.extend(len(part))
            sequence.commit(part)


def measure(options: Options) -> list[Row]:
    work = workload(GENERATED, 40) if options.quick else workload("conversation")
    capacity = 200_000 if options.quick else CAPACITY
    rows: list[Row] = []
    for name, schema in schemas().items():
        if options.only not in name:
            continue
        block_size = schema.block_size(None)
        served: dict[str, list[tuple[float, float]]] = {name: [], "full attention": []}
        for _ in range(options.runs):
            for who, layers in ((name, schema), ("full attention", FULL)):
                served[who].append(serve(layers, block_size, work, capacity))
        seconds = {who: sorted(taken)[len(taken) // 2] for who, taken in served.items()}
        rows += [
            {
                "case": f"{name}, block {block_size}", "layers": who, "seconds": taken,
                "over_full": taken / seconds["full attention"][0], "hit_percent": hit,
            }
            for who, (taken, hit) in seconds.items()
        ]  # fmt: skip
    return rows


if __name__ == "__main__":
    tell("hybrid", QUESTION, measure)
