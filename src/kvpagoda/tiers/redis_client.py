"""redis-py as the client of ``RedisDriver``: its pools, logins, TLS, cluster map and sentinels, over sockets with a deadline.

redis-py bounds each wait for bytes, not a call, and copies a value four times on its way. Both are settled at the socket: each
connection has a ``_Socket``, which gives up at the deadline of the call in progress, sends records from where they lie, and
reads plain replies and the values of records. All other replies, errors above all, are left to redis-py.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from itertools import zip_longest
from math import inf
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from redis import ConnectionPool, Redis, RedisCluster, Sentinel
from redis._parsers import _RESP2Parser
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AskError, InvalidResponse, MovedError, OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from kvpagoda.tiers.driver import Status

Words = tuple[bytes | memoryview, ...]
_Asked = tuple[Words, memoryview | None]  # a command, and the record that it is about
Reply = int | None | Status
"""GET, STRLEN: bytes of the value; DEL: how many there were; SET: 1. None: no value, or NX kept one. Or what went wrong."""

INFO_SECONDS = 1.0
_PART_NBYTES = 1 << 20  # asked for at once: more of it, and server and client wake each other for less
_PART_NAMES = 1024
_RECEIVE_NBYTES = 4 << 20
_MOST_NBYTES = 16 << 20  # of a reply that redis-py reads: the map of a cluster, a record whose slot is moving
_LINES_NBYTES, _HEAD_NBYTES = 4096, 12  # read ahead of numbers, and of a value, whose bytes shall come into its record
_LONGEST_SECONDS = 86400.0
_PLAIN = re.compile(rb"(?:\+OK|(?::|\$(?=-))(-1|\d{1,18}))\r\n")  # OK, a number, or null
_VALUE = re.compile(rb"\$(-1|\d{1,9})\r\n")  # its length, or null
_deadline: ContextVar[float] = ContextVar("deadline", default=inf)  # of the call that this thread is in


def _seconds_left() -> float:
    """Until the deadline. At least 1 ms: sockets take 0 for "do not wait"."""
    return min(max(_deadline.get() - monotonic(), 0.001), _LONGEST_SECONDS)


class _Socket:
    """A connected socket. Whatever it does ends by the deadline of the call that it is used in, with TimeoutError."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._ahead, self._is_polled, self._most = connected, b"", False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, seconds: float | None) -> None:
        """0: do not wait. Other timeouts do not count."""
        self._is_polled = seconds == 0

    def sendall(self, data: Any) -> None:
        """Send a buffer, or a list of buffers."""
        parts, at = [memoryview(part) for part in (data if isinstance(data, list) else [data])], 0
        self._most = _MOST_NBYTES
        while at < len(parts):
            ready = self._ready()
            done = ready.send(parts[at]) if isinstance(ready, ssl.SSLSocket) else ready.sendmsg(parts[at : at + 64])
            while at < len(parts) and done >= len(parts[at]):
                done -= len(parts[at])
                at += 1
            if done:
                parts[at] = parts[at][done:]

    def recv(self, nbytes: int) -> bytes:
        """What came, for redis-py; a line of what ``reply`` has read."""
        end = self._ahead.find(b"\n") + 1 or len(self._ahead)
        data, self._ahead = self._ahead[:end] or self._ready().recv(nbytes), self._ahead[end:]
        self._most -= len(data)
        if self._most < 0:
            raise OSError(f"an answer of more than {_MOST_NBYTES} bytes")
        return data

    def reply(self, target: memoryview | None) -> int | None:
        """A number, -1 for null, 1 for OK; with ``target`` the length of a value, which is read into it, or over itself.

        None for any other reply, which is left to ``recv``.
        """
        while not (head := (_PLAIN if target is None else _VALUE).match(self._ahead)):
            if b"\n" in self._ahead or len(self._ahead) > _LINES_NBYTES:
                return None
            self._read_ahead(_LINES_NBYTES if target is None else _HEAD_NBYTES)
        number, self._ahead = int(head[1] or 1), self._ahead[head.end() :]
        if target is not None and number >= 0:
            for start in range(0, number, len(target)):
                self._fill(target[: number - start])
            while len(self._ahead) < 2:
                self._read_ahead(_HEAD_NBYTES)
            if self._ahead[:2] != b"\r\n":
                raise OSError("a value is longer than it says")
            self._ahead = self._ahead[2:]
        return number

    def _fill(self, target: memoryview) -> None:
        at = min(len(target), len(self._ahead))
        target[:at], self._ahead = self._ahead[:at], self._ahead[at:]
        while at < len(target):
            at += self._some(self._ready().recv_into(target[at:]))

    def _read_ahead(self, nbytes: int) -> None:
        self._ahead += self._some(self._ready().recv(nbytes))

    def _some(self, came: Any) -> Any:
        if not came:
            raise ConnectionResetError("the server closed the connection")
        return came

    def _ready(self) -> socket.socket:
        if monotonic() >= _deadline.get():
            raise TimeoutError("no answer by the deadline")
        self._socket.settimeout(0.0 if self._is_polled else _seconds_left())
        return self._socket


class _Connection:
    """Mixed into a connection of redis-py: it has a ``_Socket``, and connects by the deadline."""

    socket_timeout = socket_connect_timeout = property(lambda _: _seconds_left(), lambda _, seconds: None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.set_parser(_RESP2Parser)  # type: ignore[attr-defined]  # hiredis reads ahead by itself

    def _connect(self) -> _Socket:
        self.wire = _Socket(super()._connect())  # type: ignore[misc]
        return self.wire


class _Tcp(Connection):  # type: ignore[misc]
    """What comes has a large buffer from the start: without it a value of 1 MiB takes 1.3 times as long."""

    def _connect(self) -> socket.socket:
        failed = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(self.host, self.port, 0, socket.SOCK_STREAM):
            connected = socket.socket(family, kind, protocol)
            try:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_NBYTES)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.settimeout(_seconds_left())
                connected.connect(place)
                connected.settimeout(_seconds_left())
                return connected
            except OSError as error:
                connected.close()
                failed = error
        raise failed


_CLASSES: dict[str, Any] = {
    "redis": type("Connection", (_Connection, _Tcp), {}),
    "rediss": type("SSLConnection", (_Connection, SSLConnection, _Tcp), {}),
    "unix": type("UnixDomainSocketConnection", (_Connection, UnixDomainSocketConnection), {}),
    "redis+sentinel": type("SentinelManagedConnection", (_Connection, SentinelManagedConnection, _Tcp), {}),
    "rediss+sentinel": type("SentinelManagedSSLConnection", (_Connection, SentinelManagedSSLConnection, _Tcp), {}),
}


def _pool(url: str) -> Any:
    """The connections to the server of ``url``, or to the master that its sentinels name. Raises ValueError or LookupError."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    options: dict[str, Any] = {"connection_class": _CLASSES[parts.scheme], "protocol": 2}
    is_whole = bool(parts.path) if scheme == "unix" else (parts.path.strip("/") or "0").isdecimal()
    if not (is_whole and (parts.fragment if kind else scheme == "unix" or (parts.hostname and parts.port != 0))):
        raise ValueError("a host, a port, a path, a database or the name of a master is missing or none")
    if not kind:
        return ConnectionPool.from_url(url, **options)
    login, at, places = parts.netloc.rpartition("@")
    sentinels = Sentinel([])
    pools = [_pool(f"{scheme}://{place}?{parts.query}") for place in places.split(",")]
    sentinels.sentinels = [Redis(connection_pool=pool) for pool in pools]
    options |= parse_url(f"redis://{login}{at}localhost{parts.path}?{parts.query}")
    return SentinelConnectionPool(parts.fragment, sentinels, **options)


class RedisClient:
    """Sends commands to a server, or to all servers of a cluster. ``last_error``: what went wrong last, for people.

    A server that says MOVED is one of a cluster, whose map redis-py reads and keeps from then on. Raises ValueError,
    LookupError, TypeError or RedisError for a URL that it does not understand.
    """

    def __init__(self, url: str) -> None:
        self.last_error = ""
        self._url, self._pool = url, _pool(url)
        self._pool.connection_class(
            **self._pool.connection_kwargs
        )  # which looks at the options, and connects to nobody
        self._cluster: Any = None
        self._lock = Lock()
        self._is_stale = self._is_closed = False
        self._info: dict[Any, tuple[float, dict[str, Any]]] = {}

    def ask(
        self, command: bytes, names: Sequence[bytes], deadline: float, records: Sequence[memoryview] = (), *more: bytes
    ) -> list[Reply]:
        """The reply to ``command`` for each name. SET stores ``records``, with words ``more``; GET reads into them.

        O(n), and a round trip to each server for each MiB of records or 1024 names. Redirected names go one after the other.
        """
        if self._is_closed or monotonic() >= deadline:
            return [Status.UNAVAILABLE if self._is_closed else Status.TIMEOUT] * len(names)
        asked: list[_Asked] = [
            ((command, name, record, *more) if command == b"SET" else (command, name), record)
            for name, record in zip_longest(names, records)
        ]
        step = max(1, _PART_NBYTES // len(records[0])) if records else _PART_NAMES
        replies: list[Reply] = [None] * len(names)
        groups: dict[Any, list[int]] = {}
        token = _deadline.set(deadline)
        try:
            self._read_map_again()
            for i, name in enumerate(names):
                groups.setdefault(self._pool_of(name), []).append(i)
            for pool, group in groups.items():
                for i, reply in zip(group, self._exchange(pool, [asked[i] for i in group], step)):
                    replies[i] = self._redirected(*asked[i], reply) if isinstance(reply, Exception) else reply
            if command == b"SET":
                for pool in {self._pool_of(name) for name, reply in zip(names, replies) if reply == 1}:
                    self._note(pool)
        except Exception as error:  # redis-py raises anything at all for what a server may say
            replies = [self._fault(error)] * len(names)
        finally:
            _deadline.reset(token)
        return replies

    def info(self) -> list[dict[str, Any]]:
        """What each server said of itself, a second before the last SET at most."""
        told = [self._info[pool] for pool in self._pools() if pool in self._info]
        return [info for _, info in told or self._info.values()]

    def close(self) -> None:
        """Close what is idle; what is in use is closed after its call. Later calls say UNAVAILABLE."""
        self._is_closed = True
        for pool in {self._pool, *self._pools()}:
            pool.disconnect(inuse_connections=False)

    def _pools(self) -> list[Any]:
        nodes = self._cluster.get_nodes() if self._cluster else ()
        return [node.redis_connection.connection_pool for node in nodes if node.redis_connection] or [self._pool]

    def _pool_of(self, name: bytes) -> Any:
        if self._cluster is None:
            return self._pool
        return self._cluster.get_redis_connection(self._cluster.get_node_from_key(name)).connection_pool

    def _exchange(self, pool: Any, asked: Sequence[_Asked], step: int) -> list[Any]:
        """Ask one server, ``step`` commands at a time. An exception is a reply too; errors of the server are, and if the
        connection fails, which is closed then, all that are missing."""
        replies: list[Any] = []
        connection = None
        try:
            connection = pool.get_connection()
            for part in (asked[start : start + step] for start in range(0, len(asked), step)):
                connection.send_packed_command([_packed(words for words, _ in part)])
                for words, record in part:
                    number = connection.wire.reply(record if words[0] == b"GET" else None)
                    replies.append(_error(connection) if number is None else None if number < 0 else number)
        except Exception as error:
            if connection is not None:
                connection.disconnect()
            replies += [error] * (len(asked) - len(replies))
        finally:
            if connection is not None:
                if self._is_closed:
                    connection.disconnect()
                pool.release(connection)
        return replies

    def _redirected(self, words: Words, record: memoryview | None, error: Exception) -> Reply:
        """What another server says if this one named it, or what the error means."""
        if not isinstance(error, (MovedError, AskError)):
            return self._fault(error)
        try:
            reply = self._known_cluster().execute_command(str(words[0], "ascii"), *words[1:])
        except Exception as failed:
            return self._fault(failed)
        if not isinstance(reply, bytes):
            return None if reply is None else int(reply)
        if record is not None and len(reply) == len(record):
            record[:] = reply
        return len(reply)

    def _fault(self, error: Exception) -> Status:
        self.last_error = str(error) or type(error).__name__
        if isinstance(error, OutOfMemoryError):
            return Status.REJECTED
        if self.last_error.startswith("WRONGTYPE"):
            return Status.CORRUPT
        self._is_stale = self._cluster is not None
        return Status.TIMEOUT if isinstance(error, (TimeoutError, RedisTimeoutError)) else Status.UNAVAILABLE

    def _known_cluster(self) -> Any:
        with self._lock:
            if self._cluster is None:
                self._cluster = RedisCluster.from_url(
                    "redis" + self._url[self._url.index(":") :],  # for the class of "rediss" would go before ours
                    connection_class=self._pool.connection_class,
                    protocol=2,
                    require_full_coverage=False,
                    retry=Retry(NoBackoff(), 0),
                )
            return self._cluster

    def _read_map_again(self) -> None:
        """After a fault, in half the time at most: who does not answer may be the one that is asked."""
        if self._is_stale:
            token = _deadline.set(monotonic() + _seconds_left() / 2)
            try:
                self._cluster.nodes_manager.initialize()
                self._is_stale = False
            except Exception as error:
                self.last_error = str(error)
            finally:
                _deadline.reset(token)

    def _note(self, pool: Any) -> None:
        """Ask a server what it holds, if it is time to."""
        if monotonic() >= self._info.get(pool, (-inf, {}))[0] + INFO_SECONDS:
            try:
                self._info[pool] = monotonic(), Redis(connection_pool=pool).info()
            except Exception as error:
                self.last_error = str(error)


def _packed(commands: Iterable[Words]) -> list[bytes | memoryview]:
    """Commands as they are sent, records where they lie."""
    parts, text = list[bytes | memoryview](), b""
    for words in commands:
        text += b"*%d\r\n" % len(words)
        for word in words:
            text += b"$%d\r\n" % len(word)
            if isinstance(word, memoryview):
                parts += [text, word]
                text = b"\r\n"
            else:
                text += word + b"\r\n"
    return [*parts, text]


def _error(connection: Any) -> ResponseError:
    """The error that redis-py reads. Raises RedisError where it is none, or one of the connection."""
    try:
        reply = connection.read_response()
    except ResponseError as error:
        return error
    raise InvalidResponse(f"no reply to what was asked: {str(reply)[:64]!r}")
