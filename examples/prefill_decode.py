"""Prefill in one process, decode in another: a request is handed over by a ticket, and its blocks through shared memory.

    scheduler   ──prompt──► prefill    computes the prompt, hands the request over, and has room for the next one
        ▲   ▲◄───ticket────────┘
        │   └──ticket──► decode        receives the request, computes nothing again, writes the answer
        └──────tokens──────┘

The two caches have other block sizes and layouts. One ticket comes too late, after its lease expired: the decode process
gets a ``HandoverMiss`` and computes that prompt itself. All answers are those of one process.

    python examples/prefill_decode.py
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from kvpagoda import HandoverMiss, Identity, KVCache, Schema, Sequence
from kvpagoda.handover import SharedMemory
from kvpagoda.hf.runner import ModelRunner

KEY = b"known to the scheduler's processes alone"
CHUNK, ANSWER, LATE = 24, 12, 3
PROMPTS = [np.random.default_rng(seed).integers(0, 128, 40 + 17 * seed).astype(np.int32) for seed in range(5)]


class Engine:
    """A model and its cache. ``LAYOUTS`` of two engines may differ."""

    def __init__(self, block_size: int, layout: str) -> None:
        torch.manual_seed(0)  # random weights, the same in every process
        torch.set_num_threads(1)
        config = Gemma3TextConfig(
            vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
            num_key_value_heads=2, sliding_window=16, initializer_range=0.2, dtype="float32",
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
        schema = Schema.from_hf_config(config).laid_out(layout)
        self.cache = KVCache(schema, "4MiB", "cpu", block_size=block_size, identity=Identity(weights="seed 0"))
        self.runner, self.computed = ModelRunner(model, self.cache), 0

    def step(self, sequence: Sequence, tokens: np.ndarray) -> int:
        """Compute ``tokens`` after those of ``sequence``, and return the likeliest next one."""
        sequence.extend(len(tokens))
        logits = self.runner.step([(sequence, tokens)])
        sequence.commit(tokens)
        self.computed += len(tokens)
        return int(logits[-1].argmax())

    def prefill(self, sequence: Sequence, prompt: np.ndarray) -> None:
        """Compute all of ``prompt`` but its last token, whose logits begin the answer."""
        while sequence.length < len(prompt) - 1:
            self.step(sequence, prompt[sequence.length : min(sequence.length + CHUNK, len(prompt) - 1)])

    def answer(self, sequence: Sequence, prompt: np.ndarray) -> list[int]:
        """Compute what is left of ``prompt``, and ``ANSWER`` tokens after it."""
        self.prefill(sequence, prompt)
        tokens = [self.step(sequence, prompt[-1:])]
        while len(tokens) < ANSWER:
            tokens.append(self.step(sequence, np.array(tokens[-1:], np.int32)))
        return tokens


def prefill(pipe: Connection) -> None:
    """The prefill process: prompts come in, tickets go out; None ends it. At last send how many tokens it computed, and
    how many leases were fetched and expired."""
    engine, transfer = Engine(8, "sglang-mha"), SharedMemory("8MiB")
    sender = engine.cache.sender(transfer, key=KEY, skew=0.1)
    while (asked := pipe.recv()) is not None:
        prompt, ttl = asked
        sequence = engine.cache.open(prompt, capacity=0)
        engine.prefill(sequence, prompt)
        pipe.send(sequence.hand_over(ttl).to_json())
    while sender.num_leases:
        sender.expire()
        time.sleep(0.05)
    engine.cache.check()
    pipe.send((engine.computed, sender.fetched, sender.expired, engine.cache.stats().running))


def decode(pipe: Connection) -> None:
    """The decode process: prompts with their tickets come in, answers go out. At last send how many tokens it computed,
    and how many prompts it had to compute itself."""
    engine, transfer, missed = Engine(16, "trtllm"), SharedMemory(), 0
    while (asked := pipe.recv()) is not None:
        prompt, ticket = asked
        try:
            sequence = engine.cache.receive(ticket, transfer, key=KEY, reserve=len(prompt) + ANSWER)
        except HandoverMiss:
            missed += 1
            sequence = engine.cache.open(prompt, capacity=0, reserve=len(prompt) + ANSWER)
        pipe.send(engine.answer(sequence, prompt))
        sequence.close()
    engine.cache.check()
    pipe.send((engine.computed, missed))


def main() -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for role in (prefill, decode):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=role, args=(theirs,), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    to_prefill, to_decode = pipes
    answers = []
    for number, prompt in enumerate(PROMPTS):
        to_prefill.send((prompt, 0.2 if number == LATE else 60.0))
        ticket = to_prefill.recv()
        if number == LATE:
            time.sleep(0.5)
        to_decode.send((prompt, ticket))
        answers.append(to_decode.recv())
    for pipe in pipes:
        pipe.send(None)
    (computed, fetched, expired, running), (decoded, missed) = to_prefill.recv(), to_decode.recv()
    for process in processes:
        process.join()
    alone = Engine(16, "trtllm")
    wanted = [alone.answer(alone.cache.open(prompt, capacity=0), prompt) for prompt in PROMPTS]
    return {
        "answers equal those of one process": answers == wanted,
        "tokens computed by prefill": computed,
        "tokens computed by decode": decoded,
        "of these, for the answers": len(PROMPTS) * ANSWER,
        "handed over": fetched,
        "expired, computed again": (expired, missed),
        "still running in prefill": running,
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:36} {value}")
