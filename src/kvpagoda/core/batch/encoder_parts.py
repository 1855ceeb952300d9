"""The rows of an encoder's input and those of the decoder's text, apart: for models with cross-attention.

    text of a request     | positions of the encoder's input | to a whole block | tokens of the decoder |
    cross-attention       | reads                            |                  |                       |
    self-attention                                                              | reads                 |

Both are K and V of the same layers, in the same blocks of one group. So rows of the encoder's input are written once, in a
step of their own before the first token, and every later step reads them; they are found, forked, evicted, stored and freed as
the rows of any text. Their tokens have no meaning: ``KVCache.open(media={0: digest})`` names the input, and all that follows
is found with an equal one only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpagoda.core.batch.step_buffers import Cells, StepArray, cells_between
from kvpagoda.core.memory.writes import Array


class PartArrays(NamedTuple):
    """The index arrays of one part of each row of a step of ``B`` rows, in the words of ``GroupArrays``, as if the part were
    the whole text: tables begin with its first block, and lengths count its tokens. int32, valid as long as the batch is."""

    block_table: StepArray
    """``[B, columns]``: kernel pages; 0 after a row's end."""
    cache_seqlens: StepArray
    """``[B]``: tokens of the part, the new ones included; 0 for padded rows."""
    kv_indptr: StepArray
    """``[B + 1]``: where each row's part of ``kv_indices`` starts."""
    kv_indices: StepArray
    """``[kv_indptr[-1]]``: the kernel pages of all rows, one row after another."""
    kv_last_page_len: StepArray
    """``[B]``: tokens in the last page of each row; 0 for padded rows."""


class EncoderParts(NamedTuple):
    """The two parts of the rows of a step: see ``Batch.encoder_parts``."""

    cross: PartArrays
    """The encoder's input, which cross-attention reads whole, without a mask."""
    own: PartArrays
    """The decoder's tokens, which self-attention reads with its causal mask."""
    positions: StepArray
    """int32 ``[T]``: the position of each new token among the decoder's."""


def part_of(
    cells: Cells, slots: Array, first: Array, lengths: Array, page_size: int, num_columns: int | None
) -> tuple[Array, ...]:
    """Return the arrays of ``PartArrays``, int64, for the parts of ``lengths[i]`` tokens that begin in column ``first[i]`` of
    row ``slots[i]`` of the table ``cells``; int64 ``[B]`` each. ``num_columns``: of the block table; None: as many as the
    longest part needs."""
    counts = -(-lengths // page_size)
    rows, columns = cells_between(first, first + counts)
    pages, most = cells[slots[rows], columns], int(counts.max()) if num_columns is None else num_columns
    table = np.zeros((len(slots), most), np.int32)
    table[rows, columns - first[rows]] = pages
    last = lengths - np.maximum(counts - 1, 0) * page_size
    return table, lengths, np.append(0, np.cumsum(counts)), pages, last
