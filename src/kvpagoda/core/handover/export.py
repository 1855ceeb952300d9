"""What a sender copies of one request to exported memory: all at once, or each layer as soon as it is computed."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kvpagoda.core.blocks.group import BlockPlaces
from kvpagoda.core.cache.core import Core
from kvpagoda.core.cache.request import RequestState
from kvpagoda.handover.checksums import algorithm, checksums_of
from kvpagoda.handover.content import GroupPlace
from kvpagoda.handover.lease import Section, checksums_in, lease_layout, seal_in, seal_of
from kvpagoda.pages import Bytes
from kvpagoda.units import ceil_div

_SCRATCH = 8 << 20
"""Bytes of whole records through which the parts of layers are copied."""


class Extent:
    """Which records of ``request`` are handed over at ``length`` tokens: what the next token reads, less the first ``after``
    blocks of texts; of states the newest; of an optional group what is there, up to the first that it lacks.

    For each group: ``firsts``, the first column (block of the text; 0 of states); ``counts``, how many."""

    def __init__(self, core: Core, request: RequestState, length: int, after: int) -> None:
        self._core, self._request, self.length = core, request, length
        self.firsts, self.counts = list[int](), list[int]()
        for group in core.groups:
            if group.growth.is_at_rest:  # of copies, requests hold none
                continue
            if group.growth.is_state:
                self.firsts.append(0)
                self.counts.append(1)
                continue
            first = after if group.growth.span is None else group.growth.first_needed(length) // group.block_size
            end = ceil_div(length, group.block_size)
            if group.growth.is_optional and length == request.own_length and request.lacking_from is not None:
                end = min(end, request.lacking_from // group.block_size)
            self.firsts.append(first)
            self.counts.append(max(0, end - first))

    def places(self, index: int, begin: int, end: int) -> BlockPlaces:
        """Return where records ``begin .. end - 1`` of group ``index`` are in the cache."""
        group, slot = self._core.groups[index], self._request.slot
        first = self.length % group.places if group.growth.is_state else self.firsts[index]
        assert first + begin >= group.first[slot], "a request has what its next token reads"
        return group.places_between(slot, first + begin, first + end)

    def records(self, index: int, begin: int, end: int) -> tuple[int, int]:
        """Return which records of group ``index`` are not whole at ``begin`` tokens, but are at ``end``."""
        group, count, first = self._core.groups[index], self.counts[index], self.firsts[index]
        if group.growth.is_state:
            return (0, count) if begin < end == self.length else (0, 0)
        last = count if end == self.length else min(count, end // group.block_size - first)
        return max(0, begin // group.block_size - first), max(0, last)

    def end_of(self, index: int, upto: int) -> int:
        """Return how many of the first ``upto`` tokens have rows in group ``index``: fewer where it is optional and lacks
        them."""
        lacking = self._request.lacking_from
        return upto if lacking is None or not self._core.groups[index].growth.is_optional else min(upto, lacking)


class Export:
    """The bytes of one lease in ``memory``, which ``layout`` names, while a sender writes them.

    ``header``: with which the lease begins from now on. ``key``: what its seal is signed with."""

    def __init__(
        self, core: Core, extent: Extent, layout: Many[Section], memory: Bytes, header: bytes, key: bytes
    ) -> None:
        self._core, self._extent, self._layout, self._memory, self._key = core, extent, layout, memory, key
        self._checksums = checksums_in(memory, sum(one.num_records for one in layout))
        self._copied = dict.fromkeys(range(len(layout)), 0)  # section -> tokens
        self._done: dict[int, int] = {}  # layer -> tokens
        self._header = header
        seal_in(memory)[:] = 0
        self._checksums[:] = 0
        memory[: len(self._header)] = np.frombuffer(self._header, np.uint8)

    @property
    def is_sealed(self) -> bool:
        """Whether all of it is written."""
        return bool(seal_in(self._memory).any())

    def layer_done(self, layer: int | None, upto: int, committed: int) -> None:
        """Copy what ``layer``, or every layer (None), has of the first ``upto`` tokens, and was not copied yet.

        What was copied of tokens behind the first ``committed`` is copied again: it may have been computed again."""
        if layer is not None:
            self._done[layer] = upto
        for number, section in enumerate(self._layout):
            if layer is not None and layer not in section.layers:
                continue
            end = upto if layer is None else min(self._done.get(one, 0) for one in section.layers)
            end = self._extent.end_of(section.group, end)
            self._copied[number] = min(self._copied[number], committed)
            if end > self._copied[number]:
                self._copy(section, *self._extent.records(section.group, self._copied[number], end))
                self._copied[number] = end

    def states_changed(self) -> None:
        """Copy states again with the next ``layer_done``."""
        for number, section in enumerate(self._layout):
            if self._core.groups[section.group].growth.is_state:
                self._copied[number] = 0

    def seal(self) -> None:
        """Prove that all of it is written: from now on a receiver takes it."""
        seal = seal_of(self._header, self._checksums, self._key)
        seal_in(self._memory)[:] = np.frombuffer(seal, np.uint8)

    def _copy(self, section: Section, begin: int, end: int) -> None:
        """Copy records ``begin .. end - 1`` of ``section``, and then their checksums."""
        if begin >= end:
            return
        table, memory, index = section.table(self._memory), self._core.memory, section.group
        nbytes = memory.record_nbytes(index)
        step = max(1, _SCRATCH // nbytes) if section.layers else end - begin
        scratch = np.zeros((min(step, end - begin) if section.layers else 0, nbytes), np.uint8)
        for first in range(begin, end, step):
            count = min(step, end - first)
            places, part = self._extent.places(index, first, first + count), table[first : first + count]
            if not section.layers:
                memory.to_host(index, places, part, range(count))
            for layer in section.layers:
                memory.to_host(index, places, scratch[:count], range(count), layer)
            memory.wait_for_copies()
            if section.layers:
                inside = section.inside(scratch[:count])
                part.reshape(inside.shape)[...] = inside
            self._checksums[section.first + first : section.first + first + count] = checksums_of([part], algorithm())


def export_of(
    core: Core, extent: Extent, groups: Many[GroupPlace], memory: Bytes, offset: int, header: bytes, key: bytes, *,
    by_layer: bool,
) -> Export:  # fmt: skip
    """Begin the lease with ``header`` at byte ``offset`` of ``memory``, with the records of ``extent``."""
    layout, nbytes = lease_layout(groups, extent.counts, by_layer=by_layer)
    return Export(core, extent, layout, memory[offset : offset + nbytes], header, key)
