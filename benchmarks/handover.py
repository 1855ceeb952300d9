"""The speed of handing a request over, compared with a bare copy of its blocks by the same transport.

Llama-3.2-1B's shapes in bfloat16 (32 KiB a token, 512 KiB a block of 16 tokens), on one thread. Sender and receiver are caches
of one process, so that nothing runs beside what is measured; the ranks of a side run one after the other.

``hand_over_ms``: copy to exported memory, checksums, ticket. ``receive_ms``: read, verify, copy into blocks, admit; of all
ranks together. ``bare_ms``: ``Transfer.read`` of as many bytes as the receivers keep. ``share_percent``: the speed of
``receive`` as a share of that. ``whole_percent``: the same of both together, as a share of two bare copies.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.swap import LLAMA_1B
from benchmarks.timing import Options, Row, seconds, tell
from kvpagoda import Identity, Retention
from kvpagoda.core.kv_cache import KVCache
from kvpagoda.handover import MooncakeEngine, Sender, SharedMemory, Ticket
from kvpagoda.handover.lease import RECEIPTS_NBYTES
from kvpagoda.schema import Schema

QUESTION = "How much of the speed of a copy is left when a request is handed to another cache?"
CASES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "equal": ((1, 1), (16, 16)),
    "blocks of 64 from 16": ((1, 1), (16, 64)),
    "2 ranks from 1": ((1, 2), (16, 16)),
    "1 rank from 2": ((2, 1), (16, 16)),
    "4 ranks from 2": ((2, 4), (16, 16)),
}
"""Ranks of sender and receiver, and tokens of their blocks."""


def measure(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    tokens = 256 if options.quick else 4096
    transports: dict[str, Callable[[int], Any]] = {"shared memory": SharedMemory}
    if find_spec("mooncake") is not None:
        transports["Mooncake over TCP"] = MooncakeEngine
    return [_row(options, name, make, case, tokens) for name, make in transports.items() for case in CASES]


def _row(options: Options, transport: str, make: Callable[[int], Any], case: str, tokens: int) -> Row:
    (many, ways), sizes = CASES[case]
    schema, nbytes = Schema.from_hf_config(LLAMA_1B), tokens * 32 << 10
    givers = [_cache(schema, rank, many, sizes[0], tokens) for rank in range(many)]
    takers = [_cache(schema, rank, ways, sizes[1], tokens) for rank in range(ways)]
    exported = [make(RECEIPTS_NBYTES + nbytes // many + (1 << 20)) for _ in givers]
    landings = [make(0) for _ in takers]
    senders = [cache.sender(one) for cache, one in zip(givers, exported)]
    text = np.arange(tokens, dtype=np.int32)
    sequences = [cache.open(text) for cache in givers]
    for sequence in sequences:
        sequence.commit(text)
    found = [_round(sequences, senders, takers, landings, nbytes) for _ in range(options.runs + 1)]
    for one in (*exported, *landings):
        one.close()
    hand_over, receive, bare = (median(values) for values in zip(*found[1:]))  # the first round touches the memory
    return {
        "case": f"{transport}, {case}",
        "tokens": tokens,
        "hand_over_ms": hand_over * 1e3,
        "receive_ms": receive * 1e3,
        "bare_ms": bare * 1e3,
        "share_percent": 100 * bare / receive,
        "whole_percent": 100 * 2 * bare / (hand_over + receive),
    }


def _round(
    sequences: list[Any], senders: list[Sender], takers: list[KVCache], landings: list[Any], nbytes: int
) -> tuple[float, float, float]:
    """Return the seconds of one hand-over, of receiving it, and of a bare copy of as many bytes."""
    tickets, taken = list[Ticket](), list[Any]()
    hand_over = seconds(lambda: tickets.extend(one.hand_over(60.0, goes_on=True) for one in sequences))
    ticket = Ticket.joined(tickets)
    receive = seconds(lambda: taken.extend(cache.receive(ticket, one) for cache, one in zip(takers, landings)))
    for sequence, cache in zip(taken, takers):
        sequence.close()
        cache.reset()
    reads = [(one, one.landing(nbytes // len(takers))) for one in landings]
    bare = seconds(lambda: [_read(one, ticket, into) for one, into in reads])
    for sender in senders:
        sender.expire()
    return hand_over, receive, bare


def _read(transfer: Any, ticket: Ticket, into: Any) -> None:
    """Read as many bytes as ``into`` has, from the leases of the source ranks in equal parts."""
    part = len(into) // len(ticket.ranks)
    for number, lease in enumerate(ticket.ranks):
        transfer.read(dict(lease.address), lease.offset, into[number * part : (number + 1) * part])


def _cache(schema: Schema, rank: int, ranks: int, size: int, tokens: int) -> KVCache:
    return KVCache(
        schema.split(tp=ranks), device="cpu", num_blocks=tokens // size + 4, max_requests=2, block_size=size,
        identity=Identity("benchmark", rank, ranks), retention=Retention(4),
    )  # fmt: skip


if __name__ == "__main__":
    tell("handover", QUESTION, measure)
