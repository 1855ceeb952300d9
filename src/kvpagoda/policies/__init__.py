"""WHICH cached block is evicted next: the interface of eviction policies, and those that have a name."""

from kvpagoda.policies.names import POLICY_NAMES, as_policy, policy_name
from kvpagoda.policies.protocol import EvictionPolicy

__all__ = ["POLICY_NAMES", "EvictionPolicy", "as_policy", "policy_name"]
