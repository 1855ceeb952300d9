"""Which versions of other packages we follow, beyond what these promise to keep: the key ``follows`` of ``extras.json``.

Each entry says below which version of a package its extra stays, which names of it we build upon though it may change them,
and which of our files do. vLLM, whose releases each need their own reading, is in ``kvpagoda.adapters.vllm.options``; the
engines of ``kvpagoda.replay`` are in ``kvpagoda.replay.engines.profiles``.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any

from kvpagoda.loading import read_json

FOLLOWED: dict[str, dict[str, Any]] = read_json("kvpagoda", "extras.json")["follows"]
"""Package -> ``below`` (a version), ``names`` ("module:attribute"), ``where`` (our files)."""


def lost(package: str) -> list[str]:
    """Return those of the names that we use of ``package`` which the installed version does not have; imports their modules.
    Empty for a package that we do not follow. Raises ImportError if the package itself cannot be imported."""
    names = FOLLOWED[package]["names"] if package in FOLLOWED else ()
    if names:
        import_module(package)
    return [name for name in names if not _has(name)]


def _has(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        reduce(getattr, path.split("."), import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
