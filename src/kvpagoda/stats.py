"""The counters of a cache, as one picture of a moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpagoda.tiers.level import LevelStats


@dataclass(frozen=True)
class GroupStats:
    """Blocks of one group: free + held = total; ``spare`` of the held ones would be given up for a running request, and
    ``promised`` of the free and spare ones are set aside."""

    name: str
    total: int
    free: int
    held: int
    spare: int
    promised: int
    peak_held: int


@dataclass(frozen=True)
class CacheStats:
    """Counters since the cache was made."""

    running: int
    max_requests: int
    opened: int
    closed: int
    computed_tokens: int
    """Tokens committed: prompt and output tokens that went through the model."""
    cached_tokens: int
    """Prompt tokens that did not have to be computed."""
    loaded_tokens: int
    """Of these, prompt tokens that came from tiers below the device."""
    evicted_blocks: int
    evicted_checkpoints: int
    nbytes: int
    suspended: int
    """Requests that are set aside."""
    swap_nbytes: int
    """Bytes of host memory that they take, of ``swap_capacity``."""
    swap_capacity: int
    groups: tuple[GroupStats, ...]
    tiers: tuple[LevelStats, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)
