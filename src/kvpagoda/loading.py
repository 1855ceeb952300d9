"""Lazy import of a package's public names, and reading of JSON files that are stored beside modules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pkgutil import get_data
from typing import Any

from kvpagoda.errors import MissingExtra


def load_when_used(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` (PEP 562) that imports each public name when it is first used.

    ``modules``: module name -> the names that ``package`` takes from it. No name may equal the name of a module in the
    package, which would hide it. The returned function raises MissingExtra if torch is needed and not installed.

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
    """Return the content of the JSON ``file`` in the folder of ``package``."""
    data = get_data(package, file)
    assert data is not None, f"{package} is loaded from something that has no files"
    found: dict[str, Any] = json.loads(data)
    return found
