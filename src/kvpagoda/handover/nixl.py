"""A transfer between machines by NIXL, over what UCX finds there: RDMA, TCP, or shared memory.

**UCX has no authentication and no encryption** over TCP: any host that reaches its ports, and knows the metadata of the agent,
which tickets carry, can read and write the exported memory. Open them to the machines of the deployment alone.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from typing import Any
from uuid import uuid4

import numpy as np

from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.handover.transfer import numbers_in, text_in
from kvpagoda.pages import Bytes, pages
from kvpagoda.units import format_bytes, name_of, parse_bytes, real_number

_KIND, _LEAST_LANDING = "nixl", 16 << 20
_MOST_AGENTS = 64
_AT_ONCE = 200e-6
"""Seconds that a transfer is waited for without sleeping."""


class NixlAgent:
    """A ``Transfer`` over an agent of NIXL. Which network UCX uses, its own variables say (``UCX_TLS``,
    ``UCX_NET_DEVICES``).

    Args:
        nbytes: of the exported memory, as a number or as text; 0 on a side that only receives.
        backend: a plugin of NIXL for memory of the host.
        timeout: seconds after which a read or write that has not ended is an OSError.

    Raises:
        BadInput: the agent cannot be made.
        MissingExtra: NIXL is not installed.
    """

    def __init__(self, nbytes: int | str = 0, *, backend: str = "UCX", timeout: float = 30.0) -> None:
        size, self._timeout = parse_bytes(nbytes) if nbytes else 0, real_number(timeout, "the timeout, in seconds,")
        name_of(backend, "the name of a backend")
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise MissingExtra(f"no NIXL here ({error}): pip install 'kvpagoda[nixl]'", name="nixl") from error
        try:
            self._agent = nixl_agent(f"kvpagoda-{uuid4()}", nixl_agent_config(backends=[backend]))
        except Exception as error:
            raise BadInput(f"NIXL cannot make an agent with {backend!r}: {error}") from error
        self.memory: Bytes = np.empty(0, np.uint8)
        self._landing: Bytes = np.empty(0, np.uint8)
        self._registered: list[Any] = []
        self._abandoned: list[tuple[Any, Bytes]] = []  # transfers that did not end, and what they may still write
        self._agents: dict[str, str] = {}
        if size:
            self.memory = self._register(size)
        self._metadata = b64encode(self._agent.get_agent_metadata()).decode()

    def address(self) -> dict[str, Any]:
        """See ``Transfer``. The metadata of the agent, and where the memory begins in its process."""
        start = self.memory.ctypes.data if len(self.memory) else 0
        return {"kind": _KIND, "agent": self._metadata, "start": start, "nbytes": len(self.memory)}

    def landing(self, nbytes: int) -> Bytes:
        """See ``Transfer``. Registered memory, kept for the next call."""
        if len(self._landing) < nbytes:
            self._landing = self._register(max(_LEAST_LANDING, nbytes))
        return self._landing[:nbytes]

    def read(self, address: dict[str, Any], offset: int, into: Bytes) -> None:
        """See ``Transfer``."""
        self._move("READ", address, offset, into)

    def write(self, address: dict[str, Any], offset: int, data: Bytes) -> None:
        """See ``Transfer``."""
        self._move("WRITE", address, offset, data)

    def close(self) -> None:
        """See ``Transfer``. The ports of the agent stay open until it is collected; its memory is not registered any more."""
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        self.memory = self._landing = np.empty(0, np.uint8)

    def _move(self, operation: str, address: dict[str, Any], offset: int, memory: Bytes) -> None:
        """Read or write ``memory``. Raises OSError; the landing memory is given up if the transfer may still use it. Raises
        TicketRefused for what is no address."""
        start, size = numbers_in(address, _KIND, "start", "nbytes")
        metadata = text_in(address, "agent")
        if not 0 <= offset <= size - len(memory):
            raise OSError(f"bytes {offset}..{offset + len(memory)} of {format_bytes(size)} of a NIXL agent")
        if not len(memory):
            return
        try:
            ours, theirs = (
                self._agent.get_xfer_descs([(begin, len(memory), 0)], "DRAM")
                for begin in (memory.ctypes.data, start + offset)
            )
            handle = self._agent.initialize_xfer(operation, ours, theirs, self._known(metadata))
            state = self._waited(handle, self._agent.transfer(handle))
        except Exception as error:
            self._agents.pop(metadata, None)
            raise OSError(f"NIXL: {type(error).__name__} {error}") from error
        if state == "PROC":
            self._abandoned.append((handle, self._landing))
            self._landing = np.empty(0, np.uint8)
            raise OSError(f"NIXL: a transfer of {format_bytes(len(memory))} took more than {self._timeout:g} s")
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"NIXL: the transfer ended as {state}")

    def _waited(self, handle: Any, state: str) -> str:
        """Return the state of a transfer once it has ended, or after the timeout."""
        began = time.monotonic()
        while state == "PROC" and (passed := time.monotonic() - began) < self._timeout:
            if passed > _AT_ONCE:
                time.sleep(_AT_ONCE)
            state = self._agent.check_xfer_state(handle)
        return state

    def _known(self, metadata: str) -> str:
        """Return the name of the agent that ``metadata`` describes."""
        if metadata not in self._agents:
            if len(self._agents) >= _MOST_AGENTS:
                oldest = next(iter(self._agents))
                self._agent.remove_remote_agent(self._agents.pop(oldest))
            name = self._agent.add_remote_agent(b64decode(metadata))
            self._agents[metadata] = name if isinstance(name, str) else name.decode()
        return self._agents[metadata]

    def _register(self, nbytes: int) -> Bytes:
        memory = pages(nbytes)
        try:
            self._registered.append(self._agent.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM"))
        except Exception as error:
            raise BadInput(f"NIXL cannot register {format_bytes(nbytes)}: {error}") from error
        return memory
