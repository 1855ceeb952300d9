"""Block tables by request slot where kernels can read them, and which layer reads which."""

from __future__ import annotations

from typing import Any

from kvpagoda.blocks.block_table import BlockTable
from kvpagoda.blocks.group import BlockGroup
from kvpagoda.errors import BadInput
from kvpagoda.memory.no_memory import HostArrays
from kvpagoda.schema import Layer, Schema


class DeviceTable:
    """``array``: the cells of ``table`` as int32 where kernels read them. On the CPU it is the same memory; on a GPU
    ``upload`` copies the rows that changed.

    The host's memory is not page-locked: a copy from such memory has read its source when it returns, so that the host
    may write on at once.
    """

    def __init__(self, table: BlockTable, arrays: HostArrays) -> None:
        self._table, self._arrays = table, arrays
        self.array = arrays.twin(table.cells)

    def upload(self) -> Any:
        """Bring ``array`` up to date and return it; nothing to copy on the CPU."""
        changed = self._table.changed
        while changed:
            slot = next(iter(changed))
            if not self._arrays.is_host:
                self._arrays.upload(self.array, self._table.cells[slot], slot)
            changed.discard(slot)
        return self.array


class DeviceTables:
    """The tables of all ``groups`` of ``schema``; each is made when it is first asked for."""

    def __init__(self, schema: Schema, groups: tuple[BlockGroup, ...], arrays: HostArrays) -> None:
        self._arrays = arrays
        self._tables: dict[int, DeviceTable] = {}
        of_law: dict[object, BlockGroup] = {group.growth: group for group in groups}
        owners = {index: schema.by_index[layer.owner] for index, layer in schema.by_index.items()}
        self._owners = {index: (layer, of_law.get(layer.growth)) for index, layer in owners.items()}

    def owner_of(self, index: int) -> tuple[Layer, BlockGroup | None]:
        """The layer whose rows layer ``index`` reads (its own, or another's that it shares), and the group of its blocks.
        Raises BadInput."""
        if index not in self._owners:
            raise BadInput(f"layer {index} is not in this schema; it has {sorted(self._owners)}")
        return self._owners[index]

    def upload(self, group: BlockGroup) -> Any:
        """The table of ``group`` on the device, up to date: int32 ``[slots + 1, columns]``."""
        if group.index not in self._tables:
            self._tables[group.index] = DeviceTable(group.table, self._arrays)
        return self._tables[group.index].upload()
