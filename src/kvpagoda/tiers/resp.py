"""One connection that speaks RESP, the protocol of Redis and Valkey. What is large is not copied, nothing is trusted."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any

from kvpagoda.tiers.driver import Status

Words = Sequence[bytes | memoryview]
Address = tuple[str, int]  # a host and its port, or a path and -1
MOST_NBYTES = 512 << 20  # of a value, by the protocol
_MOST_TEXT = 1 << 20  # of what servers say of themselves
_LINE = 4096
_SOCKET_NBYTES = 4 << 20
_LONGEST = 86400.0


class Refused(Exception):
    """An error reply. The connection is in step."""


class Malformed(OSError):
    """No reply of the protocol, or none to this command."""


class Connection:
    """A socket, and what was read ahead. Every step ends by ``deadline``, with TimeoutError; other faults are OSError or
    ValueError. After a fault it is good for nothing but ``close``."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, deadline: float) -> None:
        self.deadline, self._ahead = deadline, b""
        host, port = address
        places = [(socket.AF_UNIX, host)] if port < 0 else _places(address, deadline)
        for number, (family, place) in enumerate(places, 1):
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            try:
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _SOCKET_NBYTES)
                self._ready().connect(place)
                if port >= 0:
                    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    self._socket = tls.wrap_socket(self._ready(), server_hostname=host)
                return
            except (OSError, ValueError):
                self.close()
                if number == len(places):
                    raise

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    @property
    def is_in_step(self) -> bool:
        """Whether nothing came that nobody asked for."""
        return not self._ahead

    def send(self, commands: Sequence[Words]) -> None:
        """Write ``commands``; words that are memoryviews from where they lie."""
        parts, text = list[memoryview](), b""
        for words in commands:
            text += b"*%d\r\n" % len(words)
            for word in words:
                text += b"$%d\r\n" % len(word)
                if isinstance(word, memoryview):
                    parts += [memoryview(text), word]
                    text = b"\r\n"
                else:
                    text += word + b"\r\n"
        parts.append(memoryview(text))
        at = 0
        while at < len(parts):
            ready = self._ready()
            done = ready.send(parts[at]) if isinstance(ready, ssl.SSLSocket) else ready.sendmsg(parts[at : at + 64])
            while at < len(parts) and done >= len(parts[at]):
                done -= len(parts[at])
                at += 1
            if done:
                parts[at] = parts[at][done:]

    def number(self) -> int:
        """An integer."""
        return self._number(b":")

    def text(self) -> str:
        """A bulk string of moderate length."""
        text = bytearray(self._size(_MOST_TEXT))
        self._read(memoryview(text))
        self._end()
        return text.decode("ascii", "replace")

    def value(self, target: memoryview) -> Status:
        """A bulk string into ``target``: OK, MISS for null, and CORRUPT, after reading over it, for another length."""
        size = self._size(MOST_NBYTES)
        if size < 0:
            return Status.MISS
        for start in range(0, size, len(target)):
            self._read(target[: size - start])
        self._end()
        return Status.OK if size == len(target) else Status.CORRUPT

    def done(self) -> None:
        """OK, or null."""
        line = self._reply()
        if line not in (b"+OK", b"$-1"):
            raise Malformed(f"+OK was expected, got {line[:64]!r}")

    def _size(self, most: int) -> int:
        size = self._number(b"$")
        if size > most:
            raise Malformed(f"at most {most} bytes were expected, got {size}")
        return size

    def _number(self, kind: bytes) -> int:
        line = self._reply()
        digits = line[1:]
        if line[:1] != kind or not ((digits.isdigit() and len(digits) < 20) or line == b"$-1"):
            raise Malformed(f"{kind.decode()} and a number was expected, got {line[:64]!r}")
        return int(digits)

    def _reply(self) -> bytes:
        line = self._line()
        if line[:1] == b"-":
            raise Refused(line[1:].decode("ascii", "replace"))
        return line

    def _end(self) -> None:
        if self._line():
            raise Malformed("a value is longer than it says")

    def _line(self) -> bytes:
        while b"\n" not in self._ahead:
            if len(self._ahead) >= _LINE:
                raise Malformed(f"a line of more than {_LINE} bytes")
            more = self._ready().recv(_LINE)
            if not more:
                raise ConnectionResetError("the server closed the connection")
            self._ahead += more
        line, _, self._ahead = self._ahead.partition(b"\n")
        if line[-1:] != b"\r":
            raise Malformed(f"a line that ends otherwise: {line[:64]!r}")
        return line[:-1]

    def _read(self, target: memoryview) -> None:
        at = min(len(target), len(self._ahead))
        target[:at] = self._ahead[:at]
        self._ahead = self._ahead[at:]
        while at < len(target):
            done = self._ready().recv_into(target[at:])
            if not done:
                raise ConnectionResetError("the server closed the connection")
            at += done

    def _ready(self) -> socket.socket:
        left = self.deadline - monotonic()
        if left <= 0:
            raise TimeoutError("no answer by the deadline")
        self._socket.settimeout(min(left, _LONGEST))
        return self._socket


def _places(address: Address, deadline: float) -> list[tuple[int, Any]]:
    """The families and socket addresses of a host and a port. A thread looks names up: the system knows no deadlines."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        told: SimpleQueue[Any] = SimpleQueue()

        def ask() -> None:
            try:
                told.put(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
            except (OSError, ValueError) as error:
                told.put(error)

        Thread(target=ask, name="kvpagoda-name", daemon=True).start()
        try:
            found = told.get(timeout=max(0.0, min(deadline - monotonic(), _LONGEST)))
        except Empty:
            raise TimeoutError(f"no address of {address[0]} by the deadline") from None
        if isinstance(found, Exception):
            raise found from None
    return [(family, place) for family, *_, place in found]
