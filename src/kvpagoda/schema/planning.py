"""How a plan is made: a fixed share for every group, or sectors that all groups share. Arithmetic only."""

from __future__ import annotations

from dataclasses import replace

from kvpagoda.errors import NeverFits
from kvpagoda.schema.fields import WHOLE_TEXT
from kvpagoda.schema.plan import Demand, GroupPlan, Plan, PlannedModel, Workload, largest_below
from kvpagoda.schema.sectors import sector_size
from kvpagoda.units import format_bytes


def shared_plan(model: PlannedModel, workload: Workload, demands: tuple[Demand, ...], budget: int) -> Plan:
    """Let all groups live off ``budget`` bytes together, in sectors; the first sector belongs to padding.

    Raises NeverFits unless one block of each group fits.
    """
    sector = sector_size(tuple(demand.layout.nbytes for demand in demands), budget // 64)
    count = budget // sector.nbytes
    groups = tuple(
        _group(demand, workload, max(0, count - 1) * per, sector.nbytes // per, per)
        for demand, per in zip(demands, sector.records)
    )
    plan = Plan(model, workload, budget, groups, count, sector.nbytes)
    if not plan.fits(1, 1):
        raise _too_small(plan, (1 + len(demands)) * sector.nbytes, "; raise the budget")
    return plan


def fixed_plan(model: PlannedModel, workload: Workload, demands: tuple[Demand, ...], budget: int) -> Plan:
    """Give every group a share of ``budget`` bytes for good: as many blocks as fit, the same number for each group, so that
    the groups of ``max_requests`` equally long requests fill together; see ``plan_of_blocks`` for groups that need fewer.

    Raises NeverFits unless one block of each group and the states of all requests fit.
    """
    smallest = plan_of_blocks(model, workload, demands, 1, budget)
    if smallest.nbytes > budget:
        states = sum(group.nbytes for group in smallest.groups if group.demand.growth.is_state)
        copies = f"max_requests={workload.max_requests} and {workload.num_checkpoints} checkpoints"
        hint = f", of which {states:,} are the state rows of {copies}; raise the budget or lower them"
        raise _too_small(smallest, smallest.nbytes, hint)
    growing = sum(demand.layout.nbytes for demand in demands if not demand.growth.is_bounded)
    end = 2 + budget // max(1, growing)
    most = max((group.most_blocks or end for group in smallest.groups), default=1)
    end = min(end, 2 + (workload.max_requests + workload.num_checkpoints) * most)
    num_blocks = largest_below(
        end, lambda n: n == 0 or plan_of_blocks(model, workload, demands, n, budget).nbytes <= budget
    )
    return plan_of_blocks(model, workload, demands, num_blocks, budget)


def plan_of_blocks(
    model: PlannedModel, workload: Workload, demands: tuple[Demand, ...], num_blocks: int, budget: int | None = None
) -> Plan:
    """``num_blocks`` blocks for every group, but for a group of bounded size never more than all requests and checkpoints
    hold at once, and for states exactly that many. ``budget``: None for the bytes that this takes."""
    groups = []
    for demand in demands:
        group = _group(demand, workload, num_blocks, demand.layout.nbytes)
        kept = demand.growth.most_blocks(group.block_size, 1)
        if group.most_blocks is not None and kept is not None:
            used = workload.max_requests * group.most_blocks + workload.num_checkpoints * kept
            group = replace(group, num_blocks=used if demand.growth.is_state else min(num_blocks, used))
        groups.append(group)
    nbytes = sum(group.nbytes for group in groups) if budget is None else budget
    return Plan(model, workload, nbytes, tuple(groups))


def _group(demand: Demand, workload: Workload, num_blocks: int, row_nbytes: int, per_sector: int = 0) -> GroupPlan:
    """``num_blocks`` blocks of one group. A state is one block, however long the text is."""
    block_size = WHOLE_TEXT if demand.growth.is_state else workload.block_size
    most_blocks = demand.growth.most_blocks(block_size, workload.step_tokens)
    return GroupPlan(demand, block_size, num_blocks, most_blocks, row_nbytes, per_sector)


def _too_small(plan: Plan, needed: int, hint: str) -> NeverFits:
    """The error of a budget in which not even one request of one block fits."""
    return NeverFits(
        f"a budget of {format_bytes(plan.budget)} is too small for {plan.model.name}: one request of up to "
        f"{plan.block_size} tokens needs {needed:,} bytes ({format_bytes(needed)}){hint}"
    )
