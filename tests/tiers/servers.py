"""Real servers on the loopback, for a test to start, stop, hang, kill and start again with all keys lost.

As a program, a process of its own: ``ADDRESS SECONDS SEED`` does ``work``; ``store ADDRESS KEY`` stores one record when it is
told to; ``node ADDRESS SEGMENT HOST FILE`` gives memory to a Mooncake Store, and makes the file when it does.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from kvpagoda.tiers import Driver, RecordBuffer, Status, Tier

PRINT, PAYLOAD, ROWS = sha256(b"layout").digest(), 50_000, 16
NUM_KEYS, NUM_SHARED = 256, 12
SERVERS = __file__
SLACK = 0.08  # seconds that a busy machine takes to wake somebody: none of ours

Command = Sequence[str]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(what: Callable[[], bool], seconds: float = 10.0) -> None:
    end = monotonic() + seconds
    while not what():
        assert monotonic() < end, f"not within {seconds} s"
        sleep(0.01)


def answers(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def key_of(i: int) -> bytes:
    return sha256(b"%d" % i).digest()


def listening() -> set[tuple[str, str]]:
    """The address, as the kernel writes it, and the number of each socket by which this process accepts connections."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(entry))
        except OSError:  # the one that lists them
            continue
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {(row[1].partition(":")[0], row[9]) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


class Server:
    """One or several processes that are a store, and what a driver is told to reach it."""

    address: str
    ports: list[int]

    def __init__(self, folder: Path, commands: Sequence[Command], is_up: Callable[[], bool], **options: Any) -> None:
        self.folder, self.commands, self.is_up, self.options = folder, commands, is_up, options
        self.processes: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def running(self) -> Iterator[Server]:
        try:
            self.start()
            yield self
        finally:
            self.kill()

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            for command in self.commands:
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self.folder, **self.options
                    )
                )
        wait_for(self.is_up)

    def hang(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        while self.processes:
            process = self.processes.pop()
            process.kill()
            process.communicate()
        (self.folder / "up").unlink(missing_ok=True)


def redis_command(*options: object, memory: str = "64mb", policy: str = "allkeys-lru") -> list[str]:
    words = ["redis-server", "--save", "", "--appendonly", "no", "--maxmemory", memory, "--maxmemory-policy", policy]
    return [*words, *map(str, options)]


@contextmanager
def redis_server(
    folder: Path, *options: object, host: str = "127.0.0.1", within: Command = (), **limits: str
) -> Iterator[Server]:
    """A server that listens on ``host`` alone, and on a socket in ``folder``; started."""
    (port,) = free_ports(1)
    command = redis_command("--port", port, "--bind", host, "--unixsocket", folder / "socket", *options, **limits)
    server = Server(folder, [[*within, *command]], lambda: ask(folder / "socket", "PING")[:1] in (b"+", b"-"))
    server.address = f"redis://{host}:{port}"
    with server.running():
        yield server


@contextmanager
def redis_cluster(folder: Path, size: int = 3) -> Iterator[Server]:
    """``size`` masters that share the slots evenly; started. ``ports``: theirs."""
    ports = free_ports(2 * size)
    commands = [
        redis_command(
            "--port", port, "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-port", bus, "--cluster-config-file",
            f"nodes-{port}", "--cluster-node-timeout", 500, "--cluster-require-full-coverage", "no",
        )
        for port, bus in zip(ports[:size], ports[size:])
    ]  # fmt: skip

    def is_up() -> bool:
        return all(answers(port) and ask(port, "PING") == b"+PONG\r\n" for port in ports[:size])

    server = Server(folder, commands, is_up)
    server.address, server.ports = f"redis://127.0.0.1:{ports[0]}", ports[:size]
    with server.running():
        for i in range(size):
            ask(ports[i], "CLUSTER", "ADDSLOTSRANGE", 16384 * i // size, 16384 * (i + 1) // size - 1)
            ask(ports[0], "CLUSTER", "MEET", "127.0.0.1", ports[i], ports[size + i])
        for port in server.ports:
            wait_for(lambda port=port: ask(port, "CLUSTER", "NODES", lines=2).count(b" connected") == size)  # type: ignore[misc]
            wait_for(lambda port=port: b"cluster_state:ok" in ask(port, "CLUSTER", "INFO", lines=5))  # type: ignore[misc]
        yield server


@contextmanager
def redis_sentinel(folder: Path, master: Server) -> Iterator[Server]:
    """One that calls ``master`` "kv"; started. ``address``: of the master, by way of it."""
    (port,) = free_ports(1)
    host, _, at = master.address.removeprefix("redis://").rpartition(":")
    settings = folder / "sentinel.conf"
    settings.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor kv {host} {at} 1\n")
    server = Server(folder, [["redis-server", str(settings), "--sentinel"]], lambda: ask(port, "PING") == b"+PONG\r\n")
    server.address, server.ports = f"redis+sentinel://127.0.0.1:{port}#kv", [port]
    with server.running():
        yield server


def ask(place: Path | int, *words: object, lines: int = 1) -> bytes:
    """What a Redis server answers, as it comes; b"" without one."""
    try:
        with socket.socket(socket.AF_INET if isinstance(place, int) else socket.AF_UNIX) as one:
            one.settimeout(5)
            one.connect(("127.0.0.1", place) if isinstance(place, int) else str(place))
            encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            one.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded))
            told = b""
            while told.count(b"\r\n") < lines and (more := one.recv(1 << 16)):
                told += more
            return told
    except OSError:
        return b""


def has_redis() -> bool:
    return shutil.which("redis-server") is not None


def why_no_mooncake() -> str:
    """Empty where Mooncake Store can be used."""
    if find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    from kvpagoda.errors import BadInput

    try:
        open_driver("mooncake://127.0.0.1:1", RecordBuffer(1, 100)).close()
    except BadInput as error:
        return str(error)
    return ""


@contextmanager
def mooncake_server(
    folder: Path, segment: str = "64MiB", host: str = "127.0.0.1", within: Command = ()
) -> Iterator[Server]:
    """A master, and a process that gives it memory; started."""
    spec = find_spec("mooncake")
    assert spec is not None and spec.origin is not None
    home, (port, metrics) = Path(spec.origin).parent, free_ports(2)
    master = [
        str(home / "mooncake_master"), f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_host={host}",
        f"--metrics_port={metrics}", "--put_start_discard_timeout_sec=5", "--client_ttl=2",
    ]  # fmt: skip
    up = folder / "up"
    node = [sys.executable, __file__, "node", f"mooncake://{host}:{port}", segment, host, str(up)]

    def is_up() -> bool:
        return up.exists()

    environment = {**os.environ, "LD_LIBRARY_PATH": str(home), "GLOG_minloglevel": "2"}
    server = Server(folder, [[*within, *master], [*within, *node]], is_up, env=environment)
    server.address = f"mooncake://{host}:{port}"
    with server.running():
        yield server


def open_driver(address: str, buffer: RecordBuffer, **options: Any) -> Driver:
    """The driver for ``address``."""
    if address.startswith("mooncake://"):
        from kvpagoda.tiers.mooncake import mooncake_driver

        os.environ.setdefault("GLOG_minloglevel", "2")
        return mooncake_driver(buffer, address.removeprefix("mooncake://"), **options)
    from kvpagoda.tiers.redis import redis_driver

    return redis_driver(buffer, address, **options)


class Client:
    """A tier on a shared store. Every record that it calls OK is compared, every answer is in time."""

    def __init__(
        self, address: str, *, payload: int = PAYLOAD, faults: int = 3, pause: float = 0.2, **options: Any
    ) -> None:
        self.buffer = RecordBuffer(ROWS, payload)
        self.driver: Any = open_driver(address, self.buffer, **options)
        self.tier = Tier(self.driver, self.buffer, PRINT, faults=faults, pause=pause)
        self.told: Counter[str] = Counter()
        self.fresh = count(int.from_bytes(os.urandom(2), "little") + NUM_KEYS)

    def store(self, *which: int, seconds: float = 5.0) -> list[Status]:
        rows = self.buffer.acquire(len(which))
        for row, i in zip(rows, which):
            self.buffer.payloads[row] = self.content(i)
        return self._done("store", which, rows, seconds)

    def load(self, *which: int, seconds: float = 5.0) -> list[Status]:
        return self._done("load", which, self.buffer.acquire(len(which)), seconds)

    def lookup(self, *which: int, seconds: float = 5.0) -> list[Status]:
        return self._done("lookup", which, [], seconds)

    def discard(self, *which: int, seconds: float = 5.0) -> list[Status]:
        return self._done("discard", which, [], seconds)

    def _done(self, what: str, which: Sequence[int], rows: list[int], seconds: float) -> list[Status]:
        keys, start = [key_of(i) for i in which], monotonic()
        call: Any = getattr(self.tier, what)
        told = (call(keys, rows, start + seconds) if rows else call(keys, start + seconds)).result(2 * seconds + 5)
        took = monotonic() - start
        assert took <= 1.1 * seconds + SLACK, f"{what} took {took:.3f} s of {seconds} s"
        statuses = list(told.statuses if what == "lookup" else told)
        if what == "load":
            for row, i, status in zip(rows, which, statuses):
                is_right = np.array_equal(self.buffer.payloads[row], self.content(i))
                assert status is not Status.OK or is_right, f"wrong bytes of key {i}"
        self.buffer.release(rows)
        self.told.update(f"{what} {status.value}" for status in statuses)
        return statuses

    def content(self, i: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.resize(np.frombuffer(key_of(i), np.uint8), self.buffer.payload_nbytes)

    def is_back(self) -> bool:
        """Whether a record that nobody stored yet can be stored and loaded."""
        fresh = next(self.fresh)
        return self.store(fresh) == [Status.OK] and self.load(fresh) == [Status.OK]

    def close(self) -> None:
        assert self.tier.close(monotonic() + 30), "the driver is not done"
        assert (
            self.buffer.num_free == ROWS and not self.tier.stats().nbytes_in_flight and not self.tier.stats().last_error
        )
        self.buffer.check()


def work(address: str, seconds: float, seed: int) -> None:
    """Store and load what others store and load too, and say how often what was told."""
    client, random = Client(address), np.random.default_rng(seed)
    print("begun", flush=True)
    end = monotonic() + seconds
    while monotonic() < end:
        which = [int(i) for i in random.permutation(NUM_SHARED)[:2]]
        if client.buffer.num_free >= 4:  # a hung store may have the others still
            random.choice([client.store, client.load, client.load, client.lookup])(*which, seconds=0.5)
        sleep(0.002)
    wait_for(client.is_back, 20)
    client.close()
    print(dict(client.told), flush=True)


def worker(address: str, seconds: float, seed: int, within: Command = ()) -> subprocess.Popen[str]:
    """A process that does ``work``; it has begun."""
    command = [*within, sys.executable, __file__, address, str(seconds), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def told_by(process: subprocess.Popen[str], seconds: float = 60.0) -> Counter[str]:
    out, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, "a worker failed"
    import ast

    return Counter(ast.literal_eval(out))


if __name__ == "__main__":
    if sys.argv[1] == "node":
        driver = open_driver(sys.argv[2], RecordBuffer(1, 100), segment=sys.argv[3], host=sys.argv[4])
        wait_for(lambda: driver.stats().nbytes > 0)
        Path(sys.argv[5]).touch()
        sys.stdin.read()
    elif sys.argv[1] == "store":
        client = Client(sys.argv[2])
        print("begun", flush=True)
        sys.stdin.readline()
        client.store(int(sys.argv[3]), seconds=60)
    else:
        work(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
