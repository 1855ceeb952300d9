"""The block that a match goes on with."""

from __future__ import annotations

from kvpagoda.prefix import Match, PrefixTree


def partial_ids(tree: PrefixTree, match: Match) -> list[int]:
    """The ids of the block that goes on where the whole blocks of ``match`` end, 0 where there is none."""
    lease = tree.pin_partial(match)
    if lease is None:
        return [0] * tree.num_groups
    ids = tree.last_ids(lease).tolist()
    tree.unpin(lease)
    return ids
