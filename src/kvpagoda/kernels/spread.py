"""Write runs of words, which came to a device in one copy, to the places in other arrays where they belong.

staged | words of each run, one run after another | padding | run 0 | run 1 | ..
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

    ``staged``   int32 ``[n]``, n even: the words of the runs, and at the end the bytes of ``runs``
    ``runs``     int64 ``[m, 4]`` on the host: the address that the run is written to, its first word in ``staged``, how
                 many words it has, and the number of the target. No word of a target is in two runs
    ``targets``  contiguous int32 or int64 tensors; an int64 element is two words

    All tensors are on one device. There is no synchronisation with the host and no allocation. Nothing is checked.
    O(words), and a program for each run and each ``WORDS`` of the longest.

    >>> target = torch.zeros(4, dtype=torch.int32)
    >>> runs = np.array([[target.data_ptr() + 4, 0, 2, 0]])
    >>> spread(torch.tensor([5, 6, *runs.view(np.int32)[0]], dtype=torch.int32), runs, [target])
    >>> target.tolist()
    [0, 5, 6, 0]
    """
    if len(runs):
        run = _triton if backend(staged.device.type) == "triton" else _reference
        run(staged, runs, targets)


def _reference(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """The definition of ``spread``: a copy for each run, on any device."""
    flat = [target.view(-1).view(torch.int32) for target in targets]
    for address, source, count, number in runs.tolist():
        word = (address - flat[number].data_ptr()) // 4
        flat[number][word : word + count] = staged[source : source + count]


def _triton(staged: Tensor, runs: NDArray[np.int64], targets: Sequence[Tensor]) -> None:
    """Launch the kernel, which reads the runs from ``staged``."""
    grid = len(runs), max(1, triton.cdiv(int(runs[:, 2].max()), WORDS))
    with torch.cuda.device_of(staged):  # type: ignore[no-untyped-call]
        spread_kernel[grid](
            staged.view(torch.int64), staged, len(staged) // 2 - 4 * len(runs), WORDS=WORDS, num_warps=4
        )


@jit(do_not_specialize=["begin"])
def spread_kernel(runs, staged, begin, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy up to ``WORDS`` words of one run per program. ``runs``: ``staged`` as int64, where runs lie from ``begin`` on."""
    run = runs + begin + tl.program_id(0) * 4
    target, source = tl.load(run).to(tl.pointer_type(tl.int32)), staged + tl.load(run + 1)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    here = words < tl.load(run + 2)
    tl.store(target + words, tl.load(source + words, mask=here), mask=here)
