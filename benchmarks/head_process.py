"""The process of one source tree, which runs measurements for ``benchmarks.heads``.

``python -m benchmarks.head_process``, with the tree first in ``PYTHONPATH``, reads JSON lines:

    {"case": name, "quick": bool}   fork a child that prepares the measurement and answers {"ready": name}; the child
                                    then reads the following lines
    {"count": bool}                 run one slice; the answer is {"slice": its number in the pass, "found": its CPU
                                    seconds or, if "count", the number of calls of Python and C functions}
    {"end": true}                   end the child; no answer
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.head_cases import cases, clock, trace_of
from benchmarks.workload import workload


def _asked() -> Iterator[dict[str, Any]]:
    """Yield the requests on standard input. Never read beyond the current line: a forked child reads the next ones."""
    line = b""
    while byte := os.read(0, 1):
        if byte != b"\n":
            line += byte
            continue
        yield json.loads(line)
        line = b""


def _answer(**figures: Any) -> None:
    os.write(1, json.dumps(figures).encode() + b"\n")


def _measure(case: str, quick: bool) -> None:
    """In a child: prepare ``case``, run one pass and slice 0 of the next pass, then one slice for each request."""
    slices = cases(quick)[case]()
    next(slices)
    while next(slices):
        pass
    gc.collect()
    gc.freeze()
    _answer(ready=case)
    for asked in _asked():
        if "end" in asked:
            return
        clock.is_counting = asked["count"]
        _answer(slice=next(slices), found=clock.found)


def main() -> None:
    torch.set_num_threads(1)
    for asked in _asked():
        if asked["case"].startswith("replay"):
            # cached before the fork, so that no child has to read the trace
            workload(*trace_of(asked["case"], asked["quick"]))
        if (child := os.fork()) == 0:
            status = 1
            try:
                _measure(asked["case"], asked["quick"])
                status = 0
            except BaseException as error:
                _answer(error=f"{type(error).__name__}: {error}")
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
