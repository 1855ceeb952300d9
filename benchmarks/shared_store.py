"""The speed of a tier on a store that many machines share, as a share of the speed of plain calls of the same store.

``redis``: the plain calls are SET and GET of one record after the other, from and into the buffer, with ``sendmsg`` and
``recv_into`` only: the least that any client has to do. Also measured: the driver alone, and ``set`` and ``get`` of
redis-py with a copy of each result. ``mooncake``: the plain calls are its ``batch_put_from`` and ``batch_get_into``, 16
records at once. Server and client use the loopback of one machine; the plain calls have as many threads as the tier has
workers. Plain calls check nothing; the tier packs each record, and computes and verifies its checksum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from socket import create_connection, socket
from statistics import median
from tempfile import TemporaryDirectory

from redis import Redis

from benchmarks.disk import BATCH, Call, all_ok, later, records_of, shares
from benchmarks.timing import Options, Row, seconds, tell
from kvpagoda.tiers import Driver, RecordBuffer, Tier, mooncake_driver, redis_driver
from kvpagoda.units import format_bytes

sys.path.append(str(Path(__file__).parents[1] / "tests" / "tiers"))
from servers import has_redis, mooncake_server, redis_server, why_no_mooncake

QUESTION = "How much of the speed of a shared store's own client does a tier leave?"
REDIS_SIZES = (64 << 10, 1 << 20)
MOONCAKE_SIZES = (1 << 20, 2 << 20)
Plain = Callable[[list[bytes], list[int]], None]
Calls = tuple[Plain, Plain, Call]  # store a batch, load it, delete all records


def measure(options: Options) -> list[Row]:
    total = 8 << 20 if options.quick else 32 << 20
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        if has_redis():
            with redis_server(Path(folder), memory="1gb") as server:
                for size in REDIS_SIZES:
                    rows += _redis(options, server.address, size, total // size)
        else:
            rows.append({"who": "redis", "absent": "no redis-server: apt-get install redis-server"})
    with TemporaryDirectory() as folder:
        if reason := why_no_mooncake():
            rows.append({"who": "mooncake", "absent": reason})
        else:
            with mooncake_server(Path(folder), "512MiB") as server:
                for size in MOONCAKE_SIZES:
                    rows += _mooncake(options, server.address, size, total // size)
    return rows


def _redis(options: Options, address: str, size: int, count: int) -> list[Row]:
    """Measure ``count`` records of ``size`` bytes on the Redis server at ``address``."""
    buffer, keys, source, target = records_of(size, count)
    host, port = address.removeprefix("redis://").split(":")
    sockets: SimpleQueue[socket] = SimpleQueue()
    for _ in range(2):
        sockets.put(create_connection((host, int(port))))

    @contextmanager
    def connection() -> Iterator[socket]:
        taken = sockets.get()
        yield taken
        sockets.put(taken)

    def write(keys: list[bytes], rows: list[int]) -> None:
        with connection() as link:
            for key, row in zip(keys, rows):
                head = b"*4\r\n$3\r\nSET\r\n$32\r\n%s\r\n$%d\r\n" % (key, buffer.record_nbytes)
                parts = [memoryview(head), buffer.rows[row].data, memoryview(b"\r\n$2\r\nNX\r\n")]
                while parts:
                    done = link.sendmsg(parts)
                    while parts and done >= len(parts[0]):
                        done -= len(parts.pop(0))
                    if done:
                        parts[0] = parts[0][done:]
                assert link.recv(5) == b"+OK\r\n"

    def read(keys: list[bytes], rows: list[int]) -> None:
        head = b"$%d\r\n" % buffer.record_nbytes
        with connection() as link:
            for key, row in zip(keys, rows):
                link.sendall(b"*2\r\n$3\r\nGET\r\n$32\r\n%s\r\n" % key)
                assert link.recv(len(head)) == head
                left = buffer.rows[row].data
                while len(left):
                    left = left[link.recv_into(left) :]
                assert link.recv(1) + link.recv(1) == b"\r\n"

    def forget() -> None:
        with connection() as link:
            for key in keys:
                link.sendall(b"*2\r\n$3\r\nDEL\r\n$32\r\n%s\r\n" % key)
                link.recv(16)

    client, driver = Redis.from_url(address), redis_driver(buffer, address)
    names = {key: b"own " + key for key in keys}

    def set_all(keys: list[bytes], rows: list[int]) -> None:
        for key, row in zip(keys, rows):
            assert client.set(names[key], buffer.rows[row].data, nx=True)

    def get_all(keys: list[bytes], rows: list[int]) -> None:
        for key, row in zip(keys, rows):
            buffer.rows[row].data[:] = client.get(names[key])  # type: ignore[assignment]

    own: Calls = (set_all, get_all, lambda: client.delete(*names.values()))
    alone: Calls = (
        lambda keys, rows: all_ok([driver.store(keys, rows, later())]),
        lambda keys, rows: all_ok([driver.load(keys, rows, later())]),
        lambda: driver.discard(keys, later()),
    )
    rows = _compare(
        options, "redis", buffer, lambda: redis_driver(buffer, address), keys, source, target, (write, read, forget),
        {"redis, driver alone": alone, "redis-py itself": own},
    )  # fmt: skip
    driver.close()
    client.close()
    while not sockets.empty():
        sockets.get().close()
    return rows


def _mooncake(options: Options, address: str, size: int, count: int) -> list[Row]:
    """Measure ``count`` records of ``size`` bytes on the Mooncake server at ``address``."""
    buffer, keys, source, target = records_of(size, count)
    master = address.removeprefix("mooncake://")
    plain, start, record = mooncake_driver(buffer, master), buffer.records.ctypes.data, buffer.record_nbytes
    client = plain._client

    def names(keys: list[bytes]) -> list[str]:
        return [f"plain {key.hex()}" for key in keys]

    def write(keys: list[bytes], rows: list[int]) -> None:
        codes = client.batch_put_from(names(keys), [start + row * record for row in rows], [record] * len(rows))
        assert not any(codes), codes

    def read(keys: list[bytes], rows: list[int]) -> None:
        codes = client.batch_get_into(names(keys), [start + row * record for row in rows], [record] * len(rows))
        assert set(codes) == {record}, codes

    def forget() -> None:
        client.batch_remove(names(keys), True)

    rows = _compare(
        options,
        "mooncake",
        buffer,
        lambda: mooncake_driver(buffer, master),
        keys,
        source,
        target,
        (write, read, forget),
        {},
    )
    plain.close()
    return rows


def _compare(
    options: Options, name: str, buffer: RecordBuffer, make: Callable[[], Driver], keys: list[bytes], source: list[int],
    target: list[int], plain: Calls, others: dict[str, Calls],
) -> list[Row]:  # fmt: skip
    """Measure the tier and ``others`` in turns with ``plain``, each in an empty store, with one and two workers."""
    rows: list[Row] = []
    batches = [slice(begin, begin + BATCH) for begin in range(0, len(keys), BATCH)]
    for workers in (1, 2):
        tier = Tier(make(), buffer, bytes(32), in_flight="1GiB", workers=workers)

        def store(tier: Tier = tier) -> None:
            all_ok([future.result() for future in [tier.store(keys[part], source[part], later()) for part in batches]])

        def load(tier: Tier = tier) -> None:
            all_ok([future.result() for future in [tier.load(keys[part], target[part], later()) for part in batches]])

        def discard(tier: Tier = tier) -> None:
            tier.discard(keys, later()).result()

        with ThreadPoolExecutor(workers) as pool:

            def each(call: Plain, rows: list[int], pool: ThreadPoolExecutor = pool) -> None:
                list(pool.map(lambda part: call(keys[part], rows[part]), batches))

            def bound(calls: Calls) -> list[Call]:
                write, read, forget = calls
                return [lambda: each(write, source), lambda: each(read, target), forget]

            asked = {"plain": bound(plain), name: [store, load, discard], **{who: bound(others[who]) for who in others}}
            rounds = [
                {who: [seconds(call) for call in calls] for who, calls in asked.items()}
                for _ in range(options.runs + 1)
            ]
        for who in [name, *others]:
            taken = {
                what: [[times["plain"][i], times[who][i]] for times in rounds]
                for i, what in enumerate(("store", "load"))
            }
            case = f"{who}, {format_bytes(buffer.payload_nbytes)}, {workers} thread{'s' * (workers > 1)}"
            made = shares(case, len(keys), taken)
            # the median of the share in each round, since other load on the machine varies over time
            for row, times in zip(made, taken.values()):
                row["share_percent"] = median(100 * plain_took / took for plain_took, took in times[1:])
            rows += made
        tier.close(later())
    return rows


if __name__ == "__main__":
    tell("shared_store", QUESTION, measure)
