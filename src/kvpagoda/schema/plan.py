"""A plan: records and a budget in bytes -> blocks, states, and what fits. Arithmetic only; no torch, no model names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.schema.fields import WHOLE_TEXT, Growth, itemsize
from kvpagoda.schema.layout import RowLayout
from kvpagoda.schema.sectors import sector_size
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
    """One group's share: at most ``num_blocks`` usable blocks, and one padding block that absorbs the writes of padded
    rows. With sectors (``per_sector`` blocks in one) that is what the whole arena would make."""

    demand: Demand
    block_size: int
    num_blocks: int
    most_blocks: int | None
    row_nbytes: int
    per_sector: int = 0

    @property
    def name(self) -> str:
        return self.demand.growth.name

    @property
    def num_rows(self) -> int:
        """Records in the arena: the usable blocks and what comes before them, the padding block (id 0) or sector."""
        return self.num_blocks + self.first_id

    @property
    def first_id(self) -> int:
        """The lowest id of a usable block: the first block, or the first sector, belongs to padding."""
        return max(1, self.per_sector)

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_nbytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data a token adds, without padding."""
        return 0.0 if self.demand.growth.is_state else self.demand.layout.payload_nbytes / self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that one request of ``num_tokens`` tokens ever holds at once."""
        blocks = -(-num_tokens // self.block_size)
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)

    @property
    def index_dtype(self) -> str:
        """``int64`` where an element offset into one field (block id times stride) could pass 2^31, else ``int32``."""
        places = self.demand.layout.places
        largest = max((self.nbytes // itemsize(p.field.dtype) for p in places), default=0)
        return "int64" if largest >= 2**31 else "int32"


@dataclass(frozen=True)
class Plan:
    """Where every byte of the budget goes. ``str(plan)`` is a table, ``to_dict()`` the same as data.

    With ``num_sectors`` sectors of ``sector_nbytes`` all groups live off one arena (the first sector takes what padded
    rows write); without, each has its own share for good.
    """

    schema_name: str
    block_size: int
    max_requests: int
    num_checkpoints: int
    budget: int
    groups: tuple[GroupPlan, ...]
    kinds: tuple[KindUse, ...]
    max_positions: int | None
    lengths: tuple[int, ...]
    rewinds: tuple[tuple[int, str, int], ...]
    """(layer, label, tokens) of every layer that can take back only so many of the newest tokens."""
    num_sectors: int = 0
    sector_nbytes: int = 0

    @property
    def state_nbytes(self) -> int:
        """Bytes of one request's state."""
        return sum(group.demand.layout.nbytes for group in self.groups if group.demand.growth.is_state)

    @property
    def nbytes(self) -> int:
        """Bytes that the arenas take: exactly what ``KVCache`` allocates."""
        return self.num_sectors * self.sector_nbytes or sum(group.nbytes for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data that one more token of context adds, over all groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def padding_percent(self) -> float:
        """Share of the arenas' bytes that is padding; with sectors in the group that has most of it."""
        rows = [(g.num_rows * g.demand.layout.payload_nbytes, g.nbytes) for g in self.groups if g.nbytes]
        if self.num_sectors:
            return 100 * max(1 - payload / nbytes for payload, nbytes in rows)
        return 100 * (1 - sum(payload for payload, _ in rows) / max(1, self.nbytes)) if rows else 0.0

    @property
    def unused_percent(self) -> float:
        """Share of the budget that is left over because it does not make another block."""
        return 100 * (1 - self.nbytes / self.budget)

    @property
    def floor_nbytes(self) -> int:
        """Bytes that ``max_requests`` requests of one token must have; all others go where they are needed."""
        if not self.num_sectors:
            return self.nbytes
        return (1 + self._sectors([self.max_requests] * len(self.groups))) * self.sector_nbytes

    @property
    def hit_granularity(self) -> int:
        """Tokens: a shared prefix is reusable at multiples of this."""
        return self.block_size

    def holds(self, num_blocks: Sequence[int]) -> bool:
        """Whether so many blocks of each group fit the empty cache together."""
        if self.num_sectors:
            return self._sectors(num_blocks) < self.num_sectors
        return all(blocks <= group.num_blocks for blocks, group in zip(num_blocks, self.groups))

    def fits(self, num_requests: int, num_tokens: int) -> bool:
        """Whether ``num_requests`` requests of ``num_tokens`` tokens each run at once."""
        blocks = [num_requests * group.blocks_for(num_tokens) for group in self.groups]
        return num_requests <= self.max_requests and self.holds(blocks)

    def _sectors(self, num_blocks: Sequence[int]) -> int:
        return sum(ceil_div(blocks, group.per_sector) for blocks, group in zip(num_blocks, self.groups))

    @property
    def longest_context(self) -> int | None:
        """Tokens of the longest single request, at most the model's own limit; None if nothing grows with its length."""
        growing = [group.num_blocks for group in self.groups if not group.demand.growth.is_state]
        top = max(growing, default=0) * self.block_size + 1
        if self.fits(1, top):
            return None
        longest = _largest(top, lambda n: self.fits(1, n))
        return longest if self.max_positions is None else min(longest, self.max_positions)

    def requests_at(self, num_tokens: int) -> int:
        """How many requests of ``num_tokens`` tokens run at once."""
        return _largest(self.max_requests + 1, lambda n: self.fits(n, num_tokens))

    def blocks_wanted(self, num_tokens: int, room: int = 0, longest: int | None = None) -> list[int]:
        """The blocks of each group that one request of ``num_tokens`` tokens may come to hold, ``room`` of them written at
        once. Raises NeverFits, with what it would need, if the empty cache cannot hold them or ``longest`` is passed."""
        if longest is not None and num_tokens > longest:
            raise NeverFits(
                f"{num_tokens} tokens are more than the longest context of {longest}; {self._enough(num_tokens)}"
            )
        wanted = []
        for group in self.groups:
            blocks = at_most = group.blocks_for(num_tokens)
            if room > at_most * group.block_size:
                blocks = ceil_div(room, group.block_size)
            if blocks > group.num_blocks:
                fits_in_chunks = at_most <= group.num_blocks
                hint = "open it with a smaller room and extend chunk by chunk"
                raise NeverFits(
                    f"{num_tokens} tokens need {blocks} blocks of group {group.name!r}, which has {group.num_blocks}; "
                    f"{hint if fits_in_chunks else self._enough(num_tokens)}"
                )
            wanted.append(blocks)
        if self.num_sectors and not self.holds(wanted):
            need = format_bytes(sum(blocks * group.row_nbytes for blocks, group in zip(wanted, self.groups)))
            raise NeverFits(f"{num_tokens} tokens need {wanted} blocks, {need} in all; {self._enough(num_tokens)}")
        return wanted

    def _enough(self, num_tokens: int) -> str:
        """How many bytes would hold a request of that length, as the end of an error."""
        need = self.nbytes if self.num_sectors else 0
        for group in self.groups:
            blocks = group.num_blocks if group.demand.growth.is_state else group.blocks_for(num_tokens)
            need += (blocks + 1) * group.row_nbytes
        return f"a budget of at least {format_bytes(need)} would hold it (now {format_bytes(self.budget)})"

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain data, for JSON."""
        return {
            "schema": self.schema_name,
            "budget_bytes": self.budget,
            "allocated_bytes": self.nbytes,
            "floor_bytes": self.floor_nbytes,
            "sectors": self.num_sectors,
            "sector_bytes": self.sector_nbytes,
            "block_size": self.block_size,
            "hit_granularity": self.hit_granularity,
            "max_requests": self.max_requests,
            "checkpoints": self.num_checkpoints,
            "bytes_per_token": round(self.bytes_per_token, 3),
            "state_bytes_per_request": self.state_nbytes,
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
                    "block_bytes": group.row_nbytes,
                    "num_blocks": group.num_blocks,
                    "blocks_per_sector": group.per_sector,
                    "bytes": group.nbytes,
                    "index_dtype": group.index_dtype,
                }
                for group in self.groups
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.schema_name}: {format_bytes(self.nbytes)} of {format_bytes(self.budget)}"]
        checkpoints = f", at most {self.num_checkpoints:,} checkpoints" if self.num_checkpoints else ""
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
                f"{g.row_nbytes:,}",
                f"{g.per_sector:,}" if self.num_sectors else format_bytes(g.nbytes),
            )
            for g in self.groups
        ]
        share = "in a sector" if self.num_sectors else "bytes"
        lines += _table(("group", "layers", "at most" if self.num_sectors else "blocks", "B/block", share), groups)
        lines.append("")
        longest = "not limited by memory" if self.longest_context is None else f"{self.longest_context:,} tokens"
        lines.append(f"bytes per token     {self.bytes_per_token:,.0f} (+ {self.state_nbytes:,} per request)")
        if self.longest_context is not None and self.longest_context == self.max_positions:
            longest += " (the model's own limit)"
        lines.append(f"longest context     {longest}")
        for length in self.lengths:
            lines.append(f"requests of {length:<7,} {self.requests_at(length):,}")
        lines.append(f"hit granularity     {self.hit_granularity} tokens")
        if self.num_sectors:
            floating = format_bytes(max(0, self.nbytes - self.floor_nbytes))
            lines.append(f"one budget          {self.num_sectors:,} sectors of {format_bytes(self.sector_nbytes)}")
            lines.append(
                f"floor               {format_bytes(self.floor_nbytes)} for {self.max_requests} short requests"
            )
            lines.append(f"floats              {floating}, to the groups that need it")
        lines.append(f"waste               {self.padding_percent:.2f} % padding, {self.unused_percent:.2f} % unused")
        wide = [group.name for group in self.groups if group.index_dtype == "int64"]
        if wide:
            lines.append(f"int64 offsets       {', '.join(wide)}: element offsets pass 2^31")
        return "\n".join(lines)


def _largest(end: int, fits: Callable[[int], bool]) -> int:
    """The largest number below ``end`` that fits, where 0 does and none does beyond one that does not."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
    *,
    budget: int | None,
    max_requests: int,
    block_size: int,
    num_blocks: int | None,
    step_tokens: int,
    max_positions: int | None,
    lengths: tuple[int, ...],
    checkpoints: int,
    shared: bool,
    rewinds: tuple[tuple[int, str, int], ...],
) -> Plan:
    """Let the groups live off ``budget`` together, in sectors, or give each its share for good: with ``num_blocks``, for a
    single group, and where ``shared`` is False.

    A fixed split gives every group the same number of blocks, a bounded group never more than all requests and
    checkpoints can hold at once: so the groups of ``max_requests`` equally long requests fill together. Exactly one of
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
    sizes = [WHOLE_TEXT if demand.growth.is_state else block_size for demand in demands]
    most = [demand.growth.most_blocks(size, step_tokens) for demand, size in zip(demands, sizes)]

    def at(n: int, total: int) -> Plan:
        groups = []
        for demand, size, bound in zip(demands, sizes, most):
            kept = demand.growth.most_blocks(size, 1)
            cap = n if bound is None or kept is None else max_requests * bound + checkpoints * kept
            cap = cap if demand.growth.is_state else min(n, cap)
            groups.append(GroupPlan(demand, size, cap, bound, demand.layout.nbytes))
        return Plan(
            name, block_size, max_requests, checkpoints, total, tuple(groups), kinds, max_positions, lengths, rewinds
        )

    def in_sectors(total: int) -> Plan:
        sector = sector_size(tuple(demand.layout.nbytes for demand in demands), total // 64)
        count = total // sector.nbytes
        groups = [
            GroupPlan(demand, size, max(0, count - 1) * per, bound, sector.nbytes // per, per)
            for demand, size, bound, per in zip(demands, sizes, most, sector.records)
        ]
        totals = (name, block_size, max_requests, checkpoints, total)
        return Plan(*totals, tuple(groups), kinds, max_positions, lengths, rewinds, count, sector.nbytes)

    if num_blocks is not None:
        return at(num_blocks, at(num_blocks, 0).nbytes)
    assert budget is not None
    if shared and len(demands) > 1:
        plan = in_sectors(budget)
        if not plan.fits(1, 1):
            needed = (1 + len(demands)) * plan.sector_nbytes
            raise NeverFits(
                f"a budget of {format_bytes(budget)} is too small for {name}: one request of up to {block_size} tokens "
                f"needs {needed:,} bytes ({format_bytes(needed)}); raise the budget"
            )
        return plan
    least = at(1, budget)
    if least.nbytes > budget:
        states = sum(group.nbytes for group in least.groups if group.demand.growth.is_state)
        raise NeverFits(
            f"a budget of {format_bytes(budget)} is too small for {name}: one request of up to {block_size} tokens needs "
            f"{least.nbytes:,} bytes ({format_bytes(least.nbytes)}), of which {states:,} "
            f"are the state rows of max_requests={max_requests} and {checkpoints} checkpoints; raise the budget or lower them"
        )
    high = 2 + budget // max(1, sum(demand.layout.nbytes for demand in demands if not demand.growth.is_bounded))
    high = min(high, 2 + (max_requests + checkpoints) * max((bound or high for bound in most), default=1))
    return at(_largest(high, lambda n: n == 0 or at(n, budget).nbytes <= budget), budget)
