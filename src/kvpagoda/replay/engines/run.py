"""Replays a trace as an engine's own manager of the cache would serve it: which tokens each request finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.chains import Chains
from kvpagoda.replay.engines.driver import Manager, Schedule, serve_with
from kvpagoda.replay.engines.edge_lru import EdgeLRU
from kvpagoda.replay.engines.edge_states import StateLRU
from kvpagoda.replay.engines.edge_unified import UnifiedStates, UnifiedWindows
from kvpagoda.replay.engines.edge_windows import WindowLRU
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.moved_states import MovedStates
from kvpagoda.replay.engines.pool import EnginePool, divided
from kvpagoda.replay.engines.profiles import profile
from kvpagoda.replay.engines.queued import FULL, QueuedManager
from kvpagoda.replay.engines.settings import DEFAULTS, EngineSettings, applied
from kvpagoda.replay.readers import Source
from kvpagoda.replay.trace import Ints, Trace, readable
from kvpagoda.units import instance_of, whole_number


@dataclass(frozen=True)
class EngineResult:
    """What the requests of a trace find in the cache of an engine.

    Args:
        trace: its name.
        engine: its name.
        capacity_blocks: of the cache.
        block_size: tokens of a block.
        at_once: see ``Schedule``.
        step_tokens: see ``Schedule``.
        requests: of the trace.
        prompt_tokens: of all of them.
        hit_tokens: of these, what they found.
        never_fit: requests that did not fit into an empty cache, which find nothing; and those that fitted at first,
            were preempted, and had outgrown it.
        preempted: how often a running request had to give its memory to another; what it finds when it starts again is
            not counted.
        steps: that were computed.
        per_request: int64 ``[requests]``, the tokens of its prompt that each request found.
    """

    trace: str
    engine: str
    capacity_blocks: int
    block_size: int
    at_once: int
    step_tokens: int | None
    requests: int
    prompt_tokens: int
    hit_tokens: int
    never_fit: int
    preempted: int
    steps: int
    per_request: Ints = field(default_factory=lambda: np.empty(0, np.int64), compare=False, repr=False)

    @property
    def hit_rate(self) -> float:
        """The share of the tokens of the prompts that were found, 0 to 1."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but the array, and the hit rate, for JSON."""
        plain = {column.name: getattr(self, column.name) for column in fields(self) if column.compare}
        return {**plain, "hit_rate": self.hit_rate}


def replay_engine(
    trace: Source | Trace,
    engine: str,
    capacity_blocks: int,
    *,
    block_size: int = 16,
    at_once: int = 1,
    step_tokens: int | None = None,
    shared: bool = False,
    groups: Sequence[Group] = FULL,
    settings: EngineSettings = DEFAULTS,
    on_request: Callable[[int], None] | None = None,
    **more: Any,
) -> EngineResult:
    """Serve a trace with the cache of an engine, and count what each prompt finds.

    Requests run in their order; their times are not used. The rest of a prompt that has no id, and every output, are
    tokens that no other request has.

    Args:
        trace: see ``replay``.
        engine: a name of ``PROFILES``.
        capacity_blocks: of ``block_size`` tokens each.
        block_size: tokens of a block.
        at_once: requests that run at once.
        step_tokens: tokens of each in a step, or of all of them if ``shared``; see ``Schedule``.
        shared: see ``step_tokens``.
        groups: of layers, which share the blocks; default: full attention. vLLM has all kinds; SGLang windows of one
            size, or states, beside full attention, for which it sets blocks apart (``edge_windows.pools``,
            ``edge_states.slots``); ``dynamo-1.6.1`` states beside full attention, its ``state_cache`` of so many
            blocks.
        settings: other options of the engine.
        on_request: called after each step with the number of finished requests.
        **more: fields of ``EngineSettings``, which count more than those of ``settings``.

    Raises:
        BadInput: an unknown engine, a number below 1, groups or a setting that the engine does not have or that is out of
            range or no multiple of ``block_size``, or a trace without blocks; before anything runs.

    Examples:
        >>> chains = [1, 2], [1, 2], [1, 3]
        >>> records = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in chains]
        >>> replay_engine(records, "vllm-0.33", capacity_blocks=100).per_request.tolist()  # the last token is computed again
        [0, 1008, 512]
    """
    profile(engine)
    settings = replace(instance_of(settings, EngineSettings, "settings"), **more)
    schedule = Schedule(at_once, step_tokens, shared)
    capacity = whole_number(capacity_blocks, "a capacity in blocks", at_least=1, below=2**31 - 1)
    columns = readable(trace)
    chains = Chains(columns, block_size)
    pool = divided(engine, groups, chains.block_size, capacity, settings.memory_ratio, settings.unified_memory)
    manager = manager_of(engine, chains, pool, schedule, settings)
    served = serve_with(manager, chains, schedule, on_request)
    return EngineResult(
        columns.name, engine, capacity, chains.block_size, schedule.at_once, schedule.step_tokens, len(chains),
        int(chains.prompts.sum()), int(served.hits.sum()), served.never_fit, served.preempted, served.steps, served.hits,
    )  # fmt: skip


def manager_of(
    engine: str, chains: Chains, pool: EnginePool, schedule: Schedule, settings: EngineSettings = DEFAULTS
) -> Manager:
    """Return the manager of ``engine`` for ``chains``, with the blocks of ``pool``. Raises BadInput."""
    groups = pool.groups
    _check_groups(engine, groups)
    known = applied(engine, settings, groups, chains.block_size)
    if known.store == "tree":
        from kvpagoda.replay.engines.own_manager import OwnManager  # imports a whole cache

        return OwnManager(chains, pool.num_blocks, schedule.at_once, known.watermark)
    if known.store == "edges":
        sizes, window, memory = (pool.num_blocks, pool.num_apart), max(group.size for group in groups), pool.shared
        if Group("state") in groups and memory is not None:
            return UnifiedStates(chains, *sizes, memory, settings.states_per_path)
        if Group("state") in groups:
            return StateLRU(chains, *sizes, settings.states_per_path)
        if memory is not None:
            return UnifiedWindows(chains, *sizes, window, memory)
        return WindowLRU(chains, *sizes, window) if window else EdgeLRU(chains, pool.num_blocks)
    if known.moves_states and len(groups) > 1:
        return MovedStates(chains, pool.num_blocks, known, len(groups) - 1, schedule.step_tokens)
    return QueuedManager(
        chains, pool.num_blocks, known, groups, settings.retention, schedule.step_tokens, settings.match_unit
    )


def _check_groups(engine: str, groups: Sequence[Group]) -> None:
    """Raise BadInput for groups that the engine does not have here."""
    has_states = profile(engine).moves_states and tuple(groups) == FULL + (Group("state"),) * (len(groups) - 1)
    if not groups or (tuple(groups) != FULL and not has_states and not engine.startswith(("vllm", "sglang"))):
        raise BadInput(
            f"{engine} with {len(groups)} groups: at least one; of engines, only vLLM and SGLang have several kinds here, and "
            "Dynamo's backend vllm full attention with states: full+state",
            needed=engine, available=len(groups),
        )  # fmt: skip
