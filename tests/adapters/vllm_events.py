"""vLLM's own scheduler over random texts, and a follower of what it publishes: the judge of ``VllmFollower``."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from time import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import vllm
from vllm import config
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm_run import ModelConfig

from kvpagoda import Namespace
from kvpagoda.events import NextHit, VllmFollower

init_none_hash(sha256)
LONGEST = 200
MODELS: dict[str, tuple[int, list[tuple[str, int, int]]]] = {
    "llama": (4, [("full", 0, 4)]),
    "gpt-oss": (4, [("full", 0, 4), ("window", 10, 4)]),
    "gemma-3": (4, [("full", 0, 4), *5 * [("window", 9, 4)]]),
    "qwen3-next": (8, [*3 * [("state", 0, 8)], ("full", 0, 8)]),
    "everything": (4, [("full", 0, 4), ("window", 5, 4), ("state", 0, 4), ("full", 0, 4)]),
    "large windows": (4, [("full", 0, 4), ("window", 18, 8)]),
    "windows alone": (4, [("window", 10, 4)]),
    "windows and states": (4, [("window", 10, 4), ("state", 0, 4)]),
    "llama-4": (4, [("chunk", 8, 4), ("full", 0, 4)]),
    "gemma-4": (4, [("full", 0, 16), ("window", 7, 4)]),
    "qwen3-next, match unit": (4, [*3 * [("state", 0, 16)], ("full", 0, 16)]),
}
"""Tokens of a hash, and of each group the kind, the tokens of its window or chunk, and those of a block."""
EXACT = [*MODELS][:6]
"""The models of which the events tell all: whatever has full attention with the smallest blocks of all."""
DENSE = [*MODELS][6:8]
"""Those of which they do with ``--prefix-cache-retention-interval`` off."""


class Recorder:
    """In the place of vLLM's publisher: keeps what it would send."""

    def __init__(self) -> None:
        self.batches, self.payloads = list[Any](), list[bytes]()

    def publish(self, batch: Any) -> None:
        self.batches.append(batch)
        self.payloads.append(msgspec.msgpack.Encoder().encode(batch))

    def shutdown(self) -> None:
        pass


class Engine:
    """Random texts, a few of them with a salt or an adapter, in so little memory that blocks are evicted and requests
    preempted. ``answers``: how many answers were of which kind."""

    def __init__(self, model: str, seed: int, *, retention: int | None = None, drafts: bool = False) -> None:
        self.random, (self.hash_size, kinds) = np.random.default_rng(seed), MODELS[model]
        self.size = int(np.lcm.reduce([size for _, _, size in kinds]))
        num_blocks = (
            int(self.random.integers(1.2 * LONGEST, 3 * LONGEST)) // min(size for *_, size in kinds) * len(kinds)
        )
        caching = config.CacheConfig(block_size=self.size, enable_prefix_caching=True)
        caching.num_gpu_blocks = num_blocks
        if any(kind == "state" for kind, *_ in kinds):
            caching.mamba_cache_mode = "align"
        settings = config.VllmConfig(
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=int(self.random.integers(2, 9)), max_num_batched_tokens=int(self.random.integers(20, 90)),
                max_model_len=LONGEST, enable_chunked_prefill=True, is_encoder_decoder=False,
            ),
            cache_config=caching, device_config=config.DeviceConfig("cpu"),
            kv_events_config=config.KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )  # fmt: skip
        settings.model_config = ModelConfig(max_model_len=LONGEST, runner_type="generate", skip_tokenizer_init=True)
        groups = [
            interface.KVCacheGroupSpec([f"layer {i}"], spec_of(*kind), is_eagle_group=drafts)
            for i, kind in enumerate(kinds)
        ]
        self.scheduler = Scheduler(
            vllm_config=settings, block_size=self.size, hash_block_size=self.hash_size, log_stats=True,
            kv_cache_config=interface.KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=retention
            ),
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True, clear_backend=lambda: None),
        )  # fmt: skip
        self.scheduler.kv_event_publisher = self.sent = Recorder()
        self.follower, self.num_read, self.num_requests = VllmFollower(drafts=drafts), 0, 0
        heads = [self.random.integers(0, 9, 120).tolist() for _ in range(3)]
        self.texts = []
        for _ in range(60):
            head = heads[self.random.integers(3)][: self.random.integers(1, 120)]
            self.texts.append([*head, *self.random.integers(0, 9, self.random.integers(1, 30)).tolist()])
        self.answers = Counter(exact=0, unsure=0, bound=0, hits=0)

    def request(self, text: list[int], salt: str | None, adapter: str | None, most: int = 1) -> Any:
        self.num_requests += 1
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        return Request(
            str(self.num_requests), text, sampling, None, cache_salt=salt,
            lora_request=LoRARequest(adapter, 1, "/adapter") if adapter else None,
            block_hasher=get_request_block_hasher(self.hash_size, sha256),
        )  # fmt: skip

    def space(self) -> tuple[str | None, str | None]:
        return ([(None, None)] * 8 + [("tenant", None), (None, "adapter")])[self.random.integers(10)]

    def step(self) -> None:
        out = self.scheduler.schedule()
        said = []
        for name in out.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            is_whole = request.num_computed_tokens == request.num_tokens
            said.append([int(self.random.integers(9))] if is_whole else [])
        names = [*out.num_scheduled_tokens]
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=said
        )
        self.scheduler.update_from_output(out, output)

    def read(self) -> None:
        for payload in self.sent.payloads[self.num_read :]:
            self.follower.feed(self.num_read, payload)
            self.num_read += 1

    def compare(self, ask: Callable[[list[int], Namespace], NextHit] | None = None) -> None:
        """The follower, or ``ask``, says what the engine would find for a text now, or a bound of it."""
        text = self.texts[self.random.integers(len(self.texts))]
        text = text[: self.random.integers(1, len(text) + 1)]
        text = [*text, *self.random.integers(0, 9, self.random.integers(0, 9)).tolist()]
        salt, adapter = self.space()
        _, hit, _ = self.scheduler.kv_cache_manager.get_computed_blocks(self.request(text, salt, adapter))
        answer = (ask or self.follower.resumable)(text, Namespace(salt, adapter))
        assert hit <= answer.resumable <= answer.cached < len(text)
        assert answer.at_most or hit == answer.resumable
        kind = "bound" if hit < answer.resumable else "unsure" if answer.at_most else "exact"
        self.answers[kind] += 1
        self.answers["hits"] += hit > 0

    def run(self, num_steps: int) -> Engine:
        for number in range(num_steps):
            if self.random.random() < 0.4:
                text = self.texts[self.random.integers(len(self.texts))]
                most = int(self.random.integers(1, min(40, LONGEST - len(text))))
                self.scheduler.add_request(self.request(text, *self.space(), most))
            self.step()
            if not self.scheduler.requests and self.random.random() < 0.1:
                self.scheduler.reset_prefix_cache()
                self.scheduler.schedule()
            if self.num_read < len(self.sent.payloads) or number % 5 == 0:
                self.flush()
                self.read()
                for _ in range(3):
                    self.compare()
        self.check()
        return self

    def check(self) -> None:
        """The follower has the names that the engine has, in each group, as often."""
        self.flush()
        self.read()
        ours = {
            (number, name): count
            for number, group in self.follower._index._groups.items()
            for name, count in group.held.items()
        }
        theirs: Counter[tuple[int, Any]] = Counter()
        for key, blocks in self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache.items():
            name = maybe_convert_block_hash(get_block_hash(key))
            theirs[get_group_id(key), name] = len(blocks) if isinstance(blocks, dict) else 1
        assert ours == theirs and self.follower.is_complete

    def flush(self) -> None:
        """Send what waits for the end of the next step."""
        if events := self.scheduler.kv_cache_manager.take_events():
            self.sent.publish(KVEventBatch(ts=time(), events=events))


def spec_of(kind: str, span: int, size: int) -> Any:
    if kind == "state":
        return interface.MambaSpec(
            block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )  # fmt: skip
    rows = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind == "window":
        return interface.SlidingWindowSpec(**rows, sliding_window=span)
    if kind == "chunk":
        return interface.ChunkedLocalAttentionSpec(**rows, attention_chunk_size=span)
    return interface.FullAttentionSpec(**rows)


if __name__ == "__main__":  # STEPS MODEL ..; for each, dense and sparse, how many answers were of which kind
    for model in sys.argv[2:]:
        for retention in (None, 0):
            answers = Engine(model, 1, retention=retention).run(int(sys.argv[1])).answers
            print(json.dumps({"version": vllm.__version__, "model": model, **answers}))
