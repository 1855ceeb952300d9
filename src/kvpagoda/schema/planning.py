"""Divide a budget between groups: a fixed share for each group, or sectors that all groups share. Arithmetic only."""

from __future__ import annotations

from dataclasses import replace

from kvpagoda.errors import NeverFits
from kvpagoda.schema.plan import GroupPlan, largest_below
from kvpagoda.schema.sectors import SHARE, budget_for, sector_size
from kvpagoda.units import format_bytes

Groups = tuple[GroupPlan, ...]


def shared_groups(groups: Groups, budget: int) -> tuple[Groups, int, int]:
    """Let ``groups`` share ``budget`` bytes, cut into sectors. Return (groups, number of sectors, bytes of a sector).

    The first sector is for padding. Raises NeverFits unless one sector of each group fits beside it.
    """
    rows, multiples = tuple(group.row_nbytes for group in groups), tuple(group.multiple for group in groups)
    sector = sector_size(rows, budget // SHARE, multiples)
    count = budget // sector.nbytes
    if count < 1 + len(groups):
        raise _too_small(groups, budget, budget_for(rows, [1] * len(groups), multiples), "raise the budget")

    def share(group: GroupPlan, per: int) -> GroupPlan:
        nbytes, blocks = sector.nbytes // per, (count - 1) * per
        layout = group.layout.spread(nbytes)
        return replace(group, layout=layout, num_blocks=blocks, row_nbytes=nbytes, per_sector=per)

    return tuple(map(share, groups, sector.records)), count, sector.nbytes


def lone_group(group: GroupPlan, budget: int, max_requests: int) -> Groups:
    """Return ``group``, the only one, with as many blocks as ``budget`` bytes hold.

    Raises NeverFits unless it gets at least one block or, if it is the group of states, one for each of
    ``max_requests``.
    """
    num_blocks, least = budget // group.row_nbytes - 1, max_requests if group.growth.is_state else 1
    if num_blocks < least:
        more = f"{least} states are among them; raise the budget, or lower max_requests"
        hint = more if least > 1 else "raise the budget"
        raise _too_small((group,), budget, (1 + least) * group.row_nbytes, hint)
    return (replace(group, num_blocks=num_blocks),)


def fixed_groups(groups: Groups, budget: int) -> Groups:
    """Give every group a fixed share of ``budget`` bytes: the largest ``equal_groups`` that fit.

    All groups are then full at the same time if the largest number of requests runs and all of them are equally long.

    Raises NeverFits unless one block of each group and the states of all requests fit.
    """
    smallest = equal_groups(groups, 1)
    if (needed := groups_nbytes(smallest)) > budget:
        states = sum(group.nbytes for group in smallest if group.growth.is_state)
        copies = sum(group.num_blocks for group in smallest if group.growth.is_state)
        hint = f"{states:,} of them are {copies} states; raise the budget, or lower max_requests or checkpoints"
        raise _too_small(groups, budget, needed, hint)
    growing = sum(group.row_nbytes for group in groups if not group.growth.is_bounded)
    end = 2 + min(budget // max(1, growing), max((group.num_blocks for group in groups), default=0))
    num_blocks = largest_below(end, lambda n: n == 0 or groups_nbytes(equal_groups(groups, n)) <= budget)
    return equal_groups(groups, num_blocks)


def equal_groups(groups: Groups, num_blocks: int) -> Groups:
    """Return ``groups`` with ``num_blocks`` blocks each, at most as many as now; the number of states stays."""
    return tuple(
        group if group.growth.is_state else replace(group, num_blocks=min(num_blocks, group.num_blocks))
        for group in groups
    )


def groups_nbytes(groups: Groups) -> int:
    """Return the bytes of the arenas of ``groups``."""
    return sum(group.nbytes for group in groups)


def _too_small(groups: Groups, budget: int, needed: int, hint: str) -> NeverFits:
    """Return the error for a budget that is too small for one request of one block."""
    block_size = min(group.block_size for group in groups)
    needs = f"one request of up to {block_size} tokens needs {needed:,} bytes ({format_bytes(needed)})"
    text = f"a budget of {format_bytes(budget)} is too small: {needs}"
    return NeverFits.with_hint(text, hint, needed=needed, available=budget)
