"""A request that one cache hands over goes on in another, with the bytes that it had: every layer kind, width, page, layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "sweep")]

from kinds import KINDS, schemas
from rows import Rows

from kvpagoda import (
    BadInput, HandoverMiss, Identity, KVCache, Limits, OutOfBlocks, RetryLater, Retention, Schema, StaleHandle, TicketRefused,
)  # fmt: skip
from kvpagoda.handover import Sender, SharedMemory, Ticket

KEY = b"shared"
TEXT = np.random.default_rng(3).integers(0, 1000, 200).astype(np.int32)
LLAMA = dict(
    model_type="llama", vocab_size=1000, num_hidden_layers=2, hidden_size=64, num_attention_heads=8, num_key_value_heads=4
)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def cache_of(schema: Schema, block_size: int, rank: int = 0, ranks: int = 1, **settings: Any) -> KVCache:
    given: dict[str, Any] = dict(num_blocks=40, max_requests=4) | settings
    return KVCache(
        schema, device="cpu", block_size=block_size, identity=Identity("w", rank, ranks), poison=True,
        limits=Limits(step_tokens=2 * block_size), retention=Retention(4, 1), **given,
    )  # fmt: skip


class Side:
    """The ranks of one side, over one schema."""

    def __init__(self, schema: Schema, ranks: int = 1, block_size: int = 4, exported: str | int = 0, **settings: Any) -> None:
        self.caches = [cache_of(schema.split(tp=ranks), block_size, rank, ranks, **settings) for rank in range(ranks)]
        self.rows = [Rows(cache, rank, ranks) for rank, cache in enumerate(self.caches)]
        self.transfers = [SharedMemory(exported) for _ in self.caches]
        self.clock, self.senders = Clock(), list[Sender]()
        if exported:
            self.senders = [
                cache.sender(transfer, key=KEY, clock=self.clock) for cache, transfer in zip(self.caches, self.transfers)
            ]

    def compute(self, tokens: np.ndarray[Any, Any], upto: int) -> list[Any]:
        sequences = []
        for cache, rows in zip(self.caches, self.rows):
            sequence = cache.open(tokens, capacity=0)
            rows.compute(sequence, tokens, upto, 3)
            rows.compare(sequence)
            sequences.append(sequence)
        return sequences

    def hand_over(self, sequences: list[Any], **given: Any) -> str:
        return Ticket.joined([one.hand_over(30.0, **given) for one in sequences]).to_json()

    def receive(self, ticket: str, **given: Any) -> list[Any]:
        received = []
        for cache, rows, transfer in zip(self.caches, self.rows, self.transfers):
            sequence = cache.receive(ticket, transfer, key=KEY, clock=self.clock, **given)
            rows.compare(sequence)
            cache.check()
            received.append(sequence)
        return received

    def check_idle(self) -> None:
        """Prove that no lease, slot or exported byte is held."""
        for cache, sender in zip(self.caches, self.senders):
            sender.expire()
            assert (sender.num_leases, cache.stats().running) == (0, 0)
            assert sender._exported.free_nbytes == len(sender._transfer.memory) - (1 << 18)
            cache.check()

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for transfer in self.transfers:
            transfer.close()
        for cache in self.caches:
            cache.close()


@contextmanager
def sides(schema: Schema, ranks: tuple[int, int] = (1, 1), other: Schema | None = None, blocks: tuple[int, int] = (4, 4), **settings: Any) -> Iterator[tuple[Side, Side]]:  # fmt: skip
    one, two = Side(schema, ranks[0], blocks[0], "8MiB", **settings), Side(other or schema, ranks[1], blocks[1], **settings)
    two.clock = one.clock
    try:
        yield one, two
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("length", [1, 7, 8, 33, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind_goes_on_elsewhere(kind: str, length: int) -> None:
    size, given = KINDS[kind].block_size, {"num_blocks": None, **KINDS[kind].size}
    with sides(schemas(kind), blocks=(size, size), **given) as (one, two):
        text = TEXT[:62]
        ticket = one.hand_over(one.compute(text, length))
        received = two.receive(ticket)[0]
        assert received.length == length and received.tokens.tolist() == text[:length].tolist()
        one.check_idle()
        two.rows[0].compute(received, text, 62, 3)  # the rest of the prompt
        two.rows[0].compare(received)
        two.caches[0].check()


WIDTHS = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (8, 2), (2, 8), (1, 1)]


@pytest.mark.parametrize("blocks", [(4, 4), (4, 16), (16, 8)])
@pytest.mark.parametrize("ranks", WIDTHS)
def test_widths_pages_and_layouts_differ(ranks: tuple[int, int], blocks: tuple[int, int]) -> None:
    schema = Schema.from_hf_config(LLAMA, dtype="bfloat16")
    for layouts in ((None, None), ("trtllm", "vllm-flashinfer"), ("sglang-mha", "trtllm")):
        laid = [schema if layout is None else schema.laid_out(layout) for layout in layouts]
        Rows.of_model = {1: 4}
        with sides(laid[0], ranks, laid[1], blocks) as (one, two):
            ticket = one.hand_over(one.compute(TEXT[:50], 41))
            two.receive(ticket)
            one.check_idle()
