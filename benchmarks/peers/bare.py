"""Single modules of a project whose package cannot be imported here as a whole: it wants a GPU, or kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def bare_packages(folders: Mapping[str, Path], stand_ins: Mapping[str, ModuleType] | None = None) -> Iterator[None]:
    """Inside, each name in ``folders`` is a package in that folder whose ``__init__`` is not run, and ``stand_ins`` stand for
    modules by their names. All that was imported of them is forgotten at the end."""
    given, before = dict(stand_ins or {}), dict(sys.modules)
    for name, folder in folders.items():
        package: Any = ModuleType(name)
        package.__path__ = [str(folder)]
        given[name] = package
    sys.modules.update(given)
    for name, module in given.items():
        parent, _, last = name.rpartition(".")
        if parent in given:
            setattr(given[parent], last, module)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        roots = {name.split(".")[0] for name in folders}
        for name in [name for name in sys.modules if name in given or name.split(".")[0] in roots]:
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]
