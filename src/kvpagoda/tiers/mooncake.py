"""A driver for Mooncake Store: the memory of many machines as one store, which copies to and from the record buffer.

**Its ports have no authentication and no encryption.** Every client listens on **all** addresses, ports 15000 to 17000,
whatever host it is given. Any host that reaches these ports can read and write the memory registered there: the record
buffer and the segment. Open them only to the machines of the store, by a firewall or a network namespace. If you cannot
do that, do not use this driver.

    mooncake_master --rpc_address=10.0.0.1 --rpc_port=50051 --metrics_host=127.0.0.1 --put_start_discard_timeout_sec=5

Give the master an address: by default it listens on all. ``put_start_discard_timeout_sec`` (30 by default): if the
writer of a record dies or is late, the record can be stored again after that time. Until then storing it returns OK but
stores nothing, and loading it is a MISS.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

from kvpagoda.abc import DriverStats, Lease, Status
from kvpagoda.errors import BadInput, MissingExtra
from kvpagoda.loading import read_json
from kvpagoda.tiers.driver import Calls
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.units import format_bytes, name_of, parse_bytes

_TABLE = read_json("kvpagoda.tiers", "mooncake.json")
TIMEOUTS: dict[str, str] = _TABLE["timeouts"]
"""Timeouts of the engine as environment variables, set here if they are unset; the engine's defaults are 30 seconds."""
_STATUSES = {int(code): Status(status) for code, (status, _) in _TABLE["statuses"].items()}
_LEAST_SEGMENT = 16 << 20
_LEASE_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5.0


class MooncakeDriver:
    """See ``mooncake_driver``. ``last_error``: why a call was UNAVAILABLE, in words, for logs."""

    part_nbytes = 16 << 20  # large, because each batch asks the master twice

    def __init__(self, buffer: RecordBuffer, make: Callable[[], Any], master: str, segment_nbytes: int) -> None:
        self.last_error = f"{master} has not answered yet"
        self._buffer, self._make, self._master, self._segment_nbytes = buffer, make, master, segment_nbytes
        start = buffer.records.ctypes.data
        self._places = [start + row * buffer.record_nbytes for row in range(buffer.num_records)]
        self._process = os.getpid()
        self._client: Any = None
        self._rejected, self._lock = 0, Lock()
        self._calls, is_over = Calls(self._end), Event()
        self._calls.begin()
        Thread(target=self._connect, args=(is_over,), name="kvpagoda-mooncake", daemon=True).start()
        is_over.wait(_CONNECT_SECONDS if self._is_reachable() else 0)

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. REJECTED: no room. OK does not promise that the record was stored."""
        statuses = self._call("batch_put_from", keys, deadline, self._where(rows), wanted=0)
        with self._lock:
            self._rejected += statuses.count(Status.REJECTED)
        return statuses

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """See ``Driver``. A lease lasts at most 5 seconds; the master's own leases last longer."""
        until = monotonic() + min(hold, _LEASE_SECONDS)
        return Lease(tuple(keys), tuple(self._call("batch_is_exist", keys, deadline, wanted=1)), until)

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. CORRUPT: another length. A record discarded during the load may be OK with wrong bytes."""
        return self._call("batch_get_into", keys, deadline, self._where(rows), wanted=self._buffer.record_nbytes)

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See ``Driver``."""
        return self._call("batch_remove", keys, deadline, (True,), wanted=0)

    def stats(self) -> DriverStats:
        """Return the size of the segment, allocated at the start. Only the master knows which records it holds."""
        nbytes = self._segment_nbytes if self._client is not None else 0
        return DriverStats(0, nbytes, self._segment_nbytes, rejected=self._rejected)

    def close(self) -> None:
        """See ``Driver``. The last call that still uses the engine closes it; the records in the segment are lost."""
        if self._process == os.getpid():
            self._calls.close()

    # -- the engine ------------------------------------------------------------------------------------------------------

    def _where(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the addresses and the sizes in bytes of the records ``rows``."""
        return [self._places[row] for row in rows], [self._buffer.record_nbytes] * len(rows)

    def _call(
        self, name: str, keys: Sequence[bytes], deadline: float, arguments: Sequence[object] = (), *, wanted: int
    ) -> list[Status]:
        """Call ``name`` of the engine for one batch; the code ``wanted`` means OK.

        The engine knows no deadlines: a call may last seconds longer, until ``TIMEOUTS`` end it.
        """
        if not keys or self._process != os.getpid() or not self._calls.begin():
            return [Status.UNAVAILABLE] * len(keys)
        try:
            if self._client is None or monotonic() >= deadline:
                return [Status.UNAVAILABLE if self._client is None else Status.TIMEOUT] * len(keys)
            codes: list[int] = getattr(self._client, name)([key.hex() for key in keys], *arguments)
        finally:
            self._calls.done()
        other = Status.MISS if name == "batch_is_exist" else Status.CORRUPT
        statuses = [
            Status.OK if code == wanted else other if code >= 0 else _STATUSES.get(code, Status.UNAVAILABLE)
            for code in codes
        ]
        if Status.UNAVAILABLE in statuses:
            self.last_error = f"{name}: {codes[statuses.index(Status.UNAVAILABLE)]}"
        return statuses

    def _end(self) -> None:
        """Close the engine, which must not be called afterwards."""
        client, self._client = self._client, None
        if client is not None:
            client.unregister_buffer(self._places[0])
            client.close()

    def _is_reachable(self) -> bool:
        """Return whether a server answers at the master's address. Without one the engine would try for 90 seconds."""
        if "://" in self._master:
            return True
        host, _, port = self._master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError as error:
            self.last_error = f"{self._master}: {error}"
            return False
        return True

    def _connect(self, is_over: Event) -> None:
        """Set the engine up and register the buffer; try until that succeeds or the driver is closed.

        From then on the engine reconnects by itself.
        """
        while self._client is None and not self._calls.is_closed:
            try:
                if self._is_reachable():
                    client = self._make()
                    if client is not None and client.register_buffer(self._places[0], self._buffer.records.nbytes) == 0:
                        self._client, self.last_error = client, ""
                        break
                    self.last_error = f"{self._master}: the engine could not be set up; see what it logs"
            except Exception as error:
                self.last_error = f"{self._master}: {error!r}"
            sleep(_RETRY_SECONDS)
        is_over.set()
        self._calls.done()


def set_timeouts() -> None:
    """Set the engine's ``TIMEOUTS`` in the environment, where they are unset, before an engine is made."""
    for name, value in TIMEOUTS.items():
        os.environ.setdefault(name, value)


def mooncake_driver(
    buffer: RecordBuffer, master: str, *, segment: int | str = 0, host: str = "127.0.0.1",
    protocol: str = "tcp", devices: str = "", metadata: str = "P2PHANDSHAKE",
) -> MooncakeDriver:  # fmt: skip
    """Return a driver for a Mooncake Store. It keeps trying in the background while the master does not answer.

    **All its ports are open, on all addresses, to every host that reaches them**: read the top of this file before
    using it.

    The buffer is registered once. Until the master answers, all calls are UNAVAILABLE. A call can last seconds longer
    than its deadline, as the engine's timeouts allow (they are set here unless the environment sets them): use it
    through a ``Tier``.

    Args:
        buffer: the records.
        master: "host:port", or "etcd://.." for several masters.
        segment: memory that this process adds to the store, lost with the process; 0 adds none and only uses the store.
        host: the name by which other machines reach this one.
        protocol: "tcp", or "rdma" with ``devices``.
        devices: of "rdma", as Mooncake names them; "": all.
        metadata: the address of a metadata server, or "P2PHANDSHAKE" for none.

    Raises:
        BadInput: ``master`` is neither host:port nor a URL, ``host`` or another name is no text, or ``segment`` is no
            size or below 16 MiB.
        MissingExtra: the engine is not installed; the message names what is missing.
    """
    try:
        segment_nbytes = parse_bytes(segment) if segment else 0
        for name in (master, host, protocol, devices, metadata):
            name_of(name, "each of master, host, protocol, devices and metadata")
        if ("://" not in master and not 0 < int(master.rpartition(":")[2]) < 65536) or not host:
            raise ValueError(master)
    except ValueError as error:
        text = f"a master is host:port or etcd://.., this host is a name, got {master!r} and {host!r}"
        raise BadInput(text, needed=(master, host)) from error
    if 0 < segment_nbytes < _LEAST_SEGMENT:
        text = f"a segment is 0 or at least {format_bytes(_LEAST_SEGMENT)}, got {format_bytes(segment_nbytes)}"
        raise BadInput(text, needed=_LEAST_SEGMENT, available=segment_nbytes)
    set_timeouts()
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise MissingExtra(
            f"no Mooncake Store here ({error}): pip install 'kvpagoda[mooncake]' and apt-get install libibverbs1, or, with "
            "CUDA, pip install mooncake-transfer-engine in its place", name="mooncake",
        ) from error  # fmt: skip

    def make() -> Any:
        client = MooncakeDistributedStore()
        is_set_up = client.setup(host, metadata, segment_nbytes, 0, protocol, devices, master) == 0
        return client if is_set_up else None

    return MooncakeDriver(buffer, make, master, segment_nbytes)
