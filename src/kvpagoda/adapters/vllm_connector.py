"""A KV connector for vLLM: host memory, a disk, Redis and Mooncake Store below its cache, for every group of layers.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "KvpagodaConnector", "kv_connector_module_path": "kvpagoda.adapters.vllm_connector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"tiers": ["host:8GiB", "disk:/var/cache/kv:200GiB"]}}'

Any fault of a tier is a miss: the request computes what could not be loaded. See ``docs/vllm.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import vllm

from kvpagoda.adapters.connector.groups import grid_of, groups_of
from kvpagoda.adapters.connector.identity import adapter_of, schema_of, weights_of
from kvpagoda.adapters.connector.messages import Answers, Orders
from kvpagoda.adapters.connector.options import options_of
from kvpagoda.adapters.connector.scheduler import SchedulerSide
from kvpagoda.adapters.connector.stats import COUNTED, HELD, Figures, added, since
from kvpagoda.adapters.connector.worker import WorkerSide
from kvpagoda.adapters.vllm.log import announce, groups_text, join_log
from kvpagoda.adapters.vllm.options import check_version
from kvpagoda.errors import BadInput
from kvpagoda.tiers import LevelStats
from kvpagoda.tiers.level import RecordIdentity

_OPTION = "--kv-transfer-config"
check_version(option=_OPTION)  # first: another version may lack what is imported now

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)

_CLOSING_SECONDS = 10.0
_log = logging.getLogger(__name__)


class ConnectorOrders(Orders, KVConnectorMetadata):  # type: ignore[misc]
    """What workers do in a step, as vLLM passes it on."""


class ConnectorAnswers(Answers, KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers report, as vLLM passes it on."""

    def aggregate(self, other: ConnectorAnswers) -> ConnectorAnswers:
        """Return the reports of both."""
        return ConnectorAnswers(self.found + other.found, self.failed + other.failed, self.waiting + other.waiting)


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """The counters of tiers since they were last reported."""

    data: Figures

    def reset(self) -> None:
        """Forget what was counted."""
        self.data = {}

    def aggregate(self, other: ConnectorStats) -> ConnectorStats:
        """Add what ``other`` counted."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters for a line of the log."""
        return {f"{tier}.{name}": value for tier, fields in self.data.items() for name, value in fields.items()}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters of tiers for Prometheus: ``vllm:kvpagoda_tier_..``, by tier and engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        names = [*labelnames, "tier"]
        self._metrics = {
            name: self._counter_cls(f"vllm:kvpagoda_tier_{name}", f"KvpagodaConnector: {what}.", names)
            for name, what in COUNTED.items()
        }
        self._gauges = {
            name: self._gauge_cls(f"vllm:kvpagoda_tier_{name}", f"KvpagodaConnector: {name} of a tier.", names)
            for name in HELD
        }

    def observe(self, transfer_stats_data: Figures, engine_idx: int = 0) -> None:
        """Add what was counted since the last call."""
        labels = self.per_engine_labelvalues[engine_idx]
        for tier, fields in transfer_stats_data.items():
            for name, value in fields.items():
                if name in COUNTED:
                    self._metrics[name].labels(*labels, tier).inc(max(0.0, value))
                else:
                    self._gauges[name].labels(*labels, tier).set(value)


class KvpagodaConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector of vLLM that stores blocks in tiers; see the top of this file.

    Args:
        vllm_config: vLLM's.
        role: vLLM's.
        kv_cache_config: vLLM's.

    Raises:
        BadInput: an unknown version, option, tier, or way to run in parallel.
        SchemaError: a model whose groups cannot be stored: all before vLLM serves.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(option=_OPTION)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise BadInput(f"KvpagodaConnector does not serve {name} above 1, got {getattr(parallel, name)}")
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            raise BadInput("calculate_kv_scales makes rows that only this process can read; leave it out")
        self._options = options_of(transfer.kv_connector_extra_config)
        self._groups = groups_of(kv_cache_config)
        self._grid = grid_of(self._groups, self._options.least_record_nbytes)
        transfer.kv_load_failure_policy = "recompute"  # a fault is a miss, not the end of a request
        self._orders = Orders()
        self._worker: WorkerSide | None = None
        self._before: Figures = {}
        self._scheduler: SchedulerSide | None = None
        join_log()
        if role is KVConnectorRole.SCHEDULER:
            tiers = ", ".join(spec.name for spec in self._options.specs())
            kept = f"records of {self._grid.tokens} tokens of {groups_text(kv_cache_config)}"
            announce(f"keeps vLLM's cache in tiers ({transfer.kv_role}): {tiers}; {kept}")
            self._scheduler = SchedulerSide(
                self._options, self._grid, parallel.world_size, adapter_of, reads=transfer.is_kv_consumer,
                writes=transfer.is_kv_producer, has_drafts=vllm_config.speculative_config is not None,
            )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not stored is computed again."""
        return False

    # -- in the scheduler ----------------------------------------------------------------------------------------------

    @property
    def _planner(self) -> SchedulerSide:
        assert self._scheduler is not None, "a method of the scheduler's side"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._planner.track(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._planner.find(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorOrders:
        return ConnectorOrders(**vars(self._planner.orders(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        answers = connector_output.kv_connector_worker_meta or Answers()
        self._planner.answered(answers, connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._planner.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._planner.finished(request), None

    def reset_cache(self) -> bool:
        """Find nothing that was stored before, as if the weights were others."""
        self._planner.reset()
        return True

    # -- in a worker ---------------------------------------------------------------------------------------------------

    @property
    def _mover(self) -> WorkerSide:
        assert self._worker is not None, "a method of the worker's side, after register_kv_caches"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, parallel = self._vllm_config, self._vllm_config.parallel_config
        weights = self._options.weights or weights_of(config.model_config, str(config.load_config.load_format))
        schema = schema_of(config, self._groups, kv_caches, vllm.__version__, self._facts_of())
        rank, part = parallel.rank, []
        if parallel.data_parallel_size > 1:
            part.append(f"engine{parallel.data_parallel_rank}")
        if parallel.world_size > 1:
            part.append(f"rank{rank}")
        identity = RecordIdentity(weights, schema, self._grid.tokens, rank, parallel.world_size)
        self._worker = WorkerSide(
            self._options.specs("/".join(part)), identity, self._grid, kv_caches, self._kv_cache_config.num_blocks,
            is_layerwise=self._options.load == "layerwise",
        )  # fmt: skip

    def _facts_of(self) -> Callable[[str], str]:
        """Return a function that says which backend writes the blocks of a layer, and for a CPU with which kernels."""
        layers = self._vllm_config.compilation_config.static_forward_context

        def facts(name: str) -> str:
            layer = layers.get(name)
            backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else ""
            return f"{backend} {torch.backends.cpu.get_cpu_capability()}" if "CPU" in backend else str(backend)

        return facts

    def bind_connector_metadata(self, connector_metadata: ConnectorOrders) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._orders = connector_metadata
        self._mover.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._mover.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored with all their layers, after the step.

        Args:
            layer_name: vLLM's.
            kv_layer: vLLM's.
            attn_metadata: vLLM's.
            **kwargs: vLLM's.
        """

    def wait_for_save(self) -> None:
        self._mover.save(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._mover.finished(self._orders)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._mover.bad_ids()

    def build_connector_worker_meta(self) -> ConnectorAnswers | None:
        answers = self._mover.answers()
        return None if answers is None else ConnectorAnswers(**vars(answers))

    def tier_stats(self) -> tuple[LevelStats, ...]:
        """Return the counters of each tier of this worker, without I/O."""
        return self._mover.stats()

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._worker is None:
            return None
        changed, self._before = since(self._before, self._worker.stats())
        return ConnectorStats(changed) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layerwise"

    def shutdown(self) -> None:
        if self._worker is not None and not self._worker.close(_CLOSING_SECONDS):
            _log.warning("KvpagodaConnector: not everything was stored in %s s", _CLOSING_SECONDS)
