"""LRU block by block, as a policy: the plain form of what trees have built in, and its reference."""

from __future__ import annotations

from kvpagoda.prefix.policies.heap import HeapPolicy


class LRU(HeapPolicy):
    """Least recently used first."""
