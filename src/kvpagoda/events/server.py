"""A ``Router`` over HTTP, with the standard library's server: a thread for each connection, loopback by default."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from kvpagoda.errors import BadInput
from kvpagoda.events.router import MOST_NBYTES, Answer, Router, failure, too_large

_PATIENCE = 10.0  # seconds that a connection may be idle, or slow


class RouterServer:
    """Serves ``router`` on ``host`` and ``port`` (0: a free one) in a thread of its own, until ``close``.

    There is no authentication, and who may ask for scores learns which texts are cached: serve other hosts only behind a
    proxy that has one. Raises BadInput for an address that cannot be bound.
    """

    def __init__(self, router: Router, host: str = "127.0.0.1", port: int = 0) -> None:
        handler = type("Handler", (_Handler,), {"router": router})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except (OSError, OverflowError) as error:
            raise BadInput(f"cannot serve on {host}:{port}: {error}") from None
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


class _Handler(BaseHTTPRequestHandler):
    """Reads a request as far as ``Router.answer`` needs it, and writes the answer as JSON."""

    router: Router
    protocol_version, timeout = "HTTP/1.1", _PATIENCE
    disable_nagle_algorithm, wbufsize = True, -1

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, length = self.path.partition("?")[0], self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._refuse(
                failure(411, "LengthRequired", f"a body needs a Content-Length in bytes, got {length!r}", length)
            )
        elif int(length) > MOST_NBYTES:
            self._refuse(too_large(int(length)))
        else:
            body = self.rfile.read(int(length))
            self._write(self.router.answer(self.command, path, body))

    def _refuse(self, answer: Answer) -> None:
        """Answer without reading the body; what follows on the connection is not read either."""
        self.close_connection = True
        self._write(answer)

    def _write(self, answer: Answer) -> None:
        data = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the server itself refuses, such as one with another method."""
        self._refuse(failure(code, "BadRequest", message or "this is no request that can be read"))

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""
