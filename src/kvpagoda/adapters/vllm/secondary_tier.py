"""Our tiers below vLLM's CPU tier, by its configuration alone:

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": .., "secondary_tiers": [{"type": "KvpagodaTier",
        "module_path": "kvpagoda.adapters.vllm.secondary_tier", "tier": "disk:FOLDER:50GiB"}]}}'

    vLLM's CPU tier, chunks ──copy in a thread──► staging records ──► Tier ──► driver: a file, Redis, Mooncake Store
                                                       header, checksum; deadlines, circuit breaker

vLLM's ``TieringOffloadingManager`` decides what is stored and loaded; a record that is late, damaged or another engine's is a
miss, and its tokens are computed again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpagoda.adapters.connector.identity import files_digest
from kvpagoda.errors import BadInput, OutOfBlocks
from kvpagoda.threads import submit
from kvpagoda.tiers import RecordBuffer, Status, Tier, layout_fingerprint, record_key, tier_from_text
from kvpagoda.units import parse_bytes

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

__all__ = ["KvpagodaTier"]

_log = logging.getLogger(__name__)
_LAYOUT = 1
"""Version of what a record has: a chunk of vLLM's CPU tier, as it lies there."""


class KvpagodaTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier of vLLM over one of our tiers. vLLM makes it, in the scheduler's process.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: vLLM's CPU tier, a row for each chunk.
        tier_type: how vLLM's options name this tier.
        backpressure_detector: vLLM's.
        tier: as ``kvpagoda.tiers.tier_from_text`` reads it: ``disk:FOLDER:50GiB``, ``redis://HOST:PORT``,
            ``mooncake://HOST:PORT``, ``host:4GiB``.
        weights: a name of the weights; None: a digest of the model's files, or its name if it is no folder here.
        staging: host memory for records on their way.
        locality: ``LOCAL`` or ``REMOTE``, for vLLM's events.
        **settings: those of ``TierSpec``: ``timeout``, the most seconds of a transfer, and ``workers``.

    Raises:
        BadInput: a tier or a setting that is wrong, or ``staging`` for less than one record a worker.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: BackpressureDetector | None = None, *, tier: str, weights: str | None = None,
        staging: int | str = "64MiB", locality: str | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        spec = tier_from_text(tier, **settings)
        chunks = np.asarray(primary_kv_view)
        self._chunks = chunks.view(np.uint8).reshape(len(chunks), -1)
        nbytes = self._chunks.shape[1]
        self._part = parse_bytes(staging) // (spec.workers * RecordBuffer.nbytes_for(1, nbytes))
        if not self._part:
            least = spec.workers * RecordBuffer.nbytes_for(1, nbytes)
            text = f"tier {tier!r} stages a record for each of {spec.workers} workers: give staging of {least} bytes"
            raise BadInput(text, field="staging", needed=least, available=parse_bytes(staging))
        self._buffer = RecordBuffer(spec.workers * self._part, nbytes)
        self._fingerprint = _fingerprint(offloading_spec, weights)
        self._tier = Tier(
            spec.make(self._buffer), self._buffer, self._fingerprint, workers=spec.workers, checksum=spec.checksum,
            in_flight=2 * self._buffer.nbytes,
        )  # fmt: skip
        self._timeout = spec.timeout
        self._threads = ThreadPoolExecutor(spec.workers, thread_name_prefix="kvpagoda-vllm")
        self._running = set[Future[None]]()
        self._done: SimpleQueue[tuple[JobResult, tuple[OffloadKey, ...]]] = SimpleQueue()  # result, keys that failed
        self._lookups = _Lookups(self, tier_type)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As vLLM's: return whether there is a record, or RETRY while that is being looked up."""
        is_found = self._lookups.lookup(key, req_context)
        if is_found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_found else LookupResult.MISS

    def are_there(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return of which keys there are records, which are held for some seconds. Waits, at most ``timeout``.

        Args:
            keys: vLLM's.
        """
        lease = self._tier.lookup(self._names(keys), monotonic() + self._timeout).result()
        return [status is Status.OK for status in lease.statuses]

    def submit_store(self, job_metadata: TransferJob) -> None:
        """As vLLM's: copy chunks to the tier in a thread."""
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """As vLLM's: copy records to chunks in a thread."""
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of the jobs that ended since the last call."""
        results = []
        while not self._done.empty():
            result, failed = self._done.get()
            self._lookups.mark_miss(failed)
            results.append(result)
        self._running = {one for one in self._running if not one.done()}
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """As vLLM's: leave to vLLM what is offloaded."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """As vLLM's: forget what the request has looked up."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """As vLLM's: begin the lookups of this step."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until no job reads or writes a chunk; each ends by its ``timeout``."""
        wait(self._running)

    def shutdown(self) -> None:
        """End the threads and close the tier. Afterwards nothing refers to vLLM's memory."""
        self._lookups.shutdown()
        self._threads.shutdown()
        self._tier.close(monotonic() + self._timeout)
        del self._chunks

    # -- in a thread -------------------------------------------------------------------------------------------------

    def _submit(self, job: TransferJob, move: Any) -> None:
        try:
            self._running.add(submit(self._threads, partial(self._run, job, move)))
        except RuntimeError:  # the system has no thread to start
            self._run(job, move)

    def _run(self, job: TransferJob, move: Any) -> None:
        """Move the chunks of ``job`` in parts that staging holds, and note which are moved."""
        keys, chunks, began = [*job.keys], [int(chunk) for chunk in job.chunk_ids], monotonic()
        moved = list[OffloadKey]()
        try:
            for first in range(0, len(keys), self._part):
                part = slice(first, first + self._part)
                rows = self._buffer.acquire(len(keys[part]))
                try:
                    statuses = move(keys[part], chunks[part], rows)
                finally:
                    self._buffer.release(rows)
                moved += [key for key, status in zip(keys[part], statuses) if status is Status.OK]
        except OutOfBlocks:
            pass  # calls that exceeded their deadline still use staging: what is left is not moved
        except Exception:
            _log.exception("tier %s: a job failed", self.tier_type)
        failed = () if len(moved) == len(keys) else tuple({*keys}.difference(moved))
        nbytes = len(moved) * self._chunks.shape[1]
        some = tuple(moved) if failed and moved and job.is_promotion else None
        result = JobResult(job.job_id, not failed, some, monotonic() - began, nbytes)
        self._done.put((result, failed if job.is_promotion else ()))

    def _store(self, keys: list[OffloadKey], chunks: list[int], rows: list[int]) -> list[Status]:
        places = self._buffer.places_of(rows)
        self._buffer.payloads[places] = self._chunks[chunks]
        return self._tier.store(self._names(keys), rows, monotonic() + self._timeout).result()

    def _load(self, keys: list[OffloadKey], chunks: list[int], rows: list[int]) -> list[Status]:
        statuses = self._tier.load(self._names(keys), rows, monotonic() + self._timeout).result()
        places = self._buffer.places_of(rows)
        for place, chunk, status in zip(places, chunks, statuses):
            if status is Status.OK:
                self._chunks[chunk] = self._buffer.payloads[place]
        return statuses

    def _names(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        return [record_key(self._fingerprint, key) for key in keys]


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's thread for lookups, over ``tier``."""

    def __init__(self, tier: KvpagodaTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.are_there(keys)


def _fingerprint(spec: OffloadingSpec, weights: str | None) -> bytes:
    """Return 32 bytes that differ whenever the bytes of a chunk mean something else."""
    name = str(spec.config.model.name)
    fields = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True).get_run_config()
    layout = [spec.config.kv_cache_layout, spec.config.canonical_layout]
    if weights is None:
        weights = files_digest(name) if Path(name).exists() else name
    return layout_fingerprint(
        weights=weights, schema=json.dumps(fields, sort_keys=True), formats=json.dumps(layout), layout=_LAYOUT,
        block_size=spec.config.cache.tokens_per_hash,
    )  # fmt: skip
