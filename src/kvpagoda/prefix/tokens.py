"""Token ids as the tree takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpagoda.blocks.ids import Ids
from kvpagoda.errors import BadInput

NO_TOKEN = -(2**31)
"""Stands behind the last token of a text that ends inside a block: no token, and no media id, is this."""
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


def are_media(keys: Ids) -> npt.NDArray[np.bool_]:
    """Which of ``keys``, a text as texts are compared, are media ids."""
    media: npt.NDArray[np.bool_] = (keys < 0) & (keys != NO_TOKEN)
    return media


def as_tokens(token_ids: Any, vocab_size: int | None = None) -> Ids:
    """``token_ids`` as a contiguous int32 vector: the array itself where it is one. Raises BadInput for anything but integers
    inside the vocabulary (None: 0 .. 2^31 - 1). O(n)."""
    try:
        array = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"token ids must be a vector of integers on the host: {error}") from None
    if array.dtype == _INT32 and array.ndim == 1 and array.flags.c_contiguous:
        unsigned = array.view(_UINT32)  # one pass: what is below 0 is large
        if not len(array) or unsigned.item(unsigned.argmax()) < (vocab_size or 2**31):
            return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise BadInput(f"token ids must be a vector of integers, got {array.dtype} of shape {list(array.shape)}")
    if array.size:
        low, high = int(array.min()), int(array.max())
        top = (vocab_size or 2**31) - 1
        if low < 0 or high > top:
            raise BadInput(f"token id {low if low < 0 else high} is outside the vocabulary 0..{top}")
    return np.ascontiguousarray(array, np.int32)
