"""Print the files and lines of code of each room beside its bound, and the definitions that are long.

    python tools/code_size.py [--json]

A room is a folder or module directly below ``src/kvpagoda``. A line of code is neither blank nor a comment nor part of a
docstring. The lengths of files, classes and functions are physical lines, comments and docstrings too.

A bound changes only in a commit that gives the room a feature, and the message of that commit says which. It is not
raised for a fault that is mended or a file that is split. Needs the standard library only.
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
BOUNDS = {
    "cache": 3_700,
    "offload": 740,
    "prefix": 1_970,
    "schema": 2_700,
    "tiers": 1_900,
    "layouts": 1_580,
    "hf": 2_050,
    "replay": 5_450,
    "compat": 1_220,
    "kernels": 980,
    "adapters": 2_800,
    "policies": 750,
    "batch": 830,
    "events": 1_300,
    "memory": 1_080,
    "metrics": 600,
    "blocks": 550,
    "cli": 450,
    "formats": 560,
    "lanes": 530,
    "kv_cache": 390,
    "scheduling": 250,
    "worker": 90,
    "recording": 300,
    "hints": 640,
    "sleeping": 160,
    "handover": 1_620,
    "doctor": 150,
    "testing": 150,
    "errors": 100,
    "console": 70,
    "kvpagoda": 80,
    "loading": 50,
    "text": 80,
    "units": 110,
    "version": 50,
    "__main__": 50,
}
"""Room -> the most lines of code in it."""
ENGINE_CORE = ("kv_cache", "cache", "prefix", "blocks", "batch", "memory")
"""Rooms that every request passes through."""
ENGINE_CORE_BOUND = 8_450
ALL_BOUND = 35_500
FILES_BOUND = 320
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
    """Lines of code and files of each room (most lines first), lines of the engine core and of all rooms, and what is
    ``long``, longest first."""

    rooms: dict[str, int]
    files: dict[str, int]
    engine_core: int
    all: int
    long: list[Long]


def measure(source: Path = SOURCE) -> CodeSize:
    """Count all Python files below ``source``."""
    rooms: Counter[str] = Counter()
    files: Counter[str] = Counter()
    engine_core = 0
    long: list[Long] = []
    for path in sorted(source.rglob("*.py")):
        name = room(path, source)
        lines = count_code(path.read_text())
        rooms[name] += lines
        files[name] += 1
        if name in ENGINE_CORE:
            engine_core += lines
        long += long_parts(path, source)
    return CodeSize(dict(rooms.most_common()), dict(files), engine_core, rooms.total(), sorted(long, reverse=True))


def over_bounds(size: CodeSize) -> list[str]:
    """Return one line for each bound that ``size`` exceeds. A room without a bound exceeds it."""
    counted = [(name, lines, BOUNDS.get(name, 0), "lines of code") for name, lines in size.rooms.items()]
    counted.append(("engine core", size.engine_core, ENGINE_CORE_BOUND, "lines of code"))
    counted.append(("all", size.all, ALL_BOUND, "lines of code"))
    counted.append(("all", sum(size.files.values()), FILES_BOUND, "files"))
    return [f"{name}: {count:,} {what}, at most {bound:,}" for name, count, bound, what in counted if count > bound]


def table(size: CodeSize) -> str:
    """Return the counts and bounds as a table, then what exceeds a bound, then what is long."""
    rows = [f"{'room':<12}{'files':>6}{'lines':>8}{'bound':>8}"]
    rows += [
        f"{name:<12}{size.files[name]:>6}{lines:>8,}{BOUNDS.get(name, 0):>8,}" for name, lines in size.rooms.items()
    ]
    rows.append(f"{'engine core':<12}{'':>6}{size.engine_core:>8,}{ENGINE_CORE_BOUND:>8,}")
    rows.append(f"{'all':<12}{sum(size.files.values()):>6}{size.all:>8,}{ALL_BOUND:>8,}")
    rows.append(f"\nThe engine core is {', '.join(ENGINE_CORE)}. At most {FILES_BOUND} files.")
    rows += [f"over its bound: {line}" for line in over_bounds(size)]
    rows += [f"{one.lines} lines of a {one.kind}, over {LONG[one.kind]}: {one.where}" for one in size.long]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the files and lines of code of each room, and what is long.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    size = measure()
    if parser.parse_args().json:
        bounds = {**BOUNDS, "engine core": ENGINE_CORE_BOUND, "all": ALL_BOUND, "files": FILES_BOUND}
        print(json.dumps({**size._asdict(), "long": [one._asdict() for one in size.long], "bounds": bounds}))
    else:
        print(table(size))


if __name__ == "__main__":
    main()
