"""The two-device cache engine: for each layer one KV tensor on the device and one on the host, and block copies."""

from __future__ import annotations

import math
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import torch

from kvpagoda.errors import BadInput, NotOwned, unknown_name
from kvpagoda.id_tensors import Device, default_device
from kvpagoda.kernels import copy_rows
from kvpagoda.units import positive_numbers, whole_number

Tensor = torch.Tensor
Shape = tuple[int, ...]

NAMED_DTYPES = {
    "half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
    "float32": torch.float32, "int8": torch.int8, "fp8": torch.uint8, "fp8_e4m3": torch.uint8, "fp8_e5m2": torch.uint8,
}  # fmt: skip
"""``cache_dtype`` -> dtype of the tensors. FP8 is stored as uint8, which the attention backend views as its format."""


class LayerType(str, Enum):
    """The argument of ``get_num_layers_by_block_type``; equal to the plain string."""

    attention = "attention"


class Side(NamedTuple):
    """The cache memory of one device."""

    num_blocks: int
    rows: Tensor
    """uint8 ``[layers * planes * num_blocks, bytes of a row]``: row b of a plane of a layer belongs to block b."""
    tensors: list[Tensor]
    """One tensor per layer, views of the same memory."""


class CacheEngine:
    """A KV cache on two devices: ``gpu_cache`` and ``cpu_cache`` have one tensor per layer.

    These have ``num_gpu_blocks`` and ``num_cpu_blocks`` blocks. The configs are duck-typed and kept as attributes of
    the same names. The engine reads of them:

        cache_config      block_size, num_gpu_blocks, num_cpu_blocks (None: no cache there, an empty list of tensors),
                          cache_dtype: "auto" (the model's own) or a name of NAMED_DTYPES
        model_config      get_head_size(), get_num_kv_heads(parallel_config), dtype (of torch, or its name), use_mla,
                          get_num_layers_by_block_type(parallel_config, layer_type)
        parallel_config   pipeline_parallel_size, by which both numbers of blocks are divided
        device_config     device_type: "cuda", "cpu"; None: CUDA when a GPU is there, else the CPU

    ``num_attention_layers`` counts the layers of one pipeline stage and ``num_kv_heads`` the heads of one tensor rank,
    as ``model_config`` returns them for ``parallel_config``; they are not divided again.

    ``attn_backend`` gives the shape and the stride order:

        get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size) -> shape, num_blocks once among its axes
        get_kv_cache_stride_order() -> the axes from outermost to innermost in memory; optional (default: axis order)

    Each tensor has that shape, and its memory is dense in that order. Without a backend the shape is ``[2, num_blocks,
    block_size, num_kv_heads, head_size]``, K before V; with MLA ``[num_blocks, block_size, num_kv_heads * head_size]``
    (MLA has one head). The host's tensors are page-locked when a GPU is there. All memory is zero at the start.

    Args:
        cache_config: see above.
        model_config: see above.
        parallel_config: see above.
        device_config: see above.
        attn_backend: see above.
        layer_type: the type of layers that are counted (hybrid models count each type separately).

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> cache = SimpleNamespace(block_size=16, num_gpu_blocks=8, num_cpu_blocks=32, cache_dtype="auto")
        >>> model = SimpleNamespace(
        ...     get_head_size=lambda: 64, get_num_kv_heads=lambda parallel: 2, dtype="float16", use_mla=False,
        ...     get_num_layers_by_block_type=lambda parallel, layer_type: 4)
        >>> device = SimpleNamespace(device_type="cpu")
        >>> engine = CacheEngine(cache, model, SimpleNamespace(pipeline_parallel_size=2), device)
        >>> len(engine.gpu_cache), engine.gpu_cache[0].shape, engine.num_cpu_blocks
        (4, torch.Size([2, 4, 16, 2, 64]), 16)
        >>> engine.gpu_cache[3][:, 1] = 1.0
        >>> engine.swap_out(torch.tensor([[1, 9]]))     # device block 1 to host block 9, in all layers
        >>> bool((engine.cpu_cache[3][:, 9] == 1.0).all())
        True
    """

    def __init__(
        self,
        cache_config: Any,
        model_config: Any,
        parallel_config: Any,
        device_config: Any,
        attn_backend: Any = None,
        *,
        layer_type: Any = LayerType.attention,
    ) -> None:
        self.cache_config, self.model_config = cache_config, model_config
        self.parallel_config, self.device_config, self.attn_backend = parallel_config, device_config, attn_backend
        (stages,) = positive_numbers(pipeline_parallel_size=parallel_config.pipeline_parallel_size)
        sizes = _sizes(cache_config, model_config, parallel_config, layer_type)
        self.num_attention_layers, self.block_size, self.num_kv_heads, self.head_size = sizes
        self.num_gpu_blocks, self.num_cpu_blocks = (
            None if n is None else whole_number(n, "the number of blocks") // stages
            for n in (cache_config.num_gpu_blocks, cache_config.num_cpu_blocks)
        )
        self.use_mla = bool(model_config.use_mla)
        self.dtype = _cache_dtype(cache_config, model_config)
        self._gpu = self._allocate(self.num_gpu_blocks, device_config.device_type)
        self._cpu = self._allocate(self.num_cpu_blocks, "cpu")
        self.gpu_cache, self.cpu_cache = self._gpu.tensors, self._cpu.tensors

    def swap_in(self, src_to_dst: Tensor, *, wait: bool = True) -> None:
        """Copy whole blocks of every layer, bit for bit, from the host to the device.

        O(bytes copied).

        Args:
            src_to_dst: int64 ``[n, 2]``, (host block, device block) pairs.
            wait: until the copies are done. If False, they are queued on the current stream: then synchronise before
                the host reads or reuses a block.

        Returns:
            when the copies are done, or with ``wait=False`` when they are queued on the current stream: then
            synchronise before the host reads or reuses a block.

        Raises:
            NotOwned: an id out of range or a destination named twice.
            BadInput: another shape or dtype, before anything is copied.
        """
        self._move(self._cpu, self._gpu, src_to_dst, wait)

    def swap_out(self, src_to_dst: Tensor, *, wait: bool = True) -> None:
        """Copy whole blocks of every layer, bit for bit, from the device to the host. Otherwise as ``swap_in``.

        Args:
            src_to_dst: int64 ``[n, 2]``, (device block, host block) pairs.
            wait: see ``swap_in``.
        """
        self._move(self._gpu, self._cpu, src_to_dst, wait)

    def copy(self, src_to_dsts: Tensor) -> None:
        """Copy whole blocks of every layer within the device; one source may go to several destinations.

        Args:
            src_to_dsts: int64 ``[n, 2]``, (device block, device block) pairs.

        Raises:
            NotOwned: as ``swap_in``, and a block that is both a source and a destination; before anything is copied.
            BadInput: as ``swap_in``.
        """
        self._move(self._gpu, self._gpu, src_to_dsts, wait=False)

    @staticmethod
    def get_cache_block_size(
        cache_config: Any,
        model_config: Any,
        parallel_config: Any,
        *,
        layer_type: Any = LayerType.attention,
    ) -> int:
        """Return the bytes of one block over all layers of this rank.

        These are the K and V rows of ``block_size`` tokens; MLA has no V part. A backend whose shape has more elements
        (padded heads) takes more.

        Args:
            cache_config: see the class.
            model_config: see the class.
            parallel_config: see the class.
            layer_type: see the class.

        Raises:
            BadInput: the configs give a number that is not positive, or an unknown cache dtype.
        """
        elements = math.prod(_sizes(cache_config, model_config, parallel_config, layer_type))
        parts = 1 if model_config.use_mla else 2
        return elements * parts * _cache_dtype(cache_config, model_config).itemsize

    def _shape(self, num_blocks: int) -> Shape:
        """Return the shape of one layer's tensor with ``num_blocks`` blocks."""
        sizes = (num_blocks, self.block_size, self.num_kv_heads, self.head_size)
        if self.attn_backend is not None:
            return tuple(self.attn_backend.get_kv_cache_shape(*sizes))
        return (*sizes[:2], self.num_kv_heads * self.head_size) if self.use_mla else (2, *sizes)

    def _stride_order(self, ndim: int) -> Shape:
        """Return the axes from outermost to innermost, as the backend asks for them. Raises BadInput."""
        order = tuple(range(ndim))
        ask = getattr(self.attn_backend, "get_kv_cache_stride_order", None)
        with suppress(NotImplementedError):  # raised by a base class that does not define it
            order = order if ask is None else tuple(ask())
        if sorted(order) != list(range(ndim)):
            raise BadInput(f"stride order {order} is not an order of the {ndim} axes of the cache shape")
        return order

    def _allocate(self, num_blocks: int | None, device: Device) -> Side:
        """Allocate memory with a row for each block of each plane of each layer, and its views in the backend's shape.

        A layer in memory; planes are the indices of the axes outside the block axis (K and V, or heads):

            | plane 0: block 0, block 1, .. | plane 1: block 0, block 1, .. | ..
        """
        if num_blocks is None:
            return Side(0, torch.empty((0, 0), dtype=torch.uint8), [])
        shape, longer = self._shape(num_blocks), self._shape(num_blocks + 1)
        order = self._stride_order(len(shape))
        in_memory = [shape[axis] for axis in order]
        axes = [place for place, axis in enumerate(order) if shape[axis] != longer[axis]]
        if len(axes) != 1 or in_memory[axes[0]] != num_blocks:
            raise BadInput(f"cache shape {shape} for {num_blocks} blocks, {longer} for one more: need one block axis")
        device = default_device(device)
        is_pinned = device.type == "cpu" and torch.cuda.is_available()
        layers = torch.zeros(
            (self.num_attention_layers, *in_memory), dtype=self.dtype, device=device, pin_memory=is_pinned
        )
        row_nbytes = math.prod(in_memory[axes[0] + 1 :]) * self.dtype.itemsize
        back = [order.index(axis) for axis in range(len(order))]
        return Side(
            num_blocks, layers.view(torch.uint8).view(-1, max(1, row_nbytes)), [layer.permute(back) for layer in layers]
        )

    def _move(self, source: Side, target: Side, pairs: Tensor, wait: bool) -> None:
        """Copy the blocks ``pairs`` of every plane of every layer, in one call of ``copy_rows``."""
        pairs = _proven_pairs(pairs, source.num_blocks, target.num_blocks)
        both = set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist()) if source is target else ()
        if both:
            text = f"overlapping copy: blocks {sorted(both)[:16]} are both source and destination"
            raise NotOwned(text, needed=sorted(both)[:16])
        if not len(pairs):
            return
        planes = torch.arange(len(source.rows) // source.num_blocks)  # of all layers
        steps = planes[:, None, None] * torch.tensor([source.num_blocks, target.num_blocks])
        copy_rows(source.rows, target.rows, (pairs + steps).reshape(-1, 2))
        if wait and self._gpu.rows.device.type == "cuda":
            torch.cuda.current_stream(self._gpu.rows.device).synchronize()


def _sizes(cache_config: Any, model_config: Any, parallel_config: Any, layer_type: Any) -> tuple[int, int, int, int]:
    """Return the number of layers, the block size, the KV heads and the head size. Raises BadInput."""
    layers = model_config.get_num_layers_by_block_type(parallel_config, layer_type)
    block_size, num_kv_heads, head_size = positive_numbers(
        block_size=cache_config.block_size,
        num_kv_heads=model_config.get_num_kv_heads(parallel_config),
        head_size=model_config.get_head_size(),
    )
    return whole_number(layers, "the number of layers"), block_size, num_kv_heads, head_size


def _cache_dtype(cache_config: Any, model_config: Any) -> torch.dtype:
    """Return the dtype of the cache's tensors. Raises BadInput for a name that is not in ``NAMED_DTYPES``."""
    name = model_config.dtype if cache_config.cache_dtype == "auto" else cache_config.cache_dtype
    if isinstance(name, torch.dtype):
        return name
    if not isinstance(name, str) or name not in NAMED_DTYPES:
        raise unknown_name("cache dtype", name, ("auto", *NAMED_DTYPES))
    return NAMED_DTYPES[name]


def _proven_pairs(pairs: Tensor, num_src: int, num_dst: int) -> Tensor:
    """Return ``pairs`` on the host. Raises BadInput, and NotOwned for ids out of range or a destination named twice."""
    if not isinstance(pairs, torch.Tensor) or pairs.dtype != torch.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
        given = f"{pairs.dtype} {list(pairs.shape)}" if isinstance(pairs, torch.Tensor) else type(pairs).__name__
        raise BadInput(f"block pairs must be an int64 tensor [n, 2], got {given}", needed=given)
    pairs = pairs.cpu()
    for column, name, limit in ((0, "source", num_src), (1, "destination", num_dst)):
        ids = pairs[:, column]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
            text = f"{name} blocks {int(ids.min())}..{int(ids.max())} are not all in 0..{limit - 1}"
            raise NotOwned(text, field=name, needed=[int(ids.min()), int(ids.max())], available=limit - 1)
    found, counts = torch.unique(pairs[:, 1], return_counts=True)
    if len(found) != len(pairs):
        text = f"destination blocks named twice: {found[counts > 1].tolist()[:16]}"
        raise NotOwned(text, needed=found[counts > 1].tolist()[:16])
    return pairs
