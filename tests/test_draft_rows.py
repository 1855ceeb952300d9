"""Rows of draft layers: what a hit serves of them, what it costs, and that it costs the model itself nothing.

An EAGLE or MTP layer makes a row from the hidden state of one token and from the token after it. It is stored at the
place of the later one, so a row depends on no token behind its place, as every other row of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda import KVCache, Limits, Retention
from kvpagoda.schema import Attention, Growth, Layer, LayerKind, Recurrent, Rows, Schema

pytest.importorskip("torch")
import torch

SIZE = 4
FULL, WINDOW = Attention(1, 1, 1, "float32"), Attention(1, 1, 1, "float32", Growth(window=8))
STATES = Recurrent((Rows("recurrent", (4,), "float32"),))


def schema_of(*kinds: LayerKind) -> Schema:
    return Schema(tuple(Layer(i, "attention", (kind,)) for i, kind in enumerate(kinds)), vocab_size=1000)


def hidden_states(text: list[int]) -> np.ndarray:
    """Return for each token a number that depends on it and all before it: the model's hidden state."""
    states, state = [], 1
    for token in text:
        state = (state * 31 + token + 1) % 65521
        states.append(state)
    return np.array(states)


def draft_rows(text: list[int], shift: int) -> np.ndarray:
    """Return the rows of an EAGLE layer in the order of their places. ``shift`` 1: the row of token p and the one after it
    lies at place p + 1; 0: at place p, where the row of the last token is not known yet (0)."""
    states, tokens = hidden_states(text), np.array(text)
    rows = np.zeros(len(text))
    rows[shift : len(text) - 1 + shift] = (states[:-1] * 7 + tokens[1:]) % 65521
    return rows


def served(cache: KVCache, text: list[int], shift: int, num_own: int) -> tuple[np.ndarray, int]:
    """Compute ``text`` over ``cache`` as an engine does: return the draft's rows that it started from, and their number."""
    sequence = cache.open(text)
    start, rows = sequence.length, draft_rows(text, shift)
    found = np.zeros(0)
    if start:
        view = cache.batch([sequence], [start], firsts=[0]).layer(num_own)
        places = view.slot_mapping.numpy()
        found = view["k"].numpy()[places // SIZE, places % SIZE].reshape(-1).copy()
    while sequence.length < len(text):
        begin = sequence.length
        end = min(len(text), begin + cache.step_limit(sequence))
        given = torch.tensor(rows[begin:end], dtype=torch.float32).view(-1, 1, 1)
        cache.batch([sequence], [end - begin]).layer(num_own).write(k=given, v=given)
        sequence.commit(np.array(text[begin:end], np.int32))
    sequence.close()
    return found, start


@pytest.mark.parametrize("own", [[FULL], [FULL, STATES], [WINDOW, FULL]], ids=["full", "states", "window"])
def test_texts_that_part_at_the_end_of_a_block_share_no_row_made_from_the_next_token(own: list[LayerKind]) -> None:
    """Two texts of which the first ``2 * SIZE`` tokens are equal, and none after them. The rows that the second is served
    are those that it would compute itself. Stored at the place of the earlier token, the last one is not."""
    common = [5, 6, 7, 8, 9, 10, 11, 12]
    texts = [[*common, 100, 101, 102], [*common, 200, 201, 202]]
    schema = schema_of(*own).drafted_by(schema_of(FULL))
    wrong = {}
    for shift in (0, 1):
        cache = KVCache(schema, num_blocks=40, max_requests=2, block_size=SIZE, device="cpu")
        assert served(cache, texts[0], shift, len(own))[1] == 0
        found, start = served(cache, texts[1], shift, len(own))
        assert start == len(common)
        wrong[shift] = np.flatnonzero(found != draft_rows(texts[1], shift)[:start]).tolist()
        cache.check()
    assert wrong == {0: [len(common) - 1], 1: []}


# -- what a draft costs ------------------------------------------------------------------------------------------------


def traffic(schema: Schema, **sizes: Any) -> tuple[list[int], KVCache]:
    """Serve texts that begin like earlier ones; return what was found of each, and the cache. Without memory."""
    random, found = np.random.default_rng(7), []
    cache = KVCache(schema, max_requests=4, block_size=SIZE, limits=Limits(max_context=400, step_tokens=64), **sizes)
    prefixes = [random.integers(0, 1000, int(random.integers(20, 90))) for _ in range(40)]
    running: list[Any] = []
    for _ in range(250):
        prefix = prefixes[min(int(random.zipf(1.3)) - 1, 39)]
        text = np.concatenate((prefix, random.integers(0, 1000, int(random.integers(5, 30))))).astype(np.int32)
        if len(running) == 4:
            running.pop(0).close()
        sequence = cache.open(text, capacity=0)
        running.append(sequence)
        found.append(sequence.cached_tokens)
        while sequence.length < len(text):
            more = text[sequence.length : sequence.length + min(64, cache.step_limit(sequence))]
            sequence.extend(len(more))
            sequence.commit(more)
    cache.check()
    return found, cache


TARGETS = {"full": [FULL, FULL, FULL], "windows": [WINDOW, WINDOW, WINDOW], "mixed": [FULL, WINDOW, WINDOW, STATES]}


@pytest.mark.parametrize("name", TARGETS)
def test_without_pressure_hits_are_those_without_a_draft(name: str) -> None:
    """Whether the draft lies in the same blocks or has groups of its own, which may lack anything."""
    own = schema_of(*TARGETS[name])
    sizes = {"num_blocks": 4000, "retention": Retention(1000)}
    plain, _ = traffic(own, **sizes)
    for drafts in ([FULL], [WINDOW], [FULL, Attention(1, 1, 1, "float32", Growth(window=5))]):
        found, _ = traffic(own.drafted_by(schema_of(*drafts)), **sizes)
        assert found == plain, drafts
    assert sum(plain) > 2_000


def test_a_draft_in_the_same_blocks_takes_its_bytes_and_no_more() -> None:
    """With as many blocks hits are equal under pressure too: nothing else is evicted. Where there are checkpoints the order
    may differ, since they take fewer bytes beside the larger blocks of text."""
    own = schema_of(*TARGETS["full"])
    plain, _ = traffic(own, num_blocks=150)
    drafted, cache = traffic(own.drafted_by(schema_of(FULL)), num_blocks=150)
    assert drafted == plain and any(group.evicted for group in cache.stats().groups)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [("full", [WINDOW]), ("windows", [FULL]), ("mixed", [Attention(1, 1, 1, "float32", Growth(window=5))])],
)
def test_a_draft_with_a_group_of_its_own_leaves_the_blocks_of_the_model(name: str, drafts: list[LayerKind]) -> None:
    """Under pressure, in one budget: the hits of the model are at least those that it has alone, in a budget without the
    blocks that the draft of four running requests takes."""
    own = schema_of(*TARGETS[name])
    both = own.drafted_by(schema_of(*drafts))
    budget = 22 * 1024
    drafted, cache = traffic(both, budget=budget)
    (optional,) = [group for group in cache.plan.groups if group.growth.is_optional]
    running = 4 * optional.blocks_for(120 + 64) * optional.row_nbytes
    alone, _ = traffic(own, budget=budget)
    less, _ = traffic(own, budget=budget - running - 2 * cache.plan.sector_nbytes)
    assert sum(less) <= sum(drafted)
    assert sum(less) < sum(alone)
