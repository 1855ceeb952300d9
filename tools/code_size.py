"""How much code there is: lines without blanks, comments and docstrings, for each room, and what is over the limits.

    python tools/code_size.py [--json]

The core is all of ``src/kvpagoda`` but the rooms in ``OUTSIDE``. The limits of a file, a class and a function count the
lines as they stand in the file, comments and docstrings too. Standard library only.
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
"""Rooms that are not the core."""
LIMITS = {"file": 400, "class": 300, "function": 60}
"""The most physical lines of each."""
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class TooLong(NamedTuple):
    """Something that is longer than its limit: ``kind`` is a key of ``LIMITS``."""

    lines: int
    kind: str
    where: str


def room(path: Path, source: Path = SOURCE) -> str:
    """The folder or module directly below ``source`` that holds ``path``; "kvpagoda" for the package's own file."""
    first = path.relative_to(source).parts[0]
    return "kvpagoda" if first == "__init__.py" else first.removesuffix(".py")


def count_code(text: str) -> int:
    """Lines of the Python source ``text`` that hold code. A string that stands alone, a docstring or what describes
    an attribute, is no code."""
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
    """What of the file ``path`` is over the limits: the file itself, its classes and functions, nested ones too."""
    text, name = path.read_text(), path.relative_to(source).as_posix()
    lines = len(text.splitlines())
    if lines > LIMITS["file"]:
        yield TooLong(lines, "file", name)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DEFINITIONS):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            if lines > LIMITS[kind]:
                yield TooLong(lines, kind, f"{name}:{first} {node.name}")


class CodeSize(NamedTuple):
    """Code lines of each room, of the core and of all, and what is over the limits, the longest first."""

    rooms: dict[str, int]
    core: int
    all: int
    over: list[TooLong]


def measure(source: Path = SOURCE) -> CodeSize:
    """Count every file below ``source``."""
    rooms: Counter[str] = Counter()
    over: list[TooLong] = []
    for path in sorted(source.rglob("*.py")):
        rooms[room(path, source)] += count_code(path.read_text())
        over += too_long(path, source)
    core = sum(lines for name, lines in rooms.items() if name not in OUTSIDE)
    return CodeSize(dict(rooms.most_common()), core, rooms.total(), sorted(over, reverse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the code lines of each room and what is over the limits.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    size = measure()
    if parser.parse_args().json:
        print(json.dumps({**size._asdict(), "over": [one._asdict() for one in size.over], "limits": LIMITS}))
        return
    for name, lines in size.rooms.items():
        print(f"{lines:6,}  {name}{'   (not core)' if name in OUTSIDE else ''}")
    print(f"{size.core:6,}  core\n{size.all:6,}  all")
    for one in size.over:
        print(f"{one.lines:6,}  lines of a {one.kind}, at most {LIMITS[one.kind]}: {one.where}")


if __name__ == "__main__":
    main()
