"""What an engine's cache is set to, beside what its profile says: one object, from a call or a command to the manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from kvpagoda.errors import BadInput
from kvpagoda.replay.engines.groups import Group
from kvpagoda.replay.engines.profiles import Profile, profile
from kvpagoda.units import real_number, whole_number

_OF: dict[str, tuple[str, ...]] = {
    "retention": ("vllm",), "match_unit": ("vllm",), "watermark": ("vllm", "kvpagoda"), "reserve_prompt": ("vllm",),
    "memory_ratio": ("sglang",), "states_per_path": ("sglang",), "unified_memory": ("sglang",),
}  # fmt: skip
"""How the names of the engines begin that have a setting."""


@dataclass(frozen=True)
class EngineSettings:
    """Options of an engine that decide what its cache finds. Each default is the engine's own.

    Calls that take one take the fields as keywords too: ``replay(trace, 4_000, engine="vllm-0.33", watermark=0.1)``.

    Args:
        retention: vLLM's ``--prefix-cache-retention-interval``, for windows and states: others find only what resumes where a
            prompt ends, where texts part, and after multiples of so many tokens, whole blocks (0: nowhere else; None: all).
        match_unit: vLLM's ``--prefix-match-unit``, for states beside full attention: the last whole unit of so many tokens of
            a prompt can be found too, within a block, whose tokens it divides (None: whole blocks alone).
        memory_ratio: SGLang's ``--mamba-full-memory-ratio``, the memory of states as a multiple of that of blocks (None: 0.9);
            with windows its ``--swa-full-tokens-ratio``, at most 1, blocks of a layer with a window for one of full attention
            (None: 0.8).
        states_per_path: SGLang's ``--mamba-max-states-per-path``: a new state evicts the first ones of its text beyond so
            many, but those where texts part and those of running requests (None: no limit).
        unified_memory: SGLang's ``--enable-unified-memory``, for groups with windows or states: blocks share with them the
            memory that ``memory_ratio`` would divide, which then limits only how many requests with states run.
        watermark: vLLM's ``--watermark``, and ``kvpagoda.Limits.watermark``: the share of the blocks, below 1, that stay free
            when a request is admitted beside others.
        reserve_prompt: vLLM's ``--scheduler-reserve-full-isl``: a request is admitted if its whole prompt fits, not its first
            chunk alone.

    Raises:
        BadInput: a number out of range. With an engine or groups that do not have a setting: when a cache is made.
    """

    retention: int | None = 0
    match_unit: int | None = None
    memory_ratio: float | None = None
    states_per_path: int | None = None
    unified_memory: bool = False
    watermark: float = 0.0
    reserve_prompt: bool = True

    def __post_init__(self) -> None:
        for name, least in (("retention", 0), ("match_unit", 1), ("states_per_path", 1)):
            if (value := getattr(self, name)) is not None:
                whole_number(value, name, at_least=least)
        if not real_number(self.watermark, "watermark") < 1:
            text = f"watermark is a share of the blocks below 1, got {self.watermark}"
            raise BadInput(text, needed=self.watermark, available=1)


DEFAULTS = EngineSettings()
"""No option is set."""


def check_owner(engine: str, settings: EngineSettings) -> None:
    """Raise BadInput if one of ``settings`` is not the default and ``engine`` has no such setting."""
    for one in fields(settings):
        value, owners = getattr(settings, one.name), _OF[one.name]
        if not engine.startswith(owners) and value != one.default:
            text = f"{engine} with {one.name}={value}: it is a setting of {' and '.join(owners)}"
            raise BadInput(text, needed=engine, available=value)


def applied(engine: str, settings: EngineSettings, groups: Sequence[Group], block_size: int) -> Profile:
    """Return the profile of ``engine`` with ``settings``, for ``groups`` in blocks of ``block_size`` tokens. Raises BadInput
    for one that the engine does not have, or that has no effect."""
    check_owner(engine, settings)
    kinds, retention, unit = {group.kind for group in groups}, settings.retention, settings.match_unit
    if retention and (retention % block_size or kinds <= {"full", "chunk"}):
        text = "retention must be a multiple of the tokens of a block, for groups with windows or states"
        raise BadInput(
            f"{text}; got {retention} with blocks of {block_size} and {', '.join(sorted(kinds))}",
            needed=retention, available=block_size,
        )  # fmt: skip
    if unit is not None and kinds != {"full", "state"}:
        text = f"match_unit={unit} finds parts of blocks of full attention with states alone, as full+3*state"
        raise BadInput(text, needed=unit, available=len(groups))
    if unit is not None and block_size % unit:
        text = f"match_unit must divide the {block_size} tokens of a block, got {unit}"
        raise BadInput(text, needed=unit, available=block_size)
    if settings.states_per_path is not None and "state" not in kinds:
        text = f"{engine} with states_per_path={settings.states_per_path}: it is for groups with states"
        raise BadInput(text, needed=engine, available=settings.states_per_path)
    known = profile(engine)
    reserves = known.reserves if settings.reserve_prompt else "chunk"
    return replace(known, watermark=settings.watermark or known.watermark, reserves=reserves)
