"""How many layers share a block table, and how many tokens a block has, where one id names a block of any group.

An id is as many bytes as the largest group needs, so a group that fills it less wastes the rest of each of its blocks. More
groups waste less, and cost the host time in every step. Arithmetic alone: nothing here knows vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvpagoda.units import ceil_div

MOST_GROUPS = 32
"""Tables are built and copied for each group in every step."""
_GROUP_COST = 0.001
"""A group more has to save this share of the memory."""
LEAST_GAIN = 0.03
"""States in smaller groups have to save this share of what a short text holds: padding is held by long texts too."""


class StateGroups(NamedTuple):
    """Groups of states beside one of attention: the tokens of a block, the states of a group, and how many groups of them."""

    block_size: int
    per_group: int
    num_groups: int


def groups_of_states(
    num_states: int, state_nbytes: int, block_nbytes: Callable[[int], int], sizes: Sequence[int]
) -> StateGroups | None:
    """Return the groups with which a text's states and the half block at its end hold the fewest bytes.

    Args:
        num_states: layers that keep a state.
        state_nbytes: bytes of a state of one layer, as far as the next one begins.
        block_nbytes: tokens of a block -> its bytes in all layers with attention.
        sizes: tokens that a block may have, ascending.

    Returns: None if no size holds a state. O(states * log sizes) calls.
    """
    best: tuple[float, StateGroups] | None = None
    for num_groups in range(min(num_states, MOST_GROUPS - 1), 0, -1):
        per_group = ceil_div(num_states, num_groups)
        if ceil_div(num_states, per_group) < num_groups:
            continue  # fewer groups of as many
        size = next((size for size in sizes if block_nbytes(size) >= per_group * state_nbytes), None)
        if size is None:
            continue
        cost = held_nbytes(num_groups, block_nbytes(size)) * (1 + _GROUP_COST * num_groups)
        if best is None or cost < best[0]:
            best = cost, StateGroups(size, per_group, num_groups)
    return best and best[1]


def held_nbytes(num_groups: int, id_nbytes: int) -> float:
    """Return the bytes that a text holds beside its whole blocks of attention: ``num_groups`` states, and half a block."""
    return (num_groups + 0.5) * id_nbytes


def layers_per_group(counts: Sequence[int]) -> int:
    """Return how many layers a group has, for kinds of ``counts`` layers whose blocks have the same bytes.

    Each kind counts as much as the others: in short texts all hold the same blocks, in long ones full attention most.
    O(layers * kinds).
    """

    def cost(size: int) -> float:
        groups = [ceil_div(count, size) for count in counts]
        wasted = sum(number * size / count for number, count in zip(groups, counts))
        return wasted * (1 + _GROUP_COST * sum(groups))

    few = [size for size in range(max(counts), 0, -1) if sum(ceil_div(count, size) for count in counts) <= MOST_GROUPS]
    return min(few, key=cost)
