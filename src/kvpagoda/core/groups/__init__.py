"""A class for each kind of layers: which blocks a request holds, which are cached, and which are evicted next."""

from kvpagoda.core.groups.base import CacheGroup
from kvpagoda.core.groups.full import FullGroup
from kvpagoda.core.groups.state import CopyGroup, StateGroup
from kvpagoda.core.groups.window import WindowGroup
from kvpagoda.schema.fields import CopySpec, FullSpec, StateSpec, WindowSpec
from kvpagoda.schema.plan import Plan

__all__ = ["CacheGroup", "CopyGroup", "FullGroup", "StateGroup", "WindowGroup", "groups_of"]
_CLASS_OF: dict[type, type[CacheGroup]] = {
    FullSpec: FullGroup, WindowSpec: WindowGroup, StateSpec: StateGroup, CopySpec: CopyGroup,
}  # fmt: skip


def groups_of(plan: Plan, num_columns: int) -> tuple[CacheGroup, ...]:
    """Return the groups of ``plan``, each of the class of its kind, for requests of ``num_columns`` blocks."""
    may_move = bool(plan.num_sectors)
    return tuple(
        _CLASS_OF[type(group.growth.spec)](group, plan.max_requests, num_columns, index, may_move=may_move)
        for index, group in enumerate(plan.groups)
    )
