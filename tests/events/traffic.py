"""Random traffic over a cache with no memory behind it, step by step, for those who follow it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpagoda import Identity, KVCache, Limits, Retention
from kvpagoda.core.prefix import POLICY_NAMES
from kvpagoda.errors import OutOfBlocks, RetryLater
from kvpagoda.events import EventLog
from kvpagoda.schema import FULL, Attention, Growth, Layer, Schema
from random_driver.schemas import schema_named
from random_driver.texts import MEDIA, NAMESPACES

MOST_TOKENS = 48
DRAFT = Schema(
    tuple(Layer(i, "draft", (Attention(1, 4, 4, "float32", growth),)) for i, growth in enumerate((FULL, Growth(window=7)))),
    "draft", vocab_size=1000,
)  # fmt: skip


class Traffic:
    """Requests over one cache after another. ``log_capacity``: of the log; a small one begins anew all the time.
    ``checkpoint_format``: see ``Retention``. ``is_drafted``: the model of ``schema`` has a draft with a group of its own.
    ``order``: of the arenas; ``None``: as the seed says."""

    def __init__(
        self, schema: str, seed: int, log_capacity: int = 65_536, *, checkpoint_format: str | None = None,
        is_drafted: bool = False, order: str | None = None,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng([seed, len(schema), *schema.encode()])
        self.schema, self.log_capacity = schema_named(schema), log_capacity
        if is_drafted:
            self.schema = self.schema.drafted_by(DRAFT)
        self.settings: dict[str, Any] = dict(
            block_size=8 if schema == "deepseek_v4" else 4, max_requests=4, policy=POLICY_NAMES[seed % len(POLICY_NAMES)],
            limits=Limits(MOST_TOKENS + 16, 8, hit_grid=(1, 1, 16)[seed % 3]),
            retention=Retention(checkpoint_every=seed % 3, checkpoint_format=checkpoint_format),
            order=order or (None if seed % 4 else "layer"),
        )  # fmt: skip
        self.nbytes = 2048
        while not _fits(self, 3):
            self.nbytes += self.nbytes // 8
        self.start()

    def start(self) -> None:
        """Another process: nothing is cached."""
        self.log = EventLog(self.log_capacity)
        self.cache = KVCache(
            self.schema, self.nbytes, device="none", events=self.log,
            identity=Identity("w", secret=b"s"), **self.settings,
        )  # fmt: skip
        self.running: list[Any] = []
        self.pins: list[Any] = []

    def text(self) -> tuple[np.ndarray, dict[int, bytes]]:
        """A text that often begins like others, sometimes with media in it."""
        random = self.random
        tokens = random.integers(0, 2, int(random.integers(1, MOST_TOKENS))).astype(np.int32)
        alike = int(random.integers(0, len(tokens) + 1))
        tokens[:alike] = (np.arange(alike) * int(random.integers(1, 3))) % 7
        media = {}
        if random.random() < 0.15:
            media = {int(random.integers(0, len(tokens))): MEDIA[int(random.integers(0, 3))]}
        return tokens, media

    def namespace(self) -> Any:
        return NAMESPACES[int(self.random.integers(0, 4))] if self.random.random() < 0.2 else None

    def step(self) -> None:
        """One operation."""
        chance = self.random.random()
        try:
            if chance < 0.3 or not self.running:
                tokens, media = self.text()
                self.running.append(
                    self.cache.open(
                        tokens, self.namespace(), media=media, capacity=0, publish=self.random.random() < 0.95
                    )
                )
            elif chance < 0.75:
                self.compute(self.one())
            elif chance < 0.9:
                self.running.remove(sequence := self.one())
                sequence.close()
            elif chance < 0.93:
                self.running.append(self.one().fork())
            elif chance < 0.95:
                sequence = self.one()
                sequence.suspend(whole=bool(self.random.random() < 0.5))
                sequence.resume()
            elif chance < 0.97:
                self.keep()
            elif chance < 0.972:
                self.cache.invalidate(*(one for one in NAMESPACES if self.random.random() < 0.3))
            elif chance < 0.973:
                self.cache.invalidate(weights="w" if self.random.random() < 0.5 else "x")
            elif chance < 0.974:
                self.end()
                self.cache.reset()
            elif (sequence := self.one()).length:
                sequence.rewind(1)
        except (RetryLater, OutOfBlocks, ValueError):
            for sequence in self.running:
                sequence.close()
            self.running.clear()

    def one(self) -> Any:
        return self.running[int(self.random.integers(0, len(self.running)))]

    def compute(self, sequence: Any) -> None:
        """A step of the prompt, or of an answer."""
        if sequence.length < sequence.prompt_length:
            n = min(8, sequence.prompt_length - sequence.length, self.cache.step_limit(sequence))
            tokens = sequence._request.tokens[sequence.length : sequence.length + n].copy()
        else:
            n = int(self.random.integers(1, 6))
            tokens = self.random.integers(0, 2, n).astype(np.int32)
        sequence.extend(n)
        sequence.commit(tokens)

    def keep(self) -> None:
        """Pin something, or end a pin."""
        if self.pins and self.random.random() < 0.6:
            self.cache.unpin(self.pins.pop())
        else:
            tokens, media = self.text()
            self.pins.append(self.cache.pin(tokens, media=media))

    def end(self) -> None:
        """Nothing runs, nothing is pinned."""
        for sequence in self.running:
            sequence.close()
        self.running.clear()
        for pin in self.pins:
            self.cache.unpin(pin)
        self.pins.clear()


def _fits(traffic: Traffic, num_requests: int) -> bool:
    """Whether so many long requests fit at once."""
    settings = {name: traffic.settings[name] for name in ("block_size", "max_requests", "limits", "order", "retention")}
    try:
        cache = KVCache(traffic.schema, traffic.nbytes, device="none", **settings)
        running = [cache.open([number] * (MOST_TOKENS + 8), capacity=0) for number in range(num_requests)]
    except (RetryLater, ValueError):
        return False
    return len(running) == num_requests
