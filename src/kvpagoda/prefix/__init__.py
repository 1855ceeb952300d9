"""WHICH prefixes exist: the prefix tree (a radix tree on int32 arrays), eviction policies, checkpoints."""

from kvpagoda.prefix.policies.by_name import POLICY_NAMES, as_policy, policy_name
from kvpagoda.prefix.policies.protocol import EvictionPolicy
from kvpagoda.prefix.results import Evicted, Inserted, Lease, Match
from kvpagoda.prefix.tree import PrefixTree

__all__ = [
    "POLICY_NAMES",
    "Evicted",
    "EvictionPolicy",
    "Inserted",
    "Lease",
    "Match",
    "PrefixTree",
    "as_policy",
    "policy_name",
]
