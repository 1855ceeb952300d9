"""Blocks of any size from the ids of a trace: compared with the tokens that the ids stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpagoda.errors import BadInput
from kvpagoda.replay import Trace
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.texts import text_of
from raises import raises


def record(ids: list[int], length: int, output: int = 1, **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": ids, **more}


@pytest.mark.parametrize("size", [1, 5, 12, 18, 24, 36])
def test_keys_are_equal_where_tokens_are(size: int) -> None:
    rng = np.random.default_rng(size)
    chains_of_ids = [rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(80)]
    records = [
        record(ids, max(1, 12 * len(ids) + int(rng.integers(-11, 30))), int(rng.integers(1, 40)))
        for ids in chains_of_ids
    ]
    trace = Trace.read(records, block_size=12)
    chains, known = Chains(trace, size), dict[bytes, int]()
    seen = 0
    for i in range(len(trace)):
        text, num_prompt = text_of(trace, i, trace.block_size)
        assert num_prompt == chains.prompts[i] and chains.totals[i] == len(text) - 1
        keys = chains.keys(i)
        assert len(keys) == chains.totals[i] // size and keys.max(initial=0) < chains.num_keys
        for end, key in enumerate(keys.tolist(), 1):
            seen += text[: end * size].tobytes() in known
            assert known.setdefault(text[: end * size].tobytes(), key) == key
    assert len({*known.values()}) == len(known) and seen > 30


def test_ids_that_stand_for_different_numbers_of_tokens() -> None:
    records = [
        record([1, 2, 3], 70, block_tokens=[32, 8, 30]),
        record([1, 2, 4], 50, block_tokens=[32, 8, 10]),
    ]
    first, second = (Chains(Trace.read(records), 8).keys(i) for i in (0, 1))
    assert first[:5].tolist() == second[:5].tolist() and len({*first.tolist(), *second.tolist()}) == 8 + 1


def test_the_rest_of_a_prompt_and_outputs_are_the_requests_own() -> None:
    chains = Chains(Trace.read([record([1], 40, 9), record([1], 40, 9)], block_size=16), 16)
    assert chains.totals.tolist() == [48, 48]
    one, other = chains.keys(0), chains.keys(1)
    assert one[0] == other[0] and not {*one[1:].tolist()} & {*other[1:].tolist()}
    assert chains.num_keys == 2 + 2 + 2  # ids 0 and 1, and two blocks of each request's own


def test_a_chain_with_two_lengths_is_refused() -> None:
    records = [record([1, 2], 20, block_tokens=[8, 12]), record([1, 2], 28, block_tokens=[16, 12])]
    with raises(BadInput, needed=0):
        Chains(Trace.read(records), 4)
