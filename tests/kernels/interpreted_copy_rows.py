"""Run with TRITON_INTERPRET=1 in a process of its own (``test_triton.py`` does): the kernel on CPU tensors."""

import importlib

import pytest
import torch
from test_copy_rows import pairs_of, table
from triton.runtime import interpreter

from kvpagoda.core.kernels.copy_rows import Regions, copy_regions, copy_regions_kernel, copy_rows, copy_tables
from kvpagoda.core.kernels.dispatch import VARIABLE

# The interpreter makes numbers of arrays of one element, for ``range``.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    assert isinstance(copy_regions_kernel, interpreter.InterpretedFunction)
    monkeypatch.setenv(VARIABLE, "triton")


@pytest.mark.parametrize("nbytes", [1, 7, 64, 584, 2050, 40000])
@pytest.mark.parametrize(("source_padding", "target_padding"), [(0, 0), (8, 0), (0, 24), (3, 5)])
@pytest.mark.parametrize("kind", ["scattered", "runs", "repeated_source", "none"])
def test_rows_arrive_and_nothing_else_changes(nbytes, source_padding, target_padding, kind):
    src, _ = table(40, nbytes, source_padding)
    dst, whole = table(40, nbytes, target_padding, seed=1)
    pairs, expected = pairs_of(kind, 40)[:6], whole.clone()
    for s, d in pairs.tolist():
        expected[d, :nbytes] = src[s]
    copy_rows(src, dst, pairs)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("programs", [0, 1, 3])
def test_many_tables_in_one_launch(programs, monkeypatch):
    """Tables of any widths and strides, by as many programs as one likes."""
    launches = []
    module = importlib.import_module("kvpagoda.core.kernels.copy_rows")
    monkeypatch.setattr(module, "copy_regions", lambda *given: launches.append(copy_regions(*given)))
    pairs = pairs_of("runs", 40)
    made = [(table(40, n, 8, seed=n), table(40, n, 40, seed=n + 1)) for n in (16, 600, 33000)]
    expected = [whole.clone() for _, (_, whole) in made]
    for ((src, _), _), whole in zip(made, expected):
        for s, d in pairs.tolist():
            whole[d, : src.shape[1]] = src[s]
    copy_tables([(src, dst) for (src, _), (dst, _) in made], pairs, programs)
    assert len(launches) == 1 and all(torch.equal(whole, one) for (_, (_, whole)), one in zip(made, expected))


def test_regions_name_lists_of_pairs_and_skip_what_is_minus_one():
    src, dst = table(8, 64)[0], torch.zeros(8, 64, dtype=torch.uint8)
    rows = torch.tensor([[0, 0, 64, 64, 32, 0], [32, 0, 64, 64, 32, 1]])
    rows[:, 0] += src.data_ptr()
    rows[:, 1] += dst.data_ptr()
    pairs = torch.tensor([[[1, 0], [2, 1]], [[3, 4], [-1, -1]]])
    copy_regions(*Regions.of(rows.numpy(), pairs.numpy(), torch.from_numpy))
    expected = torch.zeros_like(dst)
    expected[0, :32], expected[1, :32], expected[4, :32] = src[1, :32], src[2, :32], src[3, 32:]
    assert torch.equal(dst, expected)
