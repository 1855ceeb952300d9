"""WHICH prefixes exist: a radix tree on int32 arrays, eviction policies, and the face for caches of slots."""

from kvpagoda.prefix.policies import POLICY_NAMES, policy_named
from kvpagoda.prefix.policy import Policy
from kvpagoda.prefix.results import Evicted, Inserted, Lease, Match
from kvpagoda.prefix.slot_cache import PrefixCacheManager
from kvpagoda.prefix.tree import PrefixTree

__all__ = [
    "POLICY_NAMES",
    "Evicted",
    "Inserted",
    "Lease",
    "Match",
    "Policy",
    "PrefixCacheManager",
    "PrefixTree",
    "policy_named",
]
