"""Draw the path of a request through the library, from a run: which file calls which, in order.

    python tools/request_path.py          prints the drawing in CONTRIBUTING.md; a test compares the two

A small cache without memory serves one request. Part of its prompt is cached, and blocks must be evicted for it. Every
call from one file of the library into another is a line, indented below its caller. What these calls do inside is not
drawn, so that it can change. Repeated calls at the same depth are left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvpagoda
from kvpagoda import KVCache, Schema
from kvpagoda.schema import Attention, Growth, Layer

SRC = Path(kvpagoda.__file__).parent
QUIET = {"guarded", "change", "__init__", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>"}
"""Functions that are not drawn, because they say nothing about the path."""
DEEPEST = 2
"""Calls below this depth are not drawn."""
FULL, WINDOW = Attention(1, 1, 1, "float16"), Attention(1, 1, 1, "float16", Growth(window=8))


def drawing() -> str:
    """Return the calls that ``open``, ``extend``, ``commit`` and ``close`` make, as indented lines."""
    schema = Schema((Layer(0, "full", (FULL,)), Layer(1, "window", (WINDOW,))), "drawing")
    cache = KVCache(schema, num_blocks=6, block_size=4, max_requests=2, device="none")
    for first in (0, 100):
        with cache.open(range(first, first + 9), capacity=8) as sequence:
            sequence.commit(range(first, first + 8))
    lines: list[str] = []
    sequence = _draw("cache.open(tokens)", lambda: cache.open(range(12), capacity=0), lines)
    _draw("sequence.extend(4)", lambda: sequence.extend(4), lines)
    length = sequence.length
    _draw("sequence.commit(tokens)", lambda: sequence.commit(range(length, length + 4)), lines)
    _draw("sequence.close()", sequence.close, lines)
    return "\n".join(lines)


def _draw(title: str, call: Any, lines: list[str]) -> Any:
    """Run ``call`` and return its result. Add ``title`` to ``lines``, and a line for each call into another file."""
    lines += ["", title] if lines else [title]
    stack: list[tuple[CodeType, int]] = []  # active functions of the library, and the depth of each in the drawing
    seen: set[tuple[str, str, int]] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(SRC)):
            return
        if event == "return" and stack and stack[-1][0] is code:
            stack.pop()
        elif event == "call":
            depth = stack[-1][1] if stack else 0
            is_new_file = not stack or stack[-1][0].co_filename != code.co_filename
            name = code.co_name
            if is_new_file and name not in QUIET and not _is_property(frame):
                depth += 1
                where = str(Path(code.co_filename).relative_to(SRC))
                if depth <= DEEPEST and (where, name, depth) not in seen:
                    seen.add((where, name, depth))
                    lines.append("    " * depth + f"{where}: {name}")
            stack.append((code, depth))

    sys.setprofile(watch)
    try:
        return call()
    finally:
        sys.setprofile(None)


def _is_property(frame: FrameType) -> bool:
    """Whether ``frame`` runs a property of its ``self``."""
    owner = frame.f_locals.get("self")
    return isinstance(getattr(type(owner), frame.f_code.co_name, None), property)


if __name__ == "__main__":
    print(drawing())
