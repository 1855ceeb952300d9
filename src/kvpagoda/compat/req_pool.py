"""The table that maps (request slot, position) to a KV index."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpagoda.errors import BadInput, NotOwned
from kvpagoda.free_list import FreeList
from kvpagoda.id_tensors import Device, IdsLike, default_device, ids_from, integers
from kvpagoda.units import whole_number


class ReqToTokenPool:
    """Request slots and their KV indices: ``req_to_token``, int32 ``[max_reqs + 1, max_context_len]`` on ``device``.

    Slots ``1 .. max_reqs`` are handed out; slot 0 is padding, as in ``GDNPool``. The table does not know the length of
    a request: cells not written since the slot was taken hold old values.

    Args:
        max_reqs: the most requests at once.
        max_context_len: the most tokens of a request.
        device: None: CUDA when a GPU is there, else the CPU.

    Raises:
        BadInput: a number is negative or no whole number, or there is no such device.

    Examples:
        >>> requests = ReqToTokenPool(max_reqs=4, max_context_len=8, device="cpu")
        >>> [slot] = requests.alloc(1)
        >>> requests.write((slot, slice(0, 3)), [7, 8, 9])      # KV indices of its first 3 tokens
        >>> slot, requests.req_to_token[slot].tolist()
        (1, [7, 8, 9, 0, 0, 0, 0, 0])
        >>> requests.free(slot)
    """

    def __init__(self, max_reqs: int, max_context_len: int, device: Device = None) -> None:
        self.max_context_len = whole_number(max_context_len, "max_context_len")
        self.device = default_device(device)
        self._slots = FreeList(max_reqs, first=1, what="request slots")
        self.size = self.max_reqs = self._slots.num_ids
        shape = (self.size + 1, self.max_context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def available_size(self) -> int:
        """Return the number of free slots."""
        return self._slots.num_free

    def alloc(self, n: int = 1) -> list[int] | None:
        """Take free slots; return None, taking none, if there are fewer. O(n).

        Args:
            n: how many.

        Raises:
            BadInput: ``n`` is negative or no whole number.
        """
        if whole_number(n, "the number of request slots") > self._slots.num_free:
            return None
        slots: list[int] = self._slots.acquire(n).tolist()
        return slots

    def free(self, slot: int | Sequence[int]) -> None:
        """Free slots.

        Args:
            slot: one, or a sequence.

        Raises:
            NotOwned: one is not held, out of range or named twice; then no slot is freed.
        """
        if isinstance(slot, Sequence):
            self._slots.release(ids_from(slot))
        else:
            self._slots.release_id(slot)

    def write(self, index: tuple[int, slice], values: IdsLike) -> None:
        """Write KV indices to positions of a request. Nothing is clamped.

        Args:
            index: (slot, slice) of ``n`` positions.
            values: integers ``[n]``.

        Raises:
            NotOwned: a slot that is not held.
            BadInput: a slice that leaves the row, has a step, or is not as long as ``values``, before anything is
                written.
        """
        if not isinstance(index, tuple) or len(index) != 2:
            raise BadInput(f"write takes (slot, slice), got {index!r}")
        slot, positions = index
        if not self._slots.is_held(slot):
            raise NotOwned(f"request slot {slot} is not held; alloc it first")
        start, stop = self._span(positions)
        row = integers(values, "KV indices")
        if tuple(row.shape) != (stop - start,):
            raise BadInput(f"positions {start}..{stop - 1} take {stop - start} KV indices, got shape {list(row.shape)}")
        if row.device.type == "cpu" and row.numel() and not 0 <= int(row.min()) <= int(row.max()) < 2**31:
            raise BadInput(f"KV indices {int(row.min())}..{int(row.max())} do not fit 0..2^31 - 1")
        self.req_to_token[slot, start:stop] = row.to(self.device, torch.int32)

    def clear(self) -> None:
        """Free every slot and set every cell to 0. O(cells)."""
        self._slots.clear()
        self.req_to_token.zero_()

    def check(self) -> None:
        """Prove that every slot is either free or held. O(max_reqs).

        Raises:
            CheckFailed: something is wrong; the message says what.
        """
        self._slots.check()

    def _span(self, positions: slice) -> tuple[int, int]:
        """Return the start and the stop of ``positions``. Raises BadInput unless they are in the row, with step 1."""
        if not isinstance(positions, slice) or positions.step not in (None, 1):
            raise BadInput(f"write takes (slot, slice) with a slice of step 1, got {positions!r}")
        start = whole_number(0 if positions.start is None else positions.start, "the first position")
        stop = whole_number(self.max_context_len if positions.stop is None else positions.stop, "the end position")
        if not start <= stop <= self.max_context_len:
            raise BadInput(f"positions {start}..{stop - 1} are not all in 0..{self.max_context_len - 1}")
        return start, stop


def make_req_to_token_pool(max_reqs: int, max_context_len: int, device: Device = None) -> ReqToTokenPool:
    """Return the table of request slots.

    Args:
        max_reqs: see ``ReqToTokenPool``.
        max_context_len: see ``ReqToTokenPool``.
        device: see ``ReqToTokenPool``.

    Raises:
        BadInput: a number is negative or no whole number, or there is no such device.

    Examples:
        >>> make_req_to_token_pool(4, 100, device="cpu").req_to_token.shape
        torch.Size([5, 100])
    """
    return ReqToTokenPool(max_reqs, max_context_len, device)
