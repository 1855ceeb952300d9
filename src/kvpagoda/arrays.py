"""The arrays that everything here is made of: ids of blocks, and token ids in the form that the prefix tree takes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpagoda.errors import BadInput

__all__ = ["NO_TOKEN", "AnyIds", "Ids", "Int64s", "TokenIds", "Tokens", "are_media", "as_tokens", "grown"]

Ids = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
AnyIds = npt.NDArray[np.integer[Any]]
Tokens = Ids
"""Token ids inside the library: a contiguous int32 vector."""
Scalar = TypeVar("Scalar", bound="np.generic[Any]")
TokenIds = Collection[int | np.integer[Any]]
"""Token ids, or other whole numbers, as callers give them: a list, a tuple, a range, an array or a tensor on the host."""
NO_TOKEN = -(2**31)
"""Padding after the last token of a text that ends inside a block. No token and no media id has this value."""
MOST_TOKENS = 2**31
"""Positions are int32: no text has as many tokens."""
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


def are_media(keys: Ids) -> npt.NDArray[np.bool_]:
    """Return which keys are media ids: bool ``[n]``.

    Args:
        keys: int32 ``[n]``, a text as the tree compares it.
    """
    media: npt.NDArray[np.bool_] = (keys < 0) & (keys != NO_TOKEN)
    return media


def as_tokens(token_ids: TokenIds, vocab_size: int | None = None) -> Ids:
    """Return token ids as a contiguous int32 vector, without a copy if it is one already. O(n).

    Args:
        token_ids: a vector of fewer than 2^31 integers.
        vocab_size: each id is below it; None: below 2^31.

    Raises:
        BadInput: it is something else, or an id is outside of the vocabulary.
    """
    try:
        if len(token_ids) >= MOST_TOKENS:  # before they are copied: a range is short whatever its length
            raise OverflowError(f"{len(token_ids):,} are too many")
        array = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        text = f"token ids must be a vector of integers on the host: {error}"
        raise BadInput(text, needed=type(error).__name__) from None
    if array.dtype == _INT32 and array.ndim == 1 and array.flags.c_contiguous:
        unsigned = array.view(_UINT32)  # one pass checks both bounds: negative values are large as uint32
        if not len(array) or unsigned.item(unsigned.argmax()) < (vocab_size or 2**31):
            return array
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        text = f"token ids must be a vector of integers, got {array.dtype} of shape {list(array.shape)}"
        raise BadInput(text, needed=array.dtype, available=list(array.shape))
    if array.size:
        low, high = int(array.min()), int(array.max())
        top = (vocab_size or 2**31) - 1
        if low < 0 or high > top:
            text = f"token id {low if low < 0 else high} is outside the vocabulary 0..{top}"
            raise BadInput(text, needed=low if low < 0 else high, available=top)
    return np.ascontiguousarray(array, np.int32)


def grown(array: npt.NDArray[Scalar], length: int) -> npt.NDArray[Scalar]:
    """Return ``array``, or a larger copy, whose last axis is at least twice as long; the new elements are zero.

    Args:
        array: ``[.., n]``.
        length: elements that the last axis must have.
    """
    if array.shape[-1] >= length:
        return array
    larger = np.zeros((*array.shape[:-1], max(length, 2 * array.shape[-1], 64)), array.dtype)
    larger[..., : array.shape[-1]] = array
    return larger
