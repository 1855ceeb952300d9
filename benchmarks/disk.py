"""The speed of a tier as a share of the speed of plain copies of memory, or of plain reads and writes of a file.

``host``: the host memory driver, and a tier on it, compared with as many plain copies. ``page cache``, ``O_DIRECT``: a
tier on a file, with checksums, futures and deadlines, compared with plain reads and writes of a file in the same
folder, by as many threads as the tier has workers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import monotonic

import numpy as np

from benchmarks.timing import Options, Row, seconds, tell
from kvpagoda.errors import BadInput
from kvpagoda.pages import PAGE, pages
from kvpagoda.tiers import RecordBuffer, Status, Tier, disk_driver, host_driver
from kvpagoda.tiers.records import xxh3_128
from kvpagoda.units import format_bytes

QUESTION = "How much of the speed of memory and of a file does a tier leave?"
BATCH = 16
Call = Callable[[], object]


def measure(options: Options) -> list[Row]:
    total = 4 << 20 if options.quick else 64 << 20
    rows = [row for size in (1 << 16, 1 << 20) for row in _host(options, size, total // size)]
    with tempfile.TemporaryDirectory() as folder:
        for direct in (False, True):
            for workers in (1, 2):
                try:
                    rows += _disk(options, Path(folder), 1 << 20, total >> 20, workers, direct)
                except BadInput as error:
                    rows.append({"who": "O_DIRECT", "absent": str(error)})
    return rows


def records_of(size: int, count: int) -> tuple[RecordBuffer, list[bytes], list[int], list[int]]:
    """Return (buffer, keys, source, target): ``count`` records of ``size`` bytes to store, their keys and their rows in
    the buffer, and as many rows to load into."""
    buffer = RecordBuffer(2 * count, size)
    buffer.records[:] = np.random.default_rng(0).integers(0, 256, buffer.records.shape, np.uint8)
    keys = [sha256(i.to_bytes(8, "little")).digest() for i in range(count)]
    return buffer, keys, buffer.acquire(count), buffer.acquire(count)


def rows_of(options: Options, case: str, count: int, discard: Call, asked: dict[str, tuple[Call, ...]]) -> list[Row]:
    """Time the calls in ``asked`` and return a row for each name. The calls of a name are (plain, ours), or (plain,
    ours, plain with checksum). ``discard`` removes the stored records before each round."""
    taken: dict[str, list[list[float]]] = {name: [] for name in asked}
    for _ in range(options.runs + 1):
        discard()
        for name, calls in asked.items():
            taken[name].append([seconds(call) for call in calls])
    return shares(case, count, taken)


def shares(case: str, count: int, taken: dict[str, list[list[float]]]) -> list[Row]:
    """Return a row for each name in ``taken``, which holds the seconds of each round: plain, ours and, where it was
    measured, plain with checksum."""
    made: list[Row] = []
    for name, times in taken.items():
        # the first round is left out: it touches memory and file for the first time
        plain, ours, *summed = (median(column) for column in zip(*times[1:]))
        row: Row = {
            "case": f"{case}, {name}",
            "us": ours / count * 1e6,
            "plain_us": plain / count * 1e6,
            "share_percent": 100 * plain / ours,
        }
        if summed:
            row |= {"summed_us": summed[0] / count * 1e6, "share_of_summed_percent": 100 * summed[0] / ours}
        made.append(row)
    return made


def _host(options: Options, size: int, count: int) -> list[Row]:
    """Measure the host memory driver, and a tier on it, with ``count`` records of ``size`` bytes."""
    buffer, keys, source, target = records_of(size, count)
    driver = host_driver(buffer, count * buffer.record_nbytes)
    plain = list(pages(count * buffer.record_nbytes).reshape(count, -1))

    def copy_out() -> None:
        for memory, row in zip(plain, source):
            np.copyto(memory, buffer.rows[row])

    def copy_in() -> None:
        for memory, row in zip(plain, target):
            np.copyto(buffer.rows[row], memory)

    rows: list[Row] = []
    for name, checksum in (("driver", None), ("tier, no checksums", False), ("tier", True)):
        if checksum is None:
            store: Call = lambda: all_ok([driver.store(keys, source, later())])  # noqa: E731
            load: Call = lambda: all_ok([driver.load(keys, target, later())])  # noqa: E731
        else:
            tier = Tier(driver, buffer, bytes(32), in_flight="1GiB", checksum=checksum)
            store = lambda tier=tier: all_ok([tier.store(keys, source, later()).result()])  # noqa: E731
            load = lambda tier=tier: all_ok([tier.load(keys, target, later()).result()])  # noqa: E731
        pairs = {"store": (copy_out, store), "load": (copy_in, load)}
        rows += rows_of(
            options, f"host {name}, {format_bytes(size)}", count, lambda: driver.discard(keys, later()), pairs
        )
    return rows


def _disk(options: Options, folder: Path, size: int, count: int, workers: int, direct: bool) -> list[Row]:
    """Measure a tier on a file in ``folder``: ``count`` records of ``size`` bytes. ``direct``: use O_DIRECT."""
    buffer, keys, source, target = records_of(size, count)
    record = buffer.record_nbytes
    driver = disk_driver(folder, buffer, PAGE + count * record, direct=direct)
    tier = Tier(driver, buffer, bytes(32), in_flight="1GiB", workers=workers)
    file = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    os.posix_fallocate(file, 0, count * record)
    batches = [slice(begin, begin + BATCH) for begin in range(0, count, BATCH)]

    def write(batch: slice) -> None:
        for i, row in enumerate(source[batch], batch.start):
            os.pwrite(file, buffer.rows[row].data, i * record)

    def read(batch: slice) -> None:
        for i, row in enumerate(target[batch], batch.start):
            os.preadv(file, [buffer.rows[row].data], i * record)

    def sum_and_write(batch: slice) -> None:
        for row in source[batch]:
            xxh3_128(buffer.rows[row].data)
        write(batch)

    def read_and_sum(batch: slice) -> None:
        read(batch)
        for row in target[batch]:
            xxh3_128(buffer.rows[row].data)

    def store() -> None:
        futures = [tier.store(keys[batch], source[batch], later()) for batch in batches]
        all_ok([future.result() for future in futures])

    def load() -> None:
        futures = [tier.load(keys[batch], target[batch], later()) for batch in batches]
        all_ok([future.result() for future in futures])

    case = f"{'O_DIRECT' if direct else 'page cache'}, {format_bytes(size)}, {workers} thread{'s' * (workers > 1)}"
    try:
        with ThreadPoolExecutor(workers) as pool:

            def by_threads(work: Callable[[slice], None], step: int) -> Call:
                return lambda: list(pool.map(work, [slice(begin, begin + step) for begin in range(0, count, step)]))

            asked = {
                "store": (by_threads(write, BATCH), store, by_threads(sum_and_write, 2)),
                "load": (by_threads(read, BATCH), load, by_threads(read_and_sum, 2)),
            }
            return rows_of(options, case, count, lambda: tier.discard(keys, later()).result(), asked)
    finally:
        os.close(file)
        tier.close(later())


def later() -> float:
    """Return a deadline 60 seconds from now."""
    return monotonic() + 60


def all_ok(answers: Sequence[Sequence[Status]]) -> None:
    """Assert that every status of every answer is OK."""
    assert all(status is Status.OK for statuses in answers for status in statuses), "every record must be OK"


if __name__ == "__main__":
    tell("disk", QUESTION, measure)
