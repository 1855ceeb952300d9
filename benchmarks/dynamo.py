"""Where Dynamo's mocker differs from a tree of the trace's ids, and from the engines that it models, and by which rule.

``ids``: ``replay`` with ``lru`` counts the ids of a trace that hit; compared with the mocker at the capacity of the row. An id
that stands for less than a block hits there, and the last one too; the mocker finds whole blocks alone, and computes the last
token. ``more``: requests that find more in the mocker. ``profile``: requests that differ from our profile ``dynamo-1.6.1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.oracle import trace_of
from benchmarks.peers import Absent, Process
from benchmarks.timing import Options, Row, tell
from kvpagoda.replay import Group, Schedule, Trace, replay, replay_engine
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.trace import Ints

QUESTION = "By which rules does Dynamo's mocker differ?"
SIZE, MIXES, MIX = 64, 20, 200
SHARED = Schedule(16, 2048, shared=True)


def asked(
    process: Process, source: dict[str, Any], size: int, blocks: int, schedule: Schedule, **settings: Any
) -> Ints:
    """Return the tokens that each request finds in the mocker."""
    found = process.ask(
        "oracle", trace=source, block_size=size, num_blocks=blocks, at_once=schedule.at_once,
        step_tokens=schedule.step_tokens, shared=schedule.shared, **settings,
    )  # fmt: skip
    return np.array(found["hits"], np.int64)


def by_ids(process: Process, options: Options) -> Row:
    """Compare with a tree of the trace's ids, on 3,000 requests in 4,000 blocks of 512 tokens."""
    source = {"name": "conversation", "limit": 60 if options.quick else 3_000}
    trace = trace_of(**source)
    theirs = asked(process, source, 512, 4_000, Schedule())
    tree, ours = replay(trace, 4_000).hits, replay_engine(trace, "dynamo-1.6.1", 4_000, block_size=512).per_request
    whole = np.minimum(tree, (trace.input_lengths - 1) // 512)
    unequal, more = np.flatnonzero(tree * 512 != theirs), np.flatnonzero(whole * 512 < theirs)
    return {
        "case": "ids", "requests": len(trace), "unequal": len(unequal), "last_id": int((tree > whole)[unequal].sum()),
        "more": len(more), "profile": int((ours != theirs).sum()), "which": unequal.tolist(), "which_more": more.tolist(),
    }  # fmt: skip


def mixes(options: Options) -> Iterator[tuple[dict[str, Any], Trace, int]]:
    """Yield (arguments of ``trace_of``, the trace, a capacity in blocks): one and a half, and three of its longest request."""
    for seed in range(2 if options.quick else MIXES):
        source = {"name": "mix", "limit": MIX, "seed": seed}
        trace = trace_of(**source)
        longest = -(-int(Chains(trace, SIZE).totals.max()) // SIZE)
        yield from ((source, trace, capacity) for capacity in (3 * longest // 2, 3 * longest))


def other_settings(process: Process, options: Options) -> Iterator[Row]:
    """Compare its backends and its states with the profiles that come nearest, and ``sglang`` with SGLang's too."""
    cases = (
        ("sglang, one at a time", "dynamo-1.6.1", {"backend": "sglang"}, Schedule()),
        ("trtllm, 16 share a budget", "dynamo-1.6.1-trtllm", {"backend": "trtllm"}, SHARED),
        ("states, one at a time", "dynamo-1.6.1", {"groups": "full+state"}, Schedule()),
        ("states, 16 share a budget", "dynamo-1.6.1", {"groups": "full+state"}, SHARED),
    )
    for case, engine, settings, schedule in cases:
        requests = unequal = edges = 0
        groups = Group.from_text(settings.get("groups", "full"))
        for source, trace, capacity in mixes(options):
            theirs = asked(process, source, SIZE, capacity, schedule, **settings)
            ours = replay_engine(
                trace, engine, capacity, block_size=SIZE, at_once=schedule.at_once, step_tokens=schedule.step_tokens,
                shared=schedule.shared, groups=groups,
            )  # fmt: skip
            requests += len(trace)
            unequal += int((ours.per_request != theirs).sum())
            if "sglang" in case:
                tree = replay_engine(trace, "sglang-0.5.23", capacity, block_size=SIZE)
                edges += int((tree.per_request != theirs).sum())
        row = {"case": case, "requests": requests, "unequal": unequal}
        yield {**row, "unequal_to_sglang": edges} if "sglang" in case else row


def states(process: Process, options: Options) -> Row:
    """What is found with one state of a block's size a request, and without states, where nothing need be evicted."""
    found = without = requests = 0
    for source, trace, _ in mixes(options):
        ample = 4 * int(Chains(trace, SIZE).totals.sum()) // SIZE
        found += int(asked(process, source, SIZE, ample, Schedule(), groups="full+state").sum())
        without += int(asked(process, source, SIZE, ample, Schedule()).sum())
        requests += len(trace)
    return {
        "case": "state_cache", "requests": requests, "found": found, "found_without": without,
        "found_percent": 100 * found / without,
    }  # fmt: skip


def measure(options: Options) -> list[Row]:
    try:
        process = Process("dynamo_oracle")
    except Absent as reason:
        return [{"who": "dynamo-1.6.1", "absent": str(reason)}]
    with process:
        rows = [by_ids(process, options), *other_settings(process, options), states(process, options)]
        return [{**row, "who": "dynamo-1.6.1", "version": process.version} for row in rows]


if __name__ == "__main__":
    tell("dynamo", QUESTION, measure)
