"""How a budget becomes groups of blocks: a fixed share for every group, or sectors that all groups share. Arithmetic only."""

from __future__ import annotations

from dataclasses import replace

from kvpagoda.errors import NeverFits
from kvpagoda.schema.fields import WHOLE_TEXT
from kvpagoda.schema.plan import Demand, GroupPlan, Workload, largest_below
from kvpagoda.schema.sectors import sector_size
from kvpagoda.units import format_bytes

Demands = tuple[Demand, ...]
Groups = tuple[GroupPlan, ...]


def shared_groups(demands: Demands, workload: Workload, budget: int) -> tuple[Groups, int, int]:
    """Let all groups share ``budget`` bytes, cut into sectors: (groups, number of sectors, bytes of a sector).

    The first sector belongs to padding. Raises NeverFits unless one block of each group fits beside it.
    """
    sector = sector_size(tuple(demand.layout.nbytes for demand in demands), budget // 64)
    count = budget // sector.nbytes
    if count < 1 + len(demands):
        raise _too_small(workload, budget, (1 + len(demands)) * sector.nbytes, "raise the budget")
    groups = tuple(
        _group(demand, workload, (count - 1) * per, sector.nbytes // per, per)
        for demand, per in zip(demands, sector.records)
    )
    return groups, count, sector.nbytes


def fixed_groups(demands: Demands, workload: Workload, budget: int) -> Groups:
    """Give every group a fixed share of ``budget`` bytes: the largest ``equal_groups`` that fit. So the groups fill together
    when ``max_requests`` requests are equally long.

    Raises NeverFits unless one block of each group and the states of all requests fit.
    """
    smallest = equal_groups(demands, workload, 1)
    if (needed := groups_nbytes(smallest)) > budget:
        states = sum(group.nbytes for group in smallest if group.demand.growth.is_state)
        copies = f"max_requests={workload.max_requests} and {workload.num_checkpoints} checkpoints"
        hint = f"{states:,} of them are the state rows of {copies}; raise the budget or lower these"
        raise _too_small(workload, budget, needed, hint)
    growing = sum(demand.layout.nbytes for demand in demands if not demand.growth.is_bounded)
    end = 2 + budget // max(1, growing)
    most = max((group.most_blocks or end for group in smallest), default=1)
    end = min(end, 2 + (workload.max_requests + workload.num_checkpoints) * most)
    num_blocks = largest_below(end, lambda n: n == 0 or groups_nbytes(equal_groups(demands, workload, n)) <= budget)
    return equal_groups(demands, workload, num_blocks)


def equal_groups(demands: Demands, workload: Workload, num_blocks: int) -> Groups:
    """``num_blocks`` blocks for every group; but a group of bounded size never has more than all requests and checkpoints
    hold at once, and states are exactly that many."""
    groups = []
    for demand in demands:
        group = _group(demand, workload, num_blocks, demand.layout.nbytes)
        kept = demand.growth.most_blocks(group.block_size, 1)
        if group.most_blocks is not None and kept is not None:
            used = workload.max_requests * group.most_blocks + workload.num_checkpoints * kept
            group = replace(group, num_blocks=used if demand.growth.is_state else min(num_blocks, used))
        groups.append(group)
    return tuple(groups)


def groups_nbytes(groups: Groups) -> int:
    """Bytes that the arenas of ``groups`` take."""
    return sum(group.nbytes for group in groups)


def _group(demand: Demand, workload: Workload, num_blocks: int, row_nbytes: int, per_sector: int = 0) -> GroupPlan:
    """``num_blocks`` blocks of one group. A state is one block, however long the text is."""
    block_size = WHOLE_TEXT if demand.growth.is_state else workload.block_size
    most_blocks = demand.growth.most_blocks(block_size, workload.step_tokens)
    return GroupPlan(demand, block_size, num_blocks, most_blocks, row_nbytes, per_sector)


def _too_small(workload: Workload, budget: int, needed: int, hint: str) -> NeverFits:
    """The error of a budget in which not even one request of one block fits."""
    return NeverFits(
        f"a budget of {format_bytes(budget)} is too small: one request of up to {workload.block_size} tokens needs "
        f"{needed:,} bytes ({format_bytes(needed)}); {hint}"
    )
