"""Memory that the CUDA driver maps, with a driver that records its calls and fails at each in turn; and for real."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from enum import IntEnum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvpagoda import KVCache, Schema
from kvpagoda.core.memory import virtual
from kvpagoda.core.memory.virtual import VirtualMemory
from kvpagoda.errors import BadInput, Exhausted, MissingExtra
from kvpagoda.schema import Attention, Layer
from raises import raises

GRAIN = 1 << 16
ONE = Schema((Layer(0, "full", (Attention(1, 4, 4, "float32"),)),), "one")


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_UNKNOWN = 999


class Driver:
    """The calls of a driver over host memory. ``fail(n)``: the n-th call from then on fails, as ``how`` says: a result, or an
    exception that is raised before anything is done. Wrong uses are assertions."""

    CUresult = Result
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccessDesc = SimpleNamespace

    def __init__(self) -> None:
        self.reserved: dict[int, np.ndarray[Any, Any]] = {}
        self.handles: dict[int, int] = {}  # handle -> size
        self.mapped: dict[int, int] = {}  # address -> handle
        self.allowed: set[int] = set()
        self.calls: list[str] = []
        self.left, self.how = 0, Result.CUDA_ERROR_UNKNOWN
        self._number = 0

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    def fail(self, n: int, how: Any = Result.CUDA_ERROR_UNKNOWN) -> None:
        self.left, self.how, self.calls = n, how, []

    def _fails(self, name: str) -> Any:
        self.calls.append(name)
        self.left -= 1
        if self.left:
            return None
        if isinstance(self.how, Result):
            return (self.how, 0) if name in ("cuMemCreate", "cuMemAddressReserve") else (self.how,)
        raise self.how

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def call(*given: Any) -> Any:
            return self._fails(name) or (Result.CUDA_SUCCESS, *found(*given))

        return call

    def cuInit(self, flags: int) -> tuple[()]:
        return ()

    def cuMemGetAllocationGranularity(self, kind: Any, flag: int) -> tuple[int]:
        assert kind.type == 1 and kind.location.type == 1 and kind.location.id == 0
        return (GRAIN,)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[int]:
        assert size % GRAIN == 0 and size
        memory = np.full(size, 0x55, np.uint8)
        self.reserved[memory.ctypes.data] = memory
        return (memory.ctypes.data,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[()]:
        assert address not in self.mapped and len(self.reserved.pop(address)) == size
        return ()

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[int]:
        self._number += 1
        self.handles[self._number] = size
        return (self._number,)

    def cuMemRelease(self, handle: int) -> tuple[()]:
        assert handle not in self.mapped.values()
        del self.handles[handle]
        return ()

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[()]:
        assert address not in self.mapped and size == self.handles[handle] == len(self.reserved[address]) and not offset
        self.mapped[address] = handle
        self.reserved[address][:] = 0x77  # what another process left there
        return ()

    def cuMemUnmap(self, address: int, size: int) -> tuple[()]:
        assert len(self.reserved[address]) == size
        del self.mapped[address]
        self.allowed.discard(address)
        return ()

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> tuple[()]:
        assert address in self.mapped and count == len(access) == 1 and access[0].flags == 3
        self.allowed.add(address)
        return ()

    def is_idle(self) -> bool:
        return not (self.reserved or self.handles or self.mapped)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()

    def tensor(one: Any, device: Any) -> Any:
        (address, is_read_only), (size,) = one.__cuda_array_interface__["data"], one.__cuda_array_interface__["shape"]
        assert address in made.allowed and not is_read_only and len(made.reserved[address]) == size
        found = torch.from_numpy(made.reserved[address])
        KEPT.append((found, one))  # as a tensor over an array of CUDA keeps it
        return found

    monkeypatch.setattr(virtual, "_tensor", tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.calls.append(f"wait for {device}"))
    yield made
    KEPT.clear()
    gc.collect()  # what an error's frames keep, too, while there is a device to wait for


KEPT: list[Any] = []


def test_a_cache_sleeps_and_wakes_at_the_same_addresses(driver: Driver) -> None:
    memory = VirtualMemory("cuda:0", driver=driver)
    cache = KVCache(ONE, num_blocks=33, block_size=4, max_requests=4, device="cpu", memory=memory, poison=True)
    tokens = list(range(40))
    with cache.open(tokens, capacity=0) as sequence:
        sequence.extend(40)
        view = cache.batch([sequence], [40]).layer(0)
        view["k"][view.block_table[0].long()] = 3.0
        sequence.commit(tokens)
    address, size = cache.layer(0)["k"].data_ptr(), sum(driver.handles.values())
    assert size % GRAIN == 0 and cache.plan.nbytes <= size < cache.plan.nbytes + GRAIN * len(driver.reserved)
    driver.fail(0)
    slept = cache.sleep("tree")
    assert slept.given_back == size and not driver.handles and not driver.mapped and driver.reserved
    assert driver.calls[0] == "wait for cuda:0"
    driver.fail(1, Result.CUDA_ERROR_OUT_OF_MEMORY)
    with raises(Exhausted, needed=65536):
        cache.wake()
    assert cache.stats().is_asleep
    cache.wake()
    assert cache.layer(0)["k"].data_ptr() == address
    with cache.open([*tokens, 7], capacity=0) as sequence:
        assert sequence.cached_tokens == 40
        sequence.extend(1)
        table = cache.batch([sequence], [1]).layer(0).block_table[0, :10].long()
        assert (cache.layer(0)["k"][table] == 3.0).all()
    cache.check()


WAYS = [Result.CUDA_ERROR_OUT_OF_MEMORY, Result.CUDA_ERROR_UNKNOWN, KeyboardInterrupt()]


@pytest.mark.parametrize("how", WAYS, ids=["no memory", "unknown", "interrupt"])
def test_an_allocation_that_fails_keeps_nothing(driver: Driver, how: Any) -> None:
    memory = VirtualMemory("cuda:0", driver=driver)
    for n in range(1, 5):
        driver.fail(n, how)
        with pytest.raises(KeyboardInterrupt if isinstance(how, KeyboardInterrupt) else Exhausted):
            memory.allocate(3 * GRAIN + 5)
        assert driver.is_idle(), driver.calls
    driver.fail(5, how)
    found = memory.allocate(3 * GRAIN + 5)
    assert found.shape == (3 * GRAIN + 5,) and not found.any() and sum(driver.handles.values()) == 4 * GRAIN
    assert driver.calls == ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]


@pytest.mark.parametrize("how", WAYS, ids=["no memory", "unknown", "interrupt"])
def test_what_fails_may_be_repeated(driver: Driver, how: Any) -> None:
    """Three ranges: each call of ``give_back`` and ``get_again`` fails once, and the next ones do the rest."""
    error = KeyboardInterrupt if isinstance(how, KeyboardInterrupt) else Exhausted
    memory = VirtualMemory("cuda:0", driver=driver)
    buffers = [memory.allocate(GRAIN + i) for i in range(3)]
    for n in range(1, 7):
        driver.fail(n, how)
        with pytest.raises(error):
            memory.give_back()
        driver.fail(0)
        assert memory.give_back() > 0 or n == 7
        assert not driver.handles and not driver.mapped and memory.give_back() == 0
        memory.get_again()
    for n in range(1, 10):
        memory.give_back()
        driver.fail(n, how)
        with pytest.raises(error):
            memory.get_again()
        driver.fail(0)
        assert len(driver.handles) == len(driver.mapped) == len(driver.allowed) == (n - 1) // 3  # whole ranges
        for buffer in buffers:
            buffer.fill_(9)  # garbage in what stayed mapped
        memory.get_again()
        assert len(driver.handles) == len(driver.mapped) == len(driver.allowed) == 3
        assert not any(buffer.any() for buffer in buffers)
    for n in range(1, 7):  # woken after half a sleep
        driver.fail(n, how)
        with pytest.raises(error):
            memory.give_back()
        driver.fail(0)
        memory.get_again()
        assert len(driver.handles) == len(driver.mapped) == len(driver.allowed) == 3


def test_it_is_freed_with_the_last_tensor(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    memory = VirtualMemory("cuda:0", driver=driver)
    memory.allocate(5)
    memory.allocate(GRAIN)
    del memory
    gc.collect()
    assert len(driver.reserved) == 2  # tensors keep it
    KEPT.pop()
    gc.collect()
    assert len(driver.reserved) == len(driver.handles) == 1
    driver.fail(1)
    KEPT.clear()
    gc.collect()
    assert "64.0 KiB of memory are lost: cuMemUnmap" in caplog.text


def test_devices_that_have_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(BadInput, needed="cuda", available="cpu"):
        VirtualMemory("cpu", driver=driver)
    for n in (1, 2):
        driver.fail(n)
        with raises(BadInput, needed="cuda:0"):
            VirtualMemory("cuda:0", driver=driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with raises(MissingExtra, name="cuda.bindings"):
        VirtualMemory("cuda:0")


def test_the_package_is_imported_late() -> None:
    program = "import sys, kvpagoda.core.memory.virtual; print('cuda.bindings' in sys.modules, 'cuda' in sys.modules)"
    found = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120).stdout
        for text in (program, program.replace("kvpagoda.core.memory.virtual", "torch"))
    ]
    assert found[0] == found[1]


def bindings() -> Any:
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        pytest.skip("needs cuda-bindings: pip install 'kvpagoda[cuda]'")
    from cuda.bindings import driver

    return driver


def test_the_structures_are_those_of_the_package(driver: Driver) -> None:
    """The calls above with the classes and constants of cuda-bindings."""
    real = bindings()

    class Real(Driver):
        CUmemAllocationType, CUmemLocationType = real.CUmemAllocationType, real.CUmemLocationType
        CUmemAccess_flags, CUmemAllocationProp = real.CUmemAccess_flags, real.CUmemAllocationProp
        CUmemAllocationGranularity_flags = real.CUmemAllocationGranularity_flags
        CUmemAccessDesc = real.CUmemAccessDesc

    with_structures = Real()
    memory = VirtualMemory("cuda:0", driver=with_structures)
    access = memory._access()
    assert access.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and access.location.id == 0
    for name in {
        *driver.calls,
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
    }:
        assert callable(getattr(real, name))


@pytest.mark.gpu
def test_for_real() -> None:
    bindings()
    memory = VirtualMemory("cuda")
    schema = Schema.from_hf_config(
        dict(model_type="llama", num_hidden_layers=4, hidden_size=512, num_attention_heads=4, num_key_value_heads=2)
    )
    cache = KVCache(schema, "256MiB", device="cuda", max_requests=4, memory=memory)
    tokens = list(range(400))
    with cache.open(tokens, capacity=0) as sequence:
        sequence.extend(400)
        view = cache.batch([sequence], [400]).layer(0)
        rows = torch.full((400, 2, 128), 3.0, dtype=torch.bfloat16, device="cuda")
        view.write(k=rows, v=rows)
        sequence.commit(tokens)
    address = cache.layer(0)["k"].data_ptr()
    free = torch.cuda.mem_get_info()[0]
    slept = cache.sleep("tree")
    assert slept.given_back >= cache.plan.nbytes and torch.cuda.mem_get_info()[0] - free >= 0.95 * cache.plan.nbytes
    cache.wake()
    assert cache.layer(0)["k"].data_ptr() == address
    with cache.open([*tokens, 7], capacity=0) as sequence:
        assert sequence.cached_tokens == 400
        sequence.extend(1)
        table = cache.batch([sequence], [1]).layer(0).block_table[0, :25].long()
        assert (cache.layer(0)["k"][table] == 3.0).all()
    cache.check()
