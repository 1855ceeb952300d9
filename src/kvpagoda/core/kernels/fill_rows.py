"""Write the same bytes to many rows of a table, in one operation whatever their number."""

from __future__ import annotations

import torch

from kvpagoda.core.kernels.copy_rows import as_ints

Tensor = torch.Tensor


def fill_rows(table: Tensor, index: Tensor, record: Tensor | int) -> None:
    """Write ``record`` to the rows ``index`` of ``table``: uint8 ``[nbytes]``, or one byte for all of them.

    ``table`` uint8 ``[n, nbytes]``: rows may be strided, the bytes of a row are contiguous. ``index`` int64 on the same
    device, not checked. On a GPU this is one kernel. On a CPU numpy writes the rows one after the other: torch would start
    its threads for each of them.

    >>> table = torch.zeros(3, 2, dtype=torch.uint8)
    >>> fill_rows(table, torch.tensor([2, 0]), 255)
    >>> table.tolist()
    [[255, 255], [0, 0], [255, 255]]
    """
    words, values = as_words(table, record)
    if table.device.type == "cpu":
        words.numpy()[index.numpy()] = values if isinstance(values, int) else values.numpy()
    else:
        fill_words(words, index, values)


def as_words(table: Tensor, record: Tensor | int) -> tuple[Tensor, Tensor | int]:
    """Return ``table`` and ``record`` in the widest words that fit both."""
    if not isinstance(record, int):
        words, values = as_ints(table, record[None])
        return words, values[0]
    (words,) = as_ints(table)
    word = bytes([record]) * words.element_size()
    return words, int.from_bytes(word, "little", signed=words.dtype != torch.uint8)


def fill_words(words: Tensor, index: Tensor, values: Tensor | int) -> None:
    """Write ``values``, ``[k]`` or one number, to the rows ``index`` of ``words`` ``[n, k]``, in one operation of torch."""
    if isinstance(values, int):
        words.index_fill_(0, index, values)
    else:
        words.index_copy_(0, index, values.expand(len(index), -1))
