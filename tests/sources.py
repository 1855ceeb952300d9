"""The files of ``src``, each read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import kvpagoda

SRC = Path(kvpagoda.__file__).parent


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(("kvpagoda", *(parts[:-1] if parts[-1] == "__init__" else parts)))


FILES = {module_of(path): path for path in sorted(SRC.rglob("*.py"))}
"""Module -> its file."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, as ``ast.walk`` yields them."""
    return tuple(ast.walk(tree(path)))
