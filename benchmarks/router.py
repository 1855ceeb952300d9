"""How long does a router need to say what 100 engines have of a prompt?

Followers of 100 engines are filled with the messages of caches without memory: half of the blocks of each engine are of
prompts that all engines have, half of prompts of its own, a million blocks in all. Then prompts of 4,096 tokens are scored:
directly, and over HTTP by one client and by eight. The router's thread polls its 200 sockets meanwhile.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from statistics import median, quantiles

import numpy as np

from benchmarks.hits import FULL_ONLY
from benchmarks.one_budget import GEMMA3_27B, schema_of
from benchmarks.timing import Options, Row, tell
from kvpagoda import KVCache
from kvpagoda.events import EventLog, EventStream, Router, RouterServer
from kvpagoda.schema import Schema

QUESTION = "How long does a router need to say what 100 engines have of a prompt?"
SIZE, PROMPT = 16, 4096
NOWHERE = ("ipc:///tmp/kvpagoda-bench-nobody", "ipc:///tmp/kvpagoda-bench-nobody-replays")


BUDGET = "1TiB"


def prompts(number: int, num_blocks: int) -> list[np.ndarray]:
    """Return the prompts of engine ``number``, which fill about ``num_blocks`` blocks: half of them all engines have."""
    count, common, own = (
        max(2, num_blocks * SIZE // PROMPT),
        np.random.default_rng(0),
        np.random.default_rng(1 + number),
    )
    return [(common if i < count // 2 else own).integers(0, 1000, PROMPT, np.int32) for i in range(count)]


def messages(schema: Schema, number: int, num_blocks: int) -> list[tuple[int, bytes]]:
    """Return what engine ``number`` publishes from its start on."""
    log = EventLog()
    cache = KVCache(schema, BUDGET, device="none", block_size=SIZE, max_requests=1, events=log)
    stream = EventStream(log, keep=10**6)
    for prompt in prompts(number, num_blocks):
        with cache.open(prompt, capacity=0) as sequence:
            while (n := min(cache.step_limit(sequence), PROMPT - sequence.length)) > 0:
                sequence.extend(n)
                sequence.commit(prompt[sequence.length : sequence.length + n])
        stream.drain()
    return stream.replay(0)


def measure(options: Options) -> list[Row]:
    num_workers, num_blocks = (100, 10_000) if not options.quick else (4, 1_000)
    rows = list[Row]()
    for name, config in (("Llama-3-8B, full attention", FULL_ONLY), ("Gemma-3-27B", GEMMA3_27B)):
        if options.only not in name:
            continue
        schema = schema_of(config)
        before, seconds = _resident(), 0.0
        with (
            Router({f"w{number}": NOWHERE for number in range(num_workers)}) as router,
            get_context("spawn").Pool(1) as engines,  # so that this process holds the followers alone
        ):
            for number, worker in enumerate(router.workers.values()):
                told = engines.apply(messages, (schema, number, num_blocks))
                with worker.lock:
                    start = time.process_time()
                    for message in told:
                        worker.subscriber.follower.feed(*message)
                    seconds += time.process_time() - start
            total = sum(worker.subscriber.follower.num_blocks for worker in router.workers.values())
            case = f"{name}: {num_workers} workers, {total:,} blocks"
            held = (_resident() - before) / total
            rows.append(
                {"case": case, "asked": "messages applied", "us_a_block": 1e6 * seconds / total, "bytes_a_block": held}
            )
            with RouterServer(router) as server:
                rows += [{"case": case, **row} for row in _asked(router, server, prompts(0, num_blocks)[0], options)]
    return rows


def _asked(router: Router, server: RouterServer, shared: np.ndarray, options: Options) -> list[Row]:
    """Return the times of scores of a prompt that no worker has, and of the prompt ``shared``, which all have."""
    count = 24 if options.quick else 400
    new, body, rows = np.full(PROMPT, 999, np.int32), json.dumps({"tokens": shared.tolist()}).encode(), list[Row]()
    for asked, prompt in (("a prompt that none has", new), ("a prompt that all have", shared)):
        rows.append(_row(asked, [_timed(lambda prompt=prompt: router.scores(prompt)) for _ in range(count)], 1))
    for clients in (1, 8):
        times: list[float] = []
        threads = [threading.Thread(target=_ask, args=(server, body, count // clients, times)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows.append(_row(f"the same over HTTP, {clients} at once", times, clients))
    return rows


def _row(asked: str, times: list[float], at_once: int) -> Row:
    return {
        "asked": asked,
        "p50_ms": 1e3 * median(times),
        "p99_ms": 1e3 * quantiles(times, n=100)[-1],
        "a_second": at_once * len(times) / sum(times),
    }


def _ask(server: RouterServer, body: bytes, count: int, times: list[float]) -> None:
    """Ask ``count`` times on one connection, and append the seconds of each answer to ``times``."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    for _ in range(count):
        start = time.perf_counter()
        connection.request("POST", "/score", body)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        times.append(time.perf_counter() - start)
    connection.close()


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    tell("router", QUESTION, measure)
