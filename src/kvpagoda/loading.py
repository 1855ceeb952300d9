"""Names of packages that are loaded when they are first used, and the JSON files that lie beside modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import get_data
from typing import Any

from kvpagoda.errors import MissingExtra


def load_when_used(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package`` (PEP 562): ``modules`` says for each module which of its names are the package's.

    No name may be that of a module in the package, which would take its place. Raises MissingExtra where torch is missing.

    >>> load_when_used("kvpagoda", {"kvpagoda.units": ("ceil_div",)})("ceil_div")(7, 2)
    4
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with MissingExtra.unless("torch", f"{package}.{name} needs torch; pip install 'kvpagoda[torch]'"):
            return getattr(import_module(module_of[name]), name)

    return load


def read_json(package: str, file: str) -> dict[str, Any]:
    """What the JSON ``file`` in the folder of ``package`` holds."""
    data = get_data(package, file)
    assert data is not None, f"{package} is loaded from something that has no files"
    found: dict[str, Any] = json.loads(data)
    return found
