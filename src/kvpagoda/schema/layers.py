"""A layer is a tuple of layer kinds; a group is the set of layers with one growth law, which share block ids."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from kvpagoda.errors import SchemaError
from kvpagoda.schema.fields import Growth, Rows
from kvpagoda.schema.kinds import LayerKind, Shared
from kvpagoda.schema.layout import ALIGN, RowLayout, pages_of


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Args:
        index: in the model.
        label: its type as the model names it.
        kinds: usually one.
        num_query_heads: how many heads its attention divides over tensor-parallel ranks; None: unknown, or no
            attention. They keep nothing, so layers that differ in it alone are equal.
        is_draft: whether it belongs to a draft (an MTP or EAGLE layer, or a layer of a smaller model), which proposes
            tokens of the same text; see ``Schema.drafted_by``.

    Examples:
        >>> from kvpagoda.schema import Attention
        >>> layer = Layer(0, "full_attention", (Attention(8, 128, 128, "bfloat16"),))
        >>> layer.growth.name, [rows.name for rows in layer.block_rows()], layer.rewinds
        ('full', ['k', 'v'], None)
    """

    index: int
    label: str
    kinds: tuple[LayerKind, ...]
    num_query_heads: int | None = field(default=None, compare=False, repr=False)
    is_draft: bool = field(default=False, repr=False)

    def split(self, ways: int) -> Layer:
        """Return this layer on one tensor-parallel rank.

        Args:
            ways: how many ranks there are.

        Raises:
            SchemaError: heads do not divide.
        """
        kinds, queries = tuple(kind.split(ways) for kind in self.kinds), self.num_query_heads
        if queries is None:
            return replace(self, kinds=kinds)
        if queries % ways:
            text = f"{queries} query heads cannot be divided over {ways} tensor-parallel ranks"
            raise SchemaError(text, field="query heads", needed=ways, available=queries)
        return replace(self, kinds=kinds, num_query_heads=queries // ways)

    @cached_property
    def growth(self) -> Growth | None:
        """Growth law of its block rows; None if it keeps nothing per token.

        Raises:
            SchemaError: kinds differ.
        """
        laws = {law for kind in self.kinds if (law := kind.growth()) is not None}
        if len(laws) > 1:
            text = f"layer {self.index} ({self.label}) mixes growth laws {sorted(law.name for law in laws)}"
            raise SchemaError(text, needed=1, available=len(laws))
        return laws.pop() if laws else None

    @cached_property
    def owner(self) -> int:
        """Index of the layer whose rows this layer reads: its own, unless a ``Shared`` kind names another."""
        return next((kind.owner for kind in self.kinds if isinstance(kind, Shared)), self.index)

    @property
    def rewinds(self) -> int | None:
        """How many of the newest tokens ``rewind`` may remove: the least over its kinds; None: any number."""
        return min((n for kind in self.kinds if (n := kind.rewinds()) is not None), default=None)

    def block_rows(self) -> tuple[Rows, ...]:
        """Return the rows that it keeps in blocks, over all its kinds."""
        return tuple(rows for kind in self.kinds for rows in kind.block_rows())

    def state_rows(self) -> tuple[Rows, ...]:
        """Return the rows that it keeps once per request (its state), over all its kinds."""
        return tuple(rows for kind in self.kinds for rows in kind.state_rows())

    def rows(self) -> tuple[Rows, ...]:
        """Return all rows that it keeps: those in blocks, then those in the state."""
        return (*self.block_rows(), *self.state_rows())


@dataclass(frozen=True)
class Group:
    """The layers with one growth law. One block id addresses the rows of all of them.

    The states are a group too, with the law ``STATE``: the state of one request is one block.

    Args:
        growth: the law.
        layers: those that have it.
    """

    growth: Growth
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        """``full``, ``window(1024)``, ``chunk(8192)`` or ``state``."""
        return self.growth.name

    def block_layout(
        self, block_size: int = 1, kernel_page: int | None = None, order: str = "block", multiple: int = ALIGN
    ) -> RowLayout:
        """Return the record of one block: the layers one after another, repeated for each kernel page of the block. A
        group of states ignores both sizes: its record is the state of one request, 0 bytes if no layer has a state.

        Args:
            block_size: tokens of the block.
            kernel_page: tokens of one kernel page (None: the block is one page).
            order: see ``RowLayout.of``.
            multiple: see ``RowLayout.of``.
        """
        if self.growth.is_state:
            states = (pages_of(layer.index, layer.state_rows(), lambda rows: rows.count) for layer in self.layers)
            return RowLayout.of(chain.from_iterable(states), 1, order, multiple)
        tokens = kernel_page or block_size
        pages = (
            pages_of(one.index, one.block_rows(), lambda rows: tokens // rows.tokens_per_row) for one in self.layers
        )
        return RowLayout.of(chain.from_iterable(pages), block_size // tokens, order, multiple)
