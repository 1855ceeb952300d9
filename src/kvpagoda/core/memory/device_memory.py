"""The memory of one cache on one device: an arena for each group, and all copies to, from and within them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch

from kvpagoda.abc import Backing
from kvpagoda.arrays import Ids
from kvpagoda.core.kernels.fill_rows import fill_rows
from kvpagoda.core.kernels.flatten_table import flatten_table
from kvpagoda.core.memory.arena import Arena, Tensor
from kvpagoda.core.memory.backing import backing_of, checked
from kvpagoda.core.memory.host_copy import CudaStreams, HostCopies, LayerwiseCopy
from kvpagoda.core.memory.no_memory import HostArrays, NoMemory, Part, host_pages
from kvpagoda.core.memory.page_locks import PageLocks, machine_nbytes
from kvpagoda.core.memory.pool import Pool
from kvpagoda.core.memory.staging import Staging
from kvpagoda.core.memory.writes import Array, Writes
from kvpagoda.errors import OutOfBlocks
from kvpagoda.id_tensors import Device, default_device
from kvpagoda.pages import PAGE, Bytes
from kvpagoda.schema import Layer, Plan
from kvpagoda.schema.at_rest import layer_at_rest

POISON = 0xFF
"""NaN in all float formats, -1 in the integers."""


class DeviceArrays(HostArrays):
    """``HostArrays`` whose twins are tensors on ``device``; on the CPU twins share the memory of the host's arrays."""

    device: torch.device

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_host = device, device.type == "cpu"
        self.staging = Staging(device)

    def twin(self, host: Array) -> Any:
        """Return a tensor with the contents of ``host``."""
        tensor = torch.from_numpy(host)
        return tensor if self.is_host else tensor.to(self.device, copy=True)

    def on_host(self, host: Array) -> Any:
        return torch.from_numpy(host)

    def zeros(self, shape: tuple[int, ...], dtype: type) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, np.dtype(dtype).name), device=self.device)

    def send(self, writes: Writes) -> None:
        self.staging.send(writes)

    def flatten(self, table: Any, starts: Any, indptr: Any, block_size: int, out: Any) -> None:
        flatten_table(table, starts, indptr, out, block_size)

    def warm_up(self, block_size: int) -> None:
        """Compile the kernels that steps with blocks of ``block_size`` launch, by calls with nothing to do."""
        if not self.is_host:
            writes = Writes()
            writes.put("", torch.zeros(2, dtype=torch.int32, device=self.device), np.zeros(1, np.int32))
            self.send(writes)
            ends = torch.zeros(2, dtype=torch.int32, device=self.device)
            for columns in (32, 33):  # Triton tells apart the strides that 16 divides
                table = torch.zeros(1, columns, dtype=torch.int32, device=self.device)
                flatten_table(table, ends[:1], ends, ends, block_size)


class CudaPages:
    """The ``LockRuntime`` of CUDA on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._device):  # a thread begins on device 0
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


def page_locks(device: torch.device, most: int | None = None) -> PageLocks | None:
    """Return what page-locks host memory for a device; None on a CPU.

    Args:
        device: that copies it.
        most: the most bytes; None: half of what the machine has.
    """
    if device.type != "cuda":
        return None
    return PageLocks(CudaPages(device), machine_nbytes() // 2 if most is None else most)


class DeviceMemory(NoMemory):
    """Arenas for the groups of ``plan``, allocated by the constructor.

    Groups that share one memory are in one buffer, in sectors, block-major. ``poison``: fill blocks that no owner holds
    with NaN. ``page_locked``: the most bytes of host memory that a cache on a GPU page-locks (None: half of what the machine
    has). ``backing``: provides the memory (default: ``OwnMemory``).
    """

    has_memory = True
    arrays: DeviceArrays

    def __init__(
        self,
        plan: Plan,
        device: Device = None,
        *,
        poison: bool = False,
        page_locked: int | None = None,
        backing: Backing | None = None,
    ) -> None:
        self.device = default_device(device, ("none",))
        self.arrays: DeviceArrays = DeviceArrays(self.device)
        self._backing = backing_of(backing, self.device)
        shared = self._allocate(plan.num_sectors * plan.sector_nbytes) if plan.num_sectors else None
        self.arenas = [
            Arena(
                group.layout, group.num_rows, device=self.device, order=plan.order,
                within=None if shared is None else (shared, group.row_nbytes), allocate=self._allocate,
            )
            for group in plan.groups
        ]  # fmt: skip
        for arena in self.arenas:
            arena.staging = self.arrays.staging
        self._buffers = [arena.buffer for arena in self.arenas] if shared is None else [shared]
        self._plan = plan
        self._of_states: list[dict[int, Pool]] | None = None
        self._growths = [group.growth for group in plan.groups]
        self._sector_nbytes, self.is_poisoning = plan.sector_nbytes, poison
        self._to_poison: list[tuple[int, Ids]] = []
        self._copies: list[LayerwiseCopy] = []
        is_cuda = self.device.type == "cuda"
        self.locks = page_locks(self.device, page_locked)
        self.locks_pages = is_cuda
        self.host = HostCopies(
            self.device, self.locks, CudaStreams(self.device) if is_cuda else None, self.arrays.staging
        )
        self._pools: dict[int, tuple[Pool | None, Pool | None]] = {}
        self.page_offset = max((buffer.data_ptr() % PAGE for buffer in self._buffers), default=0)
        self._poisons = poison
        self._poison_all()

    def _allocate(self, nbytes: int) -> Tensor:
        return checked(self._backing.allocate(nbytes), nbytes, self.device)

    def _poison_all(self) -> None:
        for buffer in self._buffers if self._poisons else ():
            buffer.fill_(POISON)

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas: ``plan.nbytes``."""
        return sum(buffer.numel() for buffer in self._buffers)

    def pools(self, layer: Layer) -> tuple[Pool | None, Pool | None]:
        """Return the pools of the blocks and of the states of ``layer``, None for what the layer does not keep.

        Pending copies from the host to this layer are complete, for the current stream, when this returns.
        """
        for copy in self._copies:
            copy.wait(layer.index)
        if self._copies:
            self._copies = [copy for copy in self._copies if not copy.is_done]
            self.is_copying = bool(self._copies)
        if layer.index not in self._pools:
            blocks = states = None
            for growth, arena in zip(self._growths, self.arenas):
                if growth.is_state and not growth.is_at_rest and layer.state_rows():
                    states = Pool(arena, layer.index, layer.state_rows())
                elif growth == layer.growth:
                    blocks = Pool(arena, layer.index, layer.block_rows())
            self._pools[layer.index] = blocks, states
        return self._pools[layer.index]

    def warm_up(self) -> None:
        """As ``NoMemory`` says: each kernel once for all that Triton tells apart, with nothing to do. On a CPU no kernels."""
        self.arrays.warm_up(self._plan.kernel_page)
        for arena in self.arenas:
            arena.warm_up()
            self.host.warm_up(arena)
        pools = [pool for layer in self._plan.layers for pool in self.pools(layer) if pool is not None]
        if self._plan.checkpoint_format is not None:
            pools += [pool for of_group in self._state_pools() for pool in of_group.values()]
        for pool in pools:
            pool.warm_up()

    def copy(self, group: int, sources: Ids, targets: Ids, rows: int | None = None) -> None:
        if self.is_copying:
            self.finish_copies(group)
        try:
            self.arenas[group].copy(sources, targets)
        except torch.cuda.OutOfMemoryError as error:
            text = f"the device cannot allocate memory to copy {len(sources)} blocks"
            raise OutOfBlocks.with_hint(text, "leave it more than the budget", needed=len(sources)) from error

    def convert(self, group: int, sources: Ids, other: int, targets: Ids) -> None:
        if group == other:
            self.copy(group, sources, targets)
            return
        found, written = self.arrays.staging.to_device(np.stack((sources, targets)), np.int64)
        for pools in self._state_pools():
            source, target = pools[group], pools[other]
            for name in source.rows:
                target.write(name, (written,), source.read(name, (found,)))

    def round(self, group: int, ids: Ids, other: int) -> None:
        index = self.arrays.staging.to_device(ids, np.int64)
        for pools in self._state_pools():
            for name in pools[group].rows:
                values = pools[group].read(name, (index,))
                pools[group].write(name, (index,), pools[other].stored(name, values))

    def _state_pools(self) -> list[dict[int, Pool]]:
        """Return, for each layer with a state, the pools of its states: index of the group -> pool."""
        if self._of_states is None:
            number, rest = (
                next(i for i, growth in enumerate(self._growths) if growth.is_state and growth.is_at_rest is at_rest)
                for at_rest in (False, True)
            )
            format = self._plan.checkpoint_format
            assert format is not None
            self._of_states = [
                {
                    number: Pool(self.arenas[number], layer.index, layer.state_rows()),
                    rest: Pool(self.arenas[rest], layer.index, layer_at_rest(layer, format)),
                }
                for layer in self._plan.layers
                if layer.state_rows()
            ]
        return self._of_states

    def reset(self, group: int, ids: Ids) -> None:
        self.arenas[group].reset(ids)

    def clear_sectors(self, sectors: Ids) -> None:
        """Fill ``sectors`` with zeros, or with NaN if ``poison``: data of another group could read as NaN."""
        if len(sectors):
            table = self._buffers[0].view(-1, self._sector_nbytes)
            index = self.arrays.staging.to_device(sectors, np.int64)
            fill_rows(table, index, POISON if self.is_poisoning else 0)

    def freed(self, group: int, ids: Ids) -> None:
        if self.is_poisoning and len(ids):
            self._to_poison.append((group, ids))

    def poison_freed(self) -> None:
        while self._to_poison:
            group, _ = self._to_poison[-1]
            self.arenas[group].poison(np.concatenate([ids for one, ids in self._to_poison if one == group]))
            self._to_poison = [(one, ids) for one, ids in self._to_poison if one != group]

    def give_back(self) -> int:
        self.is_poisoning = False
        self._to_poison.clear()
        return self._backing.give_back()

    def get_again(self) -> None:
        self._backing.get_again()
        self._poison_all()
        self.is_poisoning = self._poisons

    def record_nbytes(self, group: int) -> int:
        return self.arenas[group].layout.nbytes

    @property
    def page_locked_nbytes(self) -> int:
        return 0 if self.locks is None else self.locks.nbytes

    def host_memory(self, nbytes: int) -> Bytes:
        """As ``NoMemory`` says; if the cache is on a GPU it is page-locked as it is used, as far as ``page_locked`` goes."""
        memory = host_pages(nbytes, large=self.locks is not None)
        self.page_lock(memory)
        return memory

    def page_lock(self, memory: Bytes) -> None:
        if self.locks is not None:
            self.locks.watch(memory)

    def to_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int], layer: int | None = None) -> None:
        if self.is_copying:
            self.finish_copies(group)
        self.host.out(self.arenas[group], ids, table, rows, layer)

    def from_host(self, group: int, ids: Ids, table: Bytes, rows: Many[int]) -> None:
        self.host.into(self.arenas[group], ids, table, rows)

    def when_copied(self, call: Callable[[], None]) -> None:
        self.host.then(call)

    def wait_for_copies(self) -> None:
        self.host.wait()

    def close(self) -> None:
        self.host.close()
        if self.locks is not None:
            self.locks.close()

    def run_of(self, group: int, ids: Ids) -> Bytes | None:
        """As ``NoMemory`` says: of block-major arenas on a CPU, without padding between their rows."""
        arena, nbytes = self.arenas[group], self.record_nbytes(group)
        is_dense = arena.order != "layer" and arena.row_nbytes == nbytes and bool((np.diff(ids) == 1).all())
        if arena.device.type != "cpu" or not is_dense:
            return None
        records: Bytes = arena.buffer.numpy()[int(ids[0]) * nbytes : (int(ids[-1]) + 1) * nbytes]
        return records.reshape(len(ids), nbytes)

    def from_host_later(self, group: int, parts: Many[Part], done: Callable[[], None]) -> None:
        self._copies.append(LayerwiseCopy(self.arenas[group], parts, done, self.host))
        self.is_copying = True

    def finish_copies(self, group: int | None = None) -> None:
        for copy in [*self._copies]:
            if group is None or copy.arena is self.arenas[group]:
                copy.finish()
                self._copies.remove(copy)
        self.is_copying = bool(self._copies)

    def forget_copies(self) -> None:
        copies, self._copies, self._to_poison = self._copies, [], []
        self.is_copying = False
        for copy in copies:
            copy.cancel()
