"""LRU over single blocks, as a policy object: the plain form and the reference of the LRU that is built into trees."""

from __future__ import annotations

from kvpagoda.policies.heap import HeapPolicy


class LRU(HeapPolicy):
    """Least recently used first."""
