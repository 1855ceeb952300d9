import subprocess
import sys

from kvpagoda.core.kernels import dispatch
from kvpagoda.errors import BadInput
from raises import raises


def test_table_and_variable(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.backend("cpu") == dispatch.backend("mps") == "reference"
    assert dispatch.backend("cuda") == ("triton" if dispatch.triton is not None else "reference")
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.backend("cuda") == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "cython")
    with raises(BadInput, field="KVPAGODA_KERNELS", needed="cython"):
        dispatch.backend("cpu")


def test_numba_is_for_operations_that_have_it_and_for_the_cpu(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "HAS_NUMBA", True)
    assert dispatch.backend("cpu", has_numba=True) == "numba"
    assert dispatch.backend("cpu") == dispatch.backend("mps", has_numba=True) == "reference"
    monkeypatch.setenv(dispatch.VARIABLE, "numba")
    assert dispatch.backend("cpu") == dispatch.backend("cuda", has_numba=True) == "reference"
    monkeypatch.setattr(dispatch, "HAS_NUMBA", False)
    with raises(BadInput, needed="numba"):
        dispatch.backend("cpu", has_numba=True)


def test_forcing_triton(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    monkeypatch.setattr(dispatch, "triton", object())
    assert dispatch.backend("cpu") == "triton"
    monkeypatch.setattr(dispatch, "triton", None)
    with raises(BadInput, needed="triton"):
        dispatch.backend("cuda")


def test_everything_works_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from kvpagoda.core.kernels import append_swa
from kvpagoda.core.kernels.dispatch import backend
assert backend("cuda") == "reference"
pools = (
    torch.zeros(2, 4, 8, dtype=torch.uint8), torch.zeros(2, 4, 2, dtype=torch.bfloat16),
    torch.zeros(2, 4), torch.full((2, 4), -1, dtype=torch.int32),
)
row = torch.ones(1, 10, dtype=torch.bfloat16)
append_swa(row, torch.tensor([0], dtype=torch.int32), torch.tensor([6], dtype=torch.int32), *pools)
assert pools[3].tolist() == [[-1, -1, 6, -1], [-1] * 4]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
