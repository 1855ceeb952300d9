"""What a cache is told when it is made, where it belongs together."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.errors import BadInput


@dataclass(frozen=True)
class Retention:
    """What is kept for reuse.

    ``checkpoints``: the most places to resume at that are kept, with their windows and copies of their states, for models
    that have any (default: as many as memory holds; see ``Schema.plan``). ``checkpoint_every``: also keep one every so many
    blocks of a prompt, beside those at the ends of prompts and answers and where texts were seen to part. ``pin_share``: the
    share of the cache's blocks that ``KVCache.pin`` may keep, 0 to 1.
    """

    checkpoints: int | None = None
    checkpoint_every: int = 0
    pin_share: float = 0.5

    def __post_init__(self) -> None:
        if (
            isinstance(self.pin_share, bool)
            or not isinstance(self.pin_share, int | float)
            or not 0 <= self.pin_share <= 1
        ):
            raise BadInput(f"pin_share is a share of the cache, 0 to 1, got {self.pin_share!r}")
        if type(self.checkpoint_every) is not int or self.checkpoint_every < 0:
            raise BadInput(f"checkpoint_every is a number of blocks, 0 or more, got {self.checkpoint_every!r}")


@dataclass(frozen=True)
class Identity:
    """Who this process is to others that read the same tiers: only equal identities find each other's records.

    ``weights``: a digest of the model's weights (``kvpagoda.hf.weights_digest``). ``rank`` of ``num_ranks`` parallel parts.
    ``secret``: at most 64 bytes; nobody without it can tell from a key what a text was.
    """

    weights: str = ""
    rank: int = 0
    num_ranks: int = 1
    secret: bytes = b""


@dataclass(frozen=True)
class Limits:
    """How far requests may go.

    ``max_context``: the longest request in tokens (default: what fits, at most the model's own limit). ``step_tokens``: the
    most tokens of a prompt between two commits that window groups keep room for; once it is computed, of an answer, a block.
    ``swap``: bytes of host memory, as a number or as text such as ``"4GiB"``, for requests that are suspended (default: as
    many as the plan takes); it is asked for when it is first needed. ``hit_grid``: hits end at multiples of so many tokens,
    a multiple of the block size: the engine's prefill chunk, so that a warm run computes in the same pieces as a cold one,
    and to the same bits.
    """

    max_context: int | None = None
    step_tokens: int = 512
    swap: int | str | None = None
    hit_grid: int = 1

    def __post_init__(self) -> None:
        if type(self.hit_grid) is not int or self.hit_grid < 1:
            raise BadInput(f"hit_grid is a number of tokens, at least 1, got {self.hit_grid!r}")
