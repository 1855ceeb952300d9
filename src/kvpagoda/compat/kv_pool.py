"""A pool of K and V rows of single tokens, indexed by the KV indices of ``TokenToKVPoolAllocator``."""

from __future__ import annotations

import os

import torch

from kvpagoda.compat.token_allocator import TokenToKVPoolAllocator
from kvpagoda.errors import BadInput
from kvpagoda.id_tensors import Device, IdsLike, integers
from kvpagoda.pools import Arena, dtype_name
from kvpagoda.schema import Field, RowLayout
from kvpagoda.units import positive_numbers, whole_number


class KVPool:
    """One K and one V tensor per layer, over a layer-major arena with blocks of one token.

        row     0    |  1 .. size
             padding |  one token each

    ``k_buffer[l]`` is ``[size + 1, k_head_num, k_head_dim]`` and ``v_buffer[l]`` ``[size + 1, v_head_num,
    v_head_dim]``, dense, zero at the start; K and V may differ in heads and size. Row 0 absorbs the writes of padded
    tokens.

    Args:
        size: tokens.
        layer_num: layers.
        k_head_num: heads of K.
        k_head_dim: elements of a head of K.
        device: None: CUDA when a GPU is there, else the CPU.
        dtype: of both.
        v_head_num: heads of V; None: those of K.
        v_head_dim: elements of a head of V; None: those of K.
        pin_memory: page-lock a pool on the host when a GPU is there.

    Raises:
        BadInput: a number is no positive whole number, or there is no such device.

    Examples:
        >>> import torch
        >>> pool = KVPool(size=16, layer_num=2, k_head_num=2, k_head_dim=4, device="cpu", dtype=torch.float32)
        >>> pool.set_kv_buffer(0, torch.tensor([3, 5]), k=torch.ones(2, 2, 4), v=torch.ones(2, 8))
        >>> k, v = pool.get_kv_buffer(0)
        >>> k.shape, k.sum(dim=(1, 2)).nonzero()[:, 0].tolist()
        (torch.Size([17, 2, 4]), [3, 5])
    """

    def __init__(
        self,
        size: int,
        layer_num: int,
        k_head_num: int,
        k_head_dim: int,
        device: Device = None,
        dtype: torch.dtype = torch.float16,
        v_head_num: int | None = None,
        v_head_dim: int | None = None,
        pin_memory: bool = True,
    ) -> None:
        v_heads = k_head_num if v_head_num is None else v_head_num, k_head_dim if v_head_dim is None else v_head_dim
        self.size, self.layer_num = positive_numbers(size=size, layer_num=layer_num)
        self.k_head_num, self.k_head_dim = positive_numbers(k_head_num=k_head_num, k_head_dim=k_head_dim)
        self.v_head_num, self.v_head_dim = positive_numbers(v_head_num=v_heads[0], v_head_dim=v_heads[1])
        self.dtype = dtype
        fields = (
            Field("k", 1, (self.k_head_num, self.k_head_dim), dtype_name(dtype)),
            Field("v", 1, (self.v_head_num, self.v_head_dim), dtype_name(dtype)),
        )
        layout = RowLayout.build((layer, field) for layer in range(self.layer_num) for field in fields)
        self.arena = Arena(layout, self.size + 1, device=device, order="layer", pin_memory=pin_memory)
        self.device = self.arena.device
        self.k_buffer, self.v_buffer = (list(self.arena.all_layers(name)[:, :, 0]) for name in "kv")
        self._proves_device_ids = int(os.environ.get("KVPAGODA_CHECK", "0")) >= 1

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return K of a layer, ``[size + 1, k_head_num, k_head_dim]``, a view.

        Args:
            layer_id: of the layer.

        Raises:
            BadInput: an unknown layer.
        """
        return self.get_kv_buffer(layer_id)[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return V of a layer, ``[size + 1, v_head_num, v_head_dim]``, a view.

        Args:
            layer_id: of the layer.

        Raises:
            BadInput: an unknown layer.
        """
        return self.get_kv_buffer(layer_id)[1]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and the V tensor of a layer, views of the pool.

        Args:
            layer_id: of the layer.

        Raises:
            BadInput: an unknown layer.
        """
        layer = whole_number(layer_id, "a layer of this pool", below=self.layer_num)
        return self.k_buffer[layer], self.v_buffer[layer]

    def set_kv_buffer(self, layer_id: int, indices: IdsLike, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write one K and one V row for every index.

        Three layouts, for K and V each with its own heads ``h`` and dim ``d``:

            k [n, h, d]     indices [n]
            k [b, s, h, d]  indices [b, s]
            k [n, h * d]    indices [n]        (also [b, s, h * d] with [b, s])

        If an index is named twice, either of its rows is kept. Indices on a GPU are checked only with the environment
        variable ``KVPAGODA_CHECK=1``, because the check waits for the GPU. O(n) rows.

        Args:
            layer_id: of the layer.
            indices: integers in 0 .. size (0: padding).
            k: of the pool's dtype, on its device.
            v: of the pool's dtype, on its device.

        Raises:
            BadInput: an unknown layer, ``indices`` that are no integers, or ``k`` or ``v`` of another shape, dtype or
                device; before anything is written.
            NotOwned: an index out of range, before anything is written.
        """
        buffers, indices = self.get_kv_buffer(layer_id), integers(indices, "KV indices")
        rows = [self._rows(name, x, indices, buffer) for name, x, buffer in zip("kv", (k, v), buffers)]
        is_proven = indices.device.type != "cpu" and not self._proves_device_ids
        index = self.arena.row_index(indices.reshape(-1), is_proven=is_proven)
        for buffer, new in zip(buffers, rows):
            _as_codes(buffer.view(self.size + 1, -1)).index_copy_(0, index, _as_codes(new))

    def mem_bytes(self) -> int:
        """Return the bytes allocated."""
        return self.arena.nbytes

    def _rows(self, name: str, x: torch.Tensor, indices: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as ``[n, h * d]``. Raises BadInput for a shape, dtype or device that ``buffer`` lacks."""
        heads, dim = buffer.shape[1:]
        lead = tuple(indices.shape)
        if not isinstance(x, torch.Tensor):
            raise BadInput(f"{name} must be a tensor, got {type(x).__name__}")
        if tuple(x.shape) not in ((*lead, heads, dim), (*lead, heads * dim)):
            raise BadInput(
                f"{name} must be {[*lead, heads, dim]} or {[*lead, heads * dim]} for indices {list(lead)}, "
                f"got {list(x.shape)}"
            )
        if x.dtype != self.dtype or x.device != buffer.device:
            raise BadInput(f"{name} must be {self.dtype} on {buffer.device}, got {x.dtype} on {x.device}")
        return x.detach().reshape(indices.numel(), heads * dim)


def _as_codes(x: torch.Tensor) -> torch.Tensor:
    """View one-byte floats as uint8, because torch has no ``index_copy_`` for them on the CPU."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def make_full_attention_net_mem_pool(
    size: int,
    layer_num: int,
    k_head_num: int,
    k_head_dim: int,
    v_head_num: int | None = None,
    v_head_dim: int | None = None,
    device: Device = None,
    dtype: torch.dtype = torch.float16,
    page_size: int = 1,
    need_sort: bool = True,
    pin_memory: bool = True,
) -> tuple[KVPool, TokenToKVPoolAllocator]:
    """Return the pool of a model with full attention in all layers, and the allocator of its usable indices.

    Args:
        size: see ``KVPool``.
        layer_num: see ``KVPool``.
        k_head_num: see ``KVPool``.
        k_head_dim: see ``KVPool``.
        v_head_num: see ``KVPool``.
        v_head_dim: see ``KVPool``.
        device: see ``KVPool``.
        dtype: see ``KVPool``.
        page_size: see ``TokenToKVPoolAllocator``.
        need_sort: see ``TokenToKVPoolAllocator``.
        pin_memory: see ``KVPool``.

    Raises:
        BadInput: a number is no positive whole number, or there is no such device.

    Examples:
        >>> pool, tokens = make_full_attention_net_mem_pool(64, layer_num=2, k_head_num=4, k_head_dim=8, device="cpu")
        >>> indices = tokens.alloc(3)
        >>> pool.set_kv_buffer(1, indices, torch.ones(3, 4, 8).half(), torch.ones(3, 4, 8).half())
    """
    allocator = TokenToKVPoolAllocator(size, device, page_size=page_size, need_sort=need_sort)
    pool = KVPool(size, layer_num, k_head_num, k_head_dim, device, dtype, v_head_num, v_head_dim, pin_memory)
    return pool, allocator
