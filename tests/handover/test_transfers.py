"""What transfers promise: bytes are moved as they are, and a fault of any kind is an OSError."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kvpagoda import MissingExtra, TicketRefused
from kvpagoda.handover import MooncakeEngine, NixlAgent, SharedMemory
from raises import raises

MAKERS: dict[str, Callable[..., Any]] = {"mooncake": MooncakeEngine, "nixl": NixlAgent}
SIZE = 1 << 20
NO_NUMBERS = (2**64, 10**30, -1, float("nan"), float("inf"), True, "1", None, [])
HOSTILE = (*NO_NUMBERS, 1.0)
"""What no whole number of a ticket or an address may be."""


@pytest.fixture(params=["shared", "mooncake", "nixl"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Any]]:
    """Makes transfers of one kind, and closes them at the end."""
    name, made = str(request.param), list[Any]()
    if name != "shared" and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")

    def making(nbytes: int) -> Any:
        made.append(MAKERS.get(name, SharedMemory)(nbytes))
        return made[-1]

    yield making
    for one in made:
        one.close()
        one.close()


def test_bytes_are_read_and_written(make: Callable[[int], Any]) -> None:
    one, other = make(SIZE), make(0)
    one.memory[:] = np.random.default_rng(0).integers(0, 256, SIZE)
    for first, nbytes in ((0, SIZE), (12_345, 1), (64, 300_001)):
        into = other.landing(nbytes)
        other.read(one.address(), first, into)
        assert np.array_equal(into, one.memory[first : first + nbytes])
    data = other.landing(16)
    data[:] = range(16)
    before = one.memory.copy()
    other.write(one.address(), 1000, data)
    before[1000:1016] = range(16)
    assert np.array_equal(one.memory, before)


def test_what_is_no_address_is_refused_and_what_lies_outside_is_an_os_error(make: Callable[[int], Any]) -> None:
    one, other = make(SIZE), make(0)
    right, data = one.address(), other.landing(100)
    numbers = [name for name, value in right.items() if isinstance(value, int)]
    texts = [name for name, value in right.items() if isinstance(value, str)]
    wrong = [{}, {"kind": right["kind"]}, {**right, "kind": "another"}]
    wrong += [{**right, name: value} for name in numbers for value in HOSTILE]
    wrong += [{**right, name: value} for name in texts for value in (5, None, True, [])]
    for address in wrong:
        for call in (other.read, other.write):
            with pytest.raises(TicketRefused):
                call(address, 0, data)
    for first in (-1, SIZE - 99, 2 * SIZE):
        for call in (other.read, other.write):
            with pytest.raises(OSError, match="bytes"):
                call(right, first, data)


def test_shared_memory_that_is_forgotten_is_closed() -> None:
    one = SharedMemory(SIZE)
    path = f"/proc/self/fd/{one.address()['file']}"
    memory = one.memory
    assert os.readlink(path).startswith("/memfd:kvpagoda-handover")
    del one
    gc.collect()
    assert not (os.path.lexists(path) and os.readlink(path).startswith("/memfd:kvpagoda-handover"))
    memory[:] = 1  # what refers to it keeps it


def test_the_memory_of_a_process_that_ended_is_not_read_any_more() -> None:
    """Nor what is still mapped here: nobody would complete it, or free it."""
    program = (
        "import json, sys; from kvpagoda.handover import SharedMemory; one = SharedMemory(4096); one.memory[:] = 7; "
        "print(json.dumps(one.address()), flush=True); sys.stdin.read()"
    )
    pipe: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program], **pipe) as process:
        assert process.stdout is not None and process.stdin is not None
        address, other = json.loads(process.stdout.readline()), SharedMemory()
        data = other.landing(4096)
        other.read(address, 0, data)
        assert (data == 7).all()
        process.kill()
    with pytest.raises(OSError):
        other.read(address, 0, data)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_transfer_says_which_extra_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, f"{name}.engine", f"{name}._api"):
        monkeypatch.setitem(sys.modules, module, None)
    with raises(MissingExtra, name=name):
        MAKERS[name](SIZE)
