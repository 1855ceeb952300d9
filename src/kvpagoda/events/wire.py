"""The messages: the fields of vLLM's KV events, in its array form, and behind them what is ours.

A message of ZMQ has three frames: topic, sequence number (8 bytes, big-endian), a batch in MessagePack. The field names,
their order and their types are those of ``vllm/distributed/kv_events.py`` up to ``kv_cache_spec_sliding_window``; a decoder of
arrays passes over fields behind those that it knows.

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
"""In place of a sequence number: a replay is over."""
MEDIUM = "GPU"


def kind_of(growth: Growth) -> str:
    """What vLLM calls a group that grows so."""
    if growth.window is not None:
        return "sliding_window"
    if growth.chunk is not None:
        return "chunked_local_attention"
    return "mamba" if growth.is_state else "full_attention"


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of a text are there in one group.

    ``block_hashes``: 32 bytes each, made of all tokens up to its end, the namespace and the weights. ``token_ids``: of all
    these blocks; 0 where a medium begins; fewer where the last block is that of a closed text, of use up to its end.
    ``extra_keys``: None, or for each block None or digest and offset of each medium that begins in it, by turns.
    ``group_idx``: None where it is the text alone that is there, of a model none of whose groups keeps all of it.
    ``namespace``: a digest of who may share it, see ``kvpagoda.events.namespace_name``.
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
    """Blocks are there no more in one group. ``lost``: the places where a text could be resumed until now, each named by the
    last block before it: behind these blocks, and behind others that needed them."""

    block_hashes: list[bytes]
    medium: str | None = None
    group_idx: int | None = None
    group_name: str | None = None
    group_kind: str | None = None
    lost: list[bytes] = []


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Nothing is there any more. Where a batch begins with it, the batch says all that there is."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class CacheInfo(msgspec.Struct, array_like=True, frozen=True):
    """Of which cache a batch tells. ``instance``: drawn at random for each life of a publisher. ``groups``: name, kind and
    window or chunk (else None) of each; ``full``: which one keeps all tokens, -1: none."""

    instance: bytes
    block_size: int
    hit_grid: int
    groups: list[tuple[str, str, int | None]]
    full: int

    @classmethod
    def of(cls, followed: Followed, instance: bytes) -> CacheInfo:
        """What a follower must know of ``followed``."""
        groups = [(name, kind_of(growth), growth.span) for name, growth in followed.groups]
        return cls(instance, followed.block_size, followed.hit_grid, groups, followed.full)

    def followed(self) -> Followed:
        """The same for an index. Raises BadInput for a kind that is not known."""
        return Followed(
            self.block_size, self.hit_grid, tuple((name, _growth(kind, n)) for name, kind, n in self.groups), self.full
        )


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened since the batch before. ``ts``: seconds since the epoch. Without events it only says that the publisher is
    alive: its sequence number is that of the last batch with any."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
    cache: CacheInfo | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    """The third frame of a message."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """What ``encode`` made, or a publisher of vLLM. Raises BadInput."""
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise BadInput(f"{len(payload)} bytes are no batch of KV events: {error}") from None


def _growth(kind: str, span: int | None) -> Growth:
    known = {"full_attention": FULL, "mamba": STATE}
    known |= {"sliding_window": Growth(window=span), "chunked_local_attention": Growth(chunk=span)}
    if kind not in known:
        raise unknown_name("kind of a group", kind, known)
    return known[kind]
