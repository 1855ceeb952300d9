"""Prompt lookup: proposes the next tokens of a text from the text itself."""

from __future__ import annotations

import numpy as np

from kvpagoda.cache.request import Tokens

LENGTHS = (3, 2)
"""The numbers of last tokens to search for, in this order."""


def propose(text: Tokens, most: int) -> Tokens:
    """Propose ``most`` tokens to follow ``text``: it searches for the latest earlier occurrence of the last three
    tokens (else of the last two), and returns the tokens that followed it. Returns no tokens if there is no occurrence.
    Where fewer than ``most`` tokens follow, they are repeated. O(len(text)), a few numpy compares."""
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
