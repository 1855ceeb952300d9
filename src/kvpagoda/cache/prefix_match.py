"""How much of a text can be reused, and what cut it short."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from kvpagoda.cache.windows import Windows
from kvpagoda.prefix import Match, PrefixTree


class PrefixMatch(NamedTuple):
    """Why a request starts where it starts: ``seq.match``."""

    num_tokens: int
    """Leading tokens of the prompt that are in the tree, at most all but one."""
    resumable: int
    """Tokens that need not be computed: a block boundary where every layer kind has what it needs."""
    limited_by: str
    """What cut the hit short: ``nothing``, ``alignment`` (the rest of a block), ``window`` (further on, blocks of the last
    window are gone), ``checkpoint`` (further on there is no copy of the states) or ``memory`` (no room for the copy)."""
    groups: Mapping[str, int] = MappingProxyType({})
    """Group -> the longest beginning for which it has what it needs."""
    checkpoint: int | None = None
    """The checkpoint on the device whose states the request starts with, if any."""
    loaded: int = 0
    """Of ``resumable``: tokens that came from tiers below the device."""


def resume_point(
    tree: PrefixTree, match: Match, windows: Windows, has_states: bool, grid: int
) -> tuple[int, dict[str, int], str]:
    """Behind how many of its blocks, a multiple of ``grid``, the text of ``match`` can go on; the most that each window group
    and the states allow, in blocks; and what limits it: ``nothing``, ``alignment``, ``window``, ``checkpoint``. O(blocks)."""
    end = match.num_blocks
    state_end = 0 if match.checkpoint is None else match.checkpoint[0] // tree.block_size
    names = [window.group.plan.name for window in windows]
    if (not has_states or state_end == end) and end % grid == 0 and windows.can_resume(match):
        return end, dict.fromkeys([*names, "state"] if has_states else names, end), "nothing"
    flags = windows.boundaries(match)
    most = {name: int(np.flatnonzero(some)[-1]) for name, some in zip(names, flags)}
    allowed = np.logical_and.reduce(flags) if flags else np.ones(end + 1, np.bool_)
    anywhere = int(np.flatnonzero(allowed)[-1])
    allowed &= np.arange(end + 1) % grid == 0
    longest = int(np.flatnonzero(allowed)[-1])
    limited_by = "window" if anywhere < end else "alignment"
    if not has_states:
        return longest, most, limited_by
    at = most["state"] = state_end
    while not allowed[at]:  # behind no block at all it always can
        above = tree.last_checkpoint(match, at - 1)
        at = 0 if above is None else above[0] // tree.block_size
    return at, most, "checkpoint" if at < longest else limited_by
