"""Connections of redis-py whose waits end at the deadline of a call, and that receive values directly into records.

redis-py limits the time of each wait for bytes, not of a call, and copies a value four times while it is received.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextvars import ContextVar
from math import inf
from ssl import SSLSocket
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from redis import ConnectionPool, Redis, Sentinel
from redis._parsers import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.connection import (
    Connection,
    PythonRespSerializer,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.exceptions import ReadOnlyError
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

Asked = tuple[tuple[Any, ...], memoryview | None]
"""A command, and the record that its reply is read into."""
call_deadline: ContextVar[float] = ContextVar("call_deadline", default=inf)
"""The deadline, of ``time.monotonic``, of the call that this thread executes."""

_RECEIVE_NBYTES = 4 << 20  # receive buffer of a socket
_MOST_NBYTES = 16 << 20  # limit of a reply that is no record: a cluster map, a record whose hash slot is moving
_READ_NBYTES = 4096  # bytes read ahead; the part of a record among them is copied once more
_LONGEST_SECONDS = 86400.0


def seconds_left(_: object = None) -> float:
    """Return the seconds until the deadline; never 0, which sockets read as "do not wait". Raises TimeoutError."""
    seconds = call_deadline.get() - monotonic()
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
                self._sock.settimeout(seconds_left())
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
                self._sock.settimeout(seconds_left())
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
                connected.settimeout(seconds_left())
                connected.connect(place)
                return connected
            except OSError as error:
                connected.close()
                failed = error
        raise failed


class _Bounded:
    """Mixed into a connection class of redis-py: every wait of the connection ends at the deadline of the call."""

    socket_timeout = socket_connect_timeout = property(seconds_left, lambda _, seconds: None)

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
            connected.settimeout(seconds_left())
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


def connections(url: str) -> Any:
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
    pools = [connections(f"{scheme}://{place}?{parts.query}") for place in places.split(",")]
    sentinels.sentinels = [Redis(connection_pool=pool) for pool in pools]
    options |= parse_url(f"redis://{login}{at}localhost{parts.path}?{parts.query}")
    return SentinelConnectionPool(parts.fragment, sentinels, **options)


def exchange(pool: Any, asked: Sequence[Asked], step: int) -> list[Any]:
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
