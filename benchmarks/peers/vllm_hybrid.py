"""vLLM: its ``KVCacheManager`` for several groups of layers, called over a trace as its scheduler calls it.

vLLM is installed, or unpacked in the folder that ``KVPAGODA_BENCH_VLLM`` names. Its own planning computes the groups,
the block size and the number of blocks from the layers of a model. The rules of its scheduler are kept. A request is
admitted when its prompt fits. For models with states, chunks end where its ``_mamba_block_aligned_split`` says. When a
running request needs more blocks than are free, the youngest request is preempted. A step computes at most
``STEP_TOKENS`` tokens of every running request, as in ``kvpagoda.replay.serve``; or, with ``max_num_batched_tokens``, so
many of all of them together and one of an output, as vLLM does.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

from benchmarks.peers import vllm_here
from benchmarks.peers.hybrid_layers import heads_of, kinds_of, states_of
from kvpagoda.replay import Trace
from kvpagoda.replay.texts import text_of
from kvpagoda.units import ceil_div

vllm_here.prepare()

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config.cache import KVCacheLayout  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

VERSION = str(vllm.__version__)
LEAST_BLOCK = 16
AT_ONCE, STEP_TOKENS = 64, 2048
now = time.process_time


class Peer:
    """Serves ``trace`` (``tokens_per_id`` tokens per id) with the layers of the model ``config`` in ``budget`` bytes.

    ``config`` has vLLM's options too, by their names: ``prefix_cache_retention_interval`` (0 by default; raised to a
    multiple of its block), ``prefix_match_unit``, ``watermark``, ``max_num_seqs``, ``max_num_batched_tokens``."""

    def __init__(self, config: dict[str, Any], budget: int, trace: Trace, tokens_per_id: int) -> None:
        self.trace, self.per_id = trace, tokens_per_id
        specs = specs_of(config)
        self.block_size = next(iter(specs.values())).block_size
        has_states = any(isinstance(spec, MambaSpec) for spec in specs.values())
        interval = config.get("prefix_cache_retention_interval", 0)
        interval = interval and self.block_size * ceil_div(interval, self.block_size)
        settings = _settings(self.block_size, interval, config.get("prefix_match_unit"))
        self.at_once, self.shared = config.get("max_num_seqs", AT_ONCE), config.get("max_num_batched_tokens", 0)
        self.left = self.step_tokens = self.shared or STEP_TOKENS
        planned = get_kv_cache_config_from_groups(settings, get_kv_cache_groups(settings, specs), budget)
        self.block_size = planned.kv_cache_groups[0].kv_cache_spec.block_size
        scheduler_size, hash_size = resolve_kv_cache_block_sizes(planned, settings)
        longest = int((trace.input_lengths + trace.output_lengths).max())
        self.manager = KVCacheManager(
            planned, max_model_len=longest, scheduler_block_size=scheduler_size, hash_block_size=hash_size,
            max_in_flight_tokens=self.step_tokens, enable_caching=True, watermark=config.get("watermark", 0.0),
        )  # fmt: skip
        self.num_blocks, self.num_groups = planned.num_blocks, len(planned.kv_cache_groups)
        hashed_by = get_hash_fn_by_name("sha256")
        init_none_hash(hashed_by)
        self._hasher = get_request_block_hasher(hash_size, hashed_by)
        self._sampling = SamplingParams(max_tokens=longest)
        is_partial = hash_size < scheduler_size and self.manager.coordinator.enable_partial_hash_hits
        splits = _splits(settings, scheduler_size, hash_size, is_partial, self.step_tokens)
        self._splits = splits if has_states else None
        self.waiting: deque[int | Request] = deque(range(len(trace)))
        self.running: list[Request] = []
        self.outputs: dict[str, list[int]] = {}
        self.taken = 0.0
        self.hits = self.prompts = self.never_fit = self.preempted = self.steps = self.running_steps = 0
        self.again = 0  # tokens that are computed again after a preemption
        self.lost: dict[str, int] = {}  # what each preempted request had computed

    def run(self) -> dict[str, Any]:
        """Serve the whole trace and return its figures."""
        while self.waiting or self.running:
            self._step()
        free = self.manager.block_pool.get_num_free_blocks()
        assert free == self.num_blocks - 1, f"{free} of {self.num_blocks} blocks are free at the end"
        return {
            "seconds": self.taken, "requests": len(self.trace), "prompt_tokens": self.prompts,
            "hit_percent": 100 * self.hits / max(1, self.prompts), "never_fit": self.never_fit, "preempted": self.preempted,
            "mean_running": self.running_steps / max(1, self.steps), "steps": self.steps, "num_blocks": self.num_blocks,
            "block_size": self.block_size, "num_groups": self.num_groups,
            "again_percent": 100 * self.again / max(1, self.prompts),
        }  # fmt: skip

    def _step(self) -> None:
        """Compute a chunk of every running request, then admit waiting ones, in the order of vLLM's scheduler."""
        start, before = now(), self.preempted
        self.manager.new_step_starts()
        self.left = self.step_tokens
        for request in [*self.running]:
            if request in self.running and self.left:
                self._compute(request)
        self.taken += now() - start
        while self.waiting and len(self.running) < self.at_once and self.left and self.preempted == before:
            if not self._admit():
                break
        start = now()
        _, retained = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(retained)  # when the step has run the copies, as vLLM's scheduler does
        self.taken += now() - start
        self.steps += 1
        self.running_steps += len(self.running)

    def _admit(self) -> bool:
        """Admit the first waiting request and compute its first chunk; False if it does not fit now."""
        first = self.waiting[0]
        if isinstance(first, int):
            tokens, num_prompt = text_of(self.trace, first, self.per_id)
            prompt, self.outputs[str(first)] = tokens[:num_prompt].tolist(), tokens[num_prompt:].tolist()
            start = now()
            first = self.waiting[0] = Request(str(first), prompt, self._sampling, None, block_hasher=self._hasher)
        else:
            start = now()
        blocks, hit, first.shared_prefix_boundary = self.manager.get_computed_blocks(first)
        count, made = min(first.num_tokens - hit, self.left), None
        if self._splits is not None:
            count = Scheduler._mamba_block_aligned_split(self._splits, first, count, hit)
        if count:  # else too few tokens of this step are left for a chunk that ends with a block
            made = self.manager.allocate_slots(
                first, count, hit, blocks, full_sequence_must_fit=True, has_scheduled_reqs=bool(self.running)
            )
        self.taken += now() - start
        if made is None:
            if not self.running:  # the request is larger than the whole cache
                self.never_fit += 1
                self.waiting.popleft()
            return False
        if first.status == RequestStatus.WAITING:
            self.hits, self.prompts = self.hits + hit, self.prompts + first.num_prompt_tokens
        else:
            self.again += max(0, self.lost.pop(first.request_id) - hit)
        first.status, first.num_computed_tokens = RequestStatus.RUNNING, hit + count
        self.running.append(first)
        self.waiting.popleft()
        self._spend(count)
        self._end(first)
        return True

    def _spend(self, count: int) -> None:
        """Take ``count`` tokens from those of the step, if all requests share them."""
        if self.shared:
            self.left -= count

    def _compute(self, request: Request) -> None:
        """Compute the next chunk of ``request``: of its text; after the text, of its output up to the last block
        boundary; then the rest of the output. The request may be preempted, or may end."""
        length = request.num_computed_tokens
        if length == request.num_tokens:
            output = self.outputs[request.request_id]
            due = (length + len(output)) // self.block_size * self.block_size
            count = 1 if self.shared else min(STEP_TOKENS, due - length if due > length else len(output))
            request.append_output_token_ids(output[:count])
            del output[:count]
        count = min(request.num_tokens - length, self.left)
        if self._splits is not None:
            count = Scheduler._mamba_block_aligned_split(self._splits, request, count)
        if not count:
            return
        while self.manager.allocate_slots(request, count) is None:
            victim = self.running.pop()
            self.manager.free(victim)
            self.lost[victim.request_id] = victim.num_computed_tokens
            victim.status, victim.num_computed_tokens = RequestStatus.PREEMPTED, 0
            self.waiting.appendleft(victim)
            self.preempted += 1
            if victim is request:
                return
        request.num_computed_tokens += count
        self._spend(count)
        self._end(request)

    def _end(self, request: Request) -> None:
        """Free the blocks of ``request`` and stop it, if all its tokens are computed."""
        if request.num_computed_tokens == request.num_tokens and not self.outputs[request.request_id]:
            self.manager.free(request)
            self.running.remove(request)


def specs_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's cache spec for each layer of a model, by the layer's number as text. For models with states, the
    block size is the one that vLLM's platform code chooses: the least multiple of 16 tokens whose keys and values take
    at least the bytes of a state. States are in the dtype that ``config`` names (float32 by default)."""
    kinds = kinds_of(config)
    heads, width = heads_of(config)
    attention = {"num_kv_heads": heads, "head_size": width, "dtype": torch.bfloat16}
    if "state" not in kinds.values():
        made = {"full": FullAttentionSpec(block_size=LEAST_BLOCK, **attention)}
        if config.get("sliding_window"):
            made["window"] = SlidingWindowSpec(
                block_size=LEAST_BLOCK, **attention, sliding_window=config["sliding_window"]
            )
        return {str(layer): made[kind] for layer, kind in kinds.items()}
    states = {
        "shapes": states_of(config),
        "dtypes": (torch.bfloat16, getattr(torch, config.get("mamba_ssm_dtype", "float32"))),
        "mamba_cache_mode": "align",
    }
    state_nbytes = MambaSpec(block_size=LEAST_BLOCK, **states).page_size_bytes
    token_nbytes = FullAttentionSpec(block_size=1, **attention).page_size_bytes
    size = LEAST_BLOCK * ceil_div(state_nbytes, LEAST_BLOCK * token_nbytes)
    full = FullAttentionSpec(block_size=size, **attention)
    state = MambaSpec(block_size=size, page_size_padded=full.page_size_bytes, **states)
    return {str(layer): full if kind == "full" else state for layer, kind in kinds.items()}


def _settings(block_size: int, retention: int | None, unit: int | None = None) -> Any:
    """Return the part of vLLM's configuration that its planning reads, with the defaults of its options.

    ``retention``: 0, vLLM's default, keeps for reuse only the blocks of windows and states that are needed at the end
    of a prompt and where known texts branch; None keeps all. ``unit``: its ``prefix_match_unit``."""
    caching = SimpleNamespace(
        block_size=block_size, enable_prefix_caching=True, prefix_match_unit=unit, num_gpu_blocks_override=None,
        prefix_cache_retention_interval=retention, get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
    )  # fmt: skip
    return SimpleNamespace(
        cache_config=caching, attention_config=SimpleNamespace(hisparse_config=None), kv_transfer_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, long_prefill_token_threshold=0),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1), speculative_config=None,
    )  # fmt: skip


def _splits(settings: Any, block_size: int, hash_size: int, is_partial: bool, step_tokens: int) -> Any:
    """Return the attributes that ``Scheduler._mamba_block_aligned_split`` reads from a scheduler. ``is_partial``: a hit can
    end within a block."""
    settings.cache_config.block_size = block_size
    return SimpleNamespace(
        cache_config=settings.cache_config, scheduler_config=settings.scheduler_config, block_size=block_size,
        hash_block_size=hash_size, mamba_partial_cache_hit=is_partial, mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None, mamba_shared_prefix_checkpoint=False, use_eagle_block_drop=False,
        num_hash_lookahead_tokens=0, max_num_scheduled_tokens=step_tokens,
    )  # fmt: skip
