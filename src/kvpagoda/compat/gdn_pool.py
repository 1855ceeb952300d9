"""Recurrent and convolution states of gated-delta-net layers, one row a request slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpagoda.blocks.free_list import FreeList
from kvpagoda.compat.kv_pool import dtype_name
from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.memory.arena import Arena, Device, Tensor
from kvpagoda.schema import Field, RowLayout
from kvpagoda.schema.fields import itemsize

Slots = int | Sequence[int] | Tensor


class GDNPool:
    """States of fixed size over a layer-major arena: copied and reset, never shared.

        slot    0    |      1 .. max_reqs       |  max_reqs + 1 .. max_reqs + max_track_slots
             padding | those of ReqToTokenPool  |  track slots: checkpoints kept by a prefix cache

    Every layer has, all zero at the start:

        recurrent  float32  [slots, num_v_heads, head_k_dim, head_v_dim]     <- THE axis order: k before v
        conv       dtype    [slots, conv_dim, conv_kernel_size - 1]

    Kernels that want ``[.., v, k]`` ask ``get_layer_state(i, order="vk")`` for a transposed view of the same memory.
    ``device`` None: CUDA when a GPU is there, else the CPU.
    """

    def __init__(
        self,
        max_reqs: int,
        num_gdn_layers: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_dim: int,
        conv_kernel_size: int,
        device: Device = None,
        dtype: torch.dtype = torch.bfloat16,
        max_track_slots: int = 0,
    ) -> None:
        counts = (max_reqs, num_gdn_layers, num_v_heads, head_k_dim, head_v_dim, conv_dim, conv_kernel_size)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
            raise BadInput(f"requests, layers, heads, dims and kernel must be positive whole numbers, got {counts}")
        self.max_reqs, self.num_gdn_layers, self.dtype = max_reqs, num_gdn_layers, dtype
        self.num_v_heads, self.head_k_dim, self.head_v_dim = num_v_heads, head_k_dim, head_v_dim
        self.conv_dim, self.conv_kernel_size = conv_dim, conv_kernel_size
        self._track = FreeList(max_track_slots, first=max_reqs + 1, what="track slots")
        self.max_track_slots = self._track.num_ids
        self.num_slots = 1 + max_reqs + self.max_track_slots
        fields = [
            Field("recurrent", 1, (num_v_heads, head_k_dim, head_v_dim), "float32"),
            Field("conv", 1, (conv_dim, conv_kernel_size - 1), dtype_name(dtype)),
        ]
        # The widest elements first: then every region starts aligned to its element without a byte of padding.
        fields.sort(key=lambda field: -itemsize(field.dtype))
        layout = RowLayout.build((layer, field) for field in fields for layer in range(num_gdn_layers))
        self.arena = Arena(layout, self.num_slots, device=device, order="layer", field_align=1)
        self.device = self.arena.device

    def get_layer_state(self, gdn_layer_idx: int, order: str = "kv") -> tuple[Tensor, Tensor]:
        """(recurrent, conv) of a layer, counted among the GDN layers; both alias the pool.

        ``order``: ``"kv"`` for recurrent ``[slots, num_v_heads, head_k_dim, head_v_dim]``, dense; ``"vk"`` for the
        transposed view ``[slots, num_v_heads, head_v_dim, head_k_dim]``. Raises BadInput.
        """
        if not 0 <= gdn_layer_idx < self.num_gdn_layers or order not in ("kv", "vk"):
            raise BadInput(f"no layer {gdn_layer_idx} of {self.num_gdn_layers} in order {order!r}; orders: 'kv', 'vk'")
        state = self.arena.layer(gdn_layer_idx)
        recurrent = state["recurrent"][:, 0]
        return recurrent if order == "kv" else recurrent.transpose(-1, -2), state["conv"][:, 0]

    def reset_states(self, slots: Slots) -> None:
        """Set all states of ``slots`` (an int, a sequence or an integer tensor) to zero. Raises NotOwned. O(bytes)."""
        self.arena.reset(slots)

    def alloc_track_slot(self) -> int | None:
        """A free track slot, or None. Its states are whatever they were: copy into it. O(1)."""
        return int(self._track.acquire(1)[0]) if self._track.num_free else None

    def free_track_slot(self, slot: int) -> None:
        """Give a track slot back. Raises NotOwned if it is free or no track slot: nothing changes. O(1)."""
        self._track.release_id(slot)

    def available_track_slots(self) -> int:
        """Track slots that are free."""
        return self._track.num_free

    def copy_states(self, src: Slots, dst: Slots) -> None:
        """Copy all states of each slot of ``src`` to the slot of ``dst`` beside it; any two slots of the pool.

        All sources are read before a destination of the same layer is written. Raises NotOwned for a slot out of range
        or a destination named twice, and BadInput for lists of different lengths, before anything moves. O(bytes).
        """
        sources, targets = (self.arena.row_index([s] if isinstance(s, int) else s) for s in (src, dst))
        if len(sources) != len(targets):
            raise BadInput(f"{len(sources)} source slots for {len(targets)} destinations")
        if len(torch.unique(targets)) != len(targets):
            raise NotOwned(f"a destination slot is named twice: {targets.tolist()[:16]}")
        for layer in range(self.num_gdn_layers):
            for view in self.arena.layer(layer).values():
                view[targets] = view[sources]

    def mem_bytes(self) -> int:
        """Bytes allocated, which is the bytes of all states."""
        return self.arena.nbytes

    def check(self) -> None:
        """Prove that every track slot is free or held, once. Raises CheckFailed."""
        self._track.check()
