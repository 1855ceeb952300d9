"""WHICH prefixes exist: the prefix tree (a radix tree on int32 arrays), checkpoints."""

from kvpagoda.policies import POLICY_NAMES, EvictionPolicy, as_policy, policy_name
from kvpagoda.prefix.node import Evicted, Inserted, Lease, Match
from kvpagoda.prefix.order import Entry
from kvpagoda.prefix.tree import PrefixTree

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
