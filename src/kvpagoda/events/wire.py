"""The messages: the fields of vLLM's KV events, in its array form, followed by fields of kvpagoda.

A message of ZMQ has three frames: topic, sequence number (8 bytes, big-endian), a batch in MessagePack. The field
names, their order and their types are those of ``vllm/distributed/kv_events.py`` up to
``kv_cache_spec_sliding_window``. A decoder of arrays ignores fields after those that it knows.

    batch           ts  events  data_parallel_rank                                             | cache
    BlockStored     block_hashes  parent_block_hash  token_ids  block_size  lora_id  medium  lora_name  extra_keys
                    group_idx  kv_cache_spec_kind  kv_cache_spec_sliding_window                | group_name  namespace
    BlockRemoved    block_hashes  medium  group_idx                                            | group_name  group_kind  lost
    AllBlocksCleared
"""

from __future__ import annotations

from typing import Any

from kvpagoda.cache.event_log import Followed
from kvpagoda.errors import BadInput, MissingExtra, unknown_name
from kvpagoda.schema.fields import FULL, STATE, Growth

with MissingExtra.unless("msgspec", "kvpagoda.events needs msgspec; pip install 'kvpagoda[events]'"):
    import msgspec

SEQUENCE_NBYTES = 8
END = (-1).to_bytes(SEQUENCE_NBYTES, "big", signed=True)
"""Sent in place of a sequence number at the end of a replay."""
MEDIUM = "GPU"


def kind_of(growth: Growth) -> str:
    """Return vLLM's name for a group with this growth."""
    if growth.window is not None:
        return "sliding_window"
    if growth.chunk is not None:
        return "chunked_local_attention"
    return "mamba" if growth.is_state else "full_attention"


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of a text were stored in one group.

    ``block_hashes``: 32 bytes each, computed from all tokens up to the block's end, the namespace and the weights.
    ``token_ids``: those of all these blocks; 0 where a medium begins; fewer if the last block is the partial last block
    of a closed text. ``extra_keys``: None, or for each block None or the digests and offsets of the media that begin in
    it, in alternation. ``group_idx``: None if only the text is known, for a model in which no group keeps all tokens.
    ``namespace``: the digest of the namespace, see ``kvpagoda.events.namespace_name``.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    group_name: str | None = None
    namespace: bytes = b""


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Blocks were removed from one group.

    ``lost``: the positions at which a text could be resumed until now, each named by the last block before it: after
    these blocks, and after other blocks whose resumption needed them.
    """

    block_hashes: list[bytes]
    medium: str | None = None
    group_idx: int | None = None
    group_name: str | None = None
    group_kind: str | None = None
    lost: list[bytes] = []


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """All blocks were removed. A batch that begins with it is a snapshot: it stores all blocks that the cache has."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class CacheInfo(msgspec.Struct, array_like=True, frozen=True):
    """The cache that a batch describes.

    ``instance``: random bytes, new for each start of a publisher. ``groups``: name, kind and window or chunk (else
    None) of each. ``full``: the index of the group that keeps all tokens; -1 if there is none.
    """

    instance: bytes
    block_size: int
    hit_grid: int
    groups: list[tuple[str, str, int | None]]
    full: int

    @classmethod
    def of(cls, followed: Followed, instance: bytes) -> CacheInfo:
        """Return the description of ``followed`` for followers."""
        groups = [(name, kind_of(growth), growth.span) for name, growth in followed.groups]
        return cls(instance, followed.block_size, followed.hit_grid, groups, followed.full)

    def followed(self) -> Followed:
        """Return the description for an index. Raises BadInput for an unknown kind of group."""
        return Followed(
            self.block_size, self.hit_grid, tuple((name, _growth(kind, n)) for name, kind, n in self.groups), self.full
        )


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events since the batch before. ``ts``: seconds since the epoch.

    A batch without events only says that the publisher is alive; its sequence number is that of the last batch with
    events.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    cache: CacheInfo | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    """Return ``batch`` as the third frame of a message."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """Return the batch that ``encode``, or a publisher of vLLM, encoded. Raises BadInput."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise BadInput(f"{len(payload)} bytes are no batch of KV events: {error}") from None


def _growth(kind: str, span: int | None) -> Growth:
    """Return the growth of a group of ``kind`` with window or chunk ``span``. Raises BadInput for an unknown kind."""
    known = {"full_attention": FULL, "mamba": STATE}
    known |= {"sliding_window": Growth(window=span), "chunked_local_attention": Growth(chunk=span)}
    if kind not in known:
        raise unknown_name("kind of a group", kind, known)
    return known[kind]
