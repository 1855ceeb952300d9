"""Write runs of words, which came to a device in one copy, to the places in other arrays where they belong.

staged | runs: array, first word there, first word here, words | addresses of the arrays | words .. |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvpagoda.kernels.dispatch import backend, jit, tl, triton

Tensor = torch.Tensor
WORDS = 1024
"""Number of words that one program copies."""


def spread(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """Copy each of ``runs`` from ``staged`` to one of ``targets``, in place.

    ``staged``   int32 ``[n]``, n even: the bytes of ``runs``, the address of each target as int64, and the words of the runs
    ``runs``     int64 ``[m, 4]`` on the host: the number of a target, the first word in it, the first word in
                 ``staged``, and how many words. No word of a target is in two runs
    ``targets``  contiguous int32 or int64 tensors; an int64 element is two words

    All tensors are on one device. There is no synchronisation with the host and no allocation. Nothing is checked.
    O(words), and a program for each run and each ``WORDS`` of the longest.

    >>> staged, target = torch.arange(16, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    >>> spread(staged, np.array([[0, 1, 12, 2]]), [target])
    >>> target.tolist()
    [0, 12, 13, 0]
    """
    if len(runs):
        run = _triton if backend(staged.device.type) == "triton" else _reference
        run(staged, runs, targets)


def _reference(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """The definition of ``spread``: a copy for each run, on any device."""
    flat = [target.view(-1).view(torch.int32) for target in targets]
    for target, word, source, count in runs.tolist():
        flat[target][word : word + count] = staged[source : source + count]


def _triton(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """Launch the kernel, which reads the runs and the addresses from ``staged``."""
    grid = len(runs), max(1, triton.cdiv(int(runs[:, 3].max()), WORDS))
    with torch.cuda.device_of(staged):  # type: ignore[no-untyped-call]
        spread_kernel[grid](staged.view(torch.int64), staged, 4 * len(runs), WORDS=WORDS, num_warps=4)


@jit(do_not_specialize=["addresses"])
def spread_kernel(head, staged, addresses, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy up to ``WORDS`` words of one run per program. ``head``: ``staged`` as int64."""
    run = head + tl.program_id(0) * 4
    target = tl.load(head + addresses + tl.load(run)).to(tl.pointer_type(tl.int32)) + tl.load(run + 1)
    source = staged + tl.load(run + 2)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    here = words < tl.load(run + 3)
    tl.store(target + words, tl.load(source + words, mask=here), mask=here)
