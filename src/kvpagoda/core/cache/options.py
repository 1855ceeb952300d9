"""Options of a cache that belong together: ``Retention``, ``Identity``, ``Limits``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvpagoda.errors import BadInput, shown
from kvpagoda.namespace import Namespace, namespace_key
from kvpagoda.schema.at_rest import checked_format
from kvpagoda.units import parse_bytes, real_number, truth, utf8, whole_number


@dataclass(frozen=True)
class Retention:
    """What a cache keeps for reuse.

    Args:
        checkpoints: the most checkpoints that are kept, with their windows and copies of their states, for models that
            have windows or states; None: as many as fit in memory, see ``Schema.plan``.
        checkpoint_every: also keep one at every multiple of this many blocks of a prompt, besides those at the ends of
            prompts and answers and where texts were seen to diverge; 0: none besides.
        pin_share: the share of the cache's blocks that ``KVCache.pin`` may keep, 0 to 1.
        checkpoint_format: keep float32 states in fewer bytes, ``"bfloat16"`` or ``"int8"``
            (``kvpagoda.schema.at_rest``): more checkpoints fit, and a request that starts from one computes with
            rounded states. Running requests keep theirs as they are.
        rounds_states: with ``checkpoint_format``, the states of running requests are rounded too, wherever a commit
            ends at a multiple of ``Limits.hit_grid``: then a warm run gets the bits of a cold one.
        quota: the most bytes that each namespace, a tenant, may have cached: a number or text such as ``"2GiB"`` for
            every namespace, also the default one; or namespace -> bytes, where others have no limit. It counts all
            cached blocks of the namespace, of all groups and epochs, and copies of states, whether a request or a pin
            uses them or not; not what a request has for itself, what tiers have, and host memory. At the end of each
            call of the cache a namespace is within its quota, or all that it has cached is in use. What nothing uses is
            evicted until then, and up to 1/32 of the quota ahead: first what no resumption needs, then the ends of its
            least recently used texts (under another policy than LRU: of those that are unused the longest), then
            checkpoints. Tiers get it as all that is evicted. Nothing of other namespaces is evicted for it. Memory that
            requests need is taken from all namespaces, in the policy's order, as without quotas: no tenant loses
            anything to another where the quotas and what running requests hold fit into the memory together.

    Raises:
        BadInput: a number out of range, an unknown format, ``rounds_states`` without one, or a quota that is no number
            of bytes.
    """

    checkpoints: int | None = None
    checkpoint_every: int = 0
    pin_share: float = 0.5
    checkpoint_format: str | None = None
    rounds_states: bool = False
    quota: int | str | Mapping[Namespace | str | bytes | None, int | str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if real_number(self.pin_share, "pin_share") > 1:
            raise BadInput(f"pin_share is a share of the cache, 0 to 1, got {self.pin_share}")
        _whole(self, "checkpoint_every", 0)
        checked_format(self.checkpoint_format)
        object.__setattr__(self, "rounds_states", truth(self.rounds_states, "rounds_states"))
        if self.rounds_states and self.checkpoint_format is None:
            text = "rounds_states rounds as checkpoint_format does, and there is none; give one"
            raise BadInput(text, needed="checkpoint_format")
        if self.checkpoints is not None:
            _whole(self, "checkpoints", 0)
        quota = self.quota
        if isinstance(quota, Mapping):
            object.__setattr__(self, "quota", {name: _quota(nbytes) for name, nbytes in quota.items()})
            _ = [*map(namespace_key, quota)]
        elif quota is not None:
            object.__setattr__(self, "quota", _quota(quota))

    def quotas(self) -> Callable[[bytes], int | None] | None:
        """Return what gives the quota of a namespace, by its ``namespace_key``, in bytes; None: there are none."""
        quota = self.quota
        if quota is None:
            return None
        if isinstance(quota, Mapping):
            return {namespace_key(name): int(nbytes) for name, nbytes in quota.items()}.get
        most = int(quota)
        return lambda _: most


@dataclass(frozen=True)
class Identity:
    """What names this process's records in tiers: only processes with equal identities find each other's records.

    Args:
        weights: a digest of the model's weights (``kvpagoda.hf.weights_digest``).
        rank: of this process among the ``num_ranks`` parallel parts of the model.
        num_ranks: parts of the model.
        secret: at most 64 bytes, part of every key: without it the text cannot be guessed from a key.

    Raises:
        BadInput: a rank that is none of ``num_ranks``, a longer secret, or another type.
    """

    weights: str = ""
    rank: int = 0
    num_ranks: int = 1
    secret: bytes = b""

    def __post_init__(self) -> None:
        utf8(self.weights, "weights, a digest of them,")
        _whole(self, "num_ranks", 1)
        _whole(self, "rank", 0, below=self.num_ranks)
        if not isinstance(self.secret, bytes) or len(self.secret) > 64:
            text = f"secret is at most 64 bytes, got {shown(self.secret)}"
            raise BadInput(text, field="secret", needed=self.secret, available=64)


@dataclass(frozen=True)
class Limits:
    """How large requests may become, and how large their steps are.

    Args:
        max_context: the longest request in tokens; None: what fits, at most the model's own limit.
        step_tokens: the most tokens of a prompt between two commits, for which window groups keep room; after the
            prompt they keep room for one block.
        swap: bytes of host memory for suspended requests, as a number or as text such as ``"4GiB"``; None: as many as
            the plan takes. Allocated when it is first needed.
        hit_grid: hits end at multiples of this many tokens, a multiple of the block size. Set it to the engine's
            prefill chunk: a warm run then computes in the same chunks as a cold one, and gets the same bits.
        step_checkpoints: at how many positions inside a step of one request the engine can leave a copy of the states
            (``Batch.checkpoints``); with 0 or None a step ends where one is due.
        page_locked: on a GPU, the most bytes of host memory (swap, staging, a host tier) that are page-locked, given
            like ``swap``; None: half of the machine's memory. They are locked piece by piece as they are used, and what
            is not locked is copied through the processor, about ten times slower.
        watermark: the share of the memory that requests leave to cached texts: one that starts beside others raises
            RetryLater where less would be left that is free or could be evicted (vLLM's ``watermark``), in each group
            if they do not share the memory. Running requests grow into it. 0 to below 1; 0: requests take all.

    Raises:
        BadInput: a number out of range, or a text that is no size.
    """

    max_context: int | None = None
    step_tokens: int = 512
    swap: int | str | None = None
    hit_grid: int = 1
    step_checkpoints: int | None = None
    page_locked: int | str | None = None
    watermark: float = 0.0

    def __post_init__(self) -> None:
        if self.max_context is not None:
            _whole(self, "max_context", 1, bits=31)
        _whole(self, "step_tokens", 1)
        _whole(self, "hit_grid", 1)
        if self.step_checkpoints is not None:
            _whole(self, "step_checkpoints", 0, bits=31)
        if real_number(self.watermark, "watermark") >= 1:
            text = f"watermark is a share of the memory, 0 to below 1, got {self.watermark}"
            raise BadInput(text, needed=self.watermark, available=1, field="watermark")
        for name in ("swap", "page_locked"):
            nbytes = getattr(self, name)
            if isinstance(nbytes, str):
                object.__setattr__(self, name, parse_bytes(nbytes))
            elif nbytes is not None:
                _whole(self, name, 0)


def _quota(nbytes: int | str) -> int:
    """Return ``nbytes``, a quota, as a number of bytes. Raises BadInput."""
    return parse_bytes(nbytes) if isinstance(nbytes, str) else whole_number(nbytes, "quota")


def _whole(options: object, name: str, at_least: int, below: int | None = None, bits: int = 63) -> None:
    """Replace field ``name`` of the frozen ``options`` by an int, if it is a whole number. Raises BadInput."""
    object.__setattr__(options, name, whole_number(getattr(options, name), name, at_least, below=below, bits=bits))
