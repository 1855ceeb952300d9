"""The messages: vLLM's KV events, with fields of kvpagoda by name, and the two forms in which events are encoded.

A message of ZMQ has three frames: topic, sequence number (8 bytes, big-endian), a batch in MessagePack. A batch is an array
``[ts, events, data_parallel_rank]``. An event is a map with its class as ``type`` (vLLM from 0.24 on, SGLang, Dynamo), or an
array that begins with it (vLLM up to 0.23). Field names, their order and types are those of vLLM 0.33's
``vllm/distributed/kv_events.py``; those of kvpagoda come after them:

    BlockStored     block_hashes  parent_block_hash  token_ids  block_size  lora_id  medium  lora_name  extra_keys  group_idx
                    kv_cache_spec_kind  kv_cache_spec_sliding_window  locality  ownership  session_id  lookahead_token_ids
                    | instance  group_name  namespace  cache_salt
    BlockRemoved    block_hashes  medium  group_idx  locality  ownership  | instance  group_name  group_kind  lost
    AllBlocksCleared                                                      | instance  cache
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from kvpagoda.errors import BadInput, MissingExtra, unknown_name
from kvpagoda.events.event_log import TEXT, Followed
from kvpagoda.schema.fields import FULL, STATE, Growth

with MissingExtra.unless("msgspec", "kvpagoda.events needs msgspec; pip install 'kvpagoda[events]'"):
    import msgspec

SEQUENCE_NBYTES = 8
END = (-1).to_bytes(SEQUENCE_NBYTES, "big", signed=True)
"""Sent in place of a sequence number at the end of a replay."""
MEDIUM = "GPU"
NAME_BITS = 63
"""Bits of a name that is a number: every reader of 64-bit integers, signed or not, takes it."""
Name = int | bytes
"""How events name a block. Followers compare names, and read nothing from them."""
MEDIUMS = (MEDIUM, "CPU", "STORAGE")
"""Where blocks may be: on the device, in host memory, on a disk."""
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_BlockSize = Annotated[int, msgspec.Meta(ge=1, lt=2**20)]
_Group = Annotated[int, msgspec.Meta(ge=0)]
_Span = Annotated[int, msgspec.Meta(ge=1)]


def kind_of(growth: Growth, fields: Iterable[str]) -> str:
    """Return vLLM's name (``KVCacheSpecKind``) for a group with this growth, whose blocks have arrays of these names."""
    rows = {name.partition(".")[0] for name in fields}
    is_latent = bool(rows & {"latent", "rope", "entries"}) and not rows & {"k", "v", "kv"}
    if growth.window is not None:
        return "sliding_window_mla" if is_latent else "sliding_window"
    if growth.chunk is not None:
        return "chunked_local_attention"
    if growth.is_state:
        return "unknown" if rows and all(name.startswith("sink_") for name in rows) else "mamba"
    return "mla_attention" if is_latent else "full_attention"


class CacheInfo(msgspec.Struct, frozen=True):
    """What a follower must know of a cache. ``groups``: for each without which a text cannot be resumed its name, how it
    grows ("full", "window", "chunk", "state"), and the tokens of its window or chunk, else None; events number groups in
    this order. ``full``: the number of the group that keeps all tokens; -1 if there is none."""

    block_size: _BlockSize
    hit_grid: _Span
    groups: list[tuple[str, str, _Span | None]]
    full: int

    @classmethod
    def of(cls, followed: Followed) -> CacheInfo:
        """Return the description of ``followed``."""
        groups = [(name, _law(growth), growth.span) for name, growth in followed.groups]
        return cls(followed.block_size, followed.hit_grid, groups, followed.full)

    def followed(self) -> Followed:
        """Return the description for an index. Raises BadInput for one that no cache has."""
        groups = tuple((name, _growth(law, span)) for name, law, span in self.groups)
        full = [number for number, (_, growth) in enumerate(groups) if not growth.is_bounded]
        num_states = sum(growth.is_state for _, growth in groups)
        if (
            full != [self.full] * (self.full != TEXT)
            or num_states > 1
            or (self.hit_grid > 1 and self.hit_grid % self.block_size)
        ):
            raise BadInput(f"no cache has groups as in {self}: one may keep all tokens, and one states")
        return Followed(self.block_size, self.hit_grid, groups, self.full)


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks of a text were stored in one group.

    Attributes:
        block_hashes: names of the blocks, in their order.
        parent_block_hash: name of the block before; None at the beginning of a text.
        token_ids: those of all blocks; 0 where a medium begins; the last block of a text may be partial.
        block_size: tokens of a block.
        lora_id: None.
        medium: where they are stored: "GPU", or that of a tier.
        lora_name: the adapter of the namespace.
        extra_keys: None, or for each block None or what its name depends on besides its tokens: (digest in hexadecimal,
            offset in the block) of each medium that begins in it, and in the first block of a text its ``cache_salt``.
        group_idx: None if only the text is known, for a model in which no group keeps all tokens.
        kv_cache_spec_kind: vLLM's name for the kind of the group.
        kv_cache_spec_sliding_window: tokens of its window.
        locality: vLLM's; not written.
        ownership: vLLM's; not written.
        session_id: vLLM's; not written.
        lookahead_token_ids: vLLM's; not written.
        instance: in the first event of each batch, the number that the publisher drew when it started.
        group_name: as in ``cache.plan.groups``.
        namespace: in events that begin a text, the digest of its namespace, see ``kvpagoda.events.namespace_name``.
        cache_salt: SGLang's name for the digest, in hexadecimal, if the namespace has a salt or names weights.
    """

    block_hashes: list[Name]
    parent_block_hash: Name | None
    token_ids: list[_Token]
    block_size: _BlockSize
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: _Group | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    instance: int | None = None
    group_name: str | None = None
    namespace: bytes = b""
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks were removed from one group.

    Attributes:
        block_hashes: names of the blocks.
        medium: see ``BlockStored``.
        group_idx: see ``BlockStored``.
        locality: see ``BlockStored``.
        ownership: see ``BlockStored``.
        instance: see ``BlockStored``.
        group_name: see ``BlockStored``.
        group_kind: see ``BlockStored.kv_cache_spec_kind``.
        lost: the positions at which a text could be resumed until now, each named by the last block before it: after
            these blocks, and after other blocks whose resumption needed them.
    """

    block_hashes: list[Name]
    medium: str | None
    group_idx: _Group | None = None
    locality: str | None = None
    ownership: str | None = None
    instance: int | None = None
    group_name: str | None = None
    group_kind: str | None = None
    lost: list[Name] = []


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """All blocks were removed. A batch that begins with it is a snapshot: it stores all blocks that the cache has.

    Attributes:
        instance: see ``BlockStored``.
        cache: what the cache is, in a snapshot.
    """

    instance: int | None = None
    cache: CacheInfo | None = None


Event = BlockStored | BlockRemoved | AllBlocksCleared
replace = msgspec.structs.replace


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events since the batch before.

    A batch without blocks only says that the publisher is alive; its sequence number is that of the last batch with
    events.

    Attributes:
        ts: seconds since the epoch.
        events: in their order.
        data_parallel_rank: of the publisher.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_OURS: dict[type[Event], dict[str, Any]] = {
    BlockStored: {"instance": None, "group_name": None, "namespace": b"", "cache_salt": None},
    BlockRemoved: {"instance": None, "group_name": None, "group_kind": None, "lost": []},
    AllBlocksCleared: {"instance": None, "cache": None},
}
"""The fields of kvpagoda and their defaults, by class of event."""
_ARRAYS = {BlockStored: 11, BlockRemoved: 3, AllBlocksCleared: 0}
"""How many fields vLLM 0.23's arrays have, by class of event."""
_CLASSES: dict[str, type[Event]] = {of.__name__: of for of in _OURS}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)
_any_decoder = msgspec.msgpack.Decoder()


@dataclass(frozen=True)
class Encoding:
    """How a stream is written.

    Args:
        form: "map" or "array", of an event.
        names: "int" or "bytes": names of ``NAME_BITS`` bits, or the whole digest of 32 bytes.
        own_fields: write the fields of kvpagoda, without which a ``Follower`` cannot read the stream; vllm-router
            refuses events that have them.

    Raises:
        BadInput: an unknown ``form`` or ``names``.
    """

    form: str = "map"
    names: str = "int"
    own_fields: bool = True

    def __post_init__(self) -> None:
        for what, value, known in (
            ("form", self.form, ("map", "array")),
            ("kind of names", self.names, ("int", "bytes")),
        ):
            if value not in known:
                raise unknown_name(f"{what} of an encoding", value, known)

    def name(self, digest: bytes, taken: Container[Name]) -> Name:
        """Return the name of a block: the first bits of its digest, or the next free number.

        Args:
            digest: of the block.
            taken: names of other blocks.
        """
        if self.names == "bytes":
            return digest
        name = int.from_bytes(digest[:8], "big") >> 64 - NAME_BITS
        while name in taken:
            name = (name + 1) % (1 << NAME_BITS)
        return name

    def encode(self, batch: EventBatch) -> bytes:
        """Return a batch as the third frame of a message.

        Args:
            batch: its events may be changed.
        """
        if not self.own_fields:
            batch.events = [event for event in batch.events if _is_vllms(event)]
        if self.form == "map":
            return _encoder.encode(batch)
        events = [self._array(event) for event in batch.events]
        return _encoder.encode((batch.ts, events, batch.data_parallel_rank))

    def _array(self, event: Event) -> list[Any]:
        values = msgspec.structs.astuple(event)
        return [type(event).__name__, *(values if self.own_fields else values[: _ARRAYS[type(event)]])]


def decode(payload: bytes) -> EventBatch:
    """Return the batch that ``Encoding.encode``, or a publisher of vLLM, encoded in either form. Raises BadInput."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        with_arrays = _from_arrays(payload)
        if with_arrays is None:
            raise BadInput(f"{len(payload)} bytes are no batch of KV events: {error}", needed=len(payload)) from None
        return with_arrays


def _from_arrays(payload: bytes) -> EventBatch | None:
    """Return the batch whose events are arrays; None if ``payload`` is none."""
    try:
        ts, events, *rank = _any_decoder.decode(payload)
        maps = [{"type": tag, **dict(zip(_CLASSES[tag].__struct_fields__, fields))} for tag, *fields in events]
        return msgspec.convert([ts, maps, *rank[:1]], EventBatch)
    except (msgspec.MsgspecError, TypeError, ValueError, KeyError, RecursionError):
        return None


def _is_vllms(event: Event) -> bool:
    """Take the fields of kvpagoda from ``event``, and a partial block, which vLLM does not have; return whether anything is
    left."""
    for name, default in _OURS[type(event)].items():
        setattr(event, name, default)
    if isinstance(event, BlockStored):
        whole = len(event.token_ids) // event.block_size
        event.block_hashes, event.token_ids = event.block_hashes[:whole], event.token_ids[: whole * event.block_size]
        event.extra_keys = event.extra_keys and event.extra_keys[:whole]
    return isinstance(event, AllBlocksCleared) or bool(event.block_hashes)


def _law(growth: Growth) -> str:
    """Return the word for ``growth`` in ``CacheInfo``."""
    if growth.is_state:
        return "state"
    return "window" if growth.window is not None else "full" if growth.chunk is None else "chunk"


def _growth(law: str, span: int | None) -> Growth:
    """Return the growth of a group whose ``law`` has this window or chunk. Raises BadInput for an unknown one."""
    known = {"full": FULL, "state": STATE, "window": Growth(window=span), "chunk": Growth(chunk=span)}
    if law not in known:
        raise unknown_name("growth of a group", law, known)
    if (span is None) != (law in ("full", "state")):
        raise BadInput(f"a group that grows as {law!r} has a span of {span} tokens")
    return known[law]
