"""WHICH prefixes exist: the prefix tree (a radix tree on int32 arrays), checkpoints."""

from kvpagoda.core.prefix.node import Evicted, Inserted, Lease, Match
from kvpagoda.core.prefix.order import Entry
from kvpagoda.core.prefix.tree import PrefixTree
from kvpagoda.policies import POLICY_NAMES, EvictionPolicy, as_policy, policy_name

__all__ = [
    "POLICY_NAMES",
    "Entry",
    "Evicted",
    "EvictionPolicy",
    "Inserted",
    "Lease",
    "Match",
    "PrefixTree",
    "as_policy",
    "policy_name",
]
