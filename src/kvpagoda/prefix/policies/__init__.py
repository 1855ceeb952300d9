"""Eviction policies: which cached block is evicted next."""
