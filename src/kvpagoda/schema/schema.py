"""A schema: what every layer of a model keeps, and the groups and records that follow from it. Needs no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any, SupportsIndex

from kvpagoda.errors import BadInput, SchemaError, shown
from kvpagoda.layouts.named import names
from kvpagoda.layouts.pages import KIND_OF_ROWS
from kvpagoda.schema.at_rest import checked_format, layout_at_rest
from kvpagoda.schema.config_source import config_named
from kvpagoda.schema.fields import CHECKPOINT, STATE, WHOLE_TEXT, Growth, dtype_name
from kvpagoda.schema.from_hf import draft_config, read_config, read_mtp
from kvpagoda.schema.kernel_fit import LARGEST_BLOCK, Fit, KernelNames, readers_of, unmet
from kvpagoda.schema.kernel_fit import fit as fitted
from kvpagoda.schema.kinds import Attention, Compressed, Latent, LayerKind, Recurrent, Shared
from kvpagoda.schema.kv_format import KVFormatNames
from kvpagoda.schema.layers import Group, Layer
from kvpagoda.schema.layout import RowLayout
from kvpagoda.schema.layout_choice import LayoutNames, arena_order, by_kind, choices_of
from kvpagoda.schema.plan import GroupPlan, Plan, equal_groups, fixed_groups, groups_nbytes, lone_group, shared_groups
from kvpagoda.schema.row_formats import RowFormat, row_formats
from kvpagoda.units import align_up, instance_of, parse_bytes, whole_number

DEFAULT_BLOCK_SIZE = 16
MAX_CHECKPOINTS = 2**16
"""The most checkpoints by default where only memory limits them."""


@dataclass(frozen=True)
class Schema:
    """What a model keeps in the cache for its requests, layer by layer.

    Args:
        layers: one ``Layer`` each, in the model's order; those of a draft come last.
        name: the model type, for error messages.
        max_positions: the model's own limit in tokens, those of an encoder not included; None if its config names none.
        vocab_size: the model's own; None if its config names none.
        kv_scheme: what the config says of the format of its rows, and what came of it, as text; None if it says
            nothing, or a ``kv_format`` was given.
        encoder_positions: the most positions of its encoder's input, 0 if its config names none; None: it has no encoder.
            What its cross-attention reads of them are rows as those of its tokens, before these: see
            ``Batch.encoder_parts``.

    Examples:
        >>> llama = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> schema = Schema.from_hf_config(llama, dtype="float32")
        >>> schema.bytes_per_token  # K and V, 2 layers, 2 heads of 16 elements, 4 bytes each
        512.0
        >>> plan = schema.plan("1MiB", max_requests=8)
        >>> plan.block_size, plan.groups[0].num_blocks, plan.longest_context
        (16, 127, 2032)
    """

    layers: tuple[Layer, ...]
    name: str = "custom"
    max_positions: int | None = None
    vocab_size: int | None = None
    kv_scheme: str | None = field(default=None, compare=False, repr=False)
    encoder_positions: int | None = None

    @classmethod
    def from_hf_config(
        cls,
        config: object,
        *,
        dtype: str | None = None,
        kv_format: KVFormatNames = "auto",
        kv_scales: Mapping[int, tuple[float, float]] | None = None,
        layout: LayoutNames | None = None,
        verify_width: int = 0,
        draft: object = None,
    ) -> Schema:
        """Return the schema of a transformers config. Needs no torch.

        Formats, for ``kv_format``; rows that have no such form stay raw, ``formats`` tells:

        - ``raw``: all rows as the model computes them.
        - ``auto``: as the config's quantisation says (``kv_scheme`` tells), else ``raw``.
        - ``fp8``: heads as ``fp8_e4m3``; latents and entries as the packed rows of FlashMLA and DeepGEMM, or, for other
          sizes or another dtype, as codes and scales in separate arrays.
        - ``fp8_e4m3``, ``fp8_e5m2``: heads as one byte an element, one scale for all K rows of a layer and one for all V
          rows.
        - ``mxfp4``, ``nvfp4``, ``int8``: codes with one scale for 32, 16, and (latents and entries) 64 or 128 elements or
          (heads) a head.
        - ``fp8_per_token_head``, ``int8_per_token_head``: vLLM's packed heads, a scale for each.

        Args:
            config: a transformers config or a dict of one; or, as text or a ``Path``, a ``config.json``, its folder, or
                the name of a preset (``kvpagoda.schema.presets.presets``) or of its model on the Hugging Face hub.
            dtype: of the rows as they are written and read back; None: the config's, else bfloat16.
            kv_format: of K/V heads, MLA latents and DeepSeek-V4 entries: one name, or names by layer kind
                (``kv_format.LAYER_KINDS``; the others are raw), ``{"full": "fp8", "window": "raw"}``.
            kv_scales: see ``scaled``; None: 1.0.
            layout: see ``laid_out``; it decides the format and dialect of packed rows.
            verify_width: how many of the newest tokens ``rewind`` may remove, and how many of a step may stay
                uncommitted; see ``rewindable``.
            draft: adds its layers (``drafted_by``): the config of an EAGLE head or an ordinary model, given as
                ``config`` is, or "mtp" (or True) for ``config``'s multi-token prediction layers. They have ``dtype``
                too; MTP layers have ``kv_format``, other drafts raw rows.

        Raises:
            SchemaError: a field is missing, out of range or unknown; the message names it.
            LayoutError: a layout that is unknown or holds rows of other sizes.
        """
        verify_width = whole_number(verify_width, "verify_width", at_least=0, error=SchemaError)
        name, config = config_named(config) if isinstance(config, str | PathLike) else (None, config)
        schema = cls(*read_config(config, dtype=dtype, kv_format=kv_format))
        if draft is True or (isinstance(draft, str) and draft.lower() == "mtp"):
            schema = schema._with_drafts(read_mtp(config, dtype=dtype, kv_format=kv_format))
        elif draft is not None and draft is not False:
            head = draft_config(config_named(draft)[1] if isinstance(draft, str | PathLike) else draft)
            schema = schema.drafted_by(cls(*read_config(head, dtype=dtype, kv_format="raw")))
        schema = schema.rewindable(verify_width)
        schema = schema if name is None else replace(schema, name=name)
        schema = schema if kv_scales is None else schema.scaled(kv_scales)
        return schema if layout is None else schema.laid_out(layout)

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for layer in self.layers:
            if layer.index in seen:
                raise SchemaError(f"two layers have the index {layer.index}; give each its own", needed=layer.index)
            seen.add(layer.index)
            if layer.owner not in seen:
                text = f"layer {layer.index} ({layer.label}) shares layer {layer.owner}, which does not come before"
                raise SchemaError(text, needed=layer.owner, available=layer.index)
        if not self.layers:
            raise SchemaError("a schema needs at least one layer", needed=1, available=0)
        _ = self.groups, self.state_growth  # raise for layers that mix growth laws, or ways to go back

    def drafted_by(self, draft: Schema) -> Schema:
        """Return this schema with the layers of ``draft`` after its own, as its ``draft_layers``.

        Layers whose growth law a layer of this model has lie in the same blocks, so they are found and evicted
        together. Others have a group of their own, which is optional (``Growth.is_optional``): a hit never ends earlier
        for lack of its blocks.

        Args:
            draft: a smaller model or an EAGLE head that proposes tokens of the same text.

        Raises:
            SchemaError: another vocabulary; a draft with states for a model without, whose hits would end at
                checkpoints that the model does not need; or drafts that are there already.

        Examples:
            >>> from kvpagoda.schema import Attention
            >>> model = Schema((Layer(0, "attention", (Attention(8, 128, 128, "bfloat16"),)),))
            >>> head = Schema((Layer(0, "attention", (Attention(2, 64, 64, "bfloat16"),)),))
            >>> both = model.drafted_by(head)
            >>> [(layer.index, layer.is_draft) for layer in both.layers], len(both.groups)
            ([(0, False), (1, True)], 1)
        """
        instance_of(draft, Schema, "a draft")
        if None not in (self.vocab_size, draft.vocab_size) and self.vocab_size != draft.vocab_size:
            raise SchemaError(
                f"the draft {draft.name} has a vocabulary of {draft.vocab_size:,} tokens and {self.name} one of "
                f"{self.vocab_size:,}, so they cannot share a text; choose a draft with the same tokenizer",
                needed=draft.vocab_size, available=self.vocab_size,
            )  # fmt: skip
        if (self.encoder_positions, draft.encoder_positions) != (None, None):
            raise SchemaError(
                f"{self.name} or its draft {draft.name} has an encoder, and the rows of two encoders' inputs cannot share a "
                f"text; leave the draft out",
                needed=draft.name, available=self.name,
            )  # fmt: skip
        if draft.state_layout.nbytes and not self.state_layout.nbytes:
            raise SchemaError(
                f"the draft {draft.name} keeps states and {self.name} keeps none, so hits would end where checkpoints of "
                f"the draft are; choose a draft with attention only",
                needed=draft.name,
            )
        first = 1 + max(layer.index for layer in self.layers)
        return self._with_drafts(tuple(_renumbered(layer, first) for layer in draft.layers))

    def _with_drafts(self, layers: tuple[Layer, ...]) -> Schema:
        """Return this schema with the draft ``layers``, whose indices follow its own; see ``drafted_by``."""
        if self.draft_layers:
            text = f"{self.name} has {len(self.draft_layers)} draft layers already"
            raise SchemaError(text, needed=0, available=len(self.draft_layers))
        laws = {layer.growth for layer in self.layers}
        drafts = []
        for layer in layers:
            kinds = layer.kinds if layer.growth in (None, *laws) else tuple(_optional(kind) for kind in layer.kinds)
            drafts.append(replace(layer, label=f"draft {layer.label}", kinds=kinds, is_draft=True))
        return replace(self, layers=(*self.layers, *drafts))

    @cached_property
    def draft_layers(self) -> tuple[Layer, ...]:
        """The layers of its draft; none for most schemas."""
        return tuple(layer for layer in self.layers if layer.is_draft)

    @cached_property
    def without_drafts(self) -> Schema:
        """The schema of its own layers, without those of its draft."""
        return replace(self, layers=tuple(layer for layer in self.layers if not layer.is_draft))

    def draft_alone(self, name: str) -> Schema:
        """Return the schema of its draft's layers, numbered from 0.

        Args:
            name: the model type of the draft.

        Raises:
            SchemaError: it has no draft.
        """
        if not self.draft_layers:
            raise SchemaError(f"{self.name} has no draft layers; drafted_by adds those of a draft")
        first = self.draft_layers[0].index
        return replace(self, layers=tuple(_renumbered(layer, -first) for layer in self.draft_layers), name=name)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """One group for each growth law of the layers: ``full`` first, then in the order of the layers."""
        by_law: dict[Growth, list[Layer]] = {}
        for layer in self.layers:
            if (law := layer.growth) is not None:
                by_law.setdefault(law, []).append(layer)
        groups = [Group(law, tuple(layers)) for law, layers in by_law.items()]
        return tuple(sorted(groups, key=lambda group: group.name != "full"))

    @cached_property
    def by_index(self) -> Mapping[int, Layer]:
        """Index in the model -> layer. A pipeline stage has only some of the indices."""
        return {layer.index: layer for layer in self.layers}

    def owner_of(self, index: SupportsIndex) -> Layer:
        """Return the layer whose rows layer ``index`` reads: itself, or the layer that it shares.

        Args:
            index: of the layer.

        Raises:
            BadInput: no layer has this index.
        """
        number = whole_number(index, "a layer's index")
        if number not in self.by_index:
            text = f"layer {number} is not in this schema; it has {sorted(self.by_index)}"
            raise BadInput(text, needed=number, available=sorted(self.by_index))
        return self.by_index[self.by_index[number].owner]

    @cached_property
    def state_layout(self) -> RowLayout:
        """The record of one request's state, over all layers. 0 bytes for models without state."""
        return Group(STATE, self.layers).block_layout()

    @cached_property
    def state_growth(self) -> Growth:
        """The growth law of the states: with ``slack`` if they have several places in turn.

        Raises:
            SchemaError: only some layers' states have several places.
        """
        layers = {
            kind.state_places(): f"layer {layer.index} ({layer.label})"
            for layer in self.layers[::-1]
            for kind in layer.kinds
            if kind.state_rows()
        }
        if len(layers) > 1:
            places = ", ".join(f"{layer} {number}" for number, layer in sorted(layers.items()))
            text = f"the states of a request lie together, but these layers have different numbers of places: {places}"
            hint = (
                "give verify_width=0, since a state that is written in place (a ring, sinks) cannot move beside others"
            )
            raise SchemaError.with_hint(text, hint, available=0, needed=max(layers) - 1)
        return replace(STATE, slack=next(iter(layers), 1) - 1)

    @cached_property
    def all_groups(self) -> tuple[Group, ...]:
        """``groups``, and the group of states if any layer has a state."""
        return (*self.groups, Group(self.state_growth, self.layers)) if self.state_layout.nbytes else self.groups

    @cached_property
    def tokens_per_row(self) -> int:
        """Least common multiple of the compression ratios; ``block_size`` must be a multiple. 1 without compression."""
        return math.lcm(1, *(rows.tokens_per_row for layer in self.layers for rows in layer.block_rows()))

    def block_size(self, wanted: int | None = None) -> int:
        """Return the tokens of one block.

        Args:
            wanted: returned if it suits every layer; None: the least number from 16 on that does.

        Raises:
            BadInput: ``wanted`` is not a positive multiple of ``tokens_per_row``.
        """
        unit = self.tokens_per_row
        if wanted is None:
            return align_up(DEFAULT_BLOCK_SIZE, unit)
        wanted = whole_number(wanted, "block_size", at_least=1, bits=20)
        if wanted % unit:
            text = f"block_size must be a positive multiple of {unit} for {self.name}, got {wanted}"
            raise BadInput(text, field="block_size", needed=wanted, available=unit)
        return wanted

    @property
    def bytes_per_token(self) -> float:
        """Bytes of data that one more token adds over all groups, without padding, while no window is full yet."""
        unit = self.block_size()
        return sum(group.block_layout(unit).payload_nbytes for group in self.groups) / unit

    @cached_property
    def fingerprint(self) -> str:
        """16 bytes of BLAKE2b over the rows of every layer, in hex. Caches may exchange records only if it is equal."""
        rows = repr([(layer.index, layer.growth, layer.block_rows(), layer.state_rows()) for layer in self.layers])
        rows += repr([(x.index, x.growth and x.growth.is_optional) for x in self.draft_layers]) * bool(
            self.draft_layers
        )
        return hashlib.blake2b(rows.encode(), digest_size=16).hexdigest()

    def cast(self, dtype: str) -> Schema:
        """Return this schema with K, V, latent and entry rows in another dtype; states keep theirs.

        Args:
            dtype: a name or a torch dtype.

        Raises:
            SchemaError: a dtype that rows cannot have.
        """
        name = dtype_name(dtype)

        def cast(kind: LayerKind) -> LayerKind:
            return replace(kind, dtype=name) if isinstance(kind, Attention | Latent | Compressed) else kind

        return self._with_kinds(cast)

    def scaled(self, kv_scales: Mapping[int, tuple[float, float]]) -> Schema:
        """Return this schema with these scales in all layers whose heads have one scale a tensor. Stored is x / scale.

        The scales are part of the rows' identity, so caches with other scales share no records.

        Args:
            kv_scales: layer index -> (scale of K, scale of V); those of other layers are ignored, as a checkpoint may
                have them for every layer.

        Raises:
            SchemaError: a layer lacks its scales, a scale is not finite or not above 0, or no layer takes any.
        """
        takers = [layer for layer in self.layers if any(rows.encoding.is_scaled for rows in layer.rows())]
        if not takers:
            text = f"no layer of {self.name} has one scale a tensor; choose kv_format 'fp8_e4m3' or 'fp8_e5m2'"
            raise SchemaError(text, needed="a scale a tensor")
        if lacking := [layer.index for layer in takers if layer.index not in kv_scales]:
            raise SchemaError.with_hint(
                f"kv_scales has none for {len(lacking)} of {len(takers)} layers of {self.name}: {lacking[:8]}",
                "give all, or leave kv_scales out for scales of 1.0", needed=len(takers), available=len(takers) - len(lacking),
            )  # fmt: skip
        of_layer = {layer.index: _pair(kv_scales[layer.index], layer) for layer in takers}
        layers = []
        for layer in self.layers:
            try:
                kinds = tuple(kind.scaled(of_layer.get(layer.index, (1.0, 1.0))) for kind in layer.kinds)
            except SchemaError as error:
                raise error.within(f"kv_scales of layer {layer.index} ({layer.label})") from None
            layers.append(replace(layer, kinds=kinds))
        return replace(self, layers=tuple(layers))

    @cached_property
    def formats(self) -> tuple[RowFormat, ...]:
        """How the rows of each layer kind are stored, and why those stay raw that do: what ``kv_format`` came to."""
        return row_formats(self.layers)

    def laid_out(self, layout: LayoutNames) -> Schema:
        """Return this schema with its rows stored and encoded as in the named layout (``kvpagoda.layouts.names``).

        Args:
            layout: one name (``"trtllm"``), several, or names by kind of rows (``kvpagoda.layouts.pages.KINDS``), for
                example ``{"latent": "flashmla-v32", "indexer": "deepgemm-indexer"}``. ``"vllm-dsv4:flashmla"`` names
                the dialect too. Layers of other kinds stay as they are.

        Raises:
            SchemaError: a layout that no layer can have.
            LayoutError: one that is unknown or holds rows of other sizes.
        """
        choices = choices_of(layout)
        laid = self._with_kinds(lambda kind: kind.laid_out(choices))
        all_rows = [rows for layer in laid.layers for rows in layer.rows()]
        for kind, choice in choices.items():
            of_kind = [rows for rows in all_rows if KIND_OF_ROWS.get(rows.name) == kind]
            if not any(rows.page == choice.pages.get(rows.name, rows.page) for rows in of_kind):
                text = f"layout {choice.name!r} is for {kind} rows, and no layer of {self.name} keeps such rows"
                raise SchemaError(text, needed=choice.name, available=kind)
        for group in laid.groups:
            group.block_layout(laid.tokens_per_row)  # raises for rows of other sizes
        _ = laid.state_layout
        return laid

    def rewindable(self, verify_width: int) -> Schema:
        """Return this schema with rings, windows and states that let ``rewind`` remove the newest tokens.

        Rings and windows keep ``verify_width`` tokens more, and a request has that many more places for recurrent and
        convolution states; other kinds stay as they are.

        Args:
            verify_width: tokens, the draft tokens of one step of speculative decoding.

        Raises:
            SchemaError: ``verify_width`` is not a whole number of at least 0; or it is not 0 and the model keeps such
                states beside states that are written in place (rings, sinks).
        """
        width = whole_number(verify_width, "verify_width", at_least=0, error=SchemaError)

        def deepen(kind: LayerKind) -> LayerKind:
            if isinstance(kind, Compressed | Recurrent):
                return replace(kind, verify_width=width)
            if isinstance(kind, Attention | Latent):
                law = replace(kind.law, slack=width) if kind.law.is_bounded else kind.law
                indexer = kind.indexer and replace(kind.indexer, verify_width=width if kind.indexer.pool > 1 else 0)
                return replace(kind, law=law, indexer=indexer)
            return kind

        return self._with_kinds(deepen)

    def _with_kinds(self, change: Callable[[LayerKind], LayerKind]) -> Schema:
        """Return this schema with every kind replaced by ``change(kind)``."""
        layers = tuple(replace(layer, kinds=tuple(change(kind) for kind in layer.kinds)) for layer in self.layers)
        return replace(self, layers=layers)

    def split(self, *, tp: int = 1, pp: int = 1, rank: int = 0) -> Schema:
        """Return the schema of one rank. Heads and channels are divided over the tensor-parallel ranks, layers over the
        stages.

        Stages get equal runs of layers; if these do not divide evenly, the first stages get one more. The draft is in
        the last stage.

        Args:
            tp: tensor-parallel ranks of a stage.
            pp: pipeline stages.
            rank: the pipeline stage, from 0.

        Raises:
            BadInput: numbers out of range.
            SchemaError: heads that do not divide.
        """
        tp, pp = whole_number(tp, "tp", at_least=1), whole_number(pp, "pp", at_least=1)
        rank = whole_number(rank, "rank", at_least=0)
        own = [layer for layer in self.layers if not layer.is_draft]
        if pp > len(own) or rank >= pp:
            text = f"cannot split {len(own)} layers into tp={tp}, pp={pp}, stage {rank}"
            raise BadInput(text, needed=(tp, pp, rank), available=len(own))
        short, longer = divmod(len(own), pp)
        first = rank * short + min(rank, longer)
        stage = (*own[first : first + short + (rank < longer)], *(self.draft_layers if rank == pp - 1 else ()))
        return replace(self, layers=tuple(layer.split(tp) for layer in stage))

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
        kernels: KernelNames = (),
        kernel_page: int | None = None,
        order: str | None = None,
        checkpoint_format: str | None = None,
    ) -> Plan:
        """Return the plan for a budget, or for a number of blocks of every group; exactly one of the two is given.

        Args:
            budget: bytes, or text such as "40GiB".
            max_requests: the most requests that run at once.
            block_size: tokens of one block; None: the smallest from 16 on that suits the model.
            num_blocks: of every group, each of which then has its own memory.
            step_tokens: the most tokens of one request that are written between two commits (a prefill chunk); window
                groups keep blocks for them.
            lengths: context lengths in tokens for which the plan counts the requests that fit.
            checkpoints: the most checkpoints of windows and states; None: as many as memory holds, or ``max_requests``
                if each group has its own memory.
            shared: groups share the memory, cut into sectors; False: each has its own.
            kernels: those that read and write the cache (``kvpagoda.layouts.demands.kernels``), for all kinds of rows
                or by kind: ``"flashmla-sparse-sm100"``. What is not given of padding, ``kernel_page`` and
                ``block_size`` is chosen to suit them.
            kernel_page: tokens of a kernel page.
            order: of the ``Arena``; None: the layout's, else block. Groups never share layer-major arenas.
            checkpoint_format: how checkpoints keep float32 states, see ``Retention``.

        Raises:
            BadInput: neither or both of ``budget`` and ``num_blocks`` are given, an unknown ``order`` or format, or a
                number that is out of range or does not suit the layers; the message names it.
            NeverFits: not even one block of one request fits.
            SchemaError: a kernel would refuse, copy or misread the cache: the kernel's rule, what would satisfy it, and
                the layouts that fit (its ``available``).
        """
        if (budget is None) == (num_blocks is None):
            text = "give either a budget in bytes or num_blocks: exactly one of them"
            raise BadInput(text, needed=1, available=0 if budget is None else 2)
        try:
            fit = self._fit(block_size, kernel_page, kernels, arena_order(self.layers, order))
        except SchemaError as error:
            if not (found := self._fitting_layouts(block_size, kernel_page, kernels, order)):
                raise
            hint = f"it fits with layout={(found[0] if len(found) == 1 else found)!r}"
            raise SchemaError.with_hint(str(error), hint, needed=error.needed, available=found) from None
        order = arena_order(self.layers, order)
        size, max_requests = fit.block_size, whole_number(max_requests, "max_requests", at_least=1)
        step_tokens = whole_number(step_tokens, "step_tokens", at_least=1)
        lengths = tuple(whole_number(length, "each of lengths", at_least=1) for length in lengths)
        nbytes = 0 if budget is None else parse_bytes(budget)
        blocks = 0 if num_blocks is None else whole_number(num_blocks, "num_blocks", at_least=1)
        if max(max_requests, blocks) >= 2**31:
            text = f"max_requests and num_blocks must be below 2^31, got {max_requests:,} and {blocks:,}"
            raise BadInput(text, needed=max(max_requests, blocks), available=2**31 - 1)
        checkpoint_format = checked_format(checkpoint_format)
        num_groups = len(self.all_groups)
        if checkpoint_format and layout_at_rest(self.all_groups[-1], checkpoint_format, order) is not None:
            num_groups += 1
        is_shared = shared and order == "block" and not blocks and num_groups > 1
        if checkpoints is None:
            is_bounded = any(group.growth.is_bounded for group in self.all_groups)
            has_parts = bool(blocks) or (not is_shared and num_groups > 1)
            checkpoints = (max_requests if has_parts else MAX_CHECKPOINTS) if is_bounded else 0
        checkpoints = whole_number(checkpoints, "checkpoints", at_least=0)
        groups = self._largest_groups(fit, order, step_tokens, max_requests, checkpoints, checkpoint_format)
        checkpoint_format = checkpoint_format if groups[-1].growth.is_at_rest else None
        num_sectors = sector_nbytes = 0
        if blocks:
            nbytes = groups_nbytes(groups := equal_groups(groups, blocks))
        elif is_shared:
            groups, num_sectors, sector_nbytes = shared_groups(groups, nbytes)
        elif len(groups) == 1:
            groups = lone_group(groups[0], nbytes, max_requests)
        else:
            groups = fixed_groups(groups, nbytes)
        given = self.name, self.layers, self._longest_text(size), size, max_requests, checkpoints, lengths
        readers = readers_of(kernels)  # checked again: sectors may have spread the records
        assert not any([*unmet(one.layout, self.layers, readers, order, one.row_nbytes)] for one in groups if readers)
        return Plan(
            *given, nbytes, groups, num_sectors, sector_nbytes, order, fit.kernel_page, fit.notes, checkpoint_format,
            self.kv_scheme, self.encoder_positions,
        )  # fmt: skip

    def _longest_text(self, block_size: int) -> int | None:
        """Return the most tokens of a text, those before it included that stand for an encoder's positions, in whole blocks;
        None: no limit is known."""
        if self.encoder_positions is None or self.max_positions is None:
            return self.max_positions
        return align_up(self.encoder_positions, block_size) + self.max_positions if self.encoder_positions else None

    def _fit(self, block_size: int | None, kernel_page: int | None, kernels: KernelNames, order: str) -> Fit:
        """Return block size, kernel page and padding with which ``kernels`` can read; given sizes are kept."""
        size, unit = self.block_size(block_size), self.tokens_per_row
        if kernel_page is not None:
            kernel_page = whole_number(kernel_page, "kernel_page", at_least=1)
            if size % kernel_page or kernel_page % unit:
                raise BadInput(
                    f"kernel_page must divide the block_size of {size} and be a multiple of {unit}, got {kernel_page}",
                    field="kernel_page", needed=kernel_page, available=size,
                )  # fmt: skip
        readers = readers_of(kernels)
        if not readers:
            return Fit(size, kernel_page or size)
        larger = (2**n for n in range(LARGEST_BLOCK.bit_length())) if block_size is None else ()
        blocks = [size, *(n for n in larger if n > size and n % (kernel_page or unit) == 0)]
        parts = (1, 2, 4, 8, 16, 32)
        sizes = [
            (block, page)
            for block in blocks
            for page in ([kernel_page] if kernel_page else [block // n for n in parts if block % (n * unit) == 0])
        ]
        return fitted(self.all_groups, readers, sizes, order)

    def _fitting_layouts(
        self, block_size: int | None, kernel_page: int | None, kernels: KernelNames, order: str | None
    ) -> list[str]:
        """Return the names of layouts with which all ``kernels`` can read these rows; [] if there are none."""
        different = {layer.kinds: layer for layer in self.layers if layer.owner == layer.index}
        small, found = replace(self, layers=tuple(different.values())), []
        wanted = by_kind(kernels)
        for kind, kernel in wanted:
            for layout in ("", *names()):
                with suppress(BadInput):
                    laid = small.laid_out(layout) if layout else small
                    laid._fit(
                        block_size, kernel_page, {kind: kernel} if kind else kernel, arena_order(laid.layers, order)
                    )
                    found.append(layout)
                    break
            else:
                return []
        return [*dict.fromkeys(filter(None, found))]

    def _largest_groups(
        self, fit: Fit, order: str, step_tokens: int, max_requests: int, checkpoints: int, checkpoint_format: str | None
    ) -> tuple[GroupPlan, ...]:
        """Return the plan of every group, states included, with all blocks that requests and checkpoints can hold.

        A group whose requests have no bound gets ``WHOLE_TEXT`` blocks. A state has as many blocks as places, however
        long the request is. With a ``checkpoint_format`` that changes them, checkpoints have a group of their own, the last.
        """
        largest = []
        for group in self.all_groups:
            law, layout = group.growth, fit.block_layout(group, order)
            size = WHOLE_TEXT if law.is_state else fit.block_size
            most, kept = law.most_blocks(size, step_tokens), law.checkpoint_blocks(size)
            rest = layout_at_rest(group, checkpoint_format, order) if checkpoint_format else None
            if rest is not None:
                kept = 0
            blocks = WHOLE_TEXT if most is None or kept is None else max_requests * most + checkpoints * kept
            largest.append(GroupPlan(law, layout, size, blocks, most, layout.nbytes))
            if rest is not None:  # states are the last group
                largest.append(GroupPlan(CHECKPOINT, rest, size, checkpoints, 0, rest.nbytes))
        return tuple(largest)


def _pair(scales: Any, layer: Layer) -> tuple[float, float]:
    """Return the scales of K and V of ``layer``. Raises SchemaError unless they are two."""
    if not isinstance(scales, tuple | list) or len(scales) != 2 or None in scales:
        text = f"kv_scales of layer {layer.index} is {shown(scales)}; expected two numbers: those of K and V"
        raise SchemaError(text, needed=2, available=scales)
    return (scales[0], scales[1])


def _renumbered(layer: Layer, first: int) -> Layer:
    """Return ``layer`` with ``first`` added to its index, and to that of the layer whose rows it shares."""
    kinds = (replace(kind, owner=kind.owner + first) if isinstance(kind, Shared) else kind for kind in layer.kinds)
    return replace(layer, index=layer.index + first, kinds=tuple(kinds))


def _optional(kind: LayerKind) -> LayerKind:
    """Return ``kind`` with optional rows. Raises SchemaError if its kind has rows of another law beside them."""
    if (law := kind.growth()) is None:
        return kind
    if not isinstance(kind, Attention | Latent):
        raise SchemaError(f"a draft with {type(kind).__name__} layers needs a model that keeps {law.name} blocks too")
    return replace(kind, law=replace(kind.law, is_optional=True))
