"""Records in Redis or Valkey, one server or a cluster, copied by nobody between the buffer and the socket.

store    SET kvpagoda:<key in hex> <record> NX          load      GET
lookup   STRLEN, which also counts as a use             discard   DEL
"""

from __future__ import annotations

import os
import ssl
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from urllib.parse import SplitResult, unquote, urlsplit

from kvpagoda.errors import BadInput
from kvpagoda.tiers.driver import DriverStats, Lease, Status
from kvpagoda.tiers.records import RecordBuffer
from kvpagoda.tiers.resp import MOST_NBYTES, Address, Connection, Malformed, Refused, Words
from kvpagoda.units import format_bytes

PREFIX = b"kvpagoda:"
_NO_RECORD = memoryview(b"")
_PART_NBYTES = 1 << 20  # asked for at once: more of it, and server and client wake each other for less
_PART_KEYS = 1024
_NUM_SLOTS = 16384
_MOST_MOVES = 4
_MOST_NODES = 1024
_INFO_SECONDS = 1.0

Read = Callable[[Connection, memoryview], Status]
Place = tuple[Address, bool]  # where a key is, and whether its slot is only on its way there


@dataclass
class _Node:
    """A server: its idle connections, and what it said of itself last."""

    idle: list[Connection] = field(default_factory=list)
    info: dict[str, int] = field(default_factory=dict)
    told: float = -_INFO_SECONDS

    def hang_up(self) -> None:
        while self.idle:
            self.idle.pop().close()


class RedisDriver:
    """See ``redis_driver``. ``last_error``: why something was not available, for people."""

    def __init__(self, buffer: RecordBuffer, url: SplitResult, tls: ssl.SSLContext | None) -> None:
        self.last_error = ""
        self._records = [row.data for row in buffer.rows]
        self._tls = tls
        database, is_unix = url.path.strip("/"), url.scheme == "unix"
        self._login: list[Words] = []
        if url.password is not None:
            user = [unquote(url.username).encode()] if url.username else []
            self._login.append([b"AUTH", *user, unquote(url.password).encode()])
        if database and not is_unix:
            self._login.append([b"SELECT", database.encode()])
        self._seed: Address = (url.path, -1) if is_unix else (url.hostname or "", url.port or 6379)
        self._lock = Lock()
        self._process = os.getpid()
        self._nodes: dict[Address, _Node] = {}
        self._slots: list[Address] = []  # of a cluster
        self._is_stale = self._is_closed = False
        self._rejected = 0

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. REJECTED: the server is full and may not evict."""
        statuses = self._call(b"SET", keys, _done, deadline, [self._records[row] for row in rows])
        with self._lock:
            self._rejected += statuses.count(Status.REJECTED)
        return statuses

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """See ``Driver``. A server knows no leases: what was found counts as used, and ``until`` is now."""
        return Lease(tuple(keys), tuple(self._call(b"STRLEN", keys, _is_there, deadline)), monotonic())

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. CORRUPT: a value of another length, or no string."""
        return self._call(b"GET", keys, Connection.value, deadline, [self._records[row] for row in rows])

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See ``Driver``."""
        return self._call(b"DEL", keys, _is_there, deadline)

    def stats(self) -> DriverStats:
        """What the servers said of themselves with a store of this driver, a second before the last one at most: all that
        they hold, for whomever, by their own count of memory, beside ``maxmemory``, or their whole memory if that is 0."""
        with self._lock:
            told = [node.info for node in self._nodes.values()]
            records, used, most, memory, evicted = (
                sum(info.get(name, 0) for info in told)
                for name in ("keys", "used_memory", "maxmemory", "total_system_memory", "evicted_keys")
            )
            return DriverStats(records, used, most or memory, 0, evicted, self._rejected)

    def close(self) -> None:
        """See ``Driver``."""
        with self._lock:
            self._is_closed = True
            for node in self._nodes.values():
                node.hang_up()

    # -- whom to ask -----------------------------------------------------------------------------------------------------

    def _call(
        self, command: bytes, keys: Sequence[bytes], read: Read, deadline: float, records: Sequence[memoryview] = ()
    ) -> list[Status]:
        """What ``read`` makes of the reply for each key. Nodes of a cluster are asked in turn, each for all that it has.

        O(n), and a round trip per node, for each MiB of records or 1024 keys.
        """
        if self._is_closed or monotonic() >= deadline:
            return [Status.UNAVAILABLE if self._is_closed else Status.TIMEOUT] * len(keys)
        if self._is_stale:
            self._learn(deadline)
        names, slots = [PREFIX + key.hex().encode() for key in keys], self._slots
        wanted: list[tuple[Words, memoryview]] = [
            ((command, name, record, b"NX") if command == b"SET" else (command, name), record)
            for name, record in zip(names, records or [_NO_RECORD] * len(names))
        ]
        step = max(1, _PART_NBYTES // len(records[0])) if records else _PART_KEYS
        statuses = [Status.UNAVAILABLE] * len(keys)
        todo: dict[int, Place] = {
            i: (slots[crc_hqx(name, 0) % _NUM_SLOTS] if slots else self._seed, False) for i, name in enumerate(names)
        }
        for _ in range(_MOST_MOVES):
            groups: dict[Place, list[int]] = {}
            for i, place in todo.items():
                groups.setdefault(place, []).append(i)
            todo = {}
            for (address, is_asking), group in groups.items():
                for start in range(0, len(group), step):
                    part = group[start : start + step]
                    told = self._exchange(address, [wanted[i] for i in part], read, deadline, is_asking=is_asking)
                    for i, what in zip(part, told):
                        if isinstance(what, Status):
                            statuses[i] = what
                        else:
                            todo[i] = what
            if not todo:
                break
            if self._is_stale:
                self._learn(deadline, next(iter(todo.values()))[0])
        return statuses

    def _learn(self, deadline: float, *first: Address) -> None:
        """Find out who has which slots: from ``first``, then from whom we know, the last that failed last."""
        with self._lock:
            known = [*self._nodes]
        for address in dict.fromkeys((*first, *known, self._seed)):
            slots: list[Address] = []

            def read(
                connection: Connection, _: memoryview, host: str = address[0], slots: list[Address] = slots
            ) -> Status:
                slots += _read_slots(connection.text(), host)
                return Status.OK

            self._exchange(address, [((b"CLUSTER", b"NODES"), _NO_RECORD)], read, deadline)
            if slots:
                with self._lock:
                    self._slots, self._is_stale = slots, False
                    for gone in self._nodes.keys() - {*slots, self._seed}:
                        self._nodes.pop(gone).hang_up()
                return

    # -- one server ------------------------------------------------------------------------------------------------------

    def _exchange(
        self, address: Address, wanted: Sequence[tuple[Words, memoryview]], read: Read, deadline: float,
        *, is_asking: bool = False,
    ) -> list[Status | Place]:  # fmt: skip
        """Send commands and read their replies. A connection that did not come to the end of them is not used again."""
        told: list[Status | Place] = []
        connection = None
        try:
            node, connection = self._connect(address, deadline)
            is_due = wanted[0][0][0] == b"SET" and monotonic() >= node.told + _INFO_SECONDS
            asking: list[Words] = [(b"ASKING",)] if is_asking else []
            connection.send([word for words, _ in wanted for word in (*asking, words)] + [(b"INFO",)] * is_due)
            for _, record in wanted:
                if is_asking:
                    self._answer(connection, _done, record, address)
                told.append(self._answer(connection, read, record, address))
            if is_due:
                self._answer(connection, self._note(node), _NO_RECORD, address)
        except (OSError, ValueError, Refused) as error:
            fault = Status.TIMEOUT if isinstance(error, TimeoutError) else Status.UNAVAILABLE
            with self._lock:
                self.last_error = f"{address[0]}:{address[1]}: {error or type(error).__name__}"
                self._is_stale = bool(self._slots)
                if address in self._nodes:  # others that are idle are as old; and it is the last to be asked for slots
                    self._nodes[address] = self._nodes.pop(address)
                    self._nodes[address].hang_up()
            if connection is not None:
                connection.close()
            return told + [fault] * (len(wanted) - len(told))
        with self._lock:
            if self._is_closed or not connection.is_in_step or self._nodes.get(address) is not node:
                connection.close()
            else:
                node.idle.append(connection)
        return told

    def _connect(self, address: Address, deadline: float) -> tuple[_Node, Connection]:
        """An idle connection to ``address``, or a new one that has said who it is."""
        with self._lock:
            if self._process != os.getpid():  # after a fork the sockets are the parent's
                self._nodes, self._process = {}, os.getpid()
            if address not in self._nodes and len(self._nodes) >= _MOST_NODES:
                raise Malformed(f"moved to more than {_MOST_NODES} servers")
            node = self._nodes.setdefault(address, _Node())
            if node.idle:
                connection = node.idle.pop()
                connection.deadline = deadline
                return node, connection
        connection = Connection(address, self._tls, deadline)
        try:
            if self._login:
                connection.send(self._login)
            for _ in self._login:
                connection.done()
        except (OSError, Refused):
            connection.close()
            raise
        return node, connection

    def _answer(self, connection: Connection, read: Read, record: memoryview, address: Address) -> Status | Place:
        """One reply, which may be an error."""
        try:
            return read(connection, record)
        except Refused as refused:
            kind, *words = (text := str(refused)).split(" ")
        if kind in ("MOVED", "ASK") and len(words) == 2:
            self._is_stale |= kind == "MOVED"
            return _address(words[1], address[0]), kind == "ASK"
        self.last_error = text
        return {"OOM": Status.REJECTED, "WRONGTYPE": Status.CORRUPT}.get(kind, Status.UNAVAILABLE)

    def _note(self, node: _Node) -> Read:
        """Read INFO; a server may refuse to tell."""

        def read(connection: Connection, _: memoryview) -> Status:
            node.told = monotonic()
            lines = [line.partition(":") for line in connection.text().splitlines()]
            info = {name: int(value) for name, _, value in lines if value.isdecimal() and len(value) < 20}
            spaces = [value.partition(",")[0] for name, _, value in lines if name[:2] == "db"]
            info["keys"] = sum(int(keys[5:20]) for keys in spaces if keys[:5] == "keys=" and keys[5:20].isdecimal())
            node.info = info
            return Status.OK

        return read


def redis_driver(buffer: RecordBuffer, url: str, *, tls: ssl.SSLContext | None = None) -> RedisDriver:
    """Records in the Redis or Valkey server at ``url``, which many processes and machines may share.

    ``url``: ``redis://[user:password@]host[:6379][/database]``; ``rediss://`` for TLS, by the certificates of the system or by
    ``tls``; ``unix:///path``. Of a cluster any node will do, the others are found by what it says. Nothing is connected before
    the first call, and a server that was gone is in use again with the first call that it answers.

    The server bounds what it holds: set ``maxmemory``, and ``maxmemory-policy allkeys-lru``. Without the policy a full server
    REJECTS; without the bound it grows until the system ends it. It draws what goes from a sample, so a parent may go before
    its children, and there are no leases. The server, and whom it names as its cluster, is trusted with the password and with
    what records tell of prompts: they are not encrypted there. Raises BadInput.
    """
    try:
        parts = urlsplit(url)
        is_unix = parts.scheme == "unix"
        is_whole = bool(parts.path if is_unix else parts.hostname and (parts.path.strip("/") or "0").isdecimal())
        is_known = parts.scheme in ("redis", "rediss", "unix") and is_whole and parts.port != 0
    except ValueError:
        is_known = False
    if not is_known:  # and do not say what it was: there may be a password in it
        raise BadInput("a url is redis://user:password@host:port/database, rediss:// for TLS, or unix:///path")
    if buffer.record_nbytes > MOST_NBYTES:
        raise BadInput(
            f"a value is at most {format_bytes(MOST_NBYTES)}, a record is {format_bytes(buffer.record_nbytes)}"
        )
    if parts.scheme == "rediss":
        tls = tls or ssl.create_default_context()
    elif tls is not None:
        raise BadInput(f"TLS goes with rediss://, not with {parts.scheme}://")
    return RedisDriver(buffer, parts, tls)


def _done(connection: Connection, _: memoryview) -> Status:
    connection.done()
    return Status.OK


def _is_there(connection: Connection, _: memoryview) -> Status:
    return Status.OK if connection.number() else Status.MISS


def _address(text: str, host: str) -> Address:
    """``host:port[@..]`` as a node of ``host`` writes it; it leaves out a name that it does not know."""
    name, _, port = text.partition("@")[0].rpartition(":")
    if not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise Malformed(f"{text[:64]!r} is no address")
    return name or host, int(port[:6])


def _read_slots(text: str, host: str) -> list[Address]:
    """Who has each slot, of CLUSTER NODES; a slot that nobody has is for anyone to say. Raises Malformed."""
    slots: list[Address | None] = [None] * _NUM_SLOTS
    for words in (line.split(" ") for line in text.splitlines()):
        for first, _, last in (span.partition("-") for span in words[8:]):
            if first.isdecimal():  # and not a slot on its way, in brackets
                low, high = int(first[:6]), int((last or first)[:6])
                if not low <= high < _NUM_SLOTS:
                    raise Malformed(f"slots {low} to {high}")
                slots[low : high + 1] = [_address(words[1], host)] * (high - low + 1)
    anyone = next((address for address in slots if address), None)
    if anyone is None:
        raise Malformed("a cluster in which nobody has a slot")
    return [address or anyone for address in slots]
