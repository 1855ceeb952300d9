"""TokenSpeed: its C++ scheduler, driven by the plans and events of its event loop.

The scheduler decides alone who runs: it matches, allocates, hashes and builds block tables inside ``next_execution_plan``.
A prompt is one chunk. The first output token comes with the prompt, the second in a decode step of its own, and room for
all others is reserved at once, as its engine does after speculative decoding. A step decodes *every* running request,
so requests whose outputs are appended run one at a time (``AT_ONCE``).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import tokenspeed_scheduler as ts

from benchmarks.workload import Tokens

VERSION = version("tokenspeed-scheduler")
LEAST_BLOCK = 16
FORWARD = ts.ForwardEvent


class Peer:
    """TokenSpeed's ``Scheduler`` with one group of full attention. The calls are described in ``benchmarks.peers``."""

    AT_ONCE = 1
    excluded = 0.0

    def __init__(self, capacity: int, block_size: int, longest: int, at_once: int) -> None:
        num_blocks = capacity // block_size + 1  # block 0 is a placeholder
        group = ts.CacheGroupConfig("full", block_size, num_blocks, ts.AttnKind.Full)
        self.scheduler = scheduler_of([group], num_blocks, block_size, step_tokens=longest, at_once=at_once)
        self._names: dict[int, str] = {}
        self._admitted = 0

    @staticmethod
    def tokens(ids: Tokens) -> list[int]:
        return list(ids.tolist())

    def admit(self, i: int, prompt: list[int], num_output: int) -> int:
        name = self._names[i] = name_of(self._admitted)
        self._admitted += 1
        self.scheduler.submit_requests([spec(name, prompt, num_output)])
        batch = self.scheduler.next_execution_plan().forward[0]
        assert batch.request_ids == [name] and batch.num_extends() == 1
        hit = int(batch.extend_prefix_lens[0])
        assert hit + batch.input_lengths[0] == len(prompt)
        return hit

    def append(self, i: int, output: list[int]) -> None:
        name = self._names[i]
        tell(self.scheduler, extended(name, output[:1]))
        if len(output) > 1:
            assert self.scheduler.next_execution_plan().forward[0].request_ids == [name]
            tell(self.scheduler, extended(name, output[1:2]), *reserve(name, len(output) - 2))
        if len(output) > 2:
            assert self.scheduler.next_execution_plan().forward[0].request_ids == [name]
            tell(self.scheduler, extended(name, output[2:]))

    def finish(self, i: int) -> None:
        tell(self.scheduler, finished(self._names.pop(i)))

    def step(self) -> None:
        """Decode a token of every running request. The block tables are the scheduler's arrays, which it makes for the
        batch; further index arrays are made by its kernels."""
        if self.scheduler.prefilling_size():  # the results of the prompts, which ``admit`` leaves out
            tell(self.scheduler, *(extended(name, [1]) for name in self._names.values()))
        batch = self.scheduler.next_execution_plan().forward[0]
        batch.block_tables_arrays()
        names = batch.request_ids
        tell(self.scheduler, *(event for name in names for event in (extended(name, [1]), *reserve(name, 1))))

    def check(self) -> None:
        assert self.scheduler.active_lcm_blocks() == 0
        assert self.scheduler.waiting_size() + self.scheduler.prefilling_size() + self.scheduler.decoding_size() == 0


def scheduler_of(groups: list[Any], num_blocks: int, granularity: int, *, step_tokens: int, at_once: int) -> Any:
    """Return a scheduler of ``num_blocks`` physical blocks (the placeholder included) without memory in the host.

    ``granularity``: tokens between two positions at which texts are told apart."""
    config = ts.SchedulerConfig()
    config.prefix_granularity = granularity
    config.max_scheduled_tokens, config.max_batch_size = step_tokens, at_once
    config.num_device_pages, config.num_host_pages, config.num_snapshot_pages = num_blocks, 1, 1
    config.disable_l2_cache = True
    config.cache_groups = groups
    return ts.Scheduler(config)


def name_of(number: int) -> str:
    """Return a name; the scheduler orders requests by name."""
    return f"{number:08}"


def spec(name: str, prompt: list[int], num_output: int) -> Any:
    made = ts.RequestSpec()
    made.request_id, made.tokens, made.max_new_tokens = name, prompt, num_output
    return made


def extended(name: str, tokens: list[int]) -> Any:
    """Return the event that ``tokens`` are the output of the request's last step."""
    event = FORWARD.ExtendResult()
    event.request_id, event.tokens = name, tokens
    return event


def reserve(name: str, num_tokens: int) -> list[Any]:
    """Return the event that the request's next step appends ``num_tokens`` tokens; nothing for 0."""
    event = FORWARD.UpdateReserveNumTokens()
    event.request_id, event.reserve_num_tokens_in_next_schedule_event = name, num_tokens
    return [event] if num_tokens else []


def finished(name: str) -> Any:
    event = FORWARD.Finish()
    event.request_id = name
    return event


def tell(scheduler: Any, *events: Any) -> None:
    """Pass events to the scheduler, in this order."""
    happened = ts.ExecutionEvent()
    for event in events:
        happened.add_event(event)
    scheduler.advance(happened)
