"""Writes to arrays that kernels read, collected on the host, so that all of them travel in one copy.

staged | words of each run, one run after another | unused | run 0 | run 1 | ..       see ``kernels.spread``
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_COLUMNS, _RUN_NBYTES = 4, 32


class _Runs(NamedTuple):
    """Runs of words of one array: int64 ``[m]`` each; ``words``: of all of them, in any number of arrays."""

    target: Any
    starts: Array
    counts: Array
    words: list[Array]


class Writes:
    """What is to be written to contiguous int32 and int64 arrays on a device, of which an int64 element is two words.

    The arrays that are written from their beginning are the same ones in most steps, so that their runs are kept.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._whole: list[Any] = []  # the arrays that are written from their beginning
        self._places: list[int] = []  # their addresses and how many words, in turn
        self._words, self._end = np.empty(1 << 12, np.int32), 0
        self._runs: list[_Runs] = []
        self._num_words = self._num_runs = 0  # of ``_runs``
        self._last: list[int] = []  # ``_places`` of ``_head``
        self._head = np.empty((0, _COLUMNS), np.int64)

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def clear(self) -> None:
        """Forget all writes."""
        self._names, self._whole, self._places, self._end, self._runs = set(), [], [], 0, []
        self._num_words = self._num_runs = 0

    def put(self, name: str, target: Any, words: Array) -> None:
        """Write ``words`` ``[n]``, integers that fit int32, to the beginning of ``target``. They are copied here."""
        self._names.add(name)  # first: after an interrupt it is seen that something may be here
        count, begin = len(words), self._end
        end = begin + count
        if end > len(self._words):
            self._words = np.concatenate((self._words, np.empty(end, np.int32)))
        self._words[begin:end] = words
        self._end = end
        self._whole.append(target)
        self._places += target.data_ptr(), count

    def put_runs(self, name: str, target: Any, starts: Array, counts: Array, words: list[Array]) -> None:
        """Write ``counts[i]`` of ``words``, which are those of all runs one after another, to ``target`` from its word
        ``starts[i]`` on, counted row by row: int64 ``[m]`` each. No word of ``target`` is in two runs. The arrays must not
        be changed before they are packed."""
        self._names.add(name)
        self._num_words += sum(map(len, words))
        self._num_runs += len(counts)
        self._runs.append(_Runs(target, starts, counts, words))

    @property
    def targets(self) -> list[Any]:
        """The arrays that are written."""
        return [*self._whole, *[runs.target for runs in self._runs]]

    @property
    def nbytes(self) -> int:
        """How many bytes ``pack`` needs."""
        return (self._end + self._num_words + 1) // 2 * 8 + _RUN_NBYTES * (len(self._whole) + self._num_runs)

    def pack(self, staged: Array) -> Array:
        """Fill ``staged``, int64 ``[nbytes / 8 or more]``. Return the runs, int64 ``[m, 4]``, a view of its end."""
        if self._places != self._last:
            addresses, counts = np.array(self._places, np.int64).reshape(-1, 2).T
            columns = addresses, np.zeros_like(counts), np.cumsum(counts) - counts, counts
            self._head, self._last = np.stack(columns, axis=1), self._places
        words, end, row = staged.view(np.int32), self._end, len(self._head)
        words[:end] = self._words[:end]
        many = row + self._num_runs
        found: Array = staged[len(staged) - _COLUMNS * many :].reshape(many, _COLUMNS)
        found[:row] = self._head
        for target, starts, counts, parts in self._runs:
            columns = found[row : row + len(counts)].T
            columns[0], columns[1], columns[3] = target.data_ptr(), starts, counts
            columns[2] = counts.cumsum()
            columns[2] += end - counts
            row += len(counts)
            for part in parts:
                words[end : end + len(part)] = part
                end += len(part)
        return found
