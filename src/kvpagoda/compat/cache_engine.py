"""The two-device engine: a KV tensor a layer on the device, one on the host, and whole blocks moved between them."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Protocol

import torch

from kvpagoda.compat.kv_pool import dtype_name
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.kernels.copy_rows import copy_rows
from kvpagoda.memory.arena import Arena, Device, Tensor
from kvpagoda.schema import Field, RowLayout
from kvpagoda.schema.fields import itemsize

Shape = tuple[int, ...]

NAMED_DTYPES = {
    "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32",
    "int8": "int8", "fp8": "uint8", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8",
}  # fmt: skip
"""``cache_dtype`` -> the dtype of the tensors. FP8 is kept as bytes: the attention backend views them as its format."""


class LayerType(str, Enum):
    """What ``get_num_layers_by_block_type`` is asked for; equal to the plain word."""

    attention = "attention"


class CacheConfig(Protocol):
    """``cache_dtype``: ``"auto"`` (the model's own) or a name of ``NAMED_DTYPES``."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    cache_dtype: str


class ModelConfig(Protocol):
    """``dtype``: a torch dtype, or its name. The two calls that take a parallel config answer for one rank."""

    dtype: Any
    use_mla: bool

    def get_head_size(self) -> int: ...

    def get_num_kv_heads(self, parallel_config: Any) -> int: ...

    def get_num_layers_by_block_type(self, parallel_config: Any, block_type: Any) -> int: ...


class DeviceConfig(Protocol):
    """``device_type``: ``"cuda"``, ``"cpu"``; None: CUDA when a GPU is there, else the CPU."""

    device_type: Any


class CacheEngine:
    """``gpu_cache`` and ``cpu_cache``: one tensor a layer, ``num_gpu_blocks`` and ``num_cpu_blocks`` blocks.

    Shape and stride order are those that ``attn_backend`` asks for:

        get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size) -> shape, num_blocks once among its axes
        get_kv_cache_stride_order() -> the axes from outermost to innermost in memory; may be missing (as they come)

    so each tensor has that shape, and its memory is dense in that order. Without a backend: ``[2, num_blocks,
    block_size, num_kv_heads, head_size]``, K before V; with MLA ``[num_blocks, block_size, num_kv_heads * head_size]``
    (MLA has one head). The host's tensors are page-locked when a GPU is there. All memory is zero at the start.

    The configs are duck-typed (``CacheConfig``, ``ModelConfig``, ``DeviceConfig``). Layers are those of one pipeline
    stage and heads those of one tensor rank, as ``model_config`` counts them for ``parallel_config``; its answers are
    not divided again. ``layer_type`` is the word that layers are counted by (hybrid models count each type on its own).
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        model_config: ModelConfig,
        parallel_config: Any,
        device_config: DeviceConfig,
        attn_backend: Any = None,
        *,
        layer_type: Any = LayerType.attention,
    ) -> None:
        self.attn_backend = attn_backend
        self.block_size = cache_config.block_size
        self.head_size = model_config.get_head_size()
        self.num_kv_heads = model_config.get_num_kv_heads(parallel_config)
        self.num_layers = model_config.get_num_layers_by_block_type(parallel_config, layer_type)
        self.num_gpu_blocks, self.num_cpu_blocks = cache_config.num_gpu_blocks, cache_config.num_cpu_blocks
        self.use_mla = bool(model_config.use_mla)
        self.dtype: torch.dtype = getattr(torch, _cache_dtype(cache_config, model_config))
        counts = (self.block_size, self.head_size, self.num_kv_heads, self.num_layers, self.num_gpu_blocks)
        for n in (*counts, self.num_cpu_blocks):
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise BadInput(f"block size, head size, heads, layers and blocks must be whole numbers, got {n!r}")
        self._gpu, self.gpu_cache = self._allocate(self.num_gpu_blocks, device_config.device_type)
        self._cpu, self.cpu_cache = self._allocate(self.num_cpu_blocks, "cpu")

    def swap_in(self, src_to_dst: Tensor, *, wait: bool = True) -> None:
        """Copy whole blocks of every layer, bit for bit, from the host to the device.

        ``src_to_dst``: int64 ``[n, 2]``, (host block, device block) pairs. Returns when the bytes are there, or with
        ``wait=False`` when the copies are queued on the current stream: synchronise before the host reads or reuses a
        block. Raises NotOwned for an id out of range or a destination named twice, and BadInput for another shape or
        dtype, before anything moves. O(bytes moved).
        """
        pairs = _proven_pairs(src_to_dst, self.num_cpu_blocks, self.num_gpu_blocks)
        self._move(self._cpu, self._gpu, pairs, wait)

    def swap_out(self, src_to_dst: Tensor, *, wait: bool = True) -> None:
        """The same from the device to the host: (device block, host block) pairs."""
        pairs = _proven_pairs(src_to_dst, self.num_gpu_blocks, self.num_cpu_blocks)
        self._move(self._gpu, self._cpu, pairs, wait)

    def copy(self, src_to_dsts: Tensor) -> None:
        """Copy whole blocks of every layer within the device; one source may go to several destinations.

        ``src_to_dsts``: int64 ``[n, 2]``, (device block, device block) pairs. Raises as ``swap_in``, and NotOwned for a
        block that is both a source and a destination, before anything moves.
        """
        pairs = _proven_pairs(src_to_dsts, self.num_gpu_blocks, self.num_gpu_blocks)
        both = set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())
        if both:
            raise NotOwned(f"overlapping copy: blocks {sorted(both)[:16]} are both source and destination")
        self._move(self._gpu, self._gpu, pairs, wait=False)

    @staticmethod
    def get_cache_block_size(
        cache_config: CacheConfig,
        model_config: ModelConfig,
        parallel_config: Any,
        *,
        layer_type: Any = LayerType.attention,
    ) -> int:
        """Bytes of one block over all layers of this rank: K and V rows of ``block_size`` tokens; no V part for MLA.

        A backend whose shape holds more than that (padded heads) takes more.
        """
        row = model_config.get_num_kv_heads(parallel_config) * model_config.get_head_size()
        parts = 1 if model_config.use_mla else 2
        num_layers = model_config.get_num_layers_by_block_type(parallel_config, layer_type)
        return num_layers * cache_config.block_size * parts * row * itemsize(_cache_dtype(cache_config, model_config))

    def _shape(self, num_blocks: int) -> Shape:
        sizes = (num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        if self.attn_backend is not None:
            return tuple(self.attn_backend.get_kv_cache_shape(*sizes))
        return (*sizes[:2], self.num_kv_heads * self.head_size) if self.use_mla else (2, *sizes)

    def _stride_order(self, ndim: int) -> Shape:
        ask = getattr(self.attn_backend, "get_kv_cache_stride_order", None)
        try:
            order = tuple(range(ndim)) if ask is None else tuple(ask())
        except NotImplementedError:  # a base class that leaves it open
            order = tuple(range(ndim))
        if sorted(order) != list(range(ndim)):
            raise BadInput(f"stride order {order} is not an order of the {ndim} axes of the cache shape")
        return order

    def _allocate(self, num_blocks: int, device: Device) -> tuple[Arena, list[Tensor]]:
        """An arena of blocks in the order of memory, and the views of it in the backend's shape.

        A layer in memory, planes being the axes outside of the block axis (K and V, or heads):

            | plane 0: block 0, block 1, .. | plane 1: block 0, block 1, .. | ..
        """
        shape, longer = self._shape(num_blocks), self._shape(num_blocks + 1)
        order = self._stride_order(len(shape))
        in_memory = tuple(shape[axis] for axis in order)
        axes = [place for place, axis in enumerate(order) if shape[axis] != longer[axis]]
        if len(axes) != 1 or in_memory[axes[0]] != num_blocks:
            raise BadInput(f"cache shape {shape} for {num_blocks} blocks and {longer} for one more: no one block axis")
        planes, inner = math.prod(in_memory[: axes[0]]), in_memory[axes[0] + 1 :]
        fields = [Field(f"plane{plane}", 1, inner, dtype_name(self.dtype)) for plane in range(planes)]
        layout = RowLayout.build((layer, field) for layer in range(self.num_layers) for field in fields)
        arena = Arena(
            layout, num_blocks, device=device, order="layer", field_align=self.dtype.itemsize, pin_memory=True
        )
        whole = arena.buffer.view(self.dtype).view(self.num_layers, *in_memory)
        back = [order.index(axis) for axis in range(len(order))]
        return arena, [whole[layer].permute(back) for layer in range(self.num_layers)]

    def _move(self, src: Arena, dst: Arena, pairs: Tensor, wait: bool) -> None:
        """Copy block rows ``pairs`` (int64 ``[n, 2]`` on the host) of every plane of every layer, in one call."""
        planes = len(src.layout.places)
        if not len(pairs) or not planes:
            return
        nbytes = src.layout.places[0].nbytes
        steps = torch.arange(planes)[:, None] * torch.tensor([src.num_rows, dst.num_rows])
        rows = (pairs + steps[:, None]).reshape(-1, 2)
        copy_rows(src.buffer.view(-1, nbytes), dst.buffer.view(-1, nbytes), rows)
        if wait and self._gpu.device.type == "cuda":
            torch.cuda.current_stream(self._gpu.device).synchronize()


def _cache_dtype(cache_config: CacheConfig, model_config: ModelConfig) -> str:
    name = model_config.dtype if cache_config.cache_dtype == "auto" else cache_config.cache_dtype
    if isinstance(name, torch.dtype):
        return dtype_name(name)
    if name not in NAMED_DTYPES:
        raise BadInput(f"unknown cache dtype {name!r}; known: auto, {', '.join(NAMED_DTYPES)}")
    return NAMED_DTYPES[name]


def _proven_pairs(pairs: Tensor, num_src: int, num_dst: int) -> Tensor:
    """``pairs`` on the host, every id in range and every destination named once."""
    if not isinstance(pairs, torch.Tensor) or pairs.dtype != torch.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
        given = f"{pairs.dtype} {list(pairs.shape)}" if isinstance(pairs, torch.Tensor) else type(pairs).__name__
        raise BadInput(f"block pairs must be an int64 tensor [n, 2], got {given}")
    pairs = pairs.cpu()
    for column, name, limit in ((0, "source", num_src), (1, "destination", num_dst)):
        ids = pairs[:, column]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            raise NotOwned(f"{name} blocks {int(ids.min())}..{int(ids.max())} are not all in 0..{limit - 1}")
    found, counts = torch.unique(pairs[:, 1], return_counts=True)
    if len(found) != len(pairs):
        raise NotOwned(f"destination blocks named twice: {found[counts > 1].tolist()[:16]}")
    return pairs
