"""What a simulation reads of a cache after every step: what ``KVCache.stats`` counts together, one number at a time."""

from kvpagoda.core.probe import Probe

__all__ = ["Probe"]
