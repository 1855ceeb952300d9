"""A router over sockets and HTTP: its scores are those of ``lookup`` for each engine; what it refuses it says with numbers."""

from __future__ import annotations

import gc
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from kvpagoda import Namespace
from kvpagoda.errors import BadInput

pytest.importorskip("msgspec", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")
pytest.importorskip("zmq", reason="events need msgspec and pyzmq: pip install kvpagoda[events]")

from unittest.mock import ANY, Mock

from traffic import Traffic

from kvpagoda.events import Encoding, Follower, Publisher, Router, RouterServer, Subscriber
from kvpagoda.events.router import MOST_NBYTES
from kvpagoda.events.server import _Server
from raises import raises

LOCAL, PATIENCE = "tcp://127.0.0.1:*", 20.0
NOBODY = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
SCHEMAS = ("full", "gemma", "qwen3_next", "sliding")


def until(is_so: Any) -> None:
    end = monotonic() + PATIENCE
    while not is_so():
        assert monotonic() < end, is_so
        sleep(0.01)


def ask(server: RouterServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer; ``body``: bytes, or an object to send as JSON."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class Fleet:
    """An engine of each schema that publishes, and a router of all."""

    def __init__(self) -> None:
        self.engines = {name: Traffic(name, 5) for name in SCHEMAS}
        self.publishers = {name: Publisher(one.log, LOCAL, LOCAL) for name, one in self.engines.items()}
        ends = {name: (one.endpoint, one.replay_endpoint) for name, one in self.publishers.items()}
        self.router = Router(ends, secret=b"s")
        self.server = RouterServer(self.router)

    def work(self, num_steps: int) -> None:
        for name, engine in self.engines.items():
            for _ in range(num_steps):
                engine.step()
            assert self.publishers[name].flush()
        for name, worker in self.router.workers.items():
            last = self.publishers[name]._stream.last
            until(lambda worker=worker, last=last: worker.subscriber.follower._next == last + 1)

    def close(self) -> None:
        self.server.close()
        self.router.close()
        for publisher in self.publishers.values():
            publisher.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[RouterServer]:
    """The server of a router whose one worker does not run."""
    with Router({"a": NOBODY}) as router, RouterServer(router) as made:
        yield made


def test_scores_are_those_of_lookup(fleet: Fleet) -> None:
    hits = 0
    for _ in range(10):
        fleet.work(60)
        for engine in [*fleet.engines.values()] * 5:
            tokens, media = engine.text()
            if engine.running and not (one := engine.one())._request.media_ids:
                tokens, media = one.tokens, {}
            namespace = [*[None] * 8, "a", Namespace("b", adapter="c")][len(tokens) % 10]
            asked: dict[str, Any] = {"tokens": tokens.tolist(), "media": {at: one.hex() for at, one in media.items()}}
            if isinstance(namespace, Namespace):
                asked["namespace"] = {"salt": "b", "adapter": "c"}
            elif namespace is not None:
                asked["namespace"] = namespace
            status, found = ask(fleet.server, "POST", "/score", asked)
            assert (status, [*found]) == (200, ["resumable", "cached", "at_most", "stale"]) and found["stale"] == []
            for name, other in fleet.engines.items():
                said = other.cache.lookup(tokens, namespace, media=media)
                assert (found["cached"][name], found["resumable"][name]) == (said.cached, said.resumable)
                hits += said.resumable > 0
    assert hits > 20


def test_it_is_asked_by_many_while_engines_work(fleet: Fleet) -> None:
    fleet.work(30)
    faults, is_over = list[Any](), threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            status, found = ask(fleet.server, "POST", "/score", {"tokens": [0, 1, 2, 3, 4, 5, 6, 0]})
            if status != 200 or {*found["cached"]} != {*SCHEMAS}:
                faults.append((status, found))

    threads = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    fleet.work(120)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not faults


def test_health_says_what_is_known_of_each_worker(fleet: Fleet) -> None:
    fleet.work(60)
    status, said = ask(fleet.server, "GET", "/health")
    assert (status, said["status"]) == (200, "ok") and {*said["workers"]} == {*SCHEMAS}
    for name, one in said["workers"].items():
        assert one["num_blocks"] == len(fleet.publishers[name]._stream.index.blocks)
        assert (one["is_stale"], one["wanted"], one["fault"]) == (False, None, "") and one["silent_seconds"] < PATIENCE
    fleet.publishers["full"].close()
    until(lambda: ask(fleet.server, "GET", "/health")[1]["status"] == "stale")
    assert ask(fleet.server, "POST", "/score", {"tokens": [1, 2]})[1]["stale"] == ["full"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/score", b"", 400, "0 bytes are no question"),
        ("POST", "/score", b"{", 400, "1 bytes are no question"),
        ("POST", "/score", b"\xff\xfe", 400, "are no question"),
        ("POST", "/score", [1, 2], 400, "Expected `object`, got `array`"),
        ("POST", "/score", {}, 400, "missing required field `tokens`"),
        ("POST", "/score", {"tokens": "abc"}, 400, "Expected `array`, got `str` - at `$.tokens`"),
        ("POST", "/score", {"tokens": [1, 2.5]}, 400, "Expected `int`, got `float` - at `$.tokens[1]`"),
        ("POST", "/score", {"tokens": [1, -2]}, 400, "token id -2 is outside the vocabulary 0..2147483647"),
        ("POST", "/score", {"tokens": [2**63]}, 400, "token id"),
        ("POST", "/score", {"tokens": [2**70]}, 400, "token ids must be a vector of integers"),
        ("POST", "/score", {"tokens": [1], "token": 2}, 400, "unknown field `token`"),
        ("POST", "/score", {"tokens": [1], "namespace": {"tenant": "a"}}, 400, "unknown field `tenant`"),
        ("POST", "/score", {"tokens": [1], "namespace": 7}, 400, "Expected `str | object | null`, got `int`"),
        ("POST", "/score", {"tokens": [1], "media": {"0": "xy"}}, 400, "non-hexadecimal"),
        ("POST", "/score", {"tokens": [1], "media": {"a": "00"}}, 400, "Expected `int`, got `str`"),
        ("POST", "/score", {"tokens": [1], "media": {"0": "00"}}, 400, "a digest of media is at least 16 bytes"),
        ("POST", "/score", {"tokens": [1], "media": {"1": "00" * 16}}, 400, "a position in the prompt, 0..0, got 1"),
        ("POST", "/score", {"tokens": [1], "media": {"-1": "00" * 16}}, 400, "an offset of media must be a whole number"),
        ("POST", "/scores", {"tokens": [1]}, 404, "no '/scores' here; known: /score, /health; did you mean '/score'?"),
        ("GET", "/score", None, 405, "/score takes POST, got GET"),
        ("POST", "/health", {}, 405, "/health takes GET, got POST"),
        ("PUT", "/score", {}, 501, "Unsupported method"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(
    server: RouterServer, method: str, path: str, body: Any, status: int, message: str
) -> None:
    got, said = ask(server, method, path, body)
    assert got == status and {*said["error"]} == {"type", "message", "needed", "available"}, said
    assert message in said["error"]["message"], said
    assert ask(server, "POST", "/score", {"tokens": [1]})[0] == 200


def test_bodies_without_end_are_not_read(server: RouterServer, capfd: pytest.CaptureFixture[str]) -> None:
    got, said = ask(server, "POST", "/score", b"", **{"Content-Length": str(MOST_NBYTES + 1)})
    assert got == 413 and (said["error"]["needed"], said["error"]["available"]) == (MOST_NBYTES + 1, MOST_NBYTES)
    for length in ("-1", "many", "1e3"):
        got, said = ask(server, "POST", "/score", b"", **{"Content-Length": length})
        assert got == 411 and length in said["error"]["message"]
    got, said = ask(server, "POST", "/score", b"{}", **{"Transfer-Encoding": "chunked"})
    assert got == 411
    got, said = ask(server, "POST", "/score", b"", **{"Content-Length": "9" * 5000})
    assert got == 413 and "got a number of 5000 digits" in said["error"]["message"]
    assert ask(server, "POST", "/score", b"{", **{"Content-Length": "0" * 5000 + "1"})[0] == 400
    with Router({"a": NOBODY}) as router:
        assert router.answer("POST", "/score", b" " * (MOST_NBYTES + 1)).status == 413
    for text, kind in (
        (b"nonsense\r\n\r\n", b'"BadRequest"'),
        (b"POST /score HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}", b'"LengthRequired"'),
        (b"POST /" + b"a" * 70_000, b'"BadRequest"'),
        (b"POST /score HTTP/1.1\r\nA: " + b"a" * 70_000, b'"BadRequest"'),
        (b"POST /score HTTP/1.1\r\n" + b"A: a\r\n" * 200, b'"BadRequest"'),
        (b"POST /score HTTP/1.1\r\nContent-Length: 20000000\r\n\r\n" + bytes(20_000_000), b'"TooLarge"'),
    ):
        with connected(server) as line:
            line.sendall(text)
            line.shutdown(socket.SHUT_WR)
            assert kind in b"".join(iter(lambda: line.recv(1000), b"")), text[:60]
    assert capfd.readouterr() == ("", "")


def connected(server: RouterServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def test_a_hundred_clients_at_once_are_served_soon(server: RouterServer) -> None:
    """Nobody waits until the system sends its connection again, which takes a second, then two and four."""
    begin, waited, faults = threading.Barrier(100), list[float](), list[Any]()

    def client() -> None:
        begin.wait()
        start = monotonic()
        try:
            assert ask(server, "POST", "/score", {"tokens": [1, 2, 3]})[0] == 200
        except Exception as error:
            faults.append(error)
        waited.append(monotonic() - start)

    threads = [threading.Thread(target=client) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and max(waited) < 5


def test_slow_clients_keep_nobody_waiting(
    server: RouterServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where all threads wait for clients, the slowest of them is cut off for a new one."""
    monkeypatch.setattr("kvpagoda.events.server.MOST_CONNECTIONS", 8)
    monkeypatch.setattr("kvpagoda.events.server.LEAST_PATIENCE", 0.2)
    beginnings = (
        b"",
        b"POST /sc",
        b"POST /score HTTP/1.1\r\nA: b\r\n",
        b"POST /score HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    )
    lines = [connected(server) for _ in range(12)]
    for at, line in enumerate(lines):
        line.sendall(beginnings[at % 4])
    assert ask(server, "POST", "/score", {"tokens": [1]})[0] == 200
    assert lines[0].recv(1) == b""
    monkeypatch.setattr("kvpagoda.events.server.PATIENCE", 0.3)
    for line in lines[-4:]:  # a byte now and then does not help
        with suppress(ConnectionError):
            while True:
                line.sendall(b"a")
                line.settimeout(0.1)
                with suppress(TimeoutError):
                    assert not line.recv(1000).startswith(b"HTTP/1.1 2")
                    break
        line.close()
    until(lambda: not server._server.waits)
    assert ask(server, "GET", "/health")[0] == 200
    for line in lines:
        line.close()
    assert capfd.readouterr() == ("", "")


def test_a_long_secret_is_refused_where_it_is_given(here: Any, tmp_path: Path) -> None:
    """The engine's ``Identity`` refuses it too."""
    message = "a secret is at most 64 bytes, got 65; give a digest of it"
    for make in (
        lambda secret: Router({"a": NOBODY}, secret=secret),
        Follower,
        lambda secret: Subscriber(*NOBODY, secret=secret),
    ):
        with raises(BadInput, field="secret", needed=65, available=64):
            make(bytes(65))
        with raises(BadInput, field="secret", needed="str"):
            make("secret")
    with Router({"a": NOBODY}, secret=bytes(64)) as router:
        assert router.answer("POST", "/score", b'{"tokens": [1]}').status == 200
    (tmp_path / "secret").write_bytes(bytes(65))
    done = here("router", "a=" + ",".join(NOBODY), "--secret-file", str(tmp_path / "secret"))
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_worker_that_is_not_kvpagoda_is_named() -> None:
    traffic = Traffic("full", 1)
    with (
        Publisher(traffic.log, LOCAL, LOCAL, encoding=Encoding(own_fields=False)) as publisher,
        Router({"a": (publisher.endpoint, publisher.replay_endpoint)}) as router,
    ):
        until(lambda: router.workers["a"].fault)
        body = router.answer("GET", "/health").body
        assert body["status"] == "stale" and "not from kvpagoda" in body["workers"]["a"]["fault"]


def test_bad_workers_are_told() -> None:
    with raises(BadInput, needed=1, available=0):
        Router({})
    with raises(BadInput, needed="nowhere"):
        Router({"a": ("nowhere", "tcp://127.0.0.1:1")})
    with Router({"a": NOBODY}) as router:
        for host, port in (("203.0.113.7", 0), ("127.0.0.1", 70_000)):
            with raises(BadInput, needed=(host, port)):
                RouterServer(router, host, port)
        with raises(BadInput, needed=ANY, available=[1]):
            router.scores(["a"])
        assert router.answer("POST", "/score", b'{"tokens": [1], "namespace": "nobody"}').body["cached"] == {"a": 0}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts work here, and in processes that are started, also where a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_server_whose_wait_was_interrupted_can_be_closed(fleet: Fleet) -> None:
    with RouterServer(fleet.router) as server:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            server.wait()
        assert ask(server, "GET", "/health")[0] == 200
    with pytest.raises(ConnectionRefusedError):
        ask(server, "GET", "/health")


@pytest.mark.usefixtures("interruptible")
def test_the_command_serves_until_it_is_interrupted(fleet: Fleet, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    fleet.work(60)
    (tmp_path / "secret").write_bytes(b"s")
    first, *others = fleet.publishers.items()
    (tmp_path / "workers.json").write_text(
        json.dumps({name: [one.endpoint, one.replay_endpoint] for name, one in others})
    )
    command = [
        sys.executable, "-m", "kvpagoda", "router", f"{first[0]}={first[1].endpoint},{first[1].replay_endpoint}",
        "--workers", str(tmp_path / "workers.json"), "--port", "0", "--secret-file", str(tmp_path / "secret"),
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            line = child.stdout.readline()
            found = re.fullmatch(r"4 workers at (http://127.0.0.1:\d+)/score\n", line)
            assert found, (line, child.stderr.read() if child.poll() else "")
            there: Any = type("Server", (), {"url": found[1]})
            until(lambda: ask(there, "GET", "/health")[1]["status"] == "ok")
            tokens = fleet.engines["full"].text()[0].tolist()
            assert ask(there, "POST", "/score", {"tokens": tokens}) == ask(
                fleet.server, "POST", "/score", {"tokens": tokens}
            )
            child.send_signal(signal.SIGINT)
            assert child.wait(PATIENCE) == 0 and child.stderr.read() == ""
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a router follows at least one worker"),
        (["a=tcp://127.0.0.1:1"], "a worker is NAME=ENDPOINT,REPLAY, got 'a' with 1 endpoints"),
        (["a=tcp://h:1,tcp://h:2", "a=tcp://h:1,tcp://h:2"], "two workers are named 'a'"),
        (["--workers", "LIST"], "must hold JSON like"),
        (["--workers", "absent.json"], "absent.json"),
    ],
)
def test_a_wrong_command_line_is_one_line(here: Any, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "list.json").write_text("[1]")
    done = here("router", *(str(tmp_path / "list.json") if one == "LIST" else one for one in arguments))
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_connections_may_begin_while_the_slow_ones_are_looked_for() -> None:
    """Where the garbage collector runs, other threads may run, too: it calls finalizers."""
    with _Server(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.waits = {Mock(): monotonic() for _ in range(3)}

        def begin(phase: str, _: Any) -> None:
            server.waits[Mock()] = monotonic()

        before, kept = gc.get_threshold(), [(object(), 1.0) for _ in range(5000)]  # so that new pairs are allocated
        gc.callbacks.append(begin)
        gc.set_threshold(1)
        try:
            server.service_actions()
        finally:
            gc.set_threshold(*before)
            gc.callbacks.remove(begin)
        assert kept and len(server.waits) >= 3


def test_a_server_whose_thread_ended_closes_its_socket() -> None:
    with Router({"a": NOBODY}) as router:
        server = RouterServer(router)
        server._server.shutdown()
        server._thread.join()
        server.close()
        server.close()
        with pytest.raises(OSError):
            connected(server)


def test_whether_a_worker_is_stale_is_of_the_moment_of_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hear of the worker right afterwards."""

    class Lock:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            monkeypatch.setattr(type(worker), "is_stale", False)

    with Router({"a": NOBODY}, interval=1000.0) as router:
        worker = router.workers["a"]
        monkeypatch.setattr(worker, "lock", Lock())
        answer = router.answer("POST", "/score", b'{"tokens": [1, 2]}')
        assert answer.body["stale"] == ["a"] and not worker.is_stale
