"""redis-py as the client of ``RedisDriver``: its pools, logins, TLS, cluster map and sentinels, over sockets with a deadline.

redis-py bounds each wait for bytes, not a call, and copies a value four times on its way. Both are settled at the socket: each
connection has a ``_Socket``, which gives up at the deadline of the call in progress, sends records from where they lie and
reads them to where they belong. The replies that it does not know, errors above all, are left to redis-py.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from contextvars import ContextVar
from itertools import zip_longest
from math import inf
from socket import socket
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from redis import ConnectionPool, Redis, RedisCluster, Sentinel
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.exceptions import AskError, InvalidResponse, MovedError, OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from kvpagoda.tiers.driver import Status

Words = tuple[bytes | memoryview, ...]
Reply = int | None | Status
"""GET, STRLEN: bytes of the value; DEL: how many there were; SET: 1. None: no value, or NX kept one. Or what went wrong."""

INFO_SECONDS = 1.0
_PART_NBYTES = 1 << 20  # asked for at once: more of it, and server and client wake each other for less
_PART_NAMES = 1024
_MOST_READ_NBYTES = 4 << 20  # by redis-py, of the replies to one call: more than the map of the largest cluster
_HEAD_NBYTES = 12
_LINES_NBYTES = 4096
_LONGEST_SECONDS = 86400.0
_KNOWN = {
    b"GET": re.compile(rb"\$(-1|\d{1,9})\r\n"),
    b"SET": re.compile(rb"\+OK\r\n|\$(-1)\r\n"),
    b"STRLEN": re.compile(rb":(\d{1,18})\r\n"),
    b"DEL": re.compile(rb":(\d{1,18})\r\n"),
}
_deadline: ContextVar[float] = ContextVar("deadline", default=inf)  # of the call that this thread is in


def _seconds_left() -> float:
    """At least 1 ms: sockets take 0 for "do not wait"."""
    return min(max(_deadline.get() - monotonic(), 0.001), _LONGEST_SECONDS)


class _Socket:
    """A connected socket. Whatever it does ends by the deadline of the call that it is used in, with TimeoutError."""

    def __init__(self, connected: socket) -> None:
        self._socket, self._ahead, self._is_polled, self._most = connected, b"", False, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, seconds: float | None) -> None:
        """0: do not wait. Other timeouts do not count."""
        self._is_polled = seconds == 0

    def sendall(self, data: Any) -> None:
        """Send a buffer, or a list of buffers."""
        parts, at = [memoryview(part) for part in (data if isinstance(data, list) else [data])], 0
        self._most = _MOST_READ_NBYTES
        while at < len(parts):
            ready = self._ready()
            done = ready.send(parts[at]) if isinstance(ready, ssl.SSLSocket) else ready.sendmsg(parts[at : at + 64])
            while at < len(parts) and done >= len(parts[at]):
                done -= len(parts[at])
                at += 1
            if done:
                parts[at] = parts[at][done:]

    def recv(self, nbytes: int) -> bytes:
        """What came, for redis-py. Raises OSError if that is too much for an answer."""
        data, self._ahead = self._ahead or self._ready().recv(nbytes), b""
        self._most -= len(data)
        if self._most < 0:
            raise OSError(f"an answer of more than {_MOST_READ_NBYTES} bytes")
        return data

    def recv_into(self, target: memoryview) -> int:
        """The same, into ``target``."""
        data = self.recv(len(target))
        target[: len(data)] = data
        return len(data)

    def reply(self, command: bytes, target: memoryview | None) -> int | None:
        """The number that answers ``command``, -1 for null; of GET the length of a value, which is read into ``target``.

        A value longer than ``target`` is read over itself. None, and nothing is read, for any other reply.
        """
        while not (head := _KNOWN[command].match(self._ahead)):
            if b"\n" in self._ahead or len(self._ahead) >= _LINES_NBYTES:
                return None
            self._ahead += self._some(_HEAD_NBYTES if command == b"GET" else _LINES_NBYTES)
        number, self._ahead = int(head[1] or 1), self._ahead[head.end() :]
        if command == b"GET" and number >= 0 and target is not None:
            for start in range(0, number, len(target)):
                self._fill(target[: number - start])
            while len(self._ahead) < 2:
                self._ahead += self._some(_HEAD_NBYTES)
            if self._ahead[:2] != b"\r\n":
                raise OSError("a value is longer than it says")
            self._ahead = self._ahead[2:]
        return number

    def _fill(self, target: memoryview) -> None:
        at = min(len(target), len(self._ahead))
        target[:at], self._ahead = self._ahead[:at], self._ahead[at:]
        while at < len(target):
            done = self._ready().recv_into(target[at:])
            if not done:
                raise ConnectionResetError("the server closed the connection")
            at += done

    def _some(self, nbytes: int) -> bytes:
        data = self._ready().recv(nbytes)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def _ready(self) -> socket:
        if monotonic() >= _deadline.get():
            raise TimeoutError("no answer by the deadline")
        self._socket.settimeout(0.0 if self._is_polled else _seconds_left())
        return self._socket


class _Connection:
    """Mixed into a connection of redis-py: it has a ``_Socket``, and connects by the deadline."""

    wire: _Socket
    socket_timeout = socket_connect_timeout = property(lambda _: _seconds_left(), lambda _, seconds: None)

    def _connect(self) -> _Socket:
        self.wire = _Socket(super()._connect())  # type: ignore[misc]
        return self.wire


_CLASSES: dict[str, Any] = {
    scheme: type(base.__name__, (_Connection, base), {})
    for scheme, base in (
        ("redis", Connection),
        ("rediss", SSLConnection),
        ("unix", UnixDomainSocketConnection),
        ("redis+sentinel", SentinelManagedConnection),
        ("rediss+sentinel", SentinelManagedSSLConnection),
    )
}


def _pool(url: str) -> Any:
    """The connections to the server of ``url``, or to the master that its sentinels name. Raises ValueError."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if parts.scheme not in _CLASSES:
        raise ValueError(f"no scheme {parts.scheme}")
    options = {"connection_class": _CLASSES[parts.scheme], "protocol": 2}
    if kind:
        login, at, places = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        sentinels = Sentinel([])
        for place in places.split(","):
            sentinels.sentinels.append(Redis(connection_pool=_pool(f"{scheme}://{place}?{parts.query}")))
        rest = parse_url(f"redis://{login}{at}localhost/{database}?{parts.query}")
        is_whole = bool(service) and (database or "0").isdecimal()
        pool = SentinelConnectionPool(service, sentinels, **rest, **options)
    else:
        is_whole = bool(parts.path if scheme == "unix" else parts.hostname and (parts.path.strip("/") or "0").isdecimal())
        pool = ConnectionPool.from_url(url, **options)
    if not is_whole or (not kind and parts.port == 0):
        raise ValueError("a host, a port, a path, a service or a database is missing or wrong")
    return pool


class RedisClient:
    """Sends commands to a server, or to all servers of a cluster. ``last_error``: what went wrong last, for people.

    A server that says MOVED is one of a cluster, whose map redis-py reads and keeps from then on. Raises ValueError, TypeError
    or RedisError for a URL that redis-py does not understand.
    """

    def __init__(self, url: str) -> None:
        self.last_error = ""
        self._url, self._pool = url, _pool(url)
        self._pool.connection_class(**self._pool.connection_kwargs)  # which looks at the options, and connects to nobody
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
        asked: list[tuple[Words, memoryview | None]] = [
            ((command, name, record, *more) if command == b"SET" else (command, name), record)
            for name, record in zip_longest(names, records)
        ]
        step = max(1, _PART_NBYTES // len(records[0])) if records else _PART_NAMES
        replies: list[Any] = [None] * len(names)
        groups: dict[Any, list[int]] = {}
        token = _deadline.set(deadline)
        try:
            self._read_map_again()
            for i, name in enumerate(names):
                try:
                    groups.setdefault(self._pool_of(name), []).append(i)
                except Exception as error:  # nobody has its slot
                    replies[i] = error
            for pool, group in groups.items():
                for part in (group[start : start + step] for start in range(0, len(group), step)):
                    for i, reply in zip(part, self._exchange(pool, [asked[i] for i in part])):
                        replies[i] = reply
                if command == b"SET" and not isinstance(replies[group[-1]], Exception):
                    self._note(pool)
            return [self._told(*one, reply) for one, reply in zip(asked, replies)]
        finally:
            _deadline.reset(token)

    def info(self) -> list[dict[str, Any]]:
        """What each server said of itself, a second before the last SET at most."""
        return [self._info[pool][1] for pool in self._pools() if pool in self._info]

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

    def _exchange(self, pool: Any, asked: Sequence[tuple[Words, memoryview | None]]) -> list[Any]:
        """Send commands to one server and read their replies; what goes wrong is a reply too.

        A connection that did not come to the end of them is closed.
        """
        replies: list[Any] = []
        connection = None
        try:
            connection = pool.get_connection()
            connection.send_packed_command([_packed(words for words, _ in asked)])
            is_direct = True  # until redis-py has read, and perhaps ahead
            for words, record in asked:
                number = connection.wire.reply(words[0], record) if is_direct else None
                if number is None:
                    is_direct = False
                    replies.append(_read(connection, words, record))
                else:
                    replies.append(None if number < 0 else number)
        except Exception as error:  # redis-py raises anything at all for what a server may say
            if connection is not None:
                connection.disconnect()
            self._is_stale = self._cluster is not None
            replies += [error] * (len(asked) - len(replies))
        finally:
            if connection is not None:
                if self._is_closed:
                    connection.disconnect()
                pool.release(connection)
        return replies

    def _told(self, words: Words, record: memoryview | None, reply: Any) -> Reply:
        if isinstance(reply, (MovedError, AskError)):
            try:
                reply = _checked(words, record, self._known_cluster().execute_command(str(words[0], "ascii"), *words[1:]))
            except Exception as error:
                self._is_stale = self._cluster is not None
                reply = error
        if not isinstance(reply, Exception):
            return reply
        self.last_error = str(reply) or type(reply).__name__
        if isinstance(reply, OutOfMemoryError):
            return Status.REJECTED
        if isinstance(reply, (TimeoutError, RedisTimeoutError)):
            return Status.TIMEOUT
        return Status.CORRUPT if self.last_error.startswith("WRONGTYPE") else Status.UNAVAILABLE

    def _known_cluster(self) -> Any:
        with self._lock:
            if self._cluster is None:
                self._cluster = RedisCluster.from_url(
                    "redis" + self._url[self._url.index(":") :],  # for the class of "rediss" would count more than ours
                    connection_class=self._pool.connection_class,
                    protocol=2,
                    require_full_coverage=False,
                    retry=Retry(NoBackoff(), 0),
                )
            return self._cluster

    def _read_map_again(self) -> None:
        """After a fault, in half the time at most: who does not answer may be the one that is asked."""
        if self._is_stale:
            self._is_stale = False
            token = _deadline.set(monotonic() + _seconds_left() / 2)
            try:
                self._cluster.nodes_manager.initialize()
            except Exception as error:
                self._is_stale, self.last_error = True, str(error)
            finally:
                _deadline.reset(token)

    def _note(self, pool: Any) -> None:
        """Ask a server what it holds, if it is time to."""
        if monotonic() >= self._info.get(pool, (-inf, {}))[0] + INFO_SECONDS:
            try:
                self._info[pool] = monotonic(), Redis(connection_pool=pool).info()
            except Exception as error:
                self.last_error = str(error)


def _packed(commands: Any) -> list[bytes | memoryview]:
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


def _read(connection: Any, words: Words, record: memoryview | None) -> Any:
    """A reply that redis-py reads: an error, most of the time."""
    try:
        return _checked(words, record, connection.read_response())
    except ResponseError as error:
        return error


def _checked(words: Words, record: memoryview | None, reply: Any) -> int | None:
    """``reply`` as a ``Reply``. Raises InvalidResponse where it is none to these words."""
    command = words[0]
    if command == b"GET" and isinstance(reply, bytes) and record is not None:
        if len(reply) == len(record):
            record[:] = reply
        return len(reply)
    if command == b"SET" and (reply is True or reply == b"OK"):
        return 1
    if command in (b"GET", b"SET") and reply is None:
        return None
    if command in (b"STRLEN", b"DEL") and type(reply) is int:
        return reply
    raise InvalidResponse(f"no answer to {words[0]!r}: {str(reply)[:64]!r}")
