"""Memory of a CUDA device whose physical part is given back while a cache sleeps, at addresses that stay reserved.

    allocate     reserve addresses ──► create, map, allow ──► zero
    give_back    wait for the device ──► unmap ──► release
    get_again    create, map, allow ──► wait, zero

These are calls of the CUDA driver, made through NVIDIA's cuda-bindings (``pip install 'kvpagoda[cuda]'``).
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import finalize

import torch

from kvpagoda.errors import BadInput, Exhausted, MissingExtra
from kvpagoda.units import align_up, format_bytes, whole_number

_log = logging.getLogger(__name__)


class VirtualMemory:
    """A ``Backing`` of one cache for ``KVCache(memory=VirtualMemory("cuda:0"))``.

    Sizes are rounded up to the device's granularity, 2 MiB as a rule. Addresses, and what is mapped there, are freed
    with this object and the last tensor over them.

    Args:
        device: CUDA's.
        driver: an object with the functions of the module ``cuda.bindings.driver``; None: that module.

    Raises:
        BadInput: the device is not CUDA's, or has no such memory.
        MissingExtra: cuda-bindings is not installed.
    """

    def __init__(self, device: torch.device | str = "cuda", *, driver: Any = None) -> None:
        asked = torch.device(device)
        if asked.type != "cuda":
            text = f"memory that the CUDA driver maps is on a cuda device, got {asked}"
            raise BadInput(text, needed="cuda", available=asked.type)
        self._driver, self._ranges = _driver() if driver is None else driver, list[_MappedRange]()
        try:
            _call(self._driver, "cuInit", 0)
            self._device = torch.device("cuda", torch.cuda.current_device()) if asked.index is None else asked
            flags = self._driver.CUmemAllocationGranularity_flags
            least = _call(
                self._driver, "cuMemGetAllocationGranularity", self._kind(), flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            )
        except (RuntimeError, AssertionError) as error:  # no driver, no device, a torch without CUDA
            raise BadInput(f"{asked} has no memory that can be mapped: {error}", needed=str(asked)) from error
        self._granularity = int(least)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See ``Backing``.

        Args:
            nbytes: bytes.

        Raises:
            Exhausted: the device has no such memory; nothing is kept.
        """
        size = align_up(max(1, whole_number(nbytes, "bytes to allocate")), self._granularity)
        address = _call(self._driver, "cuMemAddressReserve", size, 0, 0, 0)
        one = _MappedRange(self._driver, self._device, address, size)
        try:
            one.map(self._kind(), self._access())
            memory = _tensor(one, self._device)[:nbytes]
            memory.zero_()
        except BaseException:
            _free(one.state)
            raise
        finalize(one, _free_late, one.state).atexit = False  # at the end of the process the driver frees all
        self._ranges.append(one)
        return memory

    def give_back(self) -> int:
        """See ``Backing``. Waits for the device.

        Raises:
            Exhausted: the driver fails; called again, it does the rest.
        """
        torch.cuda.synchronize(self._device)
        return sum(_unmap(one.state) for one in self._ranges)

    def get_again(self) -> None:
        """See ``Backing``.

        Raises:
            Exhausted: the device lacks memory: what was mapped by then stays, and the next call or ``give_back`` goes
                on from there.
        """
        for one in self._ranges:
            if not one.state["ready"]:
                _unmap(one.state)
                one.map(self._kind(), self._access())
        for one in self._ranges:
            _tensor(one, self._device).zero_()
        torch.cuda.synchronize(self._device)

    def _kind(self) -> Any:
        """Return which memory is created: pinned, on the device."""
        kind = self._driver.CUmemAllocationProp()
        kind.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = self._device.index
        return kind

    def _access(self) -> Any:
        """Return who may use it: the device, to read and write."""
        access = self._driver.CUmemAccessDesc()
        access.location = self._kind().location
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


class _MappedRange:
    """``size`` bytes of reserved addresses from ``address`` on. ``state``: these, the handle of the physical memory (None:
    there is none), and whether it is ``mapped``, and ``ready`` to be used. It outlives the range, to be freed."""

    def __init__(self, driver: Any, device: torch.device, address: Any, size: int) -> None:
        self.state: dict[str, Any] = dict(
            driver=driver, device=device, address=address, size=size, handle=None, mapped=False, ready=False
        )
        self.__cuda_array_interface__ = dict(
            shape=(size,), typestr="|u1", data=(int(address), False), strides=None, version=3
        )

    def map(self, kind: Any, access: Any) -> None:
        """Provide physical memory. Raises Exhausted, giving back what was created."""
        state, driver = self.state, self.state["driver"]
        try:
            state["handle"] = _call(driver, "cuMemCreate", state["size"], kind, 0)
            _call(driver, "cuMemMap", state["address"], state["size"], 0, state["handle"], 0)
            state["mapped"] = True
            _call(driver, "cuMemSetAccess", state["address"], state["size"], [access], 1)
            state["ready"] = True
        except BaseException:
            _unmap(state)
            raise


def _tensor(one: _MappedRange, device: torch.device) -> torch.Tensor:
    """Return a tensor over ``one``, which it keeps: uint8 ``[size]``."""
    return torch.as_tensor(one, device=device)


def _unmap(state: dict[str, Any]) -> int:
    """Give the physical memory back; return how many bytes that are. Raises Exhausted; called again, it does the rest."""
    state["ready"] = False
    if state["mapped"]:
        _call(state["driver"], "cuMemUnmap", state["address"], state["size"])
        state["mapped"] = False
    if state["handle"] is None:
        return 0
    _call(state["driver"], "cuMemRelease", state["handle"])
    state["handle"] = None
    return int(state["size"])


def _free(state: dict[str, Any]) -> None:
    """Give back the memory and the addresses, for good. Raises Exhausted."""
    try:
        _unmap(state)
    finally:
        if not state["mapped"]:
            _call(state["driver"], "cuMemAddressFree", state["address"], state["size"])


def _free_late(state: dict[str, Any]) -> None:
    """Free a range that nobody names any more. Steps that read it may be in flight."""
    try:
        torch.cuda.synchronize(state["device"])
        _free(state)
    except RuntimeError as error:
        _log.warning("%s of memory are lost: %s", format_bytes(state["size"]), error)


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call function ``name`` of the driver; return what it gives beside its result. Raises Exhausted unless that is
    success."""
    result, *found = getattr(driver, name)(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        reason = getattr(result, "name", str(result))
        sizes = [one for one in arguments if type(one) is int and one > 1]
        size = f" of {format_bytes(sizes[0])}" if sizes else ""
        hint = (
            "free memory of the device, then try again" if "OUT_OF_MEMORY" in reason else "see the driver's documents"
        )
        raise Exhausted.with_hint(f"{name}{size} says {reason}", hint, needed=sizes[0] if sizes else None)
    return found[0] if found else None


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        text = f"memory that is mapped needs cuda-bindings ({error}): pip install 'kvpagoda[cuda]'"
        raise MissingExtra(text, name="cuda.bindings") from error
    return driver
