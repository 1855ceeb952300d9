"""What steps and transfers cost in a simulation: a few numbers that the user gives, or defaults from public figures.

A step takes ``step`` seconds, and in addition ``prefill_token`` for each prompt token, ``decode_token`` for each request
that decodes, and ``read_byte`` for each byte of cached rows that the decoding requests read. Loading from a tier takes its
latency and its seconds for each byte. That is all: no kernels, no overlap, no contention between workers.

``costs.json`` has the public figures, each with its source. From these ``Costs.of`` computes

    prefill_token   2 * active parameters / (FLOP/s * efficiency of computing)
    decode_token    the same
    step            bytes of all parameters / (bytes/s of the memory * efficiency of memory)
    read_byte       1 / (bytes/s of the memory * efficiency of memory)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.loading import read_json
from kvpagoda.schema.plan import Plan
from kvpagoda.text import text_in
from kvpagoda.tiers.records import HEADER_NBYTES, RecordBuffer
from kvpagoda.tiers.slots import SlotDriver
from kvpagoda.tiers.spec import TierSpec
from kvpagoda.units import parse_bytes, real_number, whole_number

T = TypeVar("T")
PER_SECOND = 10**12
"""A simulation counts whole picoseconds, so that a sum of steps is the same in any order."""


@dataclass(frozen=True)
class TierCosts:
    """Seconds to load ``n`` bytes from a tier: ``latency + n * byte``.

    Args:
        latency: of a load.
        byte: of each byte.

    Raises:
        BadInput: a number that is negative or not finite.
    """

    latency: float = 0.0
    byte: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step and of its parts, see the module. All 0: everything happens at once.

    Args:
        step: of each step.
        prefill_token: of each token of a prompt.
        decode_token: of each token of an output.
        read_byte: of each cached byte that a step reads.
        tiers: kind of a tier (``"host"``, ..) -> its costs.

    Raises:
        BadInput: a number that is negative or not finite.

    Examples:
        >>> round(Costs.of("h100", "llama-3.1-8b").prefill_token * 1e6, 2)  # microseconds
        36.89
    """

    step: float = 0.0
    prefill_token: float = 0.0
    decode_token: float = 0.0
    read_byte: float = 0.0
    tiers: Mapping[str, TierCosts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of(cls, gpu: str, model: str, gpus: int = 1) -> Costs:
        """Return defaults for a model on GPUs that divide the work evenly.

        Args:
            gpu: its name.
            model: its name.
            gpus: how many.

        Raises:
            BadInput: names that ``costs.json`` does not have.
        """
        table, gpus = public_figures(), whole_number(gpus, "gpus", at_least=1)
        chip, parameters = _named(table["gpus"], gpu, "GPU"), _named(table["models"], model, "model of public costs")
        compute = gpus * chip["flops"] * table["efficiency"]["compute"]["value"]
        memory = gpus * chip["memory_bytes_s"] * table["efficiency"]["memory"]["value"]
        token = 2 * parameters["active"] / compute
        tiers = {name: TierCosts(row["latency_s"], 1 / row["bytes_s"]) for name, row in table["tiers"].items()}
        return cls(parameters["parameters"] * parameters["bytes"] / memory, token, token, 1 / memory, tiers)

    @classmethod
    def read(cls, text: str, model: str) -> Costs:
        """Return the costs that a text names.

        Args:
            text: ``none``; ``h100``, ``h100:llama-3.1-8b`` or ``4xh100:llama-3.1-70b``; or a JSON file with the fields
                of this class.
            model: where the text names none.

        Raises:
            BadInput: an unknown name, or a file that holds no costs.
        """
        if text == "none":
            return cls()
        if text.endswith(".json"):
            return cls.from_file(Path(text))
        chips, _, named = text.partition(":")
        count, times, gpu = chips.partition("x")
        return cls.of(gpu, named or model, int(count)) if times and count.isdigit() else cls.of(chips, named or model)

    @classmethod
    def from_file(cls, path: Path) -> Costs:
        """Return the costs in a JSON file.

        Args:
            path: of the file.

        Raises:
            BadInput: the file is no JSON object with the names of ``Costs``, or a number is negative or not finite.
            OSError: the file cannot be read.
        """
        try:
            given = json.loads(text_in(path))
            tiers = {name: TierCosts(**costs) for name, costs in given.pop("tiers", {}).items()}
            return cls(**given, tiers=tiers)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            known = ", ".join(one.name for one in fields(cls))
            raise BadInput(f"{path} must hold a JSON object with numbers of seconds for {known}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, for JSON."""
        return asdict(self)


class Ticks:
    """``Costs`` in whole picoseconds, for one cache with the ``plan``. ``loads``: of a record of each tier below it, and
    ``latencies``: of a request that loads from it."""

    def __init__(self, costs: Costs, plan: Plan, tiers: Iterable[str] = ()) -> None:
        growing = sum(g.layout.payload_nbytes for g in plan.groups if not g.growth.is_bounded) / plan.block_size
        bounded = 0.0
        for group in plan.groups:
            if group.growth.is_bounded and not group.growth.is_at_rest:
                rows = 1.0 if group.growth.is_state else (group.growth.span or 0) / group.block_size
                bounded += rows * group.layout.payload_nbytes
        self.step, self.prefill = _ticks(costs.step), _ticks(costs.prefill_token)
        self.decode = _ticks(costs.decode_token + bounded * costs.read_byte)
        self.context = _ticks(growing * costs.read_byte)
        below = [_named(costs.tiers, name, "tier of these costs") for name in tiers]
        self.latencies = [_ticks(tier.latency) for tier in below]
        self.loads = [_ticks(record_nbytes(plan) * tier.byte) for tier in below]

    def loading(self, records: Iterable[int]) -> int:
        """Return the picoseconds to load ``records[i]`` records from tier ``i``, one tier after the other."""
        parts = zip(records, self.latencies, self.loads)
        return sum(latency + count * load for count, latency, load in parts if count)

    def of(self, steps: int, computed: int, decoding: int, context: int) -> int:
        """Return the picoseconds of ``steps`` steps in a row. The first computes ``computed`` prompt tokens. In each
        ``decoding`` requests get a token; they have ``context`` tokens together before the first step."""
        grown = decoding * (steps * (steps - 1) // 2)
        each = self.step + decoding * self.decode
        return steps * each + computed * self.prefill + (steps * context + grown) * self.context


@cache
def public_figures() -> dict[str, Any]:
    """Return ``costs.json``: public figures and their sources. The result is shared: do not change it."""
    return read_json(__name__, "costs.json")


def _named(rows: Mapping[str, T], name: str, what: str) -> T:
    if name not in rows:
        raise unknown_name(what, name, rows)
    return rows[name]


def _check(costs: TierCosts | Costs) -> None:
    for one in fields(costs):
        if one.name != "tiers":
            object.__setattr__(costs, one.name, real_number(getattr(costs, one.name), one.name))


def _ticks(seconds: float) -> int:
    return round(seconds * PER_SECOND)


class Headers:
    """A ``Medium`` for ``SlotDriver`` that keeps the headers of ``num_slots`` records, and no blocks."""

    def __init__(self, buffer: RecordBuffer, num_slots: int) -> None:
        self.num_slots, self.slot_nbytes, self._rows = num_slots, buffer.record_nbytes, buffer.rows
        self._kept: dict[int, bytes] = {}

    def scan(self) -> list[tuple[bytes, int]]:
        return []

    def write(self, slot: int, row: int) -> bool:
        self._kept[slot] = self._rows[row][:HEADER_NBYTES].tobytes()
        return True

    def read(self, slot: int, row: int) -> bool:
        self._rows[row][:HEADER_NBYTES] = np.frombuffer(self._kept[slot], np.uint8)
        return True

    def clear(self, slot: int) -> bool:
        return True

    def close(self) -> None:
        self._kept.clear()


def record_nbytes(plan: Plan) -> int:
    """Return the bytes of a record in a tier: a block of full attention; without that the largest block that a checkpoint
    has. A checkpoint takes as many records as its windows and states need."""
    full = [group.layout.nbytes for group in plan.groups if not group.growth.is_bounded]
    return max(full or [group.layout.nbytes for group in plan.groups])


def tier_specs(tiers: Mapping[str, int | str], plan: Plan) -> list[TierSpec]:
    """Return tiers of as many records as ``tiers``, name -> bytes, hold below a cache with the ``plan``. Each stores what the
    cache evicts, blocks and checkpoints. Raises BadInput."""
    size, specs = record_nbytes(plan), list[TierSpec]()
    for name, nbytes in tiers.items():
        slots = parse_bytes(nbytes) // size
        if not slots:
            raise BadInput(f"tier {name!r} of {nbytes} holds no block of {size} bytes", needed=size, available=nbytes)
        make = partial(_driver, num_slots=slots)
        settings: dict[str, Any] = {"timeout": 60.0, "workers": 1}  # one: in one order
        specs.append(TierSpec(name, make, "evict", checksum=False, is_private=True, **settings))
    return specs


def _driver(buffer: RecordBuffer, num_slots: int) -> SlotDriver:
    return SlotDriver(Headers(buffer, num_slots))
