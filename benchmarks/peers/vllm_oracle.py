"""vLLM's own ``KVCacheManager`` behind the calls of ``kvpagoda.replay.engines.driver``, for ``benchmarks.oracle``.

vLLM is installed, or unpacked in the folder that ``KVPAGODA_BENCH_VLLM`` names, or there is the environment that ``make
consumers`` fills. Nothing of it is replaced but packages that it imports and the manager never calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.peers import vllm_here
from kvpagoda.replay import Group
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.texts import text_of

vllm_here.prepare()

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus  # noqa: E402

VERSION = str(vllm.__version__)
LEAST_BLOCK = 1
KEY_BYTES = 8


class Peer:
    """vLLM's manager of ``num_blocks`` blocks, and its null block, over the requests of ``chains``.

    ``hashed``: vLLM hashes the tokens of each request itself. Otherwise the keys of ``chains`` are its hashes, which is
    much faster. ``watermark``, ``retention``, ``match_unit``, ``reserve_prompt``: see ``EngineSettings``. ``groups``: as
    ``kvpagoda.replay.Group.from_text`` reads them. ``in_flight``: the most tokens of a request that a step computes."""

    finds_all = False

    def __init__(
        self, chains: Chains, num_blocks: int, *, hashed: bool = False, watermark: float = 0.0, retention: int | None = 0,
        groups: str = "full", in_flight: int | None = None, match_unit: int | None = None, reserve_prompt: bool = True,
    ) -> None:  # fmt: skip
        self.chains, self.num_blocks, self.size = chains, num_blocks, chains.block_size
        unit, self._must_fit = match_unit or self.size, reserve_prompt
        self._units = Chains(chains.trace, unit)
        longest = int(chains.totals.max()) + 1
        kinds = Group.from_text(groups)
        specs = [KVCacheGroupSpec([str(i)], spec_of(group, self.size)) for i, group in enumerate(kinds)]
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=specs,
            prefix_cache_retention_interval=retention,
        )
        self.manager = KVCacheManager(
            config, max_model_len=longest, scheduler_block_size=self.size, hash_block_size=unit, enable_caching=True,
            watermark=watermark, max_in_flight_tokens=in_flight,
        )  # fmt: skip
        assert self.manager.coordinator.enable_partial_hash_hits == (unit < self.size)
        self._splits = splits(self.size, in_flight or longest, unit) if Group("state") in kinds else None
        self._own_hashes = None
        if hashed:
            hashed_by = get_hash_fn_by_name("sha256")
            init_none_hash(hashed_by)
            self._own_hashes = get_request_block_hasher(unit, hashed_by)
        self._sampling = SamplingParams(max_tokens=longest)
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, list[int]] = {}
        self.running: set[int] = set()
        self._found: Any = None

    def step_starts(self) -> None:
        self.manager.new_step_starts()
        _, retained = self.manager.take_kv_cache_block_copies()  # those of the step before, which has run them
        self.manager.block_pool.free_blocks(retained)

    def find(self, request: int, known: int) -> int:
        made = self._request(request)
        self._append(request, known)
        blocks, hit, made.shared_prefix_boundary = self.manager.get_computed_blocks(made)
        self._found = request, hit, blocks
        return int(hit)

    def chunk(self, request: int, begin: int, end: int, known: int) -> int:
        made = self.requests[request]
        if self._splits is None:
            return end
        self._append(request, known)
        return begin + int(
            Scheduler._mamba_block_aligned_split(self._splits, made, end - begin, begin - made.num_computed_tokens)
        )

    def start(self, request: int, end: int, known: int) -> bool:
        asked, hit, blocks = self._found
        assert asked == request
        made = self.requests[request]
        is_fit = self.manager.allocate_slots(
            made, end - hit, hit, blocks, full_sequence_must_fit=self._must_fit, has_scheduled_reqs=bool(self.running)
        )
        if is_fit is None:
            return False
        made.status, made.num_computed_tokens = RequestStatus.RUNNING, end
        self.running.add(request)
        return True

    def grow(self, request: int, end: int, known: int) -> bool:
        made = self.requests[request]
        self._append(request, known)
        if self.manager.allocate_slots(made, end - made.num_computed_tokens) is None:
            return False
        made.num_computed_tokens = end
        return True

    def stop(self, request: int, is_complete: bool) -> None:
        made = self.requests[request]
        self.manager.free(made)
        self.running.remove(request)
        made.status, made.num_computed_tokens = RequestStatus.PREEMPTED, 0
        if is_complete:
            del self.requests[request], self.outputs[request]

    def check(self) -> None:
        self.step_starts()
        free = self.manager.block_pool.get_num_free_blocks()
        assert free == self.num_blocks, f"{free} of {self.num_blocks} blocks are free at the end"

    def _append(self, request: int, known: int) -> None:
        """Append output tokens until ``known`` tokens are known."""
        made, output = self.requests[request], self.outputs[request]
        more = known - made.num_tokens
        assert more >= 0, f"request {request} has {made.num_tokens} tokens, not {known}"
        made.append_output_token_ids(output[:more])
        del output[:more]

    def _request(self, request: int) -> Request:
        """Return vLLM's request, made when it is first looked up. Without ``hashed`` its tokens are all 0."""
        if request not in self.requests:
            num_prompt, total = int(self.chains.prompts[request]), int(self.chains.totals[request])
            if self._own_hashes is not None:
                tokens = text_of(self.chains.trace, request, self.chains.trace.block_size)[0][:total].tolist()
            else:
                tokens = [0] * total
            hasher = self._own_hashes or self._keys_of(request)
            self.requests[request] = Request(
                str(request), tokens[:num_prompt], self._sampling, None, block_hasher=hasher
            )
            self.outputs[request] = tokens[num_prompt:]
        return self.requests[request]

    def _keys_of(self, request: int) -> Any:
        """Return a hasher that names the whole units of ``request`` by their keys."""
        keys = self._units.keys(request).astype(f">i{KEY_BYTES}").tobytes()
        size = self._units.block_size

        def hasher(made: Request) -> list[bytes]:
            first, end = len(made.block_hashes), made.num_tokens // size
            return [keys[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in range(first, end)]

        return hasher


def spec_of(group: Group, block_size: int) -> Any:
    """Return vLLM's spec of a group. How large its rows are plays no part."""
    if group.kind == "state":
        return MambaSpec(block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    attention = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    if group.kind == "window":
        return SlidingWindowSpec(**attention, sliding_window=group.size)
    if group.kind == "chunk":
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.size)
    return FullAttentionSpec(**attention)


def splits(block_size: int, step_tokens: int, unit: int) -> Any:
    """Return the attributes that ``Scheduler._mamba_block_aligned_split`` reads from a scheduler."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size), block_size=block_size, hash_block_size=unit,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0), max_num_scheduled_tokens=step_tokens,
        mamba_partial_cache_hit=unit < block_size, mamba_has_prefill_checkpoint_blocks=False,
        mamba_shared_prefix_checkpoint=False,
        mamba_prefill_checkpoint_alignment=None, use_eagle_block_drop=False, num_hash_lookahead_tokens=0,
    )  # fmt: skip
