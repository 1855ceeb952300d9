"""Other projects' own code, imported from a path that an environment variable names, without what needs a GPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def path_of(variable: str, inside: str) -> Path:
    """The folder that ``variable`` names; skips the test unless it holds the file ``inside``."""
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} names no copy of the project")
    if not (Path(given) / inside).is_file():
        pytest.skip(f"{variable}={given} has no {inside}")
    return Path(given)


@contextmanager
def bare_packages(stand_ins: Mapping[str, ModuleType], **folders: Path) -> Iterator[None]:
    """Inside, each of ``folders`` is importable as a package of that name (``__`` for a dot) whose ``__init__`` is not run,
    and ``stand_ins`` stand for modules that cannot be imported here. What was imported is forgotten again."""
    before = dict(sys.modules)
    for name, folder in folders.items():
        package: Any = ModuleType(name.replace("__", "."))
        package.__path__ = [str(folder)]
        sys.modules[name.replace("__", ".")] = package
    sys.modules.update(stand_ins)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        roots = {name.split("__")[0] for name in folders}
        for name in [name for name in sys.modules if name.split(".")[0] in roots or name in stand_ins]:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]
