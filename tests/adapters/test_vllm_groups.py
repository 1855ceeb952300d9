"""How many layers share a block, as numbers alone: ``group_sizes``. No vLLM is needed."""

from __future__ import annotations

import pytest

from kvpagoda.adapters.vllm.group_sizes import (
    MOST_GROUPS,
    StateGroups,
    groups_of_states,
    held_nbytes,
    layers_per_group,
)  # fmt: skip
from kvpagoda.units import ceil_div

QWEN3_NEXT = dict(num_states=36, state_nbytes=2146304)
ROW = 2 * 2 * 256 * 2
"""Bytes of a token in one layer of Qwen3-Next with attention, of which there are 12."""


def block_nbytes(size: int) -> int:
    return 12 * size * ROW


def test_the_states_of_qwen3_next_lie_in_pairs_in_blocks_of_176_tokens() -> None:
    chosen = groups_of_states(**QWEN3_NEXT, block_nbytes=block_nbytes, sizes=range(16, 1057, 16))
    assert chosen == StateGroups(block_size=176, per_group=2, num_groups=18)
    assert 2 * QWEN3_NEXT["state_nbytes"] <= block_nbytes(176) < 1.01 * 2 * QWEN3_NEXT["state_nbytes"]


def test_only_sizes_that_kernels_take_are_chosen() -> None:
    chosen = groups_of_states(**QWEN3_NEXT, block_nbytes=block_nbytes, sizes=range(32, 1057, 32))
    assert chosen == StateGroups(block_size=352, per_group=4, num_groups=9)
    assert groups_of_states(**QWEN3_NEXT, block_nbytes=block_nbytes, sizes=(16, 32, 64)) is None


@pytest.mark.parametrize("num_states", [1, 2, 3, 7, 20, 34, 80])
@pytest.mark.parametrize("state_nbytes", [100, 5_000, 77_000])
def test_the_choice_is_the_best_of_all(num_states: int, state_nbytes: int) -> None:
    sizes = range(16, 4097, 16)
    chosen = groups_of_states(num_states, state_nbytes, lambda size: 100 * size, sizes)
    assert chosen is not None
    size, per_group, number = chosen
    assert per_group * number >= num_states > per_group * (number - 1)
    assert per_group * state_nbytes <= 100 * size and number < MOST_GROUPS
    held = held_nbytes(number, 100 * size)
    for other in range(1, min(num_states, MOST_GROUPS - 1) + 1):
        least = ceil_div(ceil_div(num_states, other) * state_nbytes, 1600) * 1600
        assert held * (1 + 0.001 * number) <= held_nbytes(other, least) * (1 + 0.001 * other) + 1e-6


@pytest.mark.parametrize(
    ("counts", "size"),
    [((10, 52), 2), ((18, 18), 18), ((8, 40), 8), ((4, 22), 2), ((1, 5), 1), ((2, 5), 1), ((24, 24, 24), 24)],
)
def test_layers_of_a_group_leave_no_padding(counts: tuple[int, ...], size: int) -> None:
    assert layers_per_group(counts) == size
    assert all(count % size == 0 for count in counts)


def test_padding_is_left_where_groups_would_be_too_many() -> None:
    assert layers_per_group((5, 29)) == 5  # Gemma-3-4B: 34 groups of one layer, or 7 and a padding layer
    assert sum(ceil_div(count, layers_per_group((100, 99))) for count in (100, 99)) <= MOST_GROUPS
