"""vLLM's tiering spec with a worker that copies in a loop: vLLM's own needs a GPU, and all else runs on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks to chunks and back when it is told to."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self.region, self.refs, self.done = region, kv_caches.group_data_refs, list[TransferResult]()
        self.blocks = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
        self.chunks = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self.copy(job_id, dst_spec, src_spec, is_store=False)

    def copy(self, job_id: int, device: Any, host: Any, *, is_store: bool) -> bool:
        first = 0
        for size, refs in zip(device.group_sizes, self.refs):
            part = slice(first, first + size)
            for block, chunk in zip(device.block_ids[part], host.block_ids[part]):
                for ref in refs:
                    ends = self.blocks[ref.tensor_idx][block], self.chunks[ref.tensor_idx][chunk]
                    source, target = ends if is_store else ends[::-1]
                    target[: ref.page_size_bytes] = source[: ref.page_size_bytes]
            first += size
        self.done.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self.blocks, self.chunks = [], []
        self.region.cleanup()


class CopyingSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
