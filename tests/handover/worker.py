"""One rank of a sender or receiver in a process of its own, which lives long and may be killed. It reads commands as lines of
JSON, and answers each with a line. ``now`` of a command is the time by its clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from tests.handover.rows import Rows
from tests.sweep.kinds import schemas

from kvpagoda import Identity, KVCache, KVPagodaError, Limits, Retention, Schema, Sequence
from kvpagoda.handover import MooncakeEngine, NixlAgent, SharedMemory, Transfer

KEY = b"a shared key"
HEADS = dict(
    vocab_size=1000, num_hidden_layers=2, hidden_size=64, num_attention_heads=8, num_key_value_heads=4, dtype="bfloat16"
)
SPLIT = {
    "llama": dict(HEADS, model_type="llama"),
    "gemma_tp": dict(
        HEADS, model_type="gemma3_text", num_hidden_layers=3, head_dim=8, sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "qwen_tp": dict(
        HEADS, model_type="qwen3_next", head_dim=16, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=4, linear_value_head_dim=4, linear_conv_kernel_dim=4, num_experts=4,
        layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=32, num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}  # fmt: skip
"""Models whose heads are divided over ranks; all others are kept whole by every rank (``KINDS``)."""


def text_of(seed: int, length: int) -> np.ndarray[Any, Any]:
    """Return a text: some seeds share the beginning."""
    begin = np.random.default_rng(seed % 5).integers(0, 1000, 24)
    return np.concatenate((begin, np.random.default_rng(seed).integers(0, 1000, length)))[:length].astype(np.int32)


class Unsteady:
    """A transfer whose reads fail or take long, as ``fault`` says, from the middle on."""

    def __init__(self, inner: Transfer) -> None:
        self.inner, self.memory, self.fault = inner, inner.memory, ""
        self.address, self.landing, self.close = inner.address, inner.landing, inner.close

    def read(self, address: dict[str, Any], offset: int, into: np.ndarray[Any, Any]) -> None:
        half = len(into) // 2
        self.inner.read(address, offset, into[:half])
        if self.fault == "cut":
            raise ConnectionResetError("the connection was cut")
        if self.fault == "slow":
            say({"reading": True})
            json.loads(sys.stdin.readline())  # until the driver lets it go on
        self.inner.read(address, offset + half, into[half:])

    def write(self, address: dict[str, Any], offset: int, data: np.ndarray[Any, Any]) -> None:
        if self.fault == "no receipt":
            raise ConnectionResetError("the connection was cut")
        self.inner.write(address, offset, data)


class Worker:
    def __init__(
        self, kind: str, transfer: str, rank: int, ranks: int, block_size: int, exported: str, weights: str
    ) -> None:
        schema = Schema.from_hf_config(SPLIT[kind]).split(tp=ranks) if kind in SPLIT else schemas(kind)
        self.now = 0.0
        self.steps: Iterator[None] = iter(())
        self.cache = KVCache(
            schema, device="cpu", num_blocks=48, max_requests=4, block_size=block_size, poison=True,
            identity=Identity(weights, rank, ranks), limits=Limits(step_tokens=2 * block_size), retention=Retention(4, 1),
        )  # fmt: skip
        self.rows = Rows(self.cache, rank, ranks)
        make = {"shared": SharedMemory, "mooncake": MooncakeEngine, "nixl": partial(NixlAgent, timeout=5.0)}[transfer]
        self.transfer = Unsteady(make(exported or 0))
        self.sender = self.cache.sender(self.transfer, key=KEY, clock=lambda: self.now, skew=1.0) if exported else None

    def hand_over(self, seed: int, length: int, ttl: float) -> dict[str, Any]:
        text = text_of(seed, length + 1)
        sequence = self.cache.open(text, capacity=0)
        self.rows.compute(sequence, text, length, 5)
        return {"ticket": sequence.hand_over(ttl).to_json()}

    def begin(self, seed: int, length: int, ttl: float, at: int, chunk: int) -> dict[str, Any]:
        """Open a text, compute its first ``at`` tokens, and promise ``length`` of them."""
        text = text_of(seed, length + 1)
        sequence = self.cache.open(text, capacity=0)
        self.rows.compute(sequence, text, at, 5)
        assert self.sender is not None
        self.promised = sequence.hand_over(ttl, upto=length)
        self.sequence, self.steps = sequence, self._layers(sequence, text, length, chunk)
        return {"ticket": self.promised.to_json()}

    def _layers(self, sequence: Sequence, text: np.ndarray[Any, Any], length: int, chunk: int) -> Iterator[None]:
        """Compute the rest in chunks, and yield after each layer."""
        assert self.sender is not None
        while sequence.length < length:
            begin = sequence.length
            end = begin + min(chunk, length - begin, self.cache.step_limit(sequence))
            sequence.extend(end - begin)
            for layer in range(len(self.cache.schema.layers)):
                self.rows.compute_layer(sequence, text, begin, end, layer)
                self.sender.layer_done(self.promised, layer, end)
                yield
            sequence.commit(text[begin:end])

    def layers(self, count: int) -> dict[str, Any]:
        """Compute the next ``count`` layers; say whether that was all."""
        return {"all": sum(1 for _ in islice(self.steps, count)) < count}

    def complete(self) -> dict[str, Any]:
        assert self.sender is not None and self.layers(1 << 20)["all"]
        self.sender.complete(self.promised)
        return {}

    def stop(self, how: str) -> dict[str, Any]:
        """End the prefill before it is complete."""
        if how == "given up":
            assert self.sender is not None
            self.sender.give_up(self.promised)
        if how == "preempted":
            self.sequence.suspend()
        self.sequence.close()
        return {}

    def receive(self, ticket: str, fault: str = "") -> dict[str, Any]:
        self.transfer.fault = fault
        try:
            sequence = self.cache.receive(ticket, self.transfer, key=KEY, clock=lambda: self.now)
        finally:
            self.transfer.fault = ""
            self.cache.check()
        before = self.rows.num_compared
        self.rows.compare(sequence)
        text = np.frombuffer(sequence.tokens.tobytes(), np.int32)
        sequence.close()
        return {"length": len(text), "rows": self.rows.num_compared - before, "first": int(text[0])}

    def idle(self) -> dict[str, Any]:
        """Prove that nothing is held once every lease ended."""
        if self.sender is not None:
            self.sender.expire()
            assert self.sender.num_leases == 0
        assert self.cache.stats().running == 0
        self.cache.check()
        return {}

    def idle_is_refused(self) -> dict[str, Any]:
        """Prove that a lease that nobody fetched is kept until it expires."""
        assert self.sender is not None and self.sender.expire() == 0 and self.sender.num_leases == 1
        return {}

    def damage(self, at: int, first: int = 64) -> dict[str, Any]:
        memory = self.transfer.inner.memory
        memory[(1 << 18) + first + at % 1000] ^= 255
        return {}


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=OUT, flush=True)


OUT = sys.stdout


def main() -> None:
    global OUT
    OUT, sys.stdout = sys.stdout, sys.stderr  # the engine prints
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        name, now = command.pop("do"), command.pop("now", 0.0)
        try:
            if name == "make":
                worker = Worker(**command)
                say({})
                continue
            assert worker is not None
            worker.now = now
            say(getattr(worker, name)(**command))
        except KVPagodaError as error:
            say({"error": type(error).__name__, "text": str(error)[:200]})
        except Exception as error:
            import traceback

            say({"wrong": traceback.format_exc()[-1500:], "error": type(error).__name__})


if __name__ == "__main__":
    main()
