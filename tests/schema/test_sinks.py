"""A layer with sinks and a window: after any life of a request a query finds the first tokens and its window, no more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpagoda import KVCache, Schema  # noqa: E402
from kvpagoda.errors import SchemaError  # noqa: E402
from kvpagoda.schema import Attention, Growth, Layer  # noqa: E402
from raises import raises  # noqa: E402

SINKS, WINDOW, SIZE = 3, 5, 4
KIND = Attention(2, 4, 6, "float32", Growth(window=WINDOW), num_sinks=SINKS)
SCHEMA = Schema((Layer(0, "sinks_and_window", (KIND,)), Layer(1, "full", (Attention(2, 4, 4, "float32"),))))


def step(cache: Any, sequence: Any, tokens: np.ndarray) -> None:
    """Write rows that hold their token, as an engine does: all into blocks, the sinks into the state too."""
    sequence.extend(len(tokens))
    batch = cache.batch([sequence], [len(tokens)])
    view, positions = batch.layer(0), batch.positions.long()
    for name in ("k", "v"):
        shape = view.blocks.rows[name].shape
        rows = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1).expand(-1, *shape)
        slots = view.arrays.slot_mapping.long()
        view.blocks.write(name, (slots // SIZE, slots % SIZE), rows)
        early = positions < SINKS
        slot = batch.state_indices.long().expand(len(tokens))
        view.state.write(f"sink_{name}", (slot[early], positions[early]), rows[early])
    sequence.commit(tokens)


def readable(cache: Any, sequence: Any) -> list[int]:
    """The tokens whose rows the next query reads: sinks before its window from the state, the window from blocks."""
    sequence.extend(1)
    batch = cache.batch([sequence], [1])
    view, query = batch.layer(0), sequence.length
    first = max(0, query - WINDOW + 1)
    sinks = view.state.read("sink_v", (batch.state_indices.long(),))[0, : min(SINKS, first), 0, 0]
    at = torch.arange(first, query) - int(view.arrays.kv_start[0])
    blocks = view.arrays.kv_indices.long()[at // SIZE]
    rows = view.blocks.read("v", (blocks, at % SIZE))[:, 0, 0]
    return [int(row) for row in (*sinks, *rows)]


def expected(tokens: np.ndarray) -> list[int]:
    n = len(tokens)
    return [int(tokens[p]) for p in range(n) if p < SINKS or p > n - WINDOW]


def test_bytes_and_ranks() -> None:
    rows = {row.name: (row.count, row.shape) for row in KIND.state_rows()}
    assert rows == {"sink_k": (SINKS, (2, 4)), "sink_v": (SINKS, (2, 6))}
    assert [row.shape for row in KIND.split(2).state_rows()] == [(1, 4), (1, 6)]
    assert SCHEMA.state_layout.payload_nbytes == SINKS * 2 * (4 + 6) * 4
    assert Attention(2, 4, 4, "float32", Growth(window=5)).state_rows() == ()
    for law, sinks in ((Growth(), 1), (Growth(chunk=4), 1), (Growth(window=4), -1)):
        with raises(SchemaError, field="num_sinks", needed=sinks):
            Attention(1, 1, 1, "float32", law, num_sinks=sinks)


@pytest.mark.parametrize("chunk", [1, 3, 4, 30])
def test_what_a_query_finds(chunk: int) -> None:
    cache = KVCache(SCHEMA, num_blocks=40, block_size=SIZE, max_requests=3, device="cpu", poison=True)
    tokens = np.arange(100, 130, dtype=np.int32)
    for run in ("cold", "warm"):
        with cache.open(tokens, capacity=0, reserve=40) as sequence:
            assert (sequence.cached_tokens > 0) == (run == "warm")
            while sequence.length < len(tokens):
                end = min(sequence.length + min(chunk, cache.step_limit(sequence)), len(tokens))
                step(cache, sequence, tokens[sequence.length : end])
                assert readable(cache, sequence) == expected(tokens[: sequence.length])
            fork = sequence.fork()
            step(cache, fork, np.array([7], np.int32))
            assert readable(cache, fork) == expected(np.append(tokens, 7))
            fork.close()
            sequence.suspend()
            sequence.resume()
            assert readable(cache, sequence) == expected(tokens)
        cache.check()
