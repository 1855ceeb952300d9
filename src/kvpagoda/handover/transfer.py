"""What transfers (``kvpagoda.abc.Transfer``) share: checks of what they are given, and of what a ticket says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvpagoda.abc import Transfer
from kvpagoda.errors import BadInput, TicketRefused, shown
from kvpagoda.units import instance_of, real_number, whole_number

__all__ = ["Transfer", "checked", "numbers_in", "text_in"]


def numbers_in(address: Mapping[str, Any], kind: str, *names: str) -> list[int]:
    """Return numbers of an address.

    Args:
        address: of a transfer.
        kind: that it must be of.
        *names: of the numbers.

    Raises:
        TicketRefused: the address is malformed.
    """
    if address.get("kind") != kind:
        raise TicketRefused(f"the ticket names memory of {shown(address.get('kind'))}; this transfer is {kind!r}")
    return [whole_number(address.get(one), f"{one!r} of an address", error=TicketRefused) for one in names]


def text_in(address: Mapping[str, Any], name: str) -> str:
    """Return a text of an address.

    Args:
        address: of a transfer.
        name: of the text.

    Raises:
        TicketRefused: the address is malformed.
    """
    if not isinstance(text := address.get(name), str):
        raise TicketRefused(f"{name!r} of an address is text, got {shown(text)}")
    return text


def checked(transfer: Transfer, key: bytes, clock: Callable[[], float]) -> None:
    """Check the arguments of a sender or a receiver.

    Args:
        transfer: as ``Transfer`` demands.
        key: bytes.
        clock: returns seconds.

    Raises:
        BadInput: one of them is something else.
    """
    methods = ("address", "landing", "read", "write", "close")
    if isinstance(transfer, type) or not all(callable(getattr(transfer, name, None)) for name in methods):
        raise BadInput(f"a transfer has the methods {', '.join(methods)}, got {shown(transfer)}")
    instance_of(transfer.memory, np.ndarray, "the memory of a transfer, uint8 [n],")
    instance_of(key, bytes, "a key, bytes,")
    try:
        real_number(clock(), "the time by a clock, in seconds since 1970,")
    except TypeError as error:
        raise BadInput(f"a clock is called without arguments and returns seconds since 1970: {error}") from None
