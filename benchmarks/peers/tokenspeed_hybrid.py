"""TokenSpeed: its C++ scheduler for several groups of layers, over a trace.

The scheduler runs as in its engine: it admits requests in the order of the trace, computes at most ``STEP_TOKENS`` prompt
tokens in a step (its default), prompts before outputs, and then decodes a token of each of at most ``AT_ONCE`` requests.
Its engine, whose planning needs a GPU, is not on the registry. So ``groups_of`` divides the memory by the rules of its
recipes: groups share physical blocks, and the largest block of any group is the size of one. The pool of the recipes for
models without states would have one block of each group in a physical block; here as many as fit.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from math import prod
from typing import Any

import tokenspeed_scheduler as ts

from benchmarks.peers.hybrid_layers import heads_of, kinds_of, states_of
from benchmarks.peers.tokenspeed import (
    LEAST_BLOCK,
    VERSION,
    extended,
    finished,
    name_of,
    reserve,
    scheduler_of,
    spec,
    tell,
)
from kvpagoda.replay import Trace
from kvpagoda.replay.texts import text_of

__all__ = ["LEAST_BLOCK", "VERSION", "Peer"]
AT_ONCE, STEP_TOKENS, STATE_BLOCK = 64, 8192, 128
"""``STATE_BLOCK``: tokens of a block, and between two states that can be kept, in models with recurrent states."""
WAITING = 4
"""Requests that wait in the scheduler; it hashes the prompts of all of them in every step in which memory is short."""
KINDS = {"full": ts.AttnKind.Full, "window": ts.AttnKind.SlidingWindow}
now = time.process_time


class Peer:
    """Serves ``trace`` (``tokens_per_id`` tokens per id) with the layers of the model ``config`` in ``budget`` bytes."""

    def __init__(self, config: dict[str, Any], budget: int, trace: Trace, tokens_per_id: int) -> None:
        self.trace, self.per_id = trace, tokens_per_id
        groups, self.block_size, nbytes = groups_of(config)
        self.num_blocks, self.num_groups = budget // nbytes, len(groups)
        for group in groups:
            group.total_pages = (self.num_blocks - 1) * group.cache_blocks_per_lcm_block + 1
        self.scheduler = scheduler_of(
            groups, self.num_blocks, self.block_size, step_tokens=STEP_TOKENS, at_once=AT_ONCE
        )  # fmt: skip
        self.longest = self.scheduler.max_single_request_tokens()
        self.waiting = deque(range(len(trace)))
        self.outputs: dict[str, list[int]] = {}
        self.reserved: dict[str, int] = {}
        self.seen: set[str] = set()
        self.taken = 0.0
        self.hits = self.prompts = self.never_fit = self.preempted = self.steps = self.running_steps = 0

    def run(self) -> dict[str, Any]:
        """Serve the whole trace and return its figures."""
        while self.waiting or self.outputs:
            self._submit()
            if self.outputs:
                self._step()
        assert self.scheduler.active_lcm_blocks() == 0, "blocks are lost"
        return {
            "seconds": self.taken, "requests": len(self.trace), "prompt_tokens": self.prompts,
            "hit_percent": 100 * self.hits / max(1, self.prompts), "never_fit": self.never_fit, "preempted": self.preempted,
            "mean_running": self.running_steps / max(1, self.steps), "steps": self.steps, "num_blocks": self.num_blocks,
            "block_size": self.block_size, "num_groups": self.num_groups,
        }  # fmt: skip

    def _submit(self) -> None:
        """Pass waiting requests to the scheduler until it has ``WAITING``."""
        while self.waiting and self.scheduler.waiting_size() < WAITING:
            number = self.waiting.popleft()
            tokens, num_prompt = text_of(self.trace, number, self.per_id)
            prompt, output, name = tokens[:num_prompt].tolist(), tokens[num_prompt:].tolist(), name_of(number)
            if len(tokens) > self.longest:
                self.never_fit += 1
                continue
            start = now()
            self.scheduler.submit_requests([spec(name, prompt, len(output))])
            self.taken += now() - start
            self.outputs[name] = output
            self.prompts += num_prompt

    def _step(self) -> None:
        """Ask for a plan, and tell the scheduler what its batch computed."""
        start = now()
        plan = self.scheduler.next_execution_plan()
        assert not plan.aborts, [abort.detail for abort in plan.aborts]
        batches = plan.forward
        self.steps += 1
        self.running_steps += self.scheduler.prefilling_size() + self.scheduler.decoding_size()
        if batches:
            self._computed(batches[0])
        self.taken += now() - start

    def _computed(self, batch: Any) -> None:
        """Count the hits of prompts that began, and give each request that is past its prompt its next token."""
        num_prompts = batch.num_extends()
        names, lengths, begun = batch.request_ids, batch.input_lengths, batch.extend_prefix_lens
        events = []
        for place, name in enumerate(names):
            is_prompt = place < num_prompts
            if is_prompt:
                if name not in self.seen:
                    self.seen.add(name)
                    self.hits += begun[place]
                if begun[place] + lengths[place] < batch.prefill_lengths[place]:
                    events.append(extended(name, []))
                    continue
            output = self.outputs[name]
            count = 1 if is_prompt else self.reserved.pop(name, 1)
            events.append(extended(name, output[:count]))
            del output[:count]
            if not output:
                events.append(finished(name))
                del self.outputs[name]
            elif not is_prompt:
                events += reserve(name, len(output))
                self.reserved[name] = len(output)
        tell(self.scheduler, *events)


def groups_of(config: dict[str, Any]) -> tuple[list[Any], int, int]:
    """Return the groups of a model, the tokens between two positions that are told apart, and the bytes of a physical
    block, in which each group has as many blocks as its bytes allow. Keys and values are bfloat16."""
    sizes = Counter(kinds_of(config).values())
    token = 2 * 2 * prod(heads_of(config))
    if "state" in sizes:
        return _with_states(config, sizes, token)
    largest = max(sizes.values())
    groups = [
        _group(kind, LEAST_BLOCK, KINDS[kind], largest // size, config["sliding_window"] if kind == "window" else None)
        for kind, size in sorted(sizes.items())
    ]
    return groups, LEAST_BLOCK, largest * token * LEAST_BLOCK


def _with_states(config: dict[str, Any], sizes: Counter[str], token: int) -> tuple[list[Any], int, int]:
    """Return the same for a model with states: as many groups of them as there are layers with states for each with full
    attention. A state has the memory of as many blocks of K as its float32 matrix takes, and that of as many of V for its
    convolution."""
    matrix, block = 4 * prod(states_of(config)[1]), token * STATE_BLOCK
    packed = matrix // (block // 2)
    groups = [_group("full", STATE_BLOCK, ts.AttnKind.Full, packed)]
    groups += [_group(f"state {i}", 0, ts.AttnKind.State, 1) for i in range(sizes["state"] // sizes["full"])]
    return groups, STATE_BLOCK, sizes["full"] * block * packed


def _group(name: str, block_size: int, kind: Any, packed: int, window: int | None = None) -> Any:
    return ts.CacheGroupConfig(name, block_size, 2, kind, window, packed)
