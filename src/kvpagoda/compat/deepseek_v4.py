"""DeepSeek-V4 (arXiv 2606.19348): the attention type of each layer, and what each layer keeps in the cache.

attention   entries               per request                            Flash   Pro   (number of layers)
CSA         1 per 4 tokens        window, tail and overlap, indexer's    21      30
HCA         1 per 128 tokens      window, tail                           20      31
SWA         none                  window                                 2       0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import ClassVar

from kvpagoda.errors import SchemaError
from kvpagoda.schema import FULL, MXFP4, STATE, Compressed, Encoding, Group, IndexKeys, Layer, RowLayout, Schema
from kvpagoda.schema.kv_format import KVFormatNames, check_used, formats_by_kind
from kvpagoda.units import ceil_div, whole_number

BLOCK_SIZE_ORIGINAL_TOKENS = 128
"""Original tokens per block: the least common multiple of the two compression ratios."""

FP8_PER_ENTRY = Encoding("fp8", kept=64)
"""580-byte entries: 448 E4M3 codes, 64 bfloat16 RoPE elements, one float32 inverse scale."""

FP8_UE8M0 = Encoding("fp8_ue8m0", kept=64, group=64)
"""584-byte entries: 448 E4M3 codes, 64 bfloat16 RoPE elements, 7 power-of-two scales and one byte of padding. The model
was trained with this format, and FlashMLA reads it."""


class AttentionType(Enum):
    """The attention of a layer; the value is the layer type in transformers.

    Examples:
        >>> AttentionType("sliding_attention").name
        'SWA'
    """

    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"
    SWA = "sliding_attention"


class FFNType(Enum):
    """The feed-forward part of a layer: experts, or one dense network.

    Examples:
        >>> {spec.ffn.name for spec in build_schedule(DSV4Config.pro())}
        {'MOE'}
    """

    MOE = "moe"
    DENSE = "dense"


class RouterMode(Enum):
    """How tokens are routed to experts: by a hash of the token id, or by a learned dense router.

    Examples:
        >>> [spec.router_mode.name for spec in build_schedule(DSV4Config.flash())[2:4]]
        ['HASH', 'DENSE']
    """

    HASH = "hash"
    DENSE = "dense"


@dataclass(frozen=True)
class DSV4Config:
    """The model's numbers that determine its cache.

    Args:
        compress_ratios: of each layer: ``csa_ratio``, ``hca_ratio``, or 0 for SWA.
        name: of the model.
        head_dim: elements of a row, RoPE dims included.
        rope_dim: the last elements of a row.
        window: tokens of the sliding window.
        csa_ratio: tokens of an entry of a CSA layer.
        hca_ratio: tokens of an entry of an HCA layer.
        index_heads: heads of the indexer's queries.
        index_dim: elements of an indexer key.
        index_topk: entries that the indexer selects.
        num_hash_layers: first layers whose experts are routed by hash.
        max_positions: the longest text in tokens.
        vocab_size: tokens that there are.
        encoding: format of entries and window rows; its ``kept`` is always set to ``rope_dim``.
        index_encoding: format of the indexer's keys.
        tail_dtype: of the rows that wait for an entry.

    Raises:
        SchemaError: a dtype or form that the rows cannot have.

    Examples:
        >>> DSV4Config.flash().num_layers, DSV4Config.pro().schema(encoding=FP8_UE8M0).bytes_per_token
        (43, 5031.4375)
    """

    compress_ratios: tuple[int, ...]
    name: str = "deepseek-v4"
    head_dim: int = 512
    rope_dim: int = 64
    window: int = 128
    csa_ratio: int = 4
    hca_ratio: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_topk: int = 512
    num_hash_layers: int = 3
    max_positions: int = 1_048_576
    vocab_size: int = 129_280
    encoding: Encoding = FP8_PER_ENTRY
    index_encoding: Encoding = MXFP4
    tail_dtype: str = "float32"

    @classmethod
    def pro(cls, *, encoding: Encoding = FP8_PER_ENTRY, index_encoding: Encoding = MXFP4) -> DSV4Config:
        """Return the config of V4-Pro: 61 layers, 0 and 1 HCA, then CSA and HCA in turn.

        Args:
            encoding: see the class.
            index_encoding: see the class.
        """
        ratios = (128, 128, *(4, 128) * 29, 4)
        return cls(ratios, "deepseek-v4-pro", index_topk=1024, encoding=encoding, index_encoding=index_encoding)

    @classmethod
    def flash(cls, *, encoding: Encoding = FP8_PER_ENTRY, index_encoding: Encoding = MXFP4) -> DSV4Config:
        """Return the config of V4-Flash: 43 layers, 0 and 1 SWA, then CSA and HCA in turn.

        Args:
            encoding: see the class.
            index_encoding: see the class.
        """
        ratios = (0, 0, *(4, 128) * 20, 4)
        return cls(ratios, "deepseek-v4-flash", encoding=encoding, index_encoding=index_encoding)

    def __post_init__(self) -> None:
        for ratio in (self.csa_ratio, self.hca_ratio):
            if ratio < 2 or BLOCK_SIZE_ORIGINAL_TOKENS % ratio:
                raise SchemaError(f"a compression ratio is a divisor of 128 and at least 2, got {ratio}")
        if self.csa_ratio == self.hca_ratio or not self.compress_ratios:
            raise SchemaError("csa_ratio and hca_ratio must differ and compress_ratios must not be empty")
        for layer_idx, ratio in enumerate(self.compress_ratios):
            if ratio not in (0, self.csa_ratio, self.hca_ratio):
                known = f"0, {self.csa_ratio} and {self.hca_ratio}"
                raise SchemaError(f"layer {layer_idx} has compression ratio {ratio}; known are {known}")
        if not 0 < self.rope_dim < self.head_dim or self.window < 1:
            raise SchemaError(
                f"need 0 < rope_dim < head_dim and window >= 1, got {self.rope_dim}, {self.head_dim} and {self.window}"
            )
        if self.encoding.name != "raw":
            object.__setattr__(self, "encoding", replace(self.encoding, kept=self.rope_dim))

    @property
    def num_layers(self) -> int:
        return len(self.compress_ratios)

    def schema(self, *, encoding: Encoding | None = None, index_encoding: Encoding | None = None) -> Schema:
        """Return the schema of the whole model.

        Args:
            encoding: replaces that of the config.
            index_encoding: replaces that of the config.
        """
        config = replace(self, encoding=encoding or self.encoding, index_encoding=index_encoding or self.index_encoding)
        layers = tuple(build_schema(config, spec).layer for spec in build_schedule(config))
        return Schema(layers, self.name, self.max_positions, self.vocab_size)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model.

    Args:
        layer_idx: of the layer.
        attn: its attention.
        ffn: its feed-forward part.
        router_mode: how that part routes.

    Examples:
        >>> spec = build_schedule(DSV4Config.flash())[2]
        >>> spec.layer_idx, spec.attn.name, spec.ffn.name, spec.router_mode.name
        (2, 'CSA', 'MOE', 'HASH')
    """

    layer_idx: int
    attn: AttentionType
    ffn: FFNType
    router_mode: RouterMode


def build_schedule(config: DSV4Config) -> list[LayerSpec]:
    """Return the layers in order. All have experts; the first ``num_hash_layers`` route by hash.

    Args:
        config: of the model.

    Examples:
        >>> "".join(spec.attn.name[0] for spec in build_schedule(DSV4Config.flash())[:6])
        'SSCHCH'
    """
    by_ratio = {0: AttentionType.SWA, config.csa_ratio: AttentionType.CSA, config.hca_ratio: AttentionType.HCA}
    return [
        LayerSpec(i, by_ratio[ratio], FFNType.MOE, RouterMode.HASH if i < config.num_hash_layers else RouterMode.DENSE)
        for i, ratio in enumerate(config.compress_ratios)
    ]


@dataclass(frozen=True)
class LayerSchema:
    """The cache shape of one layer. A count is 0 if the layer has no such rows.

    Args:
        layer_idx: of the layer.
        attn: its attention.
        kind: what it keeps, from which the counts follow.

    Examples:
        >>> config = DSV4Config.flash()
        >>> csa = build_schema(config, build_schedule(config)[2])
        >>> csa.attn.name, csa.entries_per_block, csa.tail_buffer_size, csa.overlap_size
        ('CSA', 32, 3, 4)
    """

    BLOCK_SIZE_ORIGINAL_TOKENS: ClassVar[int] = BLOCK_SIZE_ORIGINAL_TOKENS

    layer_idx: int
    attn: AttentionType
    kind: Compressed

    @property
    def entries_per_block(self) -> int:
        """Compressed entries per block."""
        return BLOCK_SIZE_ORIGINAL_TOKENS // self.kind.ratio if self.kind.ratio else 0

    @property
    def indexer_entries_per_block(self) -> int:
        """Indexer keys per block."""
        return self.entries_per_block if self.kind.index_dim else 0

    @property
    def tail_buffer_size(self) -> int:
        """Rows kept for tokens whose compression window is still open: ratio - 1."""
        return max(0, self.kind.ratio - 1)

    @property
    def overlap_size(self) -> int:
        """Rows kept of the last closed compression window, over which the next window pools too."""
        return self.kind.ratio if self.kind.overlap else 0

    @property
    def indexer_tail_buffer_size(self) -> int:
        """``tail_buffer_size`` of the indexer's own compressor."""
        return self.tail_buffer_size if self.kind.index_dim else 0

    @property
    def indexer_overlap_size(self) -> int:
        """``overlap_size`` of the indexer's own compressor."""
        return self.overlap_size if self.kind.index_dim else 0

    @property
    def swa_window_size(self) -> int:
        """Rows of the sliding-window ring."""
        return self.kind.window

    @property
    def entry_head_dim(self) -> int:
        """Elements of one entry, and of one window row."""
        return self.kind.dim

    @property
    def indexer_dim(self) -> int:
        """Elements of one indexer key."""
        return self.kind.index_dim or 0

    @property
    def layer(self) -> Layer:
        """This layer as a ``Layer`` of a ``Schema``."""
        return Layer(self.layer_idx, self.attn.value, (self.kind,))

    def block_layout(self) -> RowLayout:
        """Return the layout of one block of this layer; 0 bytes for SWA."""
        return Group(FULL, (self.layer,)).block_layout(BLOCK_SIZE_ORIGINAL_TOKENS)

    def state_layout(self) -> RowLayout:
        """Return the layout of one request's state of this layer."""
        return Group(STATE, (self.layer,)).block_layout()


def build_schema(config: DSV4Config, layer_spec: LayerSpec) -> LayerSchema:
    """Return the cache shape of a layer.

    Args:
        config: of the model.
        layer_spec: of the layer.

    Examples:
        >>> config = DSV4Config.pro()
        >>> build_schema(config, build_schedule(config)[0]).tail_buffer_size
        127
    """
    attn, indexer = layer_spec.attn, None
    if attn is AttentionType.CSA:
        indexer = IndexKeys(config.index_dim, config.index_encoding)
    ratio = {AttentionType.CSA: config.csa_ratio, AttentionType.HCA: config.hca_ratio, AttentionType.SWA: 0}[attn]
    kind = Compressed(config.head_dim, config.window, "bfloat16", ratio, indexer, config.encoding, config.tail_dtype)
    return LayerSchema(layer_spec.layer_idx, attn, kind)


def compute_block_budget(
    config: DSV4Config, schedule: Sequence[LayerSpec], max_tokens: int, max_requests: int
) -> dict[str, int]:
    """Return the blocks needed for some tokens, divided in any way among some requests.

    ``csa`` and ``hca`` are blocks of 128 tokens for *each layer* of that type: the ``num_blocks_per_csa_layer`` and
    ``num_blocks_per_hca_layer`` of a ``KVCacheManager``. A block is taken when its first entry is written. In a CSA
    layer that is at the block's 4th token, so every request may hold one block that is nearly empty. In an HCA layer it
    is at the 128th token, so no block is ever partly filled. So ``csa`` is larger, by about one block per request.

    These numbers say little about memory: a CSA block is about 36 times as large as an HCA block, and the numbers of
    layers differ. ``csa_bytes`` and ``hca_bytes`` are the bytes of these blocks over all layers of the type;
    ``state_bytes`` is those of ``max_requests`` state rows over all layers. They include neither alignment nor the
    hidden row of each pool.

    Args:
        config: of the model.
        schedule: its layers.
        max_tokens: of all requests together.
        max_requests: the most at once.

    Raises:
        BadInput: ``max_tokens`` or ``max_requests`` is no positive whole number.

    Examples:
        >>> config = DSV4Config.pro()
        >>> budget = compute_block_budget(config, build_schedule(config), max_tokens=1_000_000, max_requests=16)
        >>> budget["csa"], budget["hca"]
        (7828, 7813)
    """
    max_tokens = whole_number(max_tokens, "max_tokens", at_least=1)
    max_requests = whole_number(max_requests, "max_requests", at_least=1)
    budget = {"csa": 0, "hca": 0, "csa_bytes": 0, "hca_bytes": 0, "state_bytes": 0}
    for name, ratio in (("csa", config.csa_ratio), ("hca", config.hca_ratio)):
        budget[name] = most_blocks(ratio, max_tokens, max_requests)
    for spec in schedule:
        layer = build_schema(config, spec)
        budget["state_bytes"] += max_requests * layer.state_layout().payload_nbytes
        if spec.attn is not AttentionType.SWA:
            name = spec.attn.name.lower()
            budget[f"{name}_bytes"] += budget[name] * layer.block_layout().payload_nbytes
    return budget


def most_blocks(ratio: int, max_tokens: int, max_requests: int) -> int:
    """Return the most blocks that ``max_tokens`` tokens can take in one layer with compression ratio ``ratio``.

    At least as many as the tokens fill. Worst case: every request takes its first block with ``ratio`` tokens, and
    every 128 of the other tokens take a further block.
    """
    requests = min(max_requests, max_tokens // ratio)
    worst = requests + (max_tokens - ratio * requests) // BLOCK_SIZE_ORIGINAL_TOKENS
    return max(worst, ceil_div(max_tokens, BLOCK_SIZE_ORIGINAL_TOKENS))


def _preset(config: DSV4Config, kv_format: KVFormatNames) -> Schema:
    """Return the schema of ``config`` for ``kv_format``. Raises SchemaError for a name that is unknown, or without entries."""
    packed = formats_by_kind(kv_format)["compressed"]
    check_used(kv_format, {"compressed": config.num_layers}, config.name)
    schema = config.schema(encoding=packed.entries, index_encoding=packed.index_keys)
    return schema.laid_out(packed.layouts["Compressed"]) if packed.layouts else schema


PRESETS: dict[str, Callable[[KVFormatNames], Schema]] = {
    config.name: partial(_preset, config) for config in (DSV4Config.flash(), DSV4Config.pro())
}
"""Model name -> function that returns its schema for a ``kv_format``.

``kv_format``: ``raw`` (bfloat16 rows), ``fp8`` (584-byte entries, MXFP4 index keys), or another of ``KV_FORMATS`` that has
entries.
"""
