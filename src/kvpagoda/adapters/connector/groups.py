"""The groups of layers of an engine, which of their blocks a request needs to go on, and how records divide a text.

tokens        0          G          2G         3G         4G      G: tokens of a record
full          | record 0 | record 1 | record 2 | record 3 |       all blocks; to resume at 4G all four are needed
window < G    |       == |       == |       == |       == |       the last blocks; only record 3 is needed
window > G    | ======== | ======== | ======== | ======== |       all blocks; the last records are needed
state         |        = |        = |        = |        = |       the last block; only record 3 is needed
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

from kvpagoda.errors import SchemaError
from kvpagoda.units import ceil_div

_SERVED = {"FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"}
_REFUSED = {"RSWASpec", "CircularBufferSpec", "SinkFullAttentionSpec"}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table: block ``i`` holds tokens ``i * block_size ..`` of a text.

    ``window``: the last tokens that are read, ``chunk``: tokens are read from the last multiple of it; None: all are.
    ``is_state``: a block holds the state after its last token. ``is_handed``: the engine says which blocks hold states
    to keep; its block table does not. ``nbytes``: of a block, all layers together.
    """

    index: int
    block_size: int
    nbytes: int
    layers: tuple[str, ...]
    window: int | None = None
    chunk: int | None = None
    is_state: bool = False
    is_handed: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether a request needs all its blocks."""
        return self.window is None and self.chunk is None and not self.is_state

    def first_needed(self, end: int) -> int:
        """Return the first token that a request reads which goes on after ``end`` tokens; ``end`` if it reads none."""
        if self.is_state:
            return end - 1
        if self.window is not None:
            return min(end, max(0, end - self.window + 1))
        return 0 if self.chunk is None else end // self.chunk * self.chunk


@dataclass(frozen=True)
class RecordGrid:
    """How records divide a text: record ``k`` of a group is of tokens ``k * tokens .. (k + 1) * tokens - 1``."""

    groups: tuple[LayerGroup, ...]
    tokens: int

    def blocks(self, group: LayerGroup, number: int) -> range:
        """Return the numbers of the blocks in record ``number`` of ``group``: those that a request needs which goes on
        at its end, or later, from this record."""
        end = (number + 1) * self.tokens
        return range(max(number * self.tokens, group.first_needed(end)) // group.block_size, end // group.block_size)

    def needed(self, group: LayerGroup, end: int) -> range:
        """Return the numbers of the records of ``group`` that a request needs to go on after ``end`` records."""
        return range(min(end, group.first_needed(end * self.tokens) // self.tokens), end)

    def payload_nbytes(self) -> int:
        """Return the bytes of the largest record."""
        per_record = [self.tokens // group.block_size if not group.is_state else 1 for group in self.groups]
        return max(count * group.nbytes for count, group in zip(per_record, self.groups))


def groups_of(kv_cache_config: Any) -> tuple[LayerGroup, ...]:
    """Return the groups of vLLM's ``kv_cache_config``. Raises SchemaError for those that no other process could use."""
    served, cacheable = list[LayerGroup](), set(kv_cache_config.prefix_cacheable_group_ids)
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = [*getattr(group.kv_cache_spec, "kv_cache_specs", {}).values()] or [group.kv_cache_spec]
        names = {base.__name__ for spec in specs for base in type(spec).__mro__}
        if index not in cacheable or not names & _SERVED or names & _REFUSED:
            raise SchemaError(
                f"group {index} of this model ({type(specs[0]).__name__}, {len(group.layer_names)} layers) cannot be stored "
                f"for other requests; run this model without KvpagodaConnector",
                needed=type(specs[0]).__name__, available=index,
            )  # fmt: skip
        mode = getattr(specs[0], "mamba_cache_mode", "")
        if mode == "none":
            raise SchemaError(
                "the states of this model are not cached (mamba_cache_mode 'none'); start vLLM with "
                "--enable-prefix-caching, which sets 'align'",
                field="mamba_cache_mode", needed="align", available=mode,
            )  # fmt: skip
        nbytes = group.kv_cache_spec.page_size_bytes * (len(group.layer_names) if len(specs) == 1 else 1)
        window, chunk = (_most(specs, name) for name in ("sliding_window", "attention_chunk_size"))
        if all(hasattr(specs[0], name) for name in ("sliding_window", "attention_chunk_size")):
            window = chunk = None  # full attention, whatever part of it a layer reads
        elif window is not None:
            window += _most(specs, "extra_retained_tokens") or 0
        layers, size = tuple(group.layer_names), specs[0].block_size
        served.append(LayerGroup(index, size, nbytes, layers, window, chunk, bool(mode), mode == "align"))
    return tuple(served)


def _most(specs: list[Any], name: str) -> int | None:
    values = [value for spec in specs if (value := getattr(spec, name, None)) is not None]
    return max(values, default=None)


def grid_of(groups: tuple[LayerGroup, ...], record_nbytes: int) -> RecordGrid:
    """Return the grid of the shortest records of whole blocks of all ``groups`` whose largest has ``record_nbytes``."""
    column = lcm(*(group.block_size for group in groups))
    largest = RecordGrid(groups, column).payload_nbytes()
    return RecordGrid(groups, column * ceil_div(record_nbytes, largest))
