"""A simulation of a scheduler on a GPU that you do not have yet. Needs no GPU memory and no torch.

Chats on a few system prompts arrive at random. The scheduler, the cache and all their decisions are real. Only the
forward pass is replaced by a formula for its time on a GPU of 3.3 TB/s and 400 TFLOP/s. The program compares two
amounts of memory, each with and without preemption; without it, blocks for a whole request are reserved at admission.

    python examples/simulate.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpagoda import KVCache, Limits, OutOfBlocks, Schema
from kvpagoda.scheduling import Job, RunQueue, Youngest

LLAMA_8B = dict(
    model_type="llama", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=32768, torch_dtype="bfloat16",
)  # fmt: skip
CHUNK, VOCAB = 512, 32000


@dataclass(frozen=True)
class Machine:
    """The time of a step: the longer one of reading the weights and computing the tokens, plus reading cached rows."""

    weights: float = 16e9 / 3.3e12
    """Seconds to read all weights once."""
    token: float = 16e9 / 400e12
    """Seconds to compute one token."""
    cached_token: float = 131072 / 3.3e12
    """Seconds to read the rows of one cached token."""

    def seconds(self, new_tokens: int, read_tokens: int) -> float:
        """Return the seconds of a step that computes ``new_tokens`` and reads the rows of ``read_tokens``."""
        return max(self.weights, new_tokens * self.token) + read_tokens * self.cached_token


class Chat(Job):
    """A job with the times that its user sees: ``arrived``, and ``first_token`` (0.0: not yet), in seconds."""

    def __init__(self, prompt: np.ndarray, num_output: int, arrived: float) -> None:
        super().__init__(prompt, len(prompt) + num_output)
        self.prompt_length, self.arrived, self.first_token = len(prompt), arrived, 0.0


def arrivals(num_chats: int, per_second: float, seed: int) -> list[Chat]:
    """Return ``num_chats`` chats in the order of their arrival, ``per_second`` on average."""
    random, now = np.random.default_rng(seed), 0.0
    systems = [random.integers(0, VOCAB, 1500).astype(np.int32) for _ in range(4)]
    chats = []
    for _ in range(num_chats):
        now += random.exponential(1 / per_second)
        question = random.integers(0, VOCAB, random.integers(50, 1500)).astype(np.int32)
        chats.append(Chat(np.concatenate((systems[random.integers(4)], question)), int(random.integers(50, 300)), now))
    return chats


def simulate(budget: str, preempts: bool, num_chats: int = 120) -> dict[str, float]:
    """Serve ``num_chats`` chats with ``budget`` bytes of memory. Return the figures that ``main`` prints."""
    limits = Limits(max_context=4096, step_tokens=CHUNK)
    cache = KVCache(Schema.from_hf_config(LLAMA_8B), budget, device="none", max_requests=64, limits=limits)
    queue: RunQueue[Chat] = RunQueue(cache, Youngest() if preempts else None)
    machine, now, coming, done = Machine(), 0.0, arrivals(num_chats, per_second=14, seed=0), list[Chat]()
    while len(done) < num_chats:
        while coming and coming[0].arrived <= now:
            queue.enter(coming.pop(0))
        queue.admit()
        if not queue.running:
            now = coming[0].arrived
            continue
        new_tokens = read_tokens = 0
        for chat in [*queue.running]:
            sequence = chat.sequence
            if sequence is None:  # an older chat preempted this one in the same step
                continue
            text = chat.text[sequence.length : sequence.length + CHUNK]
            try:
                if not queue.make_room(chat, len(text)):
                    continue
            except OutOfBlocks:
                raise SystemExit(f"{budget} is too small for one chat") from None
            new_tokens, read_tokens = new_tokens + len(text), read_tokens + sequence.length
            sequence.commit(text)
            if sequence.length == len(chat.text):  # the whole text is computed, so the model writes a token
                chat.first_token = chat.first_token or now
                if len(chat.text) == chat.total:
                    queue.remove(chat)
                    done.append(chat)
                else:
                    chat.extend([len(done) % VOCAB])
        now += machine.seconds(new_tokens, read_tokens)
    cache.check()
    waits, stats = [chat.first_token - chat.arrived for chat in done], cache.stats()
    return {
        "seconds": now,
        "output tokens a second": sum(chat.total - chat.prompt_length for chat in done) / now,
        "first token, median s": float(np.median(waits)),
        "first token, 95 % s": float(np.quantile(waits, 0.95)),
        "prompt tokens cached": stats.cached_tokens / sum(chat.prompt_length for chat in done),
        "preempted": queue.num_preempted,
    }


def main() -> dict[tuple[str, bool], dict[str, float]]:
    results = {
        (budget, preempts): simulate(budget, preempts) for budget in ("3GiB", "12GiB") for preempts in (False, True)
    }
    print(f"{'':24}" + "".join(f"{budget + (', preempts' if preempts else ''):>18}" for budget, preempts in results))
    for name in next(iter(results.values())):
        print(f"{name:24}" + "".join(f"{figures[name]:18.2f}" for figures in results.values()))
    return results


if __name__ == "__main__":
    main()
