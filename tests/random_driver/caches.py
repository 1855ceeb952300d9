"""The settings of a run, drawn from its seed; the function that makes every cache; and all uses of internal names."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from kvpagoda import Identity, KVCache, Limits, Retention, Worker
from kvpagoda.core.cache.request import State
from kvpagoda.core.prefix import POLICY_NAMES
from kvpagoda.errors import NeverFits
from kvpagoda.schema import Schema
from kvpagoda.tiers import Driver, Lease, RecordBuffer, TierSpec, disk_tier, host_tier
from mirror import Mirror, cached_now

from .schemas import SCHEMA_NAMES, schema_named
from .split import SplitCache

MAX_CONTEXT = 72
LAYOUTS = {
    **dict.fromkeys(("full", "sliding", "gemma", "mixed", "fp8_heads"), ("trtllm", "vllm-blhnc", "vllm-lhbnc", "vllm-bhlnc")),
    "mla": ("kvpagoda-mla",), "qwen3_next": ("gdn-state-kv", "vllm-gdn-conv-sd", "transformers"),
}  # fmt: skip
"""Schema -> layouts that its rows may have instead of its own."""
TIERS = ("none", "commit", "evict", "disk", "none", "reuse", "packed", "host over disk")


@dataclass(frozen=True)
class Settings:
    """The settings of one run.

    ``settled``: after each operation the driver waits until tiers have stored everything, so that the run of a seed is
    always the same; otherwise threads race. ``num_long``: how many requests of 48 tokens fit at once. ``coarse``,
    ``slack``: constants of ``cache.resume_points``, in tokens: its own, which matter for long texts, or so few tokens that
    they matter for texts of 48. ``split``: a scheduler without memory, and a worker that has the rows. ``quota``: of each
    namespace, as a share of the budget. ``watermark``: of ``Limits``."""

    schema: str
    seed: int
    policy: str
    tiers: str
    verify_width: int
    block_size: int
    max_requests: int
    step_tokens: int
    num_long: int
    checkpoints: int | None
    checkpoint_every: int
    order: str | None
    pin_share: float
    swap: str | None
    settled: bool
    kernel_page: int | None
    layout: str | None
    coarse: int
    slack: int
    step_checkpoints: int
    checkpoint_format: str | None
    split: bool = False
    quota: float | None = None
    watermark: float = 0.0


def settings_of(schema: str, seed: int, *, split: bool = False) -> Settings:
    """Return the settings of run ``seed`` over ``schema``. Seeds 0, 1, 2 .. go through all policies and tiers; a cache that
    is split has no tiers."""
    random = np.random.default_rng([seed, SCHEMA_NAMES.index(schema)])
    number = seed + 3 * SCHEMA_NAMES.index(schema)

    def one(*choices: Any) -> Any:
        return choices[int(random.integers(len(choices)))]

    settings = Settings(
        schema, seed, POLICY_NAMES[number % len(POLICY_NAMES)], TIERS[number % len(TIERS)],
        verify_width=one(0, 0, 2, 3),
        block_size=8 if schema == "deepseek_v4" else one(4, 4, 8),
        max_requests=one(3, 5, 6),
        step_tokens=one(4, 8, 12),
        num_long=one(1, 2, 3, 4),
        checkpoints=one(None, 2, 4),
        checkpoint_every=one(0, 1, 2),
        order=one("block", "block", "block", "layer"),
        pin_share=one(0.5, 1.0),
        swap=one(None, None, "4KiB"),
        settled=one(True, True, True, False),
        kernel_page=None if schema in ("deepseek_v4", "pooled") else one(None, None, 2, 4),
        layout=one(None, *LAYOUTS.get(schema, ())),
        coarse=one(1024, 4, 16),
        slack=one(512, 4, 16),
        step_checkpoints=one(0, 1, 3),
        checkpoint_format="int8" if schema == "wide" else one(None, None, "bfloat16", "int8"),
        quota=one(None, None, None, 0.0, 0.1, 0.3),
        watermark=one(0.0, 0.0, 0.0, 0.1, 0.4),
    )  # fmt: skip
    if split:
        settings = replace(settings, tiers="none", split=True)
    return replace(settings, order=None) if settings.layout in ("vllm-lhbnc", "vllm-bhlnc") else settings


def budget_of(settings: Settings, schema: Schema) -> int:
    """Return about the smallest budget, in bytes, with which ``num_long`` requests of 48 tokens run at once."""
    nbytes = 2048
    while True:
        try:
            plan = schema.plan(
                nbytes, settings.max_requests, settings.block_size, step_tokens=settings.step_tokens,
                checkpoints=settings.checkpoints, order=settings.order, kernel_page=settings.kernel_page,
                checkpoint_format=settings.checkpoint_format,
            )  # fmt: skip
            if plan.fits(min(settings.num_long, settings.max_requests), 48):
                return nbytes
        except NeverFits:
            pass
        nbytes += nbytes // 8


def make_cache(settings: Settings, folder: Path | None, weights: str) -> tuple[Any, list[Counting]]:
    """Make the cache of a run, and return it and the drivers of its tiers. ``folder``: for a disk tier."""
    schema = schema_named(settings.schema, settings.verify_width)
    schema = schema if settings.layout is None else schema.laid_out(settings.layout)
    budget = budget_of(settings, schema)
    drivers: list[Counting] = []
    with patch.multiple("kvpagoda.core.cache.prefix_cache", _COARSE=settings.coarse, _SLACK=settings.slack):
        made = partial(
            KVCache,
            schema, budget, block_size=settings.block_size,
            max_requests=settings.max_requests, order=settings.order, kernel_page=settings.kernel_page, poison=True,
            policy=settings.policy,
            tiers=[_counted(tier, drivers) for tier in _tiers(settings, folder)], identity=Identity(weights),
            limits=Limits(
                MAX_CONTEXT, settings.step_tokens, settings.swap, step_checkpoints=settings.step_checkpoints,
                watermark=settings.watermark,
            ),
            retention=Retention(
                settings.checkpoints, settings.checkpoint_every, settings.pin_share,
                checkpoint_format=settings.checkpoint_format,
                quota=None if settings.quota is None else int(settings.quota * budget),
            ),
        )  # fmt: skip
        mirrors = [Mirror(settings.block_size)] if settings.seed % 2 == 0 else []
        watched: dict[str, Any] = dict(observers=mirrors, sanitize=not mirrors)
        if settings.split:
            cache = SplitCache(made(device="none", **watched), Worker(made(device="cpu", sanitize=not mirrors)))
        else:
            cache = made(device="cpu", **watched)
    return cache, drivers


def _tiers(settings: Settings, folder: Path | None) -> tuple[TierSpec, ...]:
    kind, staging = settings.tiers, "512KiB" if settings.schema == "deepseek_v4" else "128KiB"
    small: dict[str, Any] = {"staging": staging, "timeout": 10.0}
    if kind == "none":
        return ()
    if kind in ("commit", "evict", "reuse"):
        return (host_tier("256KiB", write=kind, **small),)  # type: ignore[arg-type]
    if kind == "packed":
        return (host_tier("256KiB", write="commit", record_nbytes=1500, **small),)
    assert folder is not None
    disk = disk_tier(folder, "512KiB", admit_all=True, **small)
    return (disk,) if kind == "disk" else (host_tier("100KiB", **small), disk)


def has_xxhash() -> bool:
    """Return whether xxhash is installed: records that leave the process need it for their checksums."""
    return importlib.util.find_spec("xxhash") is not None


# -- all uses of internal names --------------------------------------------------------------------------------------


class Counting:
    """A driver around another one that counts its lookups."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self.num_lookups = driver, 0
        self.store, self.load, self.discard = driver.store, driver.load, driver.discard
        self.stats, self.close = driver.stats, driver.close

    def lookup(self, keys: Sequence[bytes], deadline: float, hold: float) -> Lease:
        self.num_lookups += 1
        return self._driver.lookup(keys, deadline, hold)


def _counted(tier: TierSpec, drivers: list[Counting]) -> TierSpec:
    """Return ``tier`` with a driver that counts its lookups and is appended to ``drivers``."""

    def make(buffer: RecordBuffer) -> Driver:
        drivers.append(Counting(tier.make(buffer)))
        return drivers[-1]

    fields = {name: getattr(tier, name) for name in tier.__dataclass_fields__}
    return TierSpec(**{**fields, "make": make})


_MEMORY = ("kvpagoda.core.memory.arena", "Arena", ("reset", "copy", "poison"))


class Failing:
    """Makes a memory operation fail: after ``arm(n)`` the n-th one raises MemoryError, once."""

    def __init__(self) -> None:
        self.countdown, self.fired = 0, ""

    def arm(self, countdown: int) -> None:
        self.countdown, self.fired = countdown, ""

    def disarm(self) -> str:
        """Let no further operation fail. Returns the name of the one that failed, or an empty string."""
        fired, self.countdown, self.fired = self.fired, 0, ""
        return fired

    def hit(self, name: str) -> None:
        """Count memory operation ``name``. Raises MemoryError if it is the one to fail."""
        if self.countdown:
            self.countdown -= 1
            if not self.countdown:
                self.fired = name
                raise MemoryError(f"{name} failed: the driver let it")


@contextmanager
def failing_memory() -> Iterator[Failing]:
    """A context in which memory operations fail when the ``Failing`` object that it yields is armed."""
    module, owner_name, names = _MEMORY
    owner, failing = getattr(importlib.import_module(module), owner_name), Failing()
    real = {name: getattr(owner, name) for name in names}

    def wrapped(name: str) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            failing.hit(name)
            return real[name](*arguments, **settings)

        return call

    for name in names:
        setattr(owner, name, wrapped(name))
    try:
        yield failing
    finally:
        for name in names:
            setattr(owner, name, real[name])


def staging_in_use(cache: KVCache) -> list[int]:
    """Return how many staging records of each tier are in use."""
    return [level.buffer.num_records - level.buffer.num_free for level in cache.core.tiers.levels]


def num_moves(cache: KVCache) -> int:
    """Return how often blocks were moved so that a sector could change its group."""
    return cache.core.capacity.num_moves


def has_places(cache: KVCache) -> bool:
    """Return whether the states of a request lie in several places in turn."""
    return cache.core.states is not None and cache.core.states.places > 1


def state_places(handle: Any) -> Any:
    """Return the places of a running sequence's states in turn: int32 ``[places]``, ``[0]`` if there are none."""
    group = handle._lifecycle.core.states
    return np.empty(0, np.int32) if group is None else group.held_places(handle.slot)


def prompt_length(handle: Any) -> int:
    """Return the length of a sequence's prompt, in tokens. Commits must name these tokens as the prompt has them."""
    length: int = handle.prompt_length
    return length


def is_suspended(handle: Any) -> bool:
    """Return whether a sequence is suspended."""
    return bool(handle._request.state is State.SUSPENDED)


def is_prefetched(prefetch: Any) -> bool:
    """Return whether a prefetch has finished reading."""
    done: bool = prefetch.is_done
    return done


def is_mirrored(cache: Any) -> bool:
    """Return whether an observer of ``cache``, if it has one, knows what is cached and how many requests there are."""
    mirror = cache.core.observers.find(Mirror)
    requests = len(cache.core.running) + len(cache.core.suspended)
    return mirror is None or (mirror.cached == cached_now(cache) and len(mirror.running) == requests)
