"""Options of a cache that belong together: ``Retention``, ``Identity``, ``Limits``."""

from __future__ import annotations

from dataclasses import dataclass

from kvpagoda.errors import BadInput


@dataclass(frozen=True)
class Retention:
    """What a cache keeps for reuse.

    ``checkpoints``: the most checkpoints that are kept, with their windows and copies of their states, for models that
    have windows or states (default: as many as fit in memory; see ``Schema.plan``). ``checkpoint_every``: also keep one
    at every multiple of this many blocks of a prompt, besides those at the ends of prompts and answers and where texts
    were seen to diverge (0: none besides). ``pin_share``: the share of the cache's blocks that ``KVCache.pin`` may
    keep, 0 to 1. Raises BadInput."""

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
    """What names this process's records in tiers: only processes with equal identities find each other's records.

    ``weights``: a digest of the model's weights (``kvpagoda.hf.weights_digest``). ``rank``: of this process among the
    ``num_ranks`` parallel parts of the model. ``secret``: at most 64 bytes, part of every key: without it the text
    cannot be guessed from a key."""

    weights: str = ""
    rank: int = 0
    num_ranks: int = 1
    secret: bytes = b""


@dataclass(frozen=True)
class Limits:
    """How large requests may become, and how large their steps are.

    ``max_context``: the longest request in tokens (default: what fits, at most the model's own limit). ``step_tokens``:
    the most tokens of a prompt between two commits, for which window groups keep room; after the prompt they keep room
    for one block. ``swap``: bytes of host memory for suspended requests, as a number or as text such as ``"4GiB"``
    (default: as many as the plan takes); allocated when it is first needed. ``hit_grid``: hits end at multiples of this
    many tokens, a multiple of the block size. Set it to the engine's prefill chunk: a warm run then computes in the
    same chunks as a cold one, and gets the same bits. Raises BadInput."""

    max_context: int | None = None
    step_tokens: int = 512
    swap: int | str | None = None
    hit_grid: int = 1

    def __post_init__(self) -> None:
        if type(self.hit_grid) is not int or self.hit_grid < 1:
            raise BadInput(f"hit_grid is a number of tokens, at least 1, got {self.hit_grid!r}")
