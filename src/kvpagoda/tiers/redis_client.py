"""A driver over redis-py. It uses its pools, logins, TLS, cluster map and sentinels, and adds deadlines.

store    SET kvpagoda:<key in hex> <record> NX          load      GET
lookup   STRLEN, which also counts as a use             discard   DEL

A value of another type or length is not a record: it is a miss, and the next store overwrites it.

redis-py limits the time of each wait for bytes, not of a call, and copies a value four times while it is received. The
connections here solve both: each wait ends at the deadline of the call in progress, and values are received directly
into their records.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import zip_longest
from math import inf
from ssl import SSLSocket
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from redis import ConnectionPool, Redis, RedisCluster, Sentinel
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    PythonRespSerializer,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import AskError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from kvpagoda.tiers.driver import DriverStats, Lease, Status
from kvpagoda.tiers.records import RecordBuffer

_Asked = tuple[tuple[Any, ...], memoryview | None]  # a command, and the record that its reply is read into

PREFIX = b"kvpagoda:"
INFO_SECONDS = 1.0
_PART_NBYTES = 1 << 20  # records per pipeline; with more, server and client wake each other more often for fewer bytes
_PART_NAMES = 1024  # commands per pipeline without records
_RECEIVE_NBYTES = 4 << 20  # receive buffer of a socket
_MOST_NBYTES = 16 << 20  # limit of a reply that is no record: a cluster map, a record whose hash slot is moving
_READ_NBYTES = 4096  # bytes read ahead; the part of a record among them is copied once more
_LONGEST_SECONDS = 86400.0
_deadline: ContextVar[float] = ContextVar("deadline", default=inf)  # deadline of the call that this thread executes


def _seconds_left(_: object = None) -> float:
    """Return the seconds until the deadline; never 0, which sockets read as "do not wait". Raises TimeoutError."""
    seconds = _deadline.get() - monotonic()
    if seconds <= 0:
        raise TimeoutError("no answer by the deadline")
    return min(seconds, _LONGEST_SECONDS)


class _Received(SocketBuffer):  # type: ignore[misc]
    """The receive buffer of a redis-py parser that can receive a value directly into ``target``.

    Then the reply is ``target`` itself. A value of another length is read over ``target`` piece by piece, and the reply
    is its length.
    """

    target: memoryview | None = None

    def read(self, length: int, *options: Any, **more: Any) -> Any:
        """Read a value of ``length`` bytes, into ``target`` if there is one. Raises OSError."""
        target = self.target
        if target is None:
            return super().read(length, *options, **more)
        for start in range(0, length, len(target)):
            piece = target[: length - start]
            at = self._buffer.readinto(piece)
            while at < len(piece):
                self._sock.settimeout(_seconds_left())
                count = self._sock.recv_into(piece[at:])
                if not count:
                    raise ConnectionResetError("the server closed the connection")
                at += count
        super().read(0, *options, **more)
        return target if length == len(target) else length

    def _read_from_socket(self, length: int | None = None, *options: Any, **more: Any) -> bool:
        wanted = self.unread_bytes() + (length or 1)
        if self._buffer.tell() + wanted > _MOST_NBYTES:
            raise OSError(f"an answer of more than {_MOST_NBYTES} bytes")
        while self.unread_bytes() < wanted:
            if more.get("timeout") != 0:
                self._sock.settimeout(_seconds_left())
            if not super()._read_from_socket(None, *options, **more):
                return False
        return True


class _Parser(_RESP2Parser):  # type: ignore[misc]
    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)
        self._buffer = _Received(connection._sock, _READ_NBYTES, None)


class _Tcp(Connection):  # type: ignore[misc]
    """A connection with a large receive buffer from the start; without it a value of 1 MiB takes 1.3 times as long."""

    def _connect(self) -> socket.socket:
        failed = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(self.host, self.port, 0, socket.SOCK_STREAM):
            connected = socket.socket(family, kind, protocol)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_NBYTES)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                connected.settimeout(_seconds_left())
                connected.connect(place)
                return connected
            except OSError as error:
                connected.close()
                failed = error
        raise failed


class _Bounded:
    """Mixed into a connection class of redis-py: every wait of the connection ends at the deadline of the call."""

    socket_timeout = socket_connect_timeout = property(_seconds_left, lambda _, seconds: None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_parser(_Parser)  # type: ignore[attr-defined]

    def _construct_command_packer(self, packer: object) -> Any:
        return PythonRespSerializer(self._buffer_cutoff, self.encoder.encode)  # type: ignore[attr-defined]  # hiredis copies

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self._sock:  # type: ignore[attr-defined]
            self.connect()  # type: ignore[attr-defined]
        connected = self._sock  # type: ignore[attr-defined]
        parts = [memoryview(part) for part in command]
        while parts:
            connected.settimeout(_seconds_left())
            done = connected.send(parts[0]) if isinstance(connected, SSLSocket) else connected.sendmsg(parts[:64])
            while parts and done >= len(parts[0]):
                done -= len(parts.pop(0))
            if done:
                parts[0] = parts[0][done:]


_CLASSES: dict[str, Any] = {
    "redis": type("Connection", (_Bounded, _Tcp), {}),
    "rediss": type("SSLConnection", (_Bounded, SSLConnection, _Tcp), {}),
    "unix": type("UnixDomainSocketConnection", (_Bounded, UnixDomainSocketConnection), {}),
    "redis+sentinel": type("SentinelManagedConnection", (_Bounded, SentinelManagedConnection, _Tcp), {}),
    "rediss+sentinel": type("SentinelManagedSSLConnection", (_Bounded, SentinelManagedSSLConnection, _Tcp), {}),
}


def _pool(url: str) -> Any:
    """Return the connections to the server of ``url``, or to the master that its sentinels name.

    Raises ValueError or LookupError.
    """
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    is_whole = bool(parts.path) if scheme == "unix" else (parts.path.strip("/") or "0").isdecimal()
    if not (is_whole and (parts.fragment if kind else scheme == "unix" or (parts.hostname and parts.port != 0))):
        raise ValueError("a host, a port, a path, a database or the name of a master is missing or none")
    options: dict[str, Any] = {"connection_class": _CLASSES[parts.scheme], "protocol": 2}
    if not kind:
        return ConnectionPool(**parse_url(url) | options)
    login, at, places = parts.netloc.rpartition("@")
    sentinels = Sentinel([])
    pools = [_pool(f"{scheme}://{place}?{parts.query}") for place in places.split(",")]
    sentinels.sentinels = [Redis(connection_pool=pool) for pool in pools]
    options |= parse_url(f"redis://{login}{at}localhost{parts.path}?{parts.query}")
    return SentinelConnectionPool(parts.fragment, sentinels, **options)


class RedisDriver:
    """See ``redis_driver``. ``last_error``: why a call failed, in words, for logs.

    If a server answers MOVED, it belongs to a cluster: redis-py then reads the cluster's map and keeps it. Raises
    ValueError, LookupError, TypeError or RedisError for a URL that it does not understand.
    """

    def __init__(self, buffer: RecordBuffer, url: str) -> None:
        self.last_error = ""
        self._records, self._record_nbytes = [row.data for row in buffer.rows], buffer.record_nbytes
        self._url, self._pool = url, _pool(url)
        self._pool.make_connection()  # checks the options, and does not connect yet
        self._pool.reset()
        self._cluster: Any = None
        self._mapping, self._lock = Lock(), Lock()  # locks of the cluster map, and of the counters
        self._is_stale = self._is_closed = False
        self._rejected = 0
        self._info: WeakKeyDictionary[Any, tuple[float, dict[str, Any]]] = WeakKeyDictionary()  # pool -> time, INFO

    def store(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. REJECTED: the server is full and may not evict."""
        replies = self._ask("SET", keys, deadline, rows, b"NX")
        kept = [i for i, reply in enumerate(replies) if reply is None]  # keys that have a value already
        if kept:
            found = self._lookup([keys[i] for i in kept], deadline)
            for i, status in zip(kept, found):
                # a miss here means that the value is no record: overwrite it
                replies[i] = self._ask("SET", [keys[i]], deadline, [rows[i]])[0] if status is Status.MISS else status
        statuses = [_status(reply, True, Status.OK) for reply in replies]
        with self._lock:
            self._rejected += statuses.count(Status.REJECTED)
        return statuses

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        """See ``Driver``. Servers have no leases: found records count as used, and the lease ends at once."""
        return Lease(tuple(keys), tuple(self._lookup(keys, deadline)), monotonic())

    def _lookup(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """Return OK for each key whose value has the length of a record, MISS for other values."""
        replies = self._ask("STRLEN", keys, deadline)
        statuses = [_status(reply, reply == self._record_nbytes, Status.MISS) for reply in replies]
        return [Status.MISS if status is Status.CORRUPT else status for status in statuses]

    def load(self, keys: Sequence[bytes], rows: Sequence[int], deadline: float) -> list[Status]:
        """See ``Driver``. CORRUPT: a value of another type or length."""
        replies = self._ask("GET", keys, deadline, rows)
        return [_status(reply, isinstance(reply, memoryview), Status.CORRUPT) for reply in replies]

    def discard(self, keys: Sequence[bytes], deadline: float) -> list[Status]:
        """See ``Driver``."""
        return [_status(reply, bool(reply), Status.MISS) for reply in self._ask("DEL", keys, deadline)]

    def stats(self) -> DriverStats:
        """Return what the servers reported when this driver last stored, at most a second before its last store.

        The counts are of all data of the servers, also of other users, by the servers' own count of memory. The
        capacity is ``maxmemory``, or the whole memory of a server where that is 0.
        """
        with self._lock:
            reports = [info for _, info in self._info.values()]
        used, most, memory, evicted = (
            sum(int(info.get(name, 0)) for info in reports)
            for name in ("used_memory", "maxmemory", "total_system_memory", "evicted_keys")
        )
        records = sum(value["keys"] for info in reports for name, value in info.items() if re.fullmatch(r"db\d+", name))
        return DriverStats(records, used, most or memory, 0, evicted, self._rejected)

    def close(self) -> None:
        """See ``Driver``. Closes the idle connections now; those in use are closed when the driver is deleted."""
        self._is_closed = True
        nodes = [] if self._cluster is None else self._cluster.get_nodes()
        for pool in (self._pool, *[node.redis_connection.connection_pool for node in nodes if node.redis_connection]):
            pool.disconnect(inuse_connections=False)

    def _ask(
        self, command: str, keys: Sequence[bytes], deadline: float, rows: Sequence[int] = (), *more: bytes
    ) -> list[Any]:
        """Send ``command`` for each key and return the replies of redis-py; a fault is a ``Status``.

        SET stores the records ``rows``, with the arguments ``more``. GET reads into ``rows``; its reply is the record
        if the value has the length of a record. O(n), and one round trip to each server for each MiB of records or 1024
        keys. Redirected keys are asked for one by one.
        """
        if self._is_closed or monotonic() >= deadline:
            return [Status.UNAVAILABLE if self._is_closed else Status.TIMEOUT] * len(keys)
        names, records = [PREFIX + key.hex().encode() for key in keys], [self._records[row] for row in rows]
        asked: list[_Asked] = [
            ((command, name, record, *more), None) if command == "SET" else ((command, name), record)
            for name, record in zip_longest(names, records)
        ]
        step = max(1, _PART_NBYTES // self._record_nbytes) if rows else _PART_NAMES
        replies: list[Any] = [None] * len(keys)
        groups: dict[Any, list[int]] = {}
        token = _deadline.set(deadline)
        try:
            self._read_map_again()
            for i, name in enumerate(names):
                groups.setdefault(self._pool_of(name), []).append(i)
            for pool, group in groups.items():
                for i, reply in zip(group, _exchange(pool, [asked[i] for i in group], step)):
                    replies[i] = self._redirected(*asked[i]) if isinstance(reply, AskError) else reply
            if command == "SET":
                stored = [name for name, reply in zip(names, replies) if not isinstance(reply, Exception)]
                for pool in {self._pool_of(name) for name in stored}:
                    self._note(pool)
        except Exception as error:  # redis-py may raise any exception for an unexpected answer
            replies = [error] * len(keys)
        finally:
            _deadline.reset(token)
        return [self._fault(reply) if isinstance(reply, Exception) else reply for reply in replies]

    def _pool_of(self, name: bytes) -> Any:
        """Return the connections to the server that has the key ``name``."""
        if self._cluster is None:
            return self._pool
        return self._cluster.get_redis_connection(self._cluster.get_node_from_key(name)).connection_pool

    def _redirected(self, words: tuple[Any, ...], target: memoryview | None) -> Any:
        """Return the reply of the server to which the asked server redirects this command."""
        try:
            reply = self._known_cluster().execute_command(*words)
        except Exception as error:
            return error
        if target is None or reply is None or len(reply) != len(target):
            return reply
        target[:] = reply
        return target

    def _fault(self, error: Exception) -> Status:
        """Return the status for ``error``; after most errors the cluster map is read again."""
        self.last_error = str(error) or type(error).__name__
        if isinstance(error, OutOfMemoryError):
            return Status.REJECTED
        if self.last_error.startswith("WRONGTYPE"):
            return Status.CORRUPT
        self._is_stale = self._cluster is not None
        return Status.TIMEOUT if isinstance(error, (TimeoutError, RedisTimeoutError)) else Status.UNAVAILABLE

    def _known_cluster(self) -> Any:
        """Return redis-py's client of the cluster, made on first use."""
        with self._mapping:
            if self._cluster is None:
                self._cluster = RedisCluster.from_url(
                    "redis" + self._url[self._url.index(":") :],  # with "rediss" its own class would replace ours
                    connection_class=self._pool.connection_class,
                    protocol=2,
                    require_full_coverage=False,
                    retry=Retry(NoBackoff(), 0),
                )
            return self._cluster

    def _read_map_again(self) -> None:
        """Read the cluster map again after a fault.

        In at most half of the time left, because the server that is asked for it may be the one that is down.
        """
        if self._is_stale:
            token = _deadline.set(monotonic() + _seconds_left() / 2)
            with suppress(Exception):
                self._cluster.nodes_manager.initialize()
                self._is_stale = False
            _deadline.reset(token)

    def _note(self, pool: Any) -> None:
        """Ask the server of ``pool`` for its INFO, if the last one is older than ``INFO_SECONDS``."""
        if monotonic() >= self._info.get(pool, (-inf, {}))[0] + INFO_SECONDS:
            with suppress(Exception):
                answer = monotonic(), Redis(connection_pool=pool).info()
                with self._lock:
                    self._info[pool] = answer
                    if pool is not self._pool:  # its server is one of the cluster, and counted there
                        self._info.pop(self._pool, None)


def _exchange(pool: Any, asked: Sequence[_Asked], step: int) -> list[Any]:
    """Send the commands ``asked`` to one server, ``step`` at a time, and return their replies.

    A reply may be an exception: an error of the server, or, if the connection fails (it is then closed), that error for
    every missing reply.
    """
    replies: list[Any] = []
    connection = None
    try:
        connection = pool.get_connection()
        parser = connection._parser
        for part in (asked[start : start + step] for start in range(0, len(asked), step)):
            connection.send_packed_command(connection.pack_commands(words for words, _ in part))
            for _, parser._buffer.target in part:
                replies.append(parser._read_response())
                if isinstance(replies[-1], ReadOnlyError):
                    raise replies.pop()  # another server may be the master now
            parser._buffer.target = None
            parser._buffer.purge()  # once per part; ``read_response`` would do it for each reply
    except Exception as error:
        if connection is not None:
            connection.disconnect()
        replies += [error] * (len(asked) - len(replies))
    finally:
        if connection is not None:
            pool.release(connection)
    return replies


def _status(reply: Any, is_ours: bool, other: Status) -> Status:
    """Return the status that ``reply`` means: OK if it ``is_ours``, MISS if it is None, else ``other``."""
    if isinstance(reply, Status):
        return reply
    return Status.OK if is_ours else Status.MISS if reply is None else other
