"""A plan: records and a budget in bytes -> blocks, states, and what fits. Arithmetic only; no torch, no model names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.schema.fields import Growth, itemsize
from kvpagoda.schema.layout import RowLayout
from kvpagoda.units import ceil_div, format_bytes


@dataclass(frozen=True)
class Demand:
    """What one group asks for: its growth law, its layers and the record of one block."""

    growth: Growth
    layers: tuple[int, ...]
    layout: RowLayout


@dataclass(frozen=True)
class KindUse:
    """What the layers with one label take together, in bytes of data."""

    label: str
    num_layers: int
    bytes_per_token: float
    state_nbytes: int


@dataclass(frozen=True)
class GroupPlan:
    """One group's share: ``num_blocks`` usable blocks, and one padding block that absorbs the writes of padded rows."""

    demand: Demand
    block_size: int
    num_blocks: int
    most_blocks: int | None

    @property
    def name(self) -> str:
        return self.demand.growth.name

    @property
    def num_rows(self) -> int:
        """Records in the arena: the usable blocks and the padding block, id 0."""
        return self.num_blocks + 1

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.demand.layout.nbytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data a token adds, without padding."""
        return self.demand.layout.payload_nbytes / self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that one request of ``num_tokens`` tokens ever holds at once."""
        blocks = ceil_div(num_tokens, self.block_size)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)

    @property
    def index_dtype(self) -> str:
        """``int64`` where an element offset into one field (block id times stride) could pass 2^31, else ``int32``."""
        places = self.demand.layout.places
        largest = max((self.num_rows * self.demand.layout.nbytes // itemsize(p.field.dtype) for p in places), default=0)
        return "int64" if largest >= 2**31 else "int32"


@dataclass(frozen=True)
class Plan:
    """Where every byte of the budget goes. ``str(plan)`` is a table, ``to_dict()`` the same as data."""

    schema_name: str
    block_size: int
    max_requests: int
    num_checkpoints: int
    budget: int
    groups: tuple[GroupPlan, ...]
    kinds: tuple[KindUse, ...]
    state_layout: RowLayout
    max_positions: int | None
    lengths: tuple[int, ...]
    rewinds: tuple[tuple[int, str, int], ...]
    """(layer, label, tokens) of every layer that can take back only so many of the newest tokens."""

    @property
    def state_nbytes(self) -> int:
        """Bytes of one request's state row."""
        return self.state_layout.nbytes

    @property
    def num_states(self) -> int:
        """State rows: one for each running request and each checkpoint, and one dummy row for padded rows (the last)."""
        return self.max_requests + self.num_checkpoints + 1

    @property
    def nbytes(self) -> int:
        """Bytes that the arenas take: exactly what ``KVCache`` allocates."""
        return sum(group.nbytes for group in self.groups) + self.num_states * self.state_nbytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data that one more token of context adds, over all groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def padding_percent(self) -> float:
        """Share of the arenas' bytes that is alignment padding."""
        payload = sum(g.num_rows * g.demand.layout.payload_nbytes for g in self.groups)
        payload += self.num_states * self.state_layout.payload_nbytes
        return 100 * (1 - payload / self.nbytes) if self.nbytes else 0.0

    @property
    def unused_percent(self) -> float:
        """Share of the budget that is left over because it does not make another block."""
        return 100 * (1 - self.nbytes / self.budget)

    @property
    def hit_granularity(self) -> int:
        """Tokens: a shared prefix is reusable at multiples of this."""
        return self.block_size

    def fits(self, num_requests: int, num_tokens: int) -> bool:
        """Whether ``num_requests`` requests of ``num_tokens`` tokens each run at once."""
        return num_requests <= self.max_requests and all(
            num_requests * group.blocks_for(num_tokens) <= group.num_blocks for group in self.groups
        )

    @property
    def longest_context(self) -> int | None:
        """Tokens of the longest single request, at most the model's own limit; None if nothing grows with its length."""
        bounds = [group.num_blocks * self.block_size for group in self.groups if not self._bounded(group)]
        if not bounds:
            return None
        return min(bounds) if self.max_positions is None else min(*bounds, self.max_positions)

    @staticmethod
    def _bounded(group: GroupPlan) -> bool:
        return group.most_blocks is not None and group.most_blocks <= group.num_blocks

    def requests_at(self, num_tokens: int) -> int:
        """How many requests of ``num_tokens`` tokens run at once."""
        most = [group.num_blocks // max(1, group.blocks_for(num_tokens)) for group in self.groups]
        return min([self.max_requests, *most])

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain data, for JSON."""
        return {
            "schema": self.schema_name,
            "budget_bytes": self.budget,
            "allocated_bytes": self.nbytes,
            "block_size": self.block_size,
            "hit_granularity": self.hit_granularity,
            "max_requests": self.max_requests,
            "checkpoints": self.num_checkpoints,
            "bytes_per_token": round(self.bytes_per_token, 3),
            "state_bytes_per_request": self.state_nbytes,
            "num_states": self.num_states,
            "padding_percent": round(self.padding_percent, 4),
            "unused_percent": round(self.unused_percent, 4),
            "longest_context": self.longest_context,
            "requests_at": {str(length): self.requests_at(length) for length in self.lengths},
            "layer_kinds": [
                {
                    "label": kind.label,
                    "num_layers": kind.num_layers,
                    "bytes_per_token": round(kind.bytes_per_token, 3),
                    "state_bytes_per_request": kind.state_nbytes,
                }
                for kind in self.kinds
            ],
            "groups": [
                {
                    "name": group.name,
                    "num_layers": len(group.demand.layers),
                    "bytes_per_token": round(group.bytes_per_token, 3),
                    "block_bytes": group.demand.layout.nbytes,
                    "num_blocks": group.num_blocks,
                    "bytes": group.nbytes,
                    "index_dtype": group.index_dtype,
                }
                for group in self.groups
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.schema_name}: {format_bytes(self.nbytes)} of {format_bytes(self.budget)}"]
        checkpoints = f", {self.num_checkpoints} checkpoints" if self.num_checkpoints else ""
        lines.append(f"block of {self.block_size} tokens, up to {self.max_requests} requests{checkpoints}")
        lines.append("")
        kinds = [(k.label, str(k.num_layers), f"{k.bytes_per_token:,.0f}", f"{k.state_nbytes:,}") for k in self.kinds]
        lines += _table(("layer kind", "layers", "B/token", "B/request"), kinds)
        lines.append("")
        groups = [
            (
                g.name,
                str(len(g.demand.layers)),
                f"{g.num_blocks:,}",
                f"{g.demand.layout.nbytes:,}",
                format_bytes(g.nbytes),
            )
            for g in self.groups
        ]
        if self.state_nbytes:
            total = format_bytes(self.num_states * self.state_nbytes)
            groups.append(("state", "", f"{self.num_states:,}", f"{self.state_nbytes:,}", total))
        lines += _table(("group", "layers", "rows", "B/row", "bytes"), groups)
        lines.append("")
        longest = "not limited by memory" if self.longest_context is None else f"{self.longest_context:,} tokens"
        lines.append(f"bytes per token     {self.bytes_per_token:,.0f} (+ {self.state_nbytes:,} per request)")
        if self.longest_context is not None and self.longest_context == self.max_positions:
            longest += " (the model's own limit)"
        lines.append(f"longest context     {longest}")
        for length in self.lengths:
            lines.append(f"requests of {length:<7,} {self.requests_at(length):,}")
        lines.append(f"hit granularity     {self.hit_granularity} tokens")
        lines.append(f"waste               {self.padding_percent:.2f} % padding, {self.unused_percent:.2f} % unused")
        wide = [group.name for group in self.groups if group.index_dtype == "int64"]
        if wide:
            lines.append(f"int64 offsets       {', '.join(wide)}: element offsets pass 2^31")
        return "\n".join(lines)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of text in columns as wide as their longest cell; the first column left, the others right aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in (head, *rows)
    ]


def make_plan(
    name: str,
    demands: tuple[Demand, ...],
    kinds: tuple[KindUse, ...],
    state_layout: RowLayout,
    *,
    budget: int | None,
    max_requests: int,
    block_size: int,
    num_blocks: int | None,
    step_tokens: int,
    max_positions: int | None,
    lengths: tuple[int, ...],
    checkpoints: int,
    rewinds: tuple[tuple[int, str, int], ...],
) -> Plan:
    """Give every group the same number of blocks, a bounded group never more than all requests can hold at once.

    So the groups of ``max_requests`` equally long requests fill together, whatever their length. Exactly one of
    ``budget`` and ``num_blocks`` is given. Raises BadInput and NeverFits.
    """
    if (budget is None) == (num_blocks is None):
        raise BadInput("give either a budget in bytes or num_blocks, not both and not neither")
    if checkpoints < 0:
        raise BadInput(f"checkpoints must not be negative, got {checkpoints}")
    for what, number in (("max_requests", max_requests), ("step_tokens", step_tokens), ("num_blocks", num_blocks)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise BadInput(f"{what} must be a positive whole number, got {number!r}")

    if not all(length > 0 for length in lengths):
        raise BadInput(f"lengths must be positive numbers of tokens, got {lengths}")

    def at(n: int, total: int) -> Plan:
        groups = []
        for demand in demands:
            most = demand.growth.most_blocks(block_size, step_tokens)
            window = demand.growth.most_blocks(block_size, 1)
            cap = n if most is None or window is None else min(n, max_requests * most + checkpoints * window)
            groups.append(GroupPlan(demand, block_size, cap, most))
        sizes = (block_size, max_requests, checkpoints, total)
        return Plan(name, *sizes, tuple(groups), kinds, state_layout, max_positions, lengths, rewinds)

    if num_blocks is not None:
        return at(num_blocks, at(num_blocks, 0).nbytes)
    assert budget is not None
    least = at(1, budget)
    if least.nbytes > budget:
        raise NeverFits(
            f"a budget of {format_bytes(budget)} is too small for {name}: one request of up to {block_size} tokens needs "
            f"{least.nbytes:,} bytes ({format_bytes(least.nbytes)}), of which {least.num_states * least.state_nbytes:,} "
            f"are the state rows of max_requests={max_requests} and {checkpoints} checkpoints; raise the budget or lower them"
        )
    low, high = 1, 2 + budget // max(1, sum(demand.layout.nbytes for demand in demands if demand.growth.span is None))
    high = min(high, 2 + (max_requests + checkpoints) * max((g.most_blocks or high for g in least.groups), default=1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle, budget).nbytes <= budget else (low, middle)
    return at(low, budget)
