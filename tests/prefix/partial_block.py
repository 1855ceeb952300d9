"""The block inside which a match ends."""

from __future__ import annotations

from kvpagoda.core.prefix import Match, PrefixTree


def partial_ids(tree: PrefixTree, match: Match) -> list[int]:
    """Return the ids, one for each group, of the block whose first tokens ``match`` has after its whole blocks. Zeros
    if there is none."""
    lease = tree.pin_partial(match)
    if lease is None:
        return [0] * tree.num_groups
    ids = tree.last_ids(lease).tolist()
    tree.unpin(lease)
    return ids
