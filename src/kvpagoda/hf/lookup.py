"""Prompt lookup: what a text may go on with, read from the text itself."""

from __future__ import annotations

import numpy as np

from kvpagoda.cache.request import Tokens

LENGTHS = (3, 2)
"""How many of the last tokens are looked for, in this order."""


def propose(text: Tokens, most: int) -> Tokens:
    """``most`` tokens that may follow ``text``: those that followed its last three tokens (else its last two) where these
    stood before, the latest such place; none if there is none. Where the text has begun to repeat itself, the repetition
    goes on. O(len(text)), a few numpy compares."""
    for n in LENGTHS:
        if len(text) <= n or most < 1:
            continue
        found = text[n - 1 : -1] == text[-1]
        for back in range(1, n):
            found &= text[n - 1 - back : -1 - back] == text[-1 - back]
        ends = np.flatnonzero(found)
        if len(ends):
            return np.resize(text[ends[-1] + n :], most)
    return text[:0]
