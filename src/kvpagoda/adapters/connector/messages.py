"""What the two sides of the connector send each other with every step of the engine: values, which can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Find:
    """Say which records of a text exist. ``hashes``: of each of its records; ``begin``: tokens that are cached."""

    request_id: str
    attempt: int
    hashes: tuple[bytes, ...]
    begin: int


@dataclass(frozen=True)
class Load:
    """Fill a request's blocks with the records that were found for ``attempt``, up to record ``end``.

    ``ids[group]``: the ids of all blocks before ``end``; those of the first ``begin`` tokens, and blocks with id 0,
    stay as they are. ``is_layerwise``: the records are in staging memory, and the request runs in this step.
    """

    request_id: str
    attempt: int
    begin: int
    end: int
    ids: tuple[tuple[int, ...], ...]
    is_layerwise: bool


@dataclass(frozen=True)
class Store:
    """Store record ``number`` of ``group``, whose blocks ``ids`` are complete after this step."""

    request_id: str
    group: int
    number: int
    block_hash: bytes
    ids: tuple[int, ...]


@dataclass
class Orders:
    """What the workers do in one step.

    ``forget``: requests whose records need not be kept in staging memory, and whose blocks may be written by others
    from this step on. ``closing``: requests whose blocks vLLM frees when they are reported as sent. ``is_idle``: no
    token is computed in this step.
    """

    finds: list[Find] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)
    is_idle: bool = False


@dataclass(frozen=True)
class MatchAnswer:
    """A request can go on after any of ``ends`` records. ``is_held``: those for the last of them are in staging
    memory."""

    request_id: str
    attempt: int
    ends: tuple[int, ...]
    is_held: bool = False


@dataclass
class Answers:
    """What workers report after a step. ``failed``: requests for which a record could not be loaded. ``waiting``: requests
    whose blocks are not all copied to staging memory yet."""

    found: list[MatchAnswer] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
