"""WHICH prefixes exist: a radix tree on int32 arrays, eviction policies."""

from kvpagoda.prefix.policies import POLICY_NAMES, policy_named
from kvpagoda.prefix.policy import Policy
from kvpagoda.prefix.results import Evicted, Inserted, Lease, Match
from kvpagoda.prefix.tree import PrefixTree

__all__ = [
    "POLICY_NAMES",
    "Evicted",
    "Inserted",
    "Lease",
    "Match",
    "Policy",
    "PrefixTree",
    "policy_named",
]
