"""A plan: how many blocks and states a budget in bytes holds, and which requests fit. Arithmetic only; no torch.

``Plan`` and its figures, then the division of a budget between groups: a fixed share for each, or sectors for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from kvpagoda.errors import BadInput, NeverFits
from kvpagoda.schema.fields import Growth, itemsize
from kvpagoda.schema.layers import Layer
from kvpagoda.schema.layout import ALIGN, RowLayout
from kvpagoda.schema.row_formats import RowFormat, row_formats
from kvpagoda.schema.sectors import SHARE, budget_for, sector_size
from kvpagoda.text import table, wrapped
from kvpagoda.units import ceil_div, format_bytes

_KINDS = {
    "layer kind": "label", "layers": "num_layers", "B/token": "bytes_per_token", "B/request": "state_bytes_per_request",
}  # fmt: skip
"""Column title -> key of the figure, for the table of layer kinds."""


@dataclass(frozen=True)
class GroupPlan:
    """The share of one group: ``num_blocks`` usable blocks of ``block_size`` tokens, each ``row_nbytes`` bytes.

    ``growth``: the growth law. ``layout``: the record of one block. ``most_blocks``: the most blocks that one request
    holds (None: no bound). ``per_sector``: blocks in one sector, 0 if the group does not share memory. If groups share
    memory, ``num_blocks`` counts the blocks in all sectors together; the group owns only some of these sectors at a
    time.
    """

    growth: Growth
    layout: RowLayout
    block_size: int
    num_blocks: int
    most_blocks: int | None
    row_nbytes: int
    per_sector: int = 0

    @property
    def name(self) -> str:
        """``full``, ``window(1024)``, ``chunk(8192)`` or ``state``."""
        return self.growth.name

    @property
    def multiple(self) -> int:
        """The bytes from record to record are a multiple of this number."""
        return self.layout.multiple * self.layout.kernel_pages

    @property
    def num_rows(self) -> int:
        """Records in the arena: the usable blocks and, before them, the padding block (id 0) or padding sector.

        Writes of padded rows go to the padding records.
        """
        return self.num_blocks + self.first_id

    @property
    def first_id(self) -> int:
        """The lowest id of a usable block: the first block, or the first sector, is for padding."""
        return max(1, self.per_sector)

    @property
    def nbytes(self) -> int:
        """Bytes of all its records."""
        return self.num_rows * self.row_nbytes

    @cached_property
    def places(self) -> int:
        """How many blocks the states of one request have in turn; 1 for what is no state."""
        return self.growth.places

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that one request of ``num_tokens`` tokens holds at any time."""
        blocks = -(-num_tokens // self.block_size) * self.places
        return blocks if self.most_blocks is None else min(blocks, self.most_blocks)

    @property
    def index_dtype(self) -> str:
        """``int64`` where an element offset into one field (block id times stride) could pass 2^31, else ``int32``."""
        smallest = min((itemsize(place.field.dtype) for place in self.layout.places), default=1)
        return "int64" if self.nbytes // smallest >= 2**31 else "int32"

    def to_dict(self) -> dict[str, Any]:
        """Return its figures as plain data, for JSON."""
        return {
            "name": self.name,
            "num_layers": len({place.layer for place in self.layout.places}),
            "bytes_per_token": 0.0 if self.growth.is_state else round(self.layout.payload_nbytes / self.block_size, 3),
            "block_bytes": self.row_nbytes,
            "num_blocks": self.num_blocks,
            "blocks_per_sector": self.per_sector,
            "bytes": self.nbytes,
            "index_dtype": self.index_dtype,
        }


Groups = tuple[GroupPlan, ...]


@dataclass(frozen=True)
class Plan:
    """How many blocks of every group a budget holds, and which requests fit. ``Schema.plan`` returns plans.

    ``str(plan)`` is a table of the figures, ``to_dict()`` the same as plain data.

    Args:
        schema_name: the schema's.
        layers: the schema's.
        max_positions: the longest context in tokens, the schema's with those of an encoder; None: no known limit.
        block_size: tokens of one block.
        max_requests: the most requests that run at once.
        num_checkpoints: the most checkpoints that are kept.
        lengths: context lengths in tokens; ``to_dict`` counts the requests that fit for each.
        budget: in bytes.
        groups: the plan of each group, in the order of block tables.
        num_sectors: of the memory that groups share; 0 if each group has its own share.
        sector_nbytes: bytes of a sector; 0 if each group has its own share.
        order: of the arenas.
        kernel_page: tokens of one page that kernels see.
        kernel_notes: what was chosen for the kernels given to ``Schema.plan``.
        checkpoint_format: of the copies of states in checkpoints; None: that of running requests.
        kv_scheme: the schema's.
        encoder_positions: the schema's.

    Examples:
        >>> from kvpagoda.schema import Attention, Layer, Schema
        >>> plan = Schema((Layer(0, "attention", (Attention(2, 16, 16, "float32"),)),)).plan(num_blocks=100, max_requests=4)
        >>> plan.nbytes, plan.bytes_per_token, plan.longest_context  # 100 blocks and one for padding
        (413696, 256.0, 1600)
        >>> plan.fits(4, 400), plan.requests_at(800), plan.blocks_wanted(1000)
        (True, 2, [63])
    """

    schema_name: str
    layers: tuple[Layer, ...]
    max_positions: int | None
    block_size: int
    max_requests: int
    num_checkpoints: int
    lengths: tuple[int, ...]
    budget: int
    groups: tuple[GroupPlan, ...]
    num_sectors: int = 0
    sector_nbytes: int = 0
    order: str = "block"
    kernel_page: int = 0
    kernel_notes: tuple[str, ...] = ()
    checkpoint_format: str | None = None
    kv_scheme: str | None = None
    encoder_positions: int | None = None

    def __post_init__(self) -> None:
        most = max(group.num_blocks for group in self.groups)
        if most >= 2**31:
            text = f"a budget of {format_bytes(self.budget)} makes {most:,} blocks of a group, and ids are int32"
            raise BadInput.with_hint(text, "lower the budget or raise block_size", needed=most, available=2**31 - 1)

    @cached_property
    def rewinds(self) -> tuple[tuple[int, str, int], ...]:
        """(layer, label, tokens) of each layer with a bound on the tokens that ``rewind`` may remove."""
        return tuple((x.index, x.label, x.rewinds) for x in self.layers if x.rewinds is not None)

    @cached_property
    def formats(self) -> tuple[RowFormat, ...]:
        """How the rows of each layer kind are stored, and why those stay raw that do."""
        return row_formats(self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas: exactly what ``KVCache`` allocates."""
        return self.num_sectors * self.sector_nbytes or sum(group.nbytes for group in self.groups)

    @property
    def record_layout(self) -> str:
        """Bytes and kernel pages of each group's blocks, as text: equal for caches of one schema with equal records."""
        return ", ".join(f"{group.layout.nbytes}/{group.layout.kernel_pages}" for group in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data that one more token of context adds, over all groups."""
        return sum(group.layout.payload_nbytes for group in self.groups if not group.growth.is_state) / self.block_size

    def holds(self, num_blocks: Sequence[int]) -> bool:
        """Return whether some blocks of every group together fit in the empty cache. O(groups).

        Args:
            num_blocks: of each group.
        """
        if self.num_sectors:
            return self._sectors(num_blocks) < self.num_sectors
        return all(blocks <= group.num_blocks for blocks, group in zip(num_blocks, self.groups))

    def fits(self, num_requests: int, num_tokens: int) -> bool:
        """Return whether some requests can run at once.

        Args:
            num_requests: how many.
            num_tokens: of each.
        """
        blocks = [num_requests * group.blocks_for(num_tokens) for group in self.groups]
        return num_requests <= self.max_requests and self.holds(blocks)

    def _sectors(self, num_blocks: Sequence[int]) -> int:
        """Return the number of sectors that ``num_blocks[i]`` blocks of every group i take."""
        return sum(ceil_div(blocks, group.per_sector) for blocks, group in zip(num_blocks, self.groups))

    @property
    def longest_context(self) -> int | None:
        """Tokens of the longest single request, at most the model's own limit; None if memory does not limit it."""
        growing = [group.num_blocks for group in self.groups if not group.growth.is_state]
        top = max(growing, default=0) * self.block_size + 1
        if self.fits(1, top):
            return None
        longest = largest_below(top, lambda n: self.fits(1, n))
        return longest if self.max_positions is None else min(longest, self.max_positions)

    def requests_at(self, num_tokens: int) -> int:
        """Return how many requests can run at once; 0 if the model takes fewer tokens.

        Args:
            num_tokens: of each.
        """
        if self.max_positions is not None and num_tokens > self.max_positions:
            return 0
        return largest_below(self.max_requests + 1, lambda n: self.fits(n, num_tokens))

    def blocks_wanted(self, num_tokens: int, room: int = 0, longest: int | None = None) -> list[int]:
        """Return the most blocks of each group that a request holds. O(groups).

        Args:
            num_tokens: of the request.
            room: tokens that it writes at once.
            longest: the most tokens that the caller accepts; None: no limit.

        Raises:
            NeverFits: more tokens than the model has positions or than ``longest``, or than the empty cache can hold;
                the last two with the numbers needed and available.
        """
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise NeverFits(
                f"{num_tokens} tokens are more than the longest context of {self.max_positions}, the limit of "
                f"{self.schema_name} itself; shorten the prompt",
                needed=num_tokens, available=self.max_positions,
            )  # fmt: skip
        if longest is not None and num_tokens > longest:
            hint = self._budget_hint(num_tokens, room)
            text = f"{num_tokens} tokens are more than the longest context of {longest}"
            raise NeverFits.with_hint(text, hint, needed=num_tokens, available=longest)
        wanted = []
        for group in self.groups:
            blocks = at_most = group.blocks_for(num_tokens)
            if room > at_most * group.block_size:
                blocks = ceil_div(room, group.block_size) * group.places
            if blocks > group.num_blocks:
                hint = "open it with a smaller room and extend chunk by chunk"
                if at_most > group.num_blocks:
                    hint = self._budget_hint(num_tokens, room)
                text = f"{num_tokens} tokens need {blocks} blocks of group {group.name!r}, which has {group.num_blocks}"
                raise NeverFits.with_hint(text, hint, needed=blocks, available=group.num_blocks, group=group.name)
            wanted.append(blocks)
        if self.num_sectors and not self.holds(wanted):
            need = sum(blocks * group.row_nbytes for blocks, group in zip(wanted, self.groups))
            hint = self._budget_hint(num_tokens, room)
            text = f"{num_tokens} tokens need {wanted} blocks, {format_bytes(need)} in all"
            raise NeverFits.with_hint(text, hint, needed=need, available=self.nbytes)
        return wanted

    def _budget_hint(self, num_tokens: int, room: int = 0) -> str:
        """Return the end of an error text: the budget in bytes that would hold such a request."""
        counts = [
            max(group.blocks_for(num_tokens), ceil_div(room, group.block_size) * group.places) for group in self.groups
        ]
        if self.num_sectors:
            rows, multiples = zip(*((group.layout.nbytes, group.multiple) for group in self.groups))
            need = budget_for(rows, counts, multiples)
        else:
            counts = [group.num_blocks if group.growth.is_state else max(counts) for group in self.groups]
            need = sum((count + 1) * group.row_nbytes for count, group in zip(counts, self.groups))
        return f"a budget of {need} bytes ({format_bytes(need)}) would hold it (now {format_bytes(self.budget)})"

    def _by_label(self) -> list[dict[str, Any]]:
        """Return the bytes of data of all layers of each label, per token and per request, in layer order."""
        labels = {layer.index: layer.label for layer in self.layers}
        of_blocks, of_states = Counter[str](), Counter[str]()
        for group in self.groups:
            for place in group.layout.places:
                counts = of_states if group.growth.is_state else of_blocks
                counts[labels[place.layer]] += place.nbytes * group.layout.kernel_pages * group.places
        return [
            {
                "label": label,
                "num_layers": num_layers,
                "bytes_per_token": round(of_blocks[label] / self.block_size, 3),
                "state_bytes_per_request": of_states[label],
            }
            for label, num_layers in Counter(labels.values()).items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return every figure as plain data, for JSON.

        - ``floor_bytes``: the bytes that ``max_requests`` requests of one token need; all other bytes float between the
          groups.
        - ``padding_percent``: padding in percent of the arenas' bytes; with sectors, of the group with the largest share.
        - ``unused_percent``: the part of the budget that is too small for another block.
        - ``hit_granularity``: prefix hits are multiples of so many tokens.
        """
        filled = [(group.num_rows * group.layout.payload_nbytes, group.nbytes) for group in self.groups]
        if self.num_sectors:
            floor = 1 + self._sectors([self.max_requests * group.blocks_for(1) for group in self.groups])
            floor *= self.sector_nbytes
        else:
            filled, floor = [(sum(data for data, _ in filled), self.nbytes)], self.nbytes
        return {
            "schema": self.schema_name,
            "budget_bytes": self.budget,
            "allocated_bytes": self.nbytes,
            "floor_bytes": floor,
            "sectors": self.num_sectors,
            "sector_bytes": self.sector_nbytes,
            "block_size": self.block_size,
            "hit_granularity": self.block_size,
            "kernel_page": self.kernel_page,
            "order": self.order,
            "kernels": list(self.kernel_notes),
            "max_requests": self.max_requests,
            "checkpoints": self.num_checkpoints,
            "bytes_per_token": round(self.bytes_per_token, 3),
            "state_bytes_per_request": sum(
                one.places * one.layout.nbytes for one in self.groups if one.growth.is_state
            ),
            "padding_percent": round(max(100 * (1 - data / nbytes) if nbytes else 0.0 for data, nbytes in filled), 4),
            "unused_percent": round(100 * (1 - self.nbytes / self.budget), 4),
            "longest_context": self.longest_context,
            "requests_at": {str(length): self.requests_at(length) for length in self.lengths},
            "kv_scheme": self.kv_scheme,
            "formats": [asdict(one) for one in self.formats],
            "layer_kinds": self._by_label(),
            "groups": [group.to_dict() for group in self.groups],
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return its figures as tables and lines of text.

        Args:
            width: the most columns of a line (None: no limit). In a table that is wider, the values of a row are listed
                one below the other.
        """
        figures = self.to_dict()
        groups = {"group": "name", "layers": "num_layers"}
        if self.num_sectors:
            groups |= {"blocks at most": "num_blocks", "B/block": "block_bytes", "in a sector": "blocks_per_sector"}
        else:
            groups |= {"blocks": "num_blocks", "B/block": "block_bytes", "bytes": "total"}
        rows = [{**group, "total": format_bytes(group["bytes"])} for group in figures["groups"]]
        checkpoints = f", at most {self.num_checkpoints:,} checkpoints" if self.num_checkpoints else ""
        about = f"block of {self.block_size} tokens, up to {self.max_requests} requests{checkpoints}"
        lines = [f"{self.schema_name}: {format_bytes(self.nbytes)} of {format_bytes(self.budget)}"]
        lines += [*wrapped(about, width, "  "), ""]
        for columns, values in ((_KINDS, figures["layer_kinds"]), (groups, rows)):
            picked = ([row[key] for key in columns.values()] for row in values)
            cells = [[one if isinstance(one, str) else f"{one:,.0f}" for one in row] for row in picked]
            lines += [*table([*columns], cells, [*columns][:1], width), ""]
        for label, text in self._lines(figures).items():
            lines += wrapped(f"{label:<20} {text}", width, "  ")
        return "\n".join(lines)

    def _lines(self, figures: Mapping[str, Any]) -> dict[str, str]:
        """Return the lines below the tables of ``text``: label -> text."""
        longest, floor = figures["longest_context"], figures["floor_bytes"]
        context = "not limited by memory" if longest is None else f"{longest:,} tokens"
        if longest is not None and longest == self.max_positions:
            context += " (the model's own limit)"
        lines = {
            "bytes per token": f"{self.bytes_per_token:,.0f} (+ {figures['state_bytes_per_request']:,} per request)",
            "longest context": context,
        }
        if self.encoder_positions is not None:
            most = f", at most {self.encoder_positions:,} of a request" if self.encoder_positions else ""
            lines["encoder"] = f"each position of its input is a token, before those of the text{most}"
        for length, number in figures["requests_at"].items():
            too_long = self.max_positions is not None and int(length) > self.max_positions
            lines[f"at {int(length):,} tokens"] = (
                "0 (the model's limit is lower)" if too_long else f"{number:,} requests"
            )
        for group in self.groups:
            if (more := group.places - 1) > 0:
                cost = f"{more} more places for states, {format_bytes(more * group.layout.nbytes)} a request"
                lines["verify width"] = f"{more} tokens: {cost}"
        lines["hit granularity"] = f"{self.block_size} tokens"
        if self.num_sectors:
            lines["one budget"] = f"{self.num_sectors:,} sectors of {format_bytes(self.sector_nbytes)}"
            lines["floor"] = f"{format_bytes(floor)} for {self.max_requests} short requests"
            lines["floats"] = f"{format_bytes(max(0, self.nbytes - floor))}, to the groups that need it"
        if padded := [group for group in self.groups if group.layout.multiple > ALIGN]:
            each = (f"{group.layout.multiple} bytes ({group.name})" for group in padded)
            lines["records"] = f"padded to multiples of {', '.join(each)}"
        if self.kv_scheme is not None:
            lines["kv format"] = self.kv_scheme
        if any(one.format != "raw" for one in self.formats):
            for number, one in enumerate(self.formats):
                lines[f"rows{number + 1 if number else ''}"] = str(one)
        for number, note in enumerate(self.kernel_notes):
            lines[f"kernels{number + 1 if number else ''}"] = note
        lines["waste"] = f"{figures['padding_percent']:.2f} % padding, {figures['unused_percent']:.2f} % unused"
        if wide := [group.name for group in self.groups if group.index_dtype == "int64"]:
            lines["int64 offsets"] = f"{', '.join(wide)}: element offsets pass 2^31"
        return lines


def largest_below(end: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number below ``end`` that ``fits``, by bisection. O(log end) calls.

    0 must fit, and no number larger than one that does not fit may fit.
    """
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def shared_groups(groups: Groups, budget: int) -> tuple[Groups, int, int]:
    """Let ``groups`` share ``budget`` bytes, cut into sectors. Return (groups, number of sectors, bytes of a sector).

    The first sector is for padding. Raises NeverFits unless the sectors for one block of each group, or for the states of
    one request, fit beside it.
    """
    rows, multiples = tuple(group.row_nbytes for group in groups), tuple(group.multiple for group in groups)
    sector = sector_size(rows, budget // SHARE, multiples)
    count, least = budget // sector.nbytes, [group.blocks_for(1) for group in groups]
    if count < 1 + sum(map(ceil_div, least, sector.records)):
        raise _too_small(groups, budget, budget_for(rows, least, multiples), "raise the budget")

    def share(group: GroupPlan, per: int) -> GroupPlan:
        nbytes, blocks = sector.nbytes // per, (count - 1) * per
        layout = group.layout.spread(nbytes)
        return replace(group, layout=layout, num_blocks=blocks, row_nbytes=nbytes, per_sector=per)

    return tuple(map(share, groups, sector.records)), count, sector.nbytes


def lone_group(group: GroupPlan, budget: int, max_requests: int) -> Groups:
    """Return ``group``, the only one, with as many blocks as ``budget`` bytes hold.

    Raises NeverFits unless it gets at least one block or, if it is the group of states, one for each of
    ``max_requests``.
    """
    num_blocks, least = budget // group.row_nbytes - 1, max_requests * group.places if group.growth.is_state else 1
    if num_blocks < least:
        more = f"{least} states are among them; raise the budget, or lower max_requests"
        hint = more if least > 1 else "raise the budget"
        raise _too_small((group,), budget, (1 + least) * group.row_nbytes, hint)
    return (replace(group, num_blocks=num_blocks),)


def fixed_groups(groups: Groups, budget: int) -> Groups:
    """Give every group a fixed share of ``budget`` bytes: the largest ``equal_groups`` that fit.

    All groups are then full at the same time if the largest number of requests runs and all of them are equally long.

    Raises NeverFits unless one block of each group and the states of all requests fit.
    """
    smallest = equal_groups(groups, 1)
    if (needed := groups_nbytes(smallest)) > budget:
        states = sum(group.nbytes for group in smallest if group.growth.is_state)
        copies = sum(group.num_blocks for group in smallest if group.growth.is_state)
        hint = f"{states:,} of them are {copies} states; raise the budget, or lower max_requests or checkpoints"
        raise _too_small(groups, budget, needed, hint)
    growing = sum(group.row_nbytes for group in groups if not group.growth.is_bounded)
    end = 2 + min(budget // max(1, growing), max((group.num_blocks for group in groups), default=0))
    num_blocks = largest_below(end, lambda n: n == 0 or groups_nbytes(equal_groups(groups, n)) <= budget)
    return equal_groups(groups, num_blocks)


def equal_groups(groups: Groups, num_blocks: int) -> Groups:
    """Return ``groups`` with ``num_blocks`` blocks each, at most as many as now; the number of states stays."""
    return tuple(
        group if group.growth.is_state else replace(group, num_blocks=min(num_blocks, group.num_blocks))
        for group in groups
    )


def groups_nbytes(groups: Groups) -> int:
    """Return the bytes of the arenas of ``groups``."""
    return sum(group.nbytes for group in groups)


def _too_small(groups: Groups, budget: int, needed: int, hint: str) -> NeverFits:
    """Return the error for a budget that is too small for one request of one block."""
    block_size = min(group.block_size for group in groups)
    needs = f"one request of up to {block_size} tokens needs {needed:,} bytes ({format_bytes(needed)})"
    text = f"a budget of {format_bytes(budget)} is too small: {needs}"
    return NeverFits.with_hint(text, hint, needed=needed, available=budget)
