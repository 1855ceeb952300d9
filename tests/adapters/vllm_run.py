"""Random requests through vLLM's own scheduler, with a memory in which every row says which text it belongs to."""

from __future__ import annotations

import importlib
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from rows import GroupRows, Kind, next_token

MODULES = (
    "config", "v1.core.sched.scheduler", "v1.request", "v1.kv_cache_interface", "v1.outputs", "sampling_params",
)  # fmt: skip
"""The modules of vLLM that a ``Run`` needs, as attributes with the last part of their names."""
SHAPES: dict[str, list[Kind]] = {
    "full": [("full", 0)],
    "full, windows": [("full", 0), ("window", 6), ("window", 6)],
    "window alone": [("window", 9)],
    "full, chunk": [("chunk", 8), ("full", 0)],
    "full, state": [("state", 0), ("full", 0)],
    "everything": [("full", 0), ("window", 5), ("state", 0), ("full", 0), ("chunk", 8)],
}


EXACT = "state in blocks, full"
_KINDS = {**SHAPES, EXACT: [("state", 5), ("full", 0)]}
"""And a memory whose states take five blocks each, which our manager alone can hand out."""


class ModelConfig(SimpleNamespace):
    """A model with nothing special: whatever else is asked of it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Run:
    """One random workload through vLLM's own scheduler. The worker's tables grow by what the scheduler tells; every row is
    proved before it is read and after it is written. Blocks are shared when they are scheduled."""

    def __init__(self, project: Any, seed: int, shape: str, manager: Any = None, scheduler: Any = None) -> None:
        self.project, self.shape, self.random = project, shape, np.random.default_rng(seed)
        random, self.longest = self.random, 160
        self.size, kinds = int(random.choice([1, 4, 16])), _KINDS[shape]
        blocks = (int(random.integers(1.1 * self.longest, 4 * self.longest)) // self.size + 2) * len(kinds)
        scheduling = project.config.SchedulerConfig(
            max_num_seqs=int(random.integers(2, 12)), max_num_batched_tokens=int(random.integers(16, 90)),
            max_model_len=self.longest, enable_chunked_prefill=True, is_encoder_decoder=False,
        )  # fmt: skip
        units = kinds[0][1] if kinds[0][0] == "state" else 0
        if units:  # as many as a text of the greatest length needs, and some more
            text = -(-self.longest // self.size)
            blocks = units * (4 + -(-text // units) + int(random.integers(0, 16)))
        caching = project.config.CacheConfig(block_size=self.size, enable_prefix_caching=True)
        caching.num_gpu_blocks = blocks
        if "state" in dict(kinds):
            caching.mamba_cache_mode = "align"
        settings = project.config.VllmConfig(
            scheduler_config=scheduling, cache_config=caching, device_config=project.config.DeviceConfig("cpu")
        )
        settings.model_config = ModelConfig(
            max_model_len=self.longest, runner_type="generate", skip_tokenizer_init=True
        )
        interface = project.kv_cache_interface
        groups = [
            interface.KVCacheGroupSpec([f"layer {i}"], self.spec_of(interface, kind)) for i, kind in enumerate(kinds)
        ]
        if manager is not None:
            project.scheduler.KVCacheManager = manager
        tensors = [
            interface.KVCacheTensor(size=1, layers=list(group.layer_names), layer_stride=1, block_stride=1)
            for group in groups[: 2 * bool(units)]
        ]
        self.scheduler = (scheduler or project.scheduler.Scheduler)(
            vllm_config=settings, block_size=self.size, log_stats=True,
            kv_cache_config=interface.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups),
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True, clear_backend=lambda: None),
        )  # fmt: skip
        self.rows, self.tables = GroupRows(kinds, blocks, self.size), dict[str, list[list[int]]]()
        self.computed = self.tokens = 0
        heads = [random.integers(0, 9, 100).tolist() for _ in range(3)]
        self.texts = []
        for _ in range(50):
            text = heads[random.integers(3)][: random.integers(1, 100)]
            self.texts.append([*text, *random.integers(0, 9, random.integers(1, 9)).tolist()])

    def spec_of(self, interface: Any, kind: Kind) -> Any:
        name, span = kind
        if name == "state":
            shapes = dict(shapes=((span * self.size * 32 or 1,),), dtypes=(caching_dtype(),))
            return interface.MambaSpec(block_size=self.size, mamba_cache_mode="align", **shapes)
        make, more = {
            "full": (interface.FullAttentionSpec, {}), "window": (interface.SlidingWindowSpec, {"sliding_window": span}),
            "chunk": (interface.ChunkedLocalAttentionSpec, {"attention_chunk_size": span}),
        }[name]  # fmt: skip
        width = 16 if self.shape == EXACT else 1  # a token has the bytes of 32 elements of a state
        return make(block_size=self.size, num_kv_heads=1, head_size=width, dtype=caching_dtype(), **more)

    def request(self, name: str, text: list[int], sampling: Any) -> Any:
        hashing, utils = (
            importlib.import_module(f"vllm.{name}") for name in ("utils.hashing", "v1.core.kv_cache_utils")
        )
        utils.init_none_hash(hashing.sha256)
        hasher = utils.get_request_block_hasher(self.size, hashing.sha256)
        return self.project.request.Request(name, text, sampling, None, block_hasher=hasher)

    def run(self) -> Run:
        finished, waiting, names = 0, self.texts, map(str, count())
        while finished < 50:
            for _ in range(min(len(waiting), int(self.random.integers(0, 4)))):
                text = waiting.pop()
                most = int(self.random.integers(1, min(40, self.longest - len(text))))
                self.tokens += len(text) + most - 1
                sampling = self.project.sampling_params.SamplingParams(max_tokens=most, ignore_eos=True)
                self.scheduler.add_request(self.request(next(names), text, sampling))
            finished += self.step()
        return self

    def step(self) -> int:
        out = self.scheduler.schedule()
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = [[*ids] for ids in new.block_ids]
        cached = out.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids):
            if name in cached.resumed_req_ids:
                self.tables[name] = [[] for _ in self.tables[name]]
            for table, more in zip(self.tables[name], blocks or ()):
                table += more
        spans, said = [], []
        for name, n in out.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            tokens, end = list(request.all_token_ids), request.num_computed_tokens
            spans.append((name, tokens, end - n, end))
            # A step writes rows of attention before it reads any, so requests may share what the same step computes.
            self.rows.prove(tokens, self.tables[name], end - n, end - n, name, states_only=True)
        for name, tokens, start, end in spans:
            self.rows.write(tokens, self.tables[name], start, end)
            self.computed += end - start
        for name, tokens, start, end in spans:
            self.rows.prove(tokens, self.tables[name], start, end, name)
            said.append([next_token(tokens, 9)] if end == len(tokens) else [])
        names = [span[0] for span in spans]
        output = self.project.outputs.ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=said
        )
        told = self.scheduler.update_from_output(out, output)
        return sum(one.finish_reason is not None for each in told.values() for one in each.outputs)


def caching_dtype() -> Any:
    return importlib.import_module("torch").float32
