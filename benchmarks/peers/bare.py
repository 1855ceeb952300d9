"""Import single modules of a project whose whole package cannot be imported here, for want of a GPU or of kernels."""

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
    """Make packages importable without running their ``__init__``, while the context is open.

    ``folders``: name of a package -> its folder. ``stand_ins``: name of a module -> the module to import in its place.
    On exit, ``sys.modules`` holds again what it held before under these names and below the packages."""
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
