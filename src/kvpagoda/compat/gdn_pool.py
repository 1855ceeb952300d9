"""A pool of the recurrent and convolution states of gated-delta-net layers, one row per request slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.free_list import FreeList
from kvpagoda.id_tensors import Device, integers
from kvpagoda.pools import Arena, dtype_name
from kvpagoda.schema import RowLayout, Rows
from kvpagoda.schema.families.states import delta
from kvpagoda.schema.fields import itemsize
from kvpagoda.schema.layout import pages_of
from kvpagoda.units import positive_numbers, whole_number

Tensor = torch.Tensor
Slots = int | Sequence[int] | Tensor


class GDNPool:
    """States of gated-delta-net layers over a layer-major arena. They are copied and reset, never shared.

        slot    0    |      1 .. max_reqs       |  max_reqs + 1 .. max_reqs + max_track_slots
             padding | slots of ReqToTokenPool  |  track slots: checkpoints kept by a prefix cache

    All states are zero at the start, and the tensors are valid as long as the pool lives:

        recurrent_state  float32  [layers, slots, num_v_heads, head_k_dim, head_v_dim]
        conv_state       dtype    [layers, slots, conv_dim, conv_kernel_size - 1]

    In memory v is before k, so that the elements of one k vector are adjacent, as most kernels read them.
    ``get_layer_state`` returns that order, dense; ``recurrent_state`` has the other order, as a view of the same bytes.
    All arguments are attributes.

    Args:
        max_reqs: slots of requests.
        num_gdn_layers: layers, the GDN ones only.
        num_v_heads: heads of v.
        head_k_dim: elements of a head of k.
        head_v_dim: elements of a head of v.
        conv_dim: channels of the convolution.
        conv_kernel_size: tokens of the convolution.
        device: None: CUDA when a GPU is there, else the CPU.
        dtype: of ``conv_state``.
        max_track_slots: slots of checkpoints.

    Raises:
        BadInput: a number is no positive whole number (``max_track_slots``: may be 0), or there is no such device.

    Examples:
        >>> pool = GDNPool(max_reqs=4, num_gdn_layers=2, num_v_heads=8, head_k_dim=16, head_v_dim=32, conv_dim=64,
        ...                conv_kernel_size=4, device="cpu", max_track_slots=2)
        >>> recurrent, conv = pool.get_layer_state(1)
        >>> recurrent.shape, conv.shape
        (torch.Size([7, 8, 32, 16]), torch.Size([7, 64, 3]))
        >>> recurrent[3] = 1.0                      # what the kernels of request slot 3 write
        >>> checkpoint = pool.alloc_track_slot()
        >>> pool.copy_states(3, checkpoint)
        >>> pool.reset_states([3])
        >>> int(recurrent[3].sum()), int(pool.recurrent_state[1, checkpoint].sum())
        (0, 4096)
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
        self.max_reqs, self.num_gdn_layers, self.num_v_heads = positive_numbers(
            max_reqs=max_reqs, num_gdn_layers=num_gdn_layers, num_v_heads=num_v_heads
        )
        self.head_k_dim, self.head_v_dim, self.conv_dim, self.conv_kernel_size = positive_numbers(
            head_k_dim=head_k_dim, head_v_dim=head_v_dim, conv_dim=conv_dim, conv_kernel_size=conv_kernel_size
        )
        self.dtype = dtype
        self._track = FreeList(max_track_slots, first=self.max_reqs + 1, what="track slots")
        self.max_track_slots = self._track.num_ids
        self.num_slots = 1 + self.max_reqs + self.max_track_slots
        states = [
            delta(self.num_v_heads, self.head_k_dim, self.head_v_dim),
            Rows("conv", (self.conv_dim, self.conv_kernel_size - 1), dtype_name(dtype)),
        ]
        # Widest elements first: then every region is aligned to its elements without padding.
        states.sort(key=lambda rows: -itemsize(rows.dtype))
        layers = range(self.num_gdn_layers)
        layout = RowLayout.of(
            page for rows in states for layer in layers for page in pages_of(layer, [rows], lambda _: 1)
        )
        self.arena = Arena(layout, self.num_slots, device=device, order="layer", packed=True)
        self.device = self.arena.device
        self.recurrent_state, self.conv_state = (self.arena.all_layers(name)[:, :, 0] for name in ("recurrent", "conv"))

    def get_layer_state(self, gdn_layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the recurrent and the conv states of one layer, as views of the pool.

        Args:
            gdn_layer_idx: counts the GDN layers only.

        Returns:
            Recurrent ``[slots, num_v_heads, head_v_dim, head_k_dim]``, dense, the transpose of
            ``recurrent_state[gdn_layer_idx]``, and conv ``[slots, conv_dim, conv_kernel_size - 1]``.

        Raises:
            BadInput: the pool has no such layer.
        """
        if whole_number(gdn_layer_idx, "a GDN layer") >= self.num_gdn_layers:
            text = f"layer {gdn_layer_idx} is not one of the {self.num_gdn_layers} GDN layers of this pool"
            raise BadInput(text, needed=gdn_layer_idx, available=self.num_gdn_layers)
        return self.recurrent_state[gdn_layer_idx].transpose(-1, -2), self.conv_state[gdn_layer_idx]

    def reset_states(self, req_pool_indices: Slots) -> None:
        """Set all states of some slots to zero. O(bytes).

        Args:
            req_pool_indices: an int, a sequence or an integer tensor.

        Raises:
            NotOwned: a slot out of range.
        """
        self.arena.reset(integers(req_pool_indices, "slots").reshape(-1))

    def alloc_track_slot(self) -> int | None:
        """Take a free track slot; None if there is none. Its states are not reset: copy states into it. O(1)."""
        return int(self._track.acquire(1)[0]) if self._track.num_free else None

    def free_track_slot(self, slot: int) -> None:
        """Free a track slot. O(1).

        Args:
            slot: of ``alloc_track_slot``.

        Raises:
            NotOwned: it is free already or no track slot; nothing changed then.
        """
        self._track.release_id(slot)

    def available_track_slots(self) -> int:
        """Return the number of free track slots."""
        return self._track.num_free

    def copy_states(self, src_index: Slots, dst_index: Slots) -> None:
        """Copy all states between slots of the pool, of any kind.

        All sources are read before a destination of the same layer is written. O(bytes).

        Args:
            src_index: slots.
            dst_index: as many slots.

        Raises:
            NotOwned: a slot out of range or a destination named twice.
            BadInput: lists of different lengths, before anything is copied.
        """
        sources, targets = (self.arena.row_index(integers(s, "slots").reshape(-1)) for s in (src_index, dst_index))
        if len(sources) != len(targets):
            raise BadInput(f"{len(sources)} source slots for {len(targets)} destinations")
        if len(torch.unique(targets)) != len(targets):
            raise NotOwned(f"a destination slot is named twice: {targets.tolist()[:16]}")
        self.arena.copy(sources, targets)

    def mem_bytes(self) -> int:
        """Return the bytes allocated; they are the bytes of all states."""
        return self.arena.nbytes

    def check(self) -> None:
        """Prove that every track slot is either free or held.

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._track.check()
