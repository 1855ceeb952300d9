"""How much of a text can be reused, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvpagoda.cache.windows import Windows
from kvpagoda.prefix import Match, PrefixTree


class PrefixMatch(NamedTuple):
    """How much of its prompt a request need not compute, and what limited that: ``seq.match``."""

    num_tokens: int
    """Leading tokens of the prompt that are in the tree, at most all but one."""
    resumable: int
    """Tokens that need not be computed: every group has what it needs to go on from there. A block boundary, unless the
    model has only a full group: then a multiple of ``hit_grid``."""
    limited_by: str
    """What limited the hit: ``nothing``, ``alignment`` (the rest of a block), ``window`` (further on, blocks of the
    last window were evicted), ``checkpoint`` (further on there is no copy of the states) or ``memory`` (no room for a
    copy)."""
    groups: Mapping[str, int] = MappingProxyType({})
    """Group -> the most tokens after which the group alone has what it needs to resume."""
    checkpoint: int | None = None
    """The name of the checkpoint on the device whose states the request starts with, if any."""
    loaded: int = 0
    """The part of ``resumable`` that came from tiers below the device."""


def resume_point(
    tree: PrefixTree, match: Match, windows: Windows, has_states: bool, grid: int
) -> tuple[int, dict[str, int], str]:
    """Return after how many blocks of ``match`` its text can be resumed, and what limits that. O(blocks).

    The number of blocks is a multiple of ``grid``. Then: the most blocks that each window group and the states allow.
    Then the limit: ``nothing``, ``alignment``, ``window`` or ``checkpoint``.
    """
    end = match.num_blocks
    state_end = 0 if match.checkpoint is None else match.checkpoint[0] // tree.block_size
    names = [window.group.plan.name for window in windows]
    if (not has_states or state_end == end) and end % grid == 0 and windows.can_resume(match):
        return end, dict.fromkeys([*names, "state"] if has_states else names, end), "nothing"
    flags = windows.boundaries(match)
    most = {name: int(np.flatnonzero(allows)[-1]) for name, allows in zip(names, flags)}
    allowed = np.logical_and.reduce(flags) if flags else np.ones(end + 1, np.bool_)
    anywhere = int(np.flatnonzero(allowed)[-1])
    allowed &= np.arange(end + 1) % grid == 0
    longest = int(np.flatnonzero(allowed)[-1])
    limited_by = "window" if anywhere < end else "alignment"
    if not has_states:
        return longest, most, limited_by
    depth = most["state"] = state_end
    while not allowed[depth]:  # depth 0 is always allowed
        above = tree.last_checkpoint(match, depth - 1)
        depth = 0 if above is None else above[0] // tree.block_size
    return depth, most, "checkpoint" if depth < longest else limited_by
