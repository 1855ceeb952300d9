"""Print the files and lines of code of each room, and the definitions that are long. ``tools/budgets.py`` has the bounds.

    python tools/code_size.py [--json]

A room is a folder or module directly below ``src/kvpagoda``, or below its ``core``. A line of code is neither blank nor
a comment nor part of a docstring. The lengths of files, classes and functions are physical lines, comments and docstrings too.

Needs the standard library only.
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
ENGINE_CORE = ("core/kv_cache", "core/cache", "core/groups", "core/prefix", "core/blocks", "core/batch", "core/memory")
"""The rooms of the core that every request passes through."""
LONG = {"file": 400, "class": 300, "function": 60}
"""Kind of definition -> the physical lines above which it is a reason to look."""
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Long(NamedTuple):
    """A long file, class or function: its physical ``lines``, its ``kind`` (a key of ``LONG``), and ``where`` it is:
    "path", or "path:line name"."""

    lines: int
    kind: str
    where: str


def room(path: Path, source: Path = SOURCE) -> str:
    """Return the room of ``path``: the folder or module directly below ``source``, or below its ``core``; "kvpagoda" for
    ``__init__.py``."""
    parts = path.relative_to(source).parts
    name = "/".join(parts[:2] if parts[0] == "core" else parts[:1]).removesuffix(".py").removesuffix("/__init__")
    return "kvpagoda" if name == "__init__" else name


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


def long_parts(path: Path, source: Path = SOURCE) -> Iterator[Long]:
    """Yield what is long in the file ``path``: the file itself, its classes and functions, nested ones too."""
    text, name = path.read_text(), path.relative_to(source).as_posix()
    lines = len(text.splitlines())
    if lines > LONG["file"]:
        yield Long(lines, "file", name)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DEFINITIONS):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            if lines > LONG[kind]:
                yield Long(lines, kind, f"{name}:{first} {node.name}")


class CodeSize(NamedTuple):
    """Lines of code and files of each room (most lines first), lines of the core, of the engine core in it and of all rooms,
    and what is ``long``, longest first."""

    rooms: dict[str, int]
    files: dict[str, int]
    core: int
    engine_core: int
    all: int
    long: list[Long]


def measure(source: Path = SOURCE) -> CodeSize:
    """Count all Python files below ``source``."""
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long: list[Long] = []
    for path in sorted(source.rglob("*.py")):
        name = room(path, source)
        rooms[name] += count_code(path.read_text())
        files[name] += 1
        long += long_parts(path, source)
    core = sum(lines for name, lines in rooms.items() if name.startswith("core"))
    engine_core = sum(rooms[name] for name in ENGINE_CORE)
    return CodeSize(
        dict(rooms.most_common()), dict(files), core, engine_core, rooms.total(), sorted(long, reverse=True)
    )


def table(size: CodeSize) -> str:
    """Return the counts as a table, then what is long."""
    rows = [f"{'room':<15}{'files':>6}{'lines':>8}"]
    rows += [f"{name:<15}{size.files[name]:>6}{lines:>8,}" for name, lines in size.rooms.items()]
    rows += [
        f"{name:<15}{'':>6}{lines:>8,}" for name, lines in (("core", size.core), ("engine core", size.engine_core))
    ]
    rows.append(f"{'all':<15}{sum(size.files.values()):>6}{size.all:>8,}")
    rows.append(f"\nThe engine core is {', '.join(ENGINE_CORE)}.")
    rows += [f"{one.lines} lines of a {one.kind}, over {LONG[one.kind]}: {one.where}" for one in size.long]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the files and lines of code of each room, and what is long.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    size = measure()
    if parser.parse_args().json:
        print(json.dumps({**size._asdict(), "long": [one._asdict() for one in size.long]}))
    else:
        print(table(size))


if __name__ == "__main__":
    main()
