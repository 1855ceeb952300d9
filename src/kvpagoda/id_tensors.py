"""Ids as callers give them, tensors on their device among them, and the device that a caller names. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from kvpagoda.arrays import AnyIds
from kvpagoda.errors import BadInput, shown

__all__ = ["Device", "IdsLike", "default_device", "ids_from", "integers"]

IdsLike = torch.Tensor | npt.NDArray[Any] | Sequence[int]
Device = torch.device | str | None


def default_device(device: Device = None, others: tuple[str, ...] = ()) -> torch.device:
    """Return ``device``; for None, CUDA if there is a GPU, else the CPU.

    Args:
        device: as torch names it, or None.
        others: names that the caller takes too, for the message.

    Raises:
        BadInput: there is no such device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        names, reason = ("cpu", "cuda", "cuda:0", *others), str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        if reason.startswith("Expected one of"):
            reason = "torch knows no such name"
        raise BadInput.with_hint(
            f"no device {shown(device)} here ({reason})",
            f"give {', '.join(map(repr, names))}, or None for the default",
            needed=device,
            available=names,
        ) from None
    return torch.device(device)


def integers(values: IdsLike | int, what: str) -> torch.Tensor:
    """Return whole numbers as a tensor on their device.

    Args:
        values: may be empty.
        what: names them in messages.

    Raises:
        BadInput: they are anything but whole numbers.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{what} must be one tensor, array or flat sequence of whole numbers, got {values!r}") from None
    if not tensor.numel():
        return tensor.to(torch.int32)
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise BadInput(f"{what} must be whole numbers, got {tensor.dtype}")
    return tensor


def ids_from(ids: IdsLike) -> AnyIds:
    """Return ids as a vector of integers on the host. Waits for a tensor on a GPU.

    Args:
        ids: a tensor (any device), array or sequence, of any shape.

    Raises:
        BadInput: they are floats, bools or anything else.
    """
    array: AnyIds = integers(ids, "ids").detach().cpu().numpy()
    return array.reshape(-1)
