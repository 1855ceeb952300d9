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
from kvpagoda.replay.engines.profiles import Profile, profile
from kvpagoda.replay.engines.queued import FULL, QueuedManager
from kvpagoda.replay.readers import Source
from kvpagoda.replay.trace import Ints, Trace, readable
from kvpagoda.units import real_number, whole_number


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
    retention: int | None = 0,
    match_unit: int | None = None,
    memory_ratio: float | None = None,
    states_per_path: int | None = None,
    unified_memory: bool = False,
    watermark: float = 0.0,
    reserve_prompt: bool = True,
    on_request: Callable[[int], None] | None = None,
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
        retention: vLLM's ``prefix_cache_retention_interval``: of windows and states others find only what resumes where
            a prompt ends, where texts part, and after multiples of so many tokens (0: nowhere else; None: all).
        match_unit: vLLM's ``prefix_match_unit``, for states beside full attention: the last whole unit of so many tokens of
            a prompt can be found too, within a block. None: its default, whole blocks alone.
        memory_ratio: SGLang's ``mamba_full_memory_ratio``, the memory of states as a multiple of that of blocks (None: 0.9);
            with windows its ``swa_full_tokens_ratio``, at most 1, blocks of a layer with a window for one of full attention
            (None: 0.8).
        states_per_path: SGLang's ``mamba_max_states_per_path``: a new state evicts the first ones of its text beyond so many,
            but those where texts part and those of running requests. None: its default, no limit.
        unified_memory: SGLang's ``enable_unified_memory``, for groups with windows or states: blocks share with them the
            memory that ``memory_ratio`` would divide, which then limits only how many requests with states run.
        watermark: vLLM's ``watermark``, the share of the blocks, below 1, that stay free when a request is admitted beside
            others.
        reserve_prompt: vLLM's ``scheduler_reserve_full_isl``: a request is admitted if its whole prompt fits (default), not
            its first chunk alone.
        on_request: called after each step with the number of finished requests.

    Raises:
        BadInput: an unknown engine, a number below 1, groups, a ``retention`` or another setting that the engine does not
            have or that is out of range or no multiple of ``block_size``, or a trace without blocks; before anything runs.

    Examples:
        >>> chains = [1, 2], [1, 2], [1, 3]
        >>> records = [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in chains]
        >>> replay_engine(records, "vllm-0.33", capacity_blocks=100).per_request.tolist()  # the last token is computed again
        [0, 1008, 512]
    """
    profile(engine)
    schedule = Schedule(at_once, step_tokens, shared)
    capacity = whole_number(capacity_blocks, "a capacity in blocks", at_least=1, below=2**31 - 1)
    columns = readable(trace)
    chains = Chains(columns, block_size)
    pool = divided(engine, groups, chains.block_size, capacity, memory_ratio, unified_memory)
    admits = admission(engine, watermark, reserve_prompt)
    manager = manager_of(engine, chains, pool, schedule, retention, match_unit, states_per_path, admits)
    served = serve_with(manager, chains, schedule, on_request)
    return EngineResult(
        columns.name, engine, capacity, chains.block_size, schedule.at_once, schedule.step_tokens, len(chains),
        int(chains.prompts.sum()), int(served.hits.sum()), served.never_fit, served.preempted, served.steps, served.hits,
    )  # fmt: skip


def manager_of(
    engine: str,
    chains: Chains,
    pool: EnginePool,
    schedule: Schedule,
    retention: int | None,
    match_unit: int | None = None,
    states_per_path: int | None = None,
    admits: Profile | None = None,
) -> Manager:
    """Return the manager of ``engine`` for ``chains``, with the blocks of ``pool``; ``admits``: see ``admission``. Raises
    BadInput."""
    known, groups = admits or profile(engine), pool.groups
    _check_groups(engine, groups, retention, chains.block_size)
    _check_unit(engine, groups, match_unit, chains.block_size)
    if states_per_path is not None:
        whole_number(states_per_path, "states_per_path", at_least=1)
        if known.store != "edges" or Group("state") not in groups:
            text = f"{engine} with states_per_path={states_per_path}: it is SGLang's, for groups with states"
            raise BadInput(text, needed=engine, available=states_per_path)
    if known.store == "tree":
        from kvpagoda.replay.engines.own_manager import OwnManager  # imports a whole cache

        return OwnManager(chains, pool.num_blocks, schedule.at_once)
    if known.store == "edges":
        sizes, window, memory = (pool.num_blocks, pool.num_apart), max(group.size for group in groups), pool.shared
        if Group("state") in groups and memory is not None:
            return UnifiedStates(chains, *sizes, memory, states_per_path)
        if Group("state") in groups:
            return StateLRU(chains, *sizes, states_per_path)
        if memory is not None:
            return UnifiedWindows(chains, *sizes, window, memory)
        return WindowLRU(chains, *sizes, window) if window else EdgeLRU(chains, pool.num_blocks)
    if known.moves_states and len(groups) > 1:
        return MovedStates(chains, pool.num_blocks, known, len(groups) - 1, schedule.step_tokens)
    return QueuedManager(chains, pool.num_blocks, known, groups, retention, schedule.step_tokens, match_unit)


def admission(engine: str, watermark: float, reserve_prompt: bool) -> Profile:
    """Return the profile of ``engine`` with these settings of ``replay_engine``. Raises BadInput if it does not have them."""
    known = profile(engine)
    if (watermark or not reserve_prompt) and not engine.startswith("vllm"):
        text = f"{engine} with watermark={watermark}, reserve_prompt={reserve_prompt}: they are vLLM's"
        raise BadInput(text, needed=engine, available=watermark)
    if not real_number(watermark, "watermark") < 1:
        raise BadInput(f"watermark is a share of the blocks below 1, got {watermark}", needed=watermark, available=1)
    return replace(
        known, watermark=watermark or known.watermark, reserves=known.reserves if reserve_prompt else "chunk"
    )


def _check_groups(engine: str, groups: Sequence[Group], retention: int | None, block_size: int) -> None:
    """Raise BadInput for groups that the engine does not have here, and for a retention that has no effect on them."""
    has_states = profile(engine).moves_states and tuple(groups) == FULL + (Group("state"),) * (len(groups) - 1)
    if not groups or (tuple(groups) != FULL and not has_states and not engine.startswith(("vllm", "sglang"))):
        raise BadInput(
            f"{engine} with {len(groups)} groups: at least one; of engines, only vLLM and SGLang have several kinds here, and "
            "Dynamo's backend vllm full attention with states: full+state",
            needed=engine, available=len(groups),
        )  # fmt: skip
    if retention != 0 and not engine.startswith("vllm"):
        text = f"{engine} with retention={retention}: a retention is vLLM's"
        raise BadInput(text, needed=engine, available=retention)
    kinds = {group.kind for group in groups}
    if retention and (whole_number(retention, "retention", 1) % block_size or kinds <= {"full", "chunk"}):
        text = "a multiple of the tokens of a block, for groups with windows or states"
        raise BadInput(
            f"retention must be {text}; got {retention} with blocks of {block_size} and {', '.join(sorted(kinds))}",
            needed=retention, available=block_size,
        )  # fmt: skip


def _check_unit(engine: str, groups: Sequence[Group], match_unit: int | None, block_size: int) -> None:
    """Raise BadInput for a unit of matching that the engine does not have, or that has no effect on these groups."""
    if match_unit is None:
        return
    if not engine.startswith("vllm"):
        text = f"{engine} with match_unit={match_unit}: a unit of matching is vLLM's"
        raise BadInput(text, needed=engine, available=match_unit)
    if {group.kind for group in groups} != {"full", "state"}:
        text = f"match_unit={match_unit} finds parts of blocks of full attention with states alone, as full+3*state"
        raise BadInput(text, needed=match_unit, available=len(groups))
    if block_size % whole_number(match_unit, "match_unit", at_least=1):
        text = f"match_unit must divide the {block_size} tokens of a block, got {match_unit}"
        raise BadInput(text, needed=match_unit, available=block_size)
