"""``fill_rows`` writes what a loop over the rows writes, in one operation however many they are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvpagoda.core.kernels.fill_rows import as_words, fill_rows, fill_words


def noise(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("is_byte", [True, False])
@pytest.mark.parametrize("start,width,stride", [(0, 8, 8), (8, 24, 40), (1, 5, 7), (2, 6, 10), (4, 12, 16), (0, 0, 4)])
def test_rows_have_the_bytes_that_a_loop_writes(start, width, stride, is_byte):
    memory, index = noise(start + 6 * stride), torch.tensor([4, 0, 5])
    for record in (0, 1, 127, 200, 255) if is_byte else (noise(width), torch.zeros(width, dtype=torch.uint8)):
        expected, by_numpy, by_torch = (memory.clone() for _ in range(3))
        tables = [one[start:].as_strided((6, width), (stride, 1)) for one in (expected, by_numpy, by_torch)]
        for row in index.tolist():
            tables[0][row] = record
        fill_rows(tables[1], index, record)
        words, values = as_words(tables[2], record)
        fill_words(words, index, values)
        assert torch.equal(by_numpy, expected) and torch.equal(by_torch, expected)
        fill_rows(tables[1], index[:0], record)
        assert torch.equal(by_numpy, expected)


class Writes(TorchDispatchMode):
    """Lists the operations of torch that write to their argument."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 500])
def test_a_device_is_asked_once_for_any_number_of_rows(rows):
    """A table on "meta" takes the way of a GPU."""
    table, index = torch.empty(500, 64, dtype=torch.uint8, device="meta"), torch.arange(rows, device="meta")
    with Writes() as writes:
        fill_rows(table, index, 255)
        fill_rows(table, index, torch.empty(64, dtype=torch.uint8, device="meta"))
    assert writes.names == ["aten::index_fill_", "aten::index_copy_"]
