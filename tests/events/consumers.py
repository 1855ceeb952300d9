"""Programs of other projects that read events, as ``make consumers`` installed them; tests skip where they are absent."""

from __future__ import annotations

import ast
import enum
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

FOLDER = Path(os.environ.get("KVPAGODA_CONSUMERS", Path(__file__).parents[2] / ".venv-consumers"))


def installed(pattern: str) -> Path:
    """The one file below the folder of ``make consumers`` that ``pattern`` finds; the test skips where it is not."""
    found = sorted(FOLDER.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in {FOLDER.name}: make consumers")
    return found[0]


def package(path: str) -> Path:
    """The file ``path`` of a package installed there."""
    return installed(f"lib/python3*/site-packages/{path}")


def classes(path: Path, *roots: str) -> dict[str, Any]:
    """The classes in the file ``path`` that derive from ``roots`` (or from such a class), and what their annotations name.

    They are run as the file has them; the rest of the file, which imports the engine, is not."""
    known, body = {*roots}, list[ast.stmt]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & known:
                known.add(node.name)
                body.append(node)
    module = types.ModuleType(f"classes_of_{path.stem}_{len(sys.modules)}")
    sys.modules[module.__name__] = module  # msgspec looks names of annotations up in it
    module.__dict__.update({name: getattr(typing, name) for name in typing.__all__})
    module.__dict__.update(msgspec=msgspec, enum=enum, Enum=enum.Enum, ExternalBlockHash=bytes | int)
    exec(compile(ast.Module(body, []), str(path), "exec"), module.__dict__)
    return module.__dict__
