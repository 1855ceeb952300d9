"""Eviction policies of the user's own in a Python file, by "FILE.py:CLASS"."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from kvpagoda.errors import BadInput, unknown_name
from kvpagoda.policies import EvictionPolicy, as_policy


def policy_from_text(text: str) -> str | type[EvictionPolicy]:
    """Return ``text``, the name of a policy; or, of "FILE.py:CLASS", that class, after its file was run.

    Raises BadInput if the file cannot be run or has no such class, and if ``CLASS()`` raises or lacks a method of
    EvictionPolicy.
    """
    file, colon, name = text.rpartition(":")
    if text.endswith(".py"):
        raise BadInput(f"{text!r} is a file; name the class of the policy too: {text}:CLASS")
    if not colon or not file.endswith(".py"):
        return text
    path = Path(file)
    if not path.is_file():
        raise BadInput(f"no file {file!r}, which should have the policy {name}")
    spec = spec_from_file_location(f"kvpagoda_policy_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "the ending of the file is .py"
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    if name not in classes:
        raise unknown_name(f"class of {file}", name, classes)
    made: type[EvictionPolicy] = classes[name]
    try:
        policy = made()
    except Exception as error:
        raise BadInput(f"{text}: {name}() must make a policy, but: {type(error).__name__}: {error}") from error
    as_policy(policy, capacity=1)  # raises if it lacks a method
    return made
