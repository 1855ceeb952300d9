"""A transfer between machines by Mooncake's transfer engine: over TCP, or RDMA where there is the hardware.

**Its port has no authentication and no encryption**, and it listens on all addresses: any host that reaches it can read and
write the exported memory. Open it to the machines of the deployment alone, by a firewall or a network namespace. Signed
tickets keep a receiver from taking forged bytes; they do not keep others from reading.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.handover.transfer import numbers_in, text_in
from kvpagoda.pages import Bytes, pages
from kvpagoda.tiers.mooncake import set_timeouts
from kvpagoda.units import format_bytes, name_of, parse_bytes

_KIND, _LEAST_LANDING = "mooncake", 16 << 20


class MooncakeEngine:
    """A ``Transfer`` over Mooncake's transfer engine.

    The engine knows no deadlines: a read from a host that hangs returns when its own timeouts end it
    (``kvpagoda.tiers.mooncake.TIMEOUTS``).

    Args:
        nbytes: of the exported memory, as a number or as text; 0 on a side that only receives.
        host: the name by which others reach this machine.
        protocol: "tcp", or "rdma" with ``devices``.
        devices: of "rdma", as Mooncake names them; "": all.
        metadata: the address of a metadata server, or "P2PHANDSHAKE" for none.

    Raises:
        BadInput: the engine cannot be set up.
        MissingExtra: the engine is not installed.
    """

    def __init__(
        self, nbytes: int | str = 0, *, host: str = "127.0.0.1", protocol: str = "tcp", devices: str = "",
        metadata: str = "P2PHANDSHAKE",
    ) -> None:  # fmt: skip
        size = parse_bytes(nbytes) if nbytes else 0
        for name in (host, protocol, devices, metadata):
            name_of(name, "each of host, protocol, devices and metadata")
        set_timeouts()
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise MissingExtra(
                f"no Mooncake transfer engine here ({error}): pip install 'kvpagoda[mooncake]' and apt-get install "
                "libibverbs1, or, with CUDA, pip install mooncake-transfer-engine in its place", name="mooncake",
            ) from error  # fmt: skip
        self._engine = TransferEngine()
        if self._engine.initialize(host, metadata, protocol, devices):
            raise BadInput(f"Mooncake's engine cannot be set up for {host!r} with {protocol!r}; see what it logs")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self.memory: Bytes = np.empty(0, np.uint8)
        self._landing: Bytes = np.empty(0, np.uint8)
        if size:
            self.memory = self._registered(size)

    def address(self) -> dict[str, Any]:
        """See ``Transfer``. The session of the engine, and where the memory begins in its process."""
        start = self.memory.ctypes.data if len(self.memory) else 0
        return {"kind": _KIND, "session": self._session, "start": start, "nbytes": len(self.memory)}

    def landing(self, nbytes: int) -> Bytes:
        """See ``Transfer``. Registered memory, kept for the next call."""
        if len(self._landing) < nbytes:
            if len(self._landing):
                self._engine.unregister_memory(self._landing.ctypes.data)
            self._landing = self._registered(max(_LEAST_LANDING, nbytes))
        return self._landing[:nbytes]

    def read(self, address: dict[str, Any], offset: int, into: Bytes) -> None:
        """See ``Transfer``."""
        self._moved(self._engine.transfer_sync_read, address, offset, into)

    def write(self, address: dict[str, Any], offset: int, data: Bytes) -> None:
        """See ``Transfer``."""
        self._moved(self._engine.transfer_sync_write, address, offset, data)

    def close(self) -> None:
        """See ``Transfer``. The engine's port stays open until the process ends; its memory is not registered any more."""
        for memory in (self.memory, self._landing):
            if len(memory):
                self._engine.unregister_memory(memory.ctypes.data)
        self.memory = self._landing = np.empty(0, np.uint8)

    def _moved(self, call: Any, address: dict[str, Any], offset: int, memory: Bytes) -> None:
        """Read or write ``memory``, by ``call``. Raises OSError, TicketRefused."""
        start, size = numbers_in(address, _KIND, "start", "nbytes")
        session = text_in(address, "session")
        if not 0 <= offset <= size - len(memory):
            raise OSError(f"bytes {offset}..{offset + len(memory)} of {format_bytes(size)} at {session}")
        if (code := call(session, memory.ctypes.data, start + offset, len(memory))) != 0:
            raise OSError(f"{session} cannot be reached, or the transfer failed: {code}")

    def _registered(self, nbytes: int) -> Bytes:
        memory = pages(nbytes)
        if self._engine.register_memory(memory.ctypes.data, nbytes):
            raise BadInput(f"Mooncake's engine cannot register {format_bytes(nbytes)}; see what it logs")
        return memory
