"""A ``Router`` over HTTP, with the standard library's server: a thread for each connection, loopback by default.

A connection waits for its client, who sends a request or takes the answer, or for the router. Who lets it wait too long is
cut off. Where all threads are taken, further clients wait in the queue of the socket, and the one who has let the server wait
the longest is cut off sooner."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from socket import SHUT_RDWR, SHUT_WR
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from kvpagoda.errors import BadInput, shown
from kvpagoda.events.router import MOST_NBYTES, Router, RouterAnswer, failure, too_large

MOST_CONNECTIONS = 128
"""The most connections, with a thread each."""
PATIENCE = 10.0
"""Seconds that a client may take to begin and send a request, or to receive the answer."""
LEAST_PATIENCE = 1.0
"""Seconds that every client has, however many wait."""
_log = logging.getLogger(__name__)


class RouterServer:
    """Serves a router in a thread of its own, until ``close``.

    There is no authentication, and who may ask for scores learns which texts are cached: serve other hosts only behind
    a proxy that has one.

    Args:
        router: that answers.
        host: the address that is bound.
        port: 0: a free one.

    Raises:
        BadInput: an address that cannot be bound.
    """

    def __init__(self, router: Router, host: str = "127.0.0.1", port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"router": router})
        try:
            self._server = _Server((host, port), handler)
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot serve on {host}:{port}: {error}", needed=(host, port)) from None
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._ended = Event()
        self._thread = Thread(target=self._serve, name="kvpagoda-http", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the server is closed by another thread. An interrupt is raised, and the server can be closed then."""
        self._ended.wait()  # a thread whose join is interrupted counts as ended in Python 3.11, and would not be shut down

    def close(self) -> None:
        """Serve no more. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        try:
            self._server.serve_forever(0.05)
        finally:
            self._ended.set()

    def __enter__(self) -> RouterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """A server that cuts off connections whose clients are slow. ``waits``: connection -> since when it waits for its client;
    ``inf`` while it does not."""

    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.waits: dict[Any, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection in a thread of its own, as soon as there may be one more."""
        while len(self.waits) >= MOST_CONNECTIONS:
            slowest = min([*self.waits], key=self._since, default=None)
            if monotonic() - self._since(slowest) > LEAST_PATIENCE:
                self._cut(slowest)
            else:
                sleep(0.01)
        self.waits[request] = monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off who is too slow: called after each new connection, and many times a second."""
        now = monotonic()
        # Not its items: to make pairs may run the garbage collector, and that may let other threads begin connections.
        for connection in [*self.waits]:
            if now - self._since(connection) > PATIENCE:
                self._cut(connection)

    def _since(self, connection: Any) -> float:
        return self.waits.get(connection, inf)

    def shutdown_request(self, request: Any) -> None:
        self.waits.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in [*self.waits]:
            self._cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""
        _log.debug("a connection of %s ended", client_address, exc_info=True)

    def _cut(self, connection: Any) -> None:
        self.waits.pop(connection, None)
        with suppress(OSError):  # its thread sees the end of the connection, and ends
            connection.shutdown(SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Reads a request as far as ``Router.answer`` needs it, and writes the answer as JSON."""

    router: Router
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm, wbufsize = True, -1

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, lengths = self.path.partition("?")[0], self.headers.get_all("Content-Length", ["0"])
        length = lengths[0].lstrip("0") or "0" if len(lengths) == 1 else ", ".join(lengths)
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._refuse(
                failure(
                    411, "LengthRequired", f"a body needs a Content-Length in bytes, got {shown(length)}", length[:99]
                )
            )
        elif len(length) > 18:
            self._refuse(too_large(f"a number of {len(length)} digits"))
        elif int(length) > MOST_NBYTES:
            self._refuse(too_large(int(length)))
        else:
            body = self.rfile.read(int(length))
            self.server.waits[self.connection] = inf
            self._write(self.router.answer(self.command, path, body))

    def _refuse(self, answer: RouterAnswer) -> None:
        """Answer without reading the body; what follows on the connection is dropped."""
        self.close_connection = True
        self._write(answer)
        with suppress(OSError):  # closed while something is unread, a connection may lose the answer
            self.connection.shutdown(SHUT_WR)
            while self.connection.recv(1 << 16):
                pass

    def _write(self, answer: RouterAnswer) -> None:
        data = json.dumps(answer.body).encode()
        self.server.waits[self.connection] = monotonic()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        self.server.waits[self.connection] = monotonic()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the server itself refuses, such as one with another method."""
        self._refuse(failure(code, "BadRequest", message or "this is no request that can be read"))

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""
