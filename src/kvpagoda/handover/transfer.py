"""What moves bytes between the memories of processes: an interface of five methods, for transports of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from kvpagoda.errors import BadInput, TicketRefused, shown
from kvpagoda.pages import Bytes
from kvpagoda.units import instance_of, real_number, whole_number


class Transfer(Protocol):
    """Moves bytes between the memories of processes; one object in each process, on either side.

    Five methods. ``address`` returns plain data, which a ticket carries to the other side and its ``read`` takes. A fault
    of the other side or of the link is an OSError; what is no address of this kind is TicketRefused. Calls may block, but not
    for ever.
    """

    memory: Bytes
    """The exported memory, uint8 ``[n]``: all others read and write it at any time. Empty on a side that only receives."""

    def address(self) -> dict[str, Any]:
        """Return how others reach ``memory``, as JSON can hold it."""

    def landing(self, nbytes: int) -> Bytes:
        """Return memory to ``read`` into, uint8 ``[nbytes]``; it is the caller's until the next ``landing``."""

    def read(self, address: dict[str, Any], offset: int, into: Bytes) -> None:
        """Copy the bytes from ``offset`` on of the memory at ``address`` to ``into``, a part of ``landing``."""

    def write(self, address: dict[str, Any], offset: int, data: Bytes) -> None:
        """Copy ``data``, a part of ``landing``, to ``offset`` in the memory at ``address``."""

    def close(self) -> None:
        """End it: others cannot read ``memory`` any more. Idempotent."""


def numbers_in(address: Mapping[str, Any], kind: str, *names: str) -> list[int]:
    """Return the numbers ``names`` of an ``address`` of a transfer of this ``kind``. Raises TicketRefused."""
    if address.get("kind") != kind:
        raise TicketRefused(f"the ticket names memory of {shown(address.get('kind'))}; this transfer is {kind!r}")
    return [whole_number(address.get(one), f"{one!r} of an address", error=TicketRefused) for one in names]


def text_in(address: Mapping[str, Any], name: str) -> str:
    """Return the text ``name`` of an ``address`` of a transfer. Raises TicketRefused."""
    if not isinstance(text := address.get(name), str):
        raise TicketRefused(f"{name!r} of an address is text, got {shown(text)}")
    return text


def checked(transfer: Transfer, key: bytes, clock: Callable[[], float]) -> None:
    """Raise BadInput unless these are a transfer, bytes, and a clock."""
    methods = ("address", "landing", "read", "write", "close")
    if isinstance(transfer, type) or not all(callable(getattr(transfer, name, None)) for name in methods):
        raise BadInput(f"a transfer has the methods {', '.join(methods)}, got {shown(transfer)}")
    instance_of(transfer.memory, np.ndarray, "the memory of a transfer, uint8 [n],")
    instance_of(key, bytes, "a key, bytes,")
    try:
        real_number(clock(), "the time by a clock, in seconds since 1970,")
    except TypeError as error:
        raise BadInput(f"a clock is called without arguments and returns seconds since 1970: {error}") from None
