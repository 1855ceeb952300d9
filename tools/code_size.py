"""Count the lines of code in each room, without blanks, comments and docstrings, and list what exceeds the limits.

    python tools/code_size.py [--json]

A room is a folder or module directly below ``src/kvpagoda``. The core is all rooms but those in ``OUTSIDE``. The limits
of a file, a class and a function count physical lines, comments and docstrings too. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src" / "kvpagoda"
OUTSIDE = frozenset({"compat", "adapters", "events", "layouts", "replay", "hf", "cli", "doctor", "metrics"})
"""Rooms that do not belong to the core."""
LIMITS = {"file": 400, "class": 300, "function": 60}
"""Kind of definition -> the most physical lines of one."""
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class TooLong(NamedTuple):
    """A file, class or function that exceeds its limit: its physical ``lines``, its ``kind`` (a key of ``LIMITS``), and
    ``where`` it is: "path", or "path:line name"."""

    lines: int
    kind: str
    where: str


def room(path: Path, source: Path = SOURCE) -> str:
    """Return the room of ``path``: the folder or module directly below ``source``; "kvpagoda" for ``__init__.py``."""
    first = path.relative_to(source).parts[0]
    return "kvpagoda" if first == "__init__.py" else first.removesuffix(".py")


def count_code(text: str) -> int:
    """Return how many lines of the Python source ``text`` hold code. A string statement is not code: a docstring, or
    the description of an attribute."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for statement in node.body if isinstance(node, (ast.Module, *_DEFINITIONS)) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def too_long(path: Path, source: Path = SOURCE) -> Iterator[TooLong]:
    """Yield what exceeds a limit in the file ``path``: the file itself, its classes and functions, nested ones too."""
    text, name = path.read_text(), path.relative_to(source).as_posix()
    lines = len(text.splitlines())
    if lines > LIMITS["file"]:
        yield TooLong(lines, "file", name)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DEFINITIONS):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            if lines > LIMITS[kind]:
                yield TooLong(lines, kind, f"{name}:{first} {node.name}")


class CodeSize(NamedTuple):
    """Code lines of each room (largest first), of the core and of all rooms; ``over``: all that exceeds a limit."""

    rooms: dict[str, int]
    core: int
    all: int
    over: list[TooLong]


def measure(source: Path = SOURCE) -> CodeSize:
    """Count all Python files below ``source``."""
    rooms: Counter[str] = Counter()
    over: list[TooLong] = []
    for path in sorted(source.rglob("*.py")):
        rooms[room(path, source)] += count_code(path.read_text())
        over += too_long(path, source)
    core = sum(lines for name, lines in rooms.items() if name not in OUTSIDE)
    return CodeSize(dict(rooms.most_common()), core, rooms.total(), sorted(over, reverse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the code lines of each room and what exceeds the limits.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    size = measure()
    if parser.parse_args().json:
        print(json.dumps({**size._asdict(), "over": [found._asdict() for found in size.over], "limits": LIMITS}))
        return
    for name, lines in size.rooms.items():
        print(f"{lines:6,}  {name}{'   (not core)' if name in OUTSIDE else ''}")
    print(f"{size.core:6,}  core\n{size.all:6,}  all")
    for found in size.over:
        print(f"{found.lines:6,}  lines of a {found.kind}, at most {LIMITS[found.kind]}: {found.where}")


if __name__ == "__main__":
    main()
