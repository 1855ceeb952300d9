"""Dynamo's mocker, which replays a whole trace with its own scheduler, as a judge for ``benchmarks.oracle``.

``ai-dynamo-runtime`` is installed, or is in the environment that ``make consumers`` fills.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.peers import look_in_consumers
from kvpagoda.replay import Group
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import Schedule, Served
from kvpagoda.units import ceil_div

if find_spec("dynamo") is None:
    look_in_consumers()

from dynamo._core import run_mocker_trace_replay

VERSION = version("ai-dynamo-runtime")
LEAST_BLOCK = 1


class Peer:
    """Dynamo's model of ``backend`` ("vllm", "sglang" or "trtllm") with ``num_blocks`` blocks. ``groups``: full attention,
    with states of a block each, its setting ``state_cache``. ``settings``: more of its engine's settings."""

    def __init__(
        self, chains: Chains, num_blocks: int, *, backend: str = "vllm", groups: str = "full", **settings: Any
    ) -> None:
        self.chains = chains
        if states := len(Group.from_text(groups)) - 1:
            settings |= {
                "state_cache": {"bytes_per_request": states * chains.block_size},
                "kv_cache_bytes_per_token": 1,
            }
        self.engine = {"backend": backend, "num_gpu_blocks": num_blocks, "block_size": chains.block_size} | settings

    def serve(self, schedule: Schedule) -> Served:
        """Replay the trace with ``schedule.at_once`` requests in flight; ``schedule.step_tokens`` are the tokens of a step
        of all requests together."""
        most = schedule.step_tokens or int(self.chains.totals.sum()) + schedule.at_once
        engine = {**self.engine, "max_num_seqs": schedule.at_once, "max_num_batched_tokens": most}
        with TemporaryDirectory() as folder:
            file = Path(folder) / "trace.jsonl"
            file.write_text("".join(map(self._line, range(len(self.chains)))))
            found = run_mocker_trace_replay(
                [file], {"engine": engine}, trace_block_size=self.chains.trace.block_size, capture_per_request=True,
                replay_concurrency=schedule.at_once,
            )  # fmt: skip
        served = Served(np.zeros(len(self.chains), np.int64))
        for one in found.per_request:
            request = int(one["session_id"].removeprefix("request_")) - 1
            served.hits[request] = one["admission_history"][0]["reused_input_tokens"] if one["admission_history"] else 0
            served.never_fit += one["terminal_status"] == "rejected"
            served.preempted += one["readmission_count"]
        return served

    def check(self) -> None:
        """It has no such call."""

    def _line(self, request: int) -> str:
        """Return a request in Mooncake's form, which needs an id for every block: a new one for what has none."""
        trace = self.chains.trace
        ids, length = trace.chain(request).tolist(), int(self.chains.prompts[request])
        more = ceil_div(length, trace.block_size) - len(ids)
        ids += [2**40 + request * 2**20 + i for i in range(more)]
        record = {
            "timestamp": 0, "input_length": length, "output_length": max(1, int(trace.output_lengths[request])),
            "hash_ids": ids,
        }  # fmt: skip
        return json.dumps(record) + "\n"
