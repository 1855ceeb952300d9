"""A schema: what every layer of a model keeps, and the groups and records that follow from it. No torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvpagoda.errors import BadInput, SchemaError
from kvpagoda.schema.fields import STATE, Growth, Rows, itemsize
from kvpagoda.schema.from_hf import read_layers
from kvpagoda.schema.kinds import Attention, Compressed, Latent, LayerKind, Shared
from kvpagoda.schema.layout import RowLayout
from kvpagoda.schema.plan import Demand, KindUse, Plan, make_plan
from kvpagoda.units import align_up, parse_bytes

DEFAULT_BLOCK_SIZE = 16
MOST_CHECKPOINTS = 4096


@dataclass(frozen=True)
class Layer:
    """One layer: its index in the model, the model's own word for it, and what it keeps (usually one kind)."""

    index: int
    label: str
    kinds: tuple[LayerKind, ...]

    @property
    def growth(self) -> Growth | None:
        """The growth law of its block rows; None for a layer that keeps nothing per token. Raises SchemaError."""
        laws = {law for kind in self.kinds if (law := kind.growth()) is not None}
        if len(laws) > 1:
            raise SchemaError(f"layer {self.index} ({self.label}) mixes growth laws {sorted(law.name for law in laws)}")
        return laws.pop() if laws else None

    @property
    def owner(self) -> int:
        """The layer whose rows this layer reads: itself, unless it shares another's."""
        return next((kind.owner for kind in self.kinds if isinstance(kind, Shared)), self.index)

    @property
    def rewinds(self) -> int | None:
        """How many of the newest tokens all that it keeps can take back; None: any number."""
        return min((n for kind in self.kinds if (n := kind.rewinds()) is not None), default=None)

    def block_rows(self) -> tuple[Rows, ...]:
        return tuple(rows for kind in self.kinds for rows in kind.block_rows())

    def state_rows(self) -> tuple[Rows, ...]:
        return tuple(rows for kind in self.kinds for rows in kind.state_rows())


@dataclass(frozen=True)
class Group:
    """Layers with one growth law: they grow together and share one block id."""

    growth: Growth
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        return self.growth.name

    def block_layout(self, block_size: int) -> RowLayout:
        """The record of one block of ``block_size`` tokens: all layers of the group."""
        return RowLayout.build(
            (layer.index, field)
            for layer in self.layers
            for rows in layer.block_rows()
            for field in rows.fields(block_size // rows.tokens_per_row)
        )


@dataclass(frozen=True)
class Schema:
    """What a model keeps for its requests, layer by layer.

    ``max_positions`` and ``vocab_size`` are the model's own limits where the config names them (None: no limit known).
    """

    layers: tuple[Layer, ...]
    name: str = "custom"
    max_positions: int | None = None
    vocab_size: int | None = None

    @classmethod
    def from_hf_config(
        cls, config: Any, *, dtype: str | None = None, kv_format: str = "raw", verify_width: int = 0
    ) -> Schema:
        """Read a transformers config, or a dict read from ``config.json``.

        ``dtype``: of the cached rows; default the config's own (bfloat16 if it names none). ``kv_format``: ``raw``
        keeps rows as the model computes them; ``fp8`` uses the packed rows of the big engines for the kinds that have
        them (MLA latents, DeepSeek-V4 entries). ``verify_width``: see ``rewindable``. Raises SchemaError naming the
        missing, absurd or unknown field.
        """
        name, specs, max_positions, vocab_size = read_layers(config, dtype=dtype, kv_format=kv_format)
        layers = tuple(Layer(index, label, kinds) for index, (label, kinds) in enumerate(specs))
        return cls(layers, name, max_positions, vocab_size).rewindable(verify_width)

    def __post_init__(self) -> None:
        for position, layer in enumerate(self.layers):
            owner = layer.owner
            if owner != layer.index and not any(other.index == owner for other in self.layers[:position]):
                raise SchemaError(
                    f"layer {layer.index} ({layer.label}) shares layer {owner}, which does not come before"
                )
        if not self.layers:
            raise SchemaError("a schema needs at least one layer")
        _ = self.groups

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """One group for every growth law, ``full`` first, then in the order of the layers."""
        by_law: dict[Growth, list[Layer]] = {}
        for layer in self.layers:
            if (law := layer.growth) is not None:
                by_law.setdefault(law, []).append(layer)
        groups = [Group(law, tuple(layers)) for law, layers in by_law.items()]
        return tuple(sorted(groups, key=lambda group: group.name != "full"))

    @cached_property
    def by_index(self) -> Mapping[int, Layer]:
        """Layers by their index in the model (a pipeline stage has only some of them)."""
        return {layer.index: layer for layer in self.layers}

    @cached_property
    def state_layout(self) -> RowLayout:
        """The record of one request's state: all layers. 0 bytes for models without state."""
        return RowLayout.build(
            (layer.index, field)
            for layer in self.layers
            for rows in layer.state_rows()
            for field in rows.fields(rows.count)
        )

    @cached_property
    def tokens_per_row(self) -> int:
        """The least common multiple of all compression ratios: blocks are a multiple of it. 1 without compression."""
        return math.lcm(1, *(rows.tokens_per_row for layer in self.layers for rows in layer.block_rows()))

    def block_size(self, wanted: int | None = None) -> int:
        """Tokens of one block: ``wanted`` if it suits every layer, else (None) the smallest that does, at least 16."""
        unit = self.tokens_per_row
        if wanted is None:
            return align_up(DEFAULT_BLOCK_SIZE, unit)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1 or wanted % unit:
            raise BadInput(f"block_size must be a positive multiple of {unit} for {self.name}, got {wanted!r}")
        return wanted

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data that one more token of context adds over all groups (windows still filling), no padding."""
        unit = self.block_size()
        return sum(group.block_layout(unit).payload_nbytes for group in self.groups) / unit

    @cached_property
    def fingerprint(self) -> str:
        """16 bytes of BLAKE2b over every layer's rows, in hex: two caches may exchange records only if they agree."""
        rows = repr([(layer.index, layer.growth, layer.block_rows(), layer.state_rows()) for layer in self.layers])
        return hashlib.blake2b(rows.encode(), digest_size=16).hexdigest()

    def cast(self, dtype: str) -> Schema:
        """The same schema with its K, V, latent and entry rows in ``dtype``; states keep theirs. Raises SchemaError."""
        itemsize(dtype)

        def one(kind: LayerKind) -> LayerKind:
            return replace(kind, dtype=dtype) if isinstance(kind, Attention | Latent | Compressed) else kind

        return self._with_kinds(one)

    def rewindable(self, verify_width: int) -> Schema:
        """The same schema with rings and windows from which ``verify_width`` tokens can be taken back: the draft tokens of one
        step of speculative decoding. They keep that many tokens more; other kinds stay as they are. Raises SchemaError."""
        if isinstance(verify_width, bool) or not isinstance(verify_width, int) or verify_width < 0:
            raise SchemaError(f"verify_width must be a whole number of tokens, at least 0, got {verify_width!r}")

        def one(kind: LayerKind) -> LayerKind:
            if isinstance(kind, Compressed):
                return replace(kind, verify_width=verify_width)
            if isinstance(kind, Attention | Latent) and kind.law.is_bounded:
                return replace(kind, law=replace(kind.law, slack=verify_width))
            return kind

        return self._with_kinds(one)

    def _with_kinds(self, change: Callable[[LayerKind], LayerKind]) -> Schema:
        """The same schema with every kind changed by ``change``."""
        layers = tuple(replace(layer, kinds=tuple(change(kind) for kind in layer.kinds)) for layer in self.layers)
        return replace(self, layers=layers)

    def split(self, *, tp: int = 1, pp: int = 1, rank: int = 0) -> Schema:
        """What one rank keeps: heads and channels divided over ``tp``, layers over ``pp`` stages; stage ``rank``.

        Stages take equal runs of layers, the first ones one more where they do not divide evenly.
        """
        if tp < 1 or pp < 1 or pp > len(self.layers) or not 0 <= rank < pp:
            raise BadInput(f"cannot split {len(self.layers)} layers into tp={tp}, pp={pp}, stage {rank}")
        short, longer = divmod(len(self.layers), pp)
        first = rank * short + min(rank, longer)
        stage = self.layers[first : first + short + (rank < longer)]
        layers = tuple(replace(layer, kinds=tuple(kind.split(tp) for kind in layer.kinds)) for layer in stage)
        return replace(self, layers=layers)

    def plan(
        self,
        budget: int | str | None = None,
        max_requests: int = 64,
        block_size: int | None = None,
        *,
        num_blocks: int | None = None,
        step_tokens: int = 512,
        lengths: tuple[int, ...] = (1024, 8192, 32768, 131072),
        checkpoints: int | None = None,
        shared: bool = True,
    ) -> Plan:
        """Divide ``budget`` (bytes or text), or size for ``num_blocks``, for ``max_requests`` running at once.

        ``step_tokens``: the most tokens of one request written between two commits (a prefill chunk); window groups
        keep room for them. ``lengths``: for which to count the requests that fit. ``checkpoints``: the most copies of
        windows and states, where layers keep any (default ``max_requests``; where groups share, as many as there is memory
        for). ``shared``: several groups live off one budget; False, or ``num_blocks``: each has its own share. Raises
        BadInput, and NeverFits if not even one block of one request has room.
        """
        size = self.block_size(block_size)
        demands = [
            Demand(group.growth, tuple(layer.index for layer in group.layers), group.block_layout(size))
            for group in self.groups
        ]
        if self.state_layout.nbytes:
            layers = tuple(layer.index for layer in self.layers if layer.state_rows())
            demands.append(Demand(STATE, layers, self.state_layout))
        if checkpoints is None:
            floats = shared and num_blocks is None and len(demands) > 1
            checkpoints = (MOST_CHECKPOINTS if floats else max_requests) * any(d.growth.is_bounded for d in demands)
        return make_plan(
            self.name,
            tuple(demands),
            self._kind_uses(size),
            budget=None if budget is None else parse_bytes(budget),
            max_requests=max_requests,
            block_size=size,
            num_blocks=num_blocks,
            step_tokens=step_tokens,
            max_positions=self.max_positions,
            lengths=lengths,
            checkpoints=checkpoints,
            rewinds=tuple((x.index, x.label, x.rewinds) for x in self.layers if x.rewinds is not None),
            shared=shared,
        )

    def _kind_uses(self, block_size: int) -> tuple[KindUse, ...]:
        """Data bytes of the layers of each label, in the order of their first layer."""
        blocks = [group.block_layout(block_size) for group in self.groups]
        uses: dict[str, list[float]] = {}
        for layer in self.layers:
            use = uses.setdefault(layer.label, [0, 0.0, 0])
            use[0] += 1
            use[1] += sum(layout.layer_nbytes(layer.index) for layout in blocks) / block_size
            use[2] += self.state_layout.layer_nbytes(layer.index)
        return tuple(KindUse(label, int(n), per_token, int(state)) for label, (n, per_token, state) in uses.items())
