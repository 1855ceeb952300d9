"""LRU block by block: the plain form of what trees have built in, and its reference in tests."""

from __future__ import annotations

from kvpagoda.prefix.policies.heap import HeapPolicy


class LRU(HeapPolicy):
    """Least recently used first."""
