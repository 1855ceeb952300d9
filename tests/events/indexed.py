"""Dynamo's indexer beside caches: ``indexed.py PYTHON ROUNDS SCHEMA..``, in a network namespace of its own, for it binds all
addresses. PYTHON has ai-dynamo-runtime.

For each schema a publisher sends what random traffic does, with evictions; the indexer joins when half of it is over. The
output is a line of JSON for each: the schema, then [tokens asked for, the indexer's score, cached, resumable] of each
question, the last two as ``lookup`` says them, and blocks evicted. The last line is that of ``tiered``."""

from __future__ import annotations

import fcntl
import json
import random
import socket
import struct
import subprocess
import sys
import time
from typing import Any
from urllib.request import Request, urlopen

from kvpagoda import KVCache, Namespace, Schema
from kvpagoda.events import EventLog, Publisher
from kvpagoda.tiers import host_tier

PORT, SIZE, PATIENCE = 8090, 16, 20.0
HEADS = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "full": (dict(model_type="llama", num_hidden_layers=2, **HEADS), "256KiB"),
    "sliding": (dict(model_type="mistral", num_hidden_layers=2, sliding_window=32, **HEADS), "256KiB"),
    "gemma": (
        dict(
            model_type="gemma3_text", num_hidden_layers=6, sliding_window=32,
            layer_types=["sliding_attention"] * 5 + ["full_attention"], **HEADS,
        ),
        "512KiB",
    ),
    "mla": (
        dict(
            model_type="deepseek_v3", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, kv_lora_rank=24,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, q_lora_rank=None,
        ),
        "64KiB",
    ),
}  # fmt: skip


def bring_up_loopback() -> None:
    """A new network namespace has the loopback, switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up and running


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    with urlopen(request, timeout=5) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def wait(until: Any) -> None:
    """Wait until the function ``until`` returns something true."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if until():
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(until)
        time.sleep(0.02)


class Indexed:
    """A cache whose publisher the indexer listens to as the model ``name``."""

    def __init__(self, name: str) -> None:
        config, nbytes = CONFIGS[name]
        self.name, self.log, self.random = name, EventLog(), random.Random(name)
        self.number = [*CONFIGS].index(name)
        self.cache = KVCache(
            Schema.from_hf_config(config), nbytes, device="none", block_size=SIZE, max_requests=2, events=self.log
        )
        self.publisher = Publisher(self.log, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", interval=0.001)
        self.texts: list[list[int]] = []
        self.marks = 0

    def score(self, text: list[int]) -> int:
        found = ask("/query", dict(token_ids=text, model_name=self.name))["scores"].get(str(self.number), {})
        return int(found.get("0", 0))

    def serve(self, text: list[int], namespace: Namespace | None = None) -> None:
        with self.cache.open(text, namespace) as sequence:
            while (n := min(self.cache.step_limit(sequence), len(text) - sequence.length)) > 0:
                sequence.extend(n)
                sequence.commit(text[sequence.length : sequence.length + n])
        self.texts = [*self.texts[-19:], text]

    def step(self) -> None:
        """A prompt that often begins like others, and one of another tenant."""
        draw = self.random
        text = [draw.randrange(6)] * (SIZE * draw.randrange(1, 7)) + [
            draw.randrange(2) for _ in range(draw.randrange(8, 100))
        ]
        if self.texts and draw.random() < 0.3:
            text = draw.choice(self.texts) + text[-30:]
        self.serve(text[:400], Namespace("another") if draw.random() < 0.2 else None)

    def join(self) -> None:
        """The indexer begins to listen; what was before it asks for."""
        ends = dict(endpoint=self.publisher.endpoint, replay_endpoint=self.publisher.replay_endpoint)
        ask("/register", dict(instance_id=self.number, model_name=self.name, block_size=SIZE, **ends))

    def catch_up(self) -> None:
        """Wait until the indexer has heard all: a text that is new is the last thing said."""
        self.marks += 1
        text = [1000 + self.marks] * (2 * SIZE)
        self.serve(text)
        self.texts.pop()
        assert self.publisher.flush()
        wait(lambda: self.score(text) == 2 * SIZE)

    def compare(self) -> list[tuple[int, int, int, int]]:
        draw, told = self.random, []
        for text in [draw.choice(self.texts), draw.choice(self.texts)[: draw.randrange(17, 200)] + [9] * 40]:
            found = self.cache.lookup([*text, 31_999])
            told.append((len(text), self.score(text), found.cached, found.resumable))
        return told


def tiered() -> tuple[str, list[tuple[int, int, int, int]], int]:
    """Prompts of which the first ones are in host memory only: [tokens, on the device, there or in host memory, cached]."""
    config, log = CONFIGS["full"][0], EventLog()
    settings: dict[str, Any] = dict(device="cpu", block_size=SIZE, max_requests=1, tiers=[host_tier("4MiB")])
    cache, told = KVCache(Schema.from_hf_config(config), "128KiB", events=log, **settings), []
    with Publisher(log, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", interval=0.001) as publisher:
        ends = dict(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        ask("/register", dict(instance_id=100, model_name="tiers", block_size=SIZE, **ends))
        texts = [[first] * 200 for first in range(8)]
        for text in texts:
            with cache.open(text) as sequence:
                sequence.extend(len(text))
                sequence.commit(text)
        assert cache.flush(PATIENCE)

        def matched(text: list[int]) -> dict[str, int]:
            found = ask("/query", dict(token_ids=text, model_name="tiers"))["instances"]
            return dict(found.get("100", {"gpu": 0, "cpu": 0}))

        wait(lambda: publisher.flush() and matched(texts[-1])["gpu"] and matched(texts[0])["cpu"] == 192)
        for text in texts:
            one = matched(text)
            told.append((len(text), one["gpu"], one["cpu"], cache.lookup([*text, 31_999]).cached))
    evicted = sum(group.evicted for group in cache.stats().groups)
    cache.close()
    return "tiers", told, evicted


def main(python: str, rounds: str, *schemas: str) -> None:
    bring_up_loopback()
    command = [python, "-m", "dynamo.indexer", "--block-size", str(SIZE), "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as indexer:
        try:
            wait(lambda: [ask("/health")])
            for name in schemas:
                one, told = Indexed(name), []
                for number in range(int(rounds)):
                    one.step()
                    if number == int(rounds) // 2:
                        one.join()
                    if number > int(rounds) // 2 and number % 3 == 0:
                        one.catch_up()
                        told += one.compare()
                print(json.dumps([name, told, sum(group.evicted for group in one.cache.stats().groups)]), flush=True)
                one.publisher.close()
            print(json.dumps(tiered()), flush=True)
        finally:
            indexer.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
