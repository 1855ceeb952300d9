"""Write runs of words, which came to a device in one copy, to the places in other arrays where they belong.

staged | words of each run, one run after another | padding | run 0 | run 1 | ..
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvpagoda.core.kernels.dispatch import backend, jit, tl

Tensor = torch.Tensor
WORDS = 1024
"""Number of words that a program copies at a time."""


def spread(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """Copy each of ``runs`` from ``staged`` to one of ``targets``, in place.

    ``staged``   int32 ``[n]``, n even: the words of the runs, and at the end the bytes of ``runs``
    ``runs``     int64 ``[m, 4]`` on the host: the address of a target, the first word in it, the first word in
                 ``staged``, and how many words. No word of a target is in two runs
    ``targets``  contiguous int32 or int64 tensors; an int64 element is two words

    All tensors are on one device. There is no synchronisation with the host and no allocation. Nothing is checked.
    O(words); one program for each run.

    >>> target = torch.zeros(4, dtype=torch.int32)
    >>> runs = np.array([[target.data_ptr(), 1, 0, 2]])
    >>> spread(torch.tensor([5, 6, *runs.view(np.int32)[0]], dtype=torch.int32), runs, [target])
    >>> target.tolist()
    [0, 5, 6, 0]
    """
    if len(runs):
        run = _triton if backend(staged.device.type) == "triton" else _reference
        run(staged, runs, targets)


def _reference(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """The definition of ``spread``: a copy for each run, on any device."""
    flat = {target.data_ptr(): target.view(-1).view(torch.int32) for target in targets}
    for address, word, source, count in runs.tolist():
        flat[address][word : word + count] = staged[source : source + count]


def _triton(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """Launch the kernel, which reads the runs from ``staged``."""
    with torch.cuda.device_of(staged):  # type: ignore[no-untyped-call]
        begin = len(staged) // 2 - 4 * len(runs)
        spread_kernel[(len(runs),)](staged.view(torch.int64), staged, begin, WORDS=WORDS, num_warps=4)


@jit(do_not_specialize=["begin"])
def spread_kernel(runs, staged, begin, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one run per program, ``WORDS`` at a time. ``runs``: ``staged`` as int64, where they lie from ``begin`` on."""
    run = runs + begin + tl.program_id(0) * 4
    target, source = tl.load(run).to(tl.pointer_type(tl.int32)) + tl.load(run + 1), staged + tl.load(run + 2)
    count = tl.load(run + 3)
    at = count * 0  # an int64, as it is when the loop goes on
    while at < count:
        words = at + tl.arange(0, WORDS)
        tl.store(target + words, tl.load(source + words, mask=words < count), mask=words < count)
        at += WORDS
