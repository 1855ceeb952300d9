"""Install what was built, with numpy alone, in a bare environment of each Python, and use it.

    python -m build
    python tools/try_package.py dist python3.10 python3.13

For each Python the wheel and the source distribution in the folder are installed in a temporary environment each, outside
of the checkout. Needs the standard library only; pip fetches numpy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import importlib.util, sys
import numpy as np
import kvpagoda
from kvpagoda import KVCache, MissingExtra, Schema
from kvpagoda.replay import replay

assert sys.prefix in kvpagoda.__file__, kvpagoda.__file__
assert importlib.util.find_spec("torch") is None
llama = dict(model_type="llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
cache = KVCache(Schema.from_hf_config(llama, dtype="float32"), budget="1MiB", device="none")
found = []
for question in ([1, 2], [3, 4, 5]):
    with cache.open([*range(40), *question]) as sequence:
        found.append(sequence.cached_tokens)
        sequence.commit([*range(sequence.cached_tokens, 40), *question])
cache.check()
assert found == [0, 40], found
trace = [{"hash_ids": ids, "input_length": 1536, "output_length": 0} for ids in ([1, 2, 3], [1, 2, 4], [1, 2, 3])]
result = replay(trace, capacity_blocks=8)
assert (result.block_hits, result.block_refs) == (5, 9), result
try:
    KVCache(Schema.from_hf_config(llama), budget="1MiB", device="cpu")
except MissingExtra as error:
    assert "kvpagoda[torch]" in str(error)
else:
    raise AssertionError("memory without torch")
print("Python", sys.version.split()[0], "numpy", np.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in the folder ``cwd``, without PYTHONPATH, and return what it prints. Its errors go to standard
    error."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def try_in(python: str, package: Path) -> str:
    """Install ``package`` in a new environment of ``python`` and use it. Return what it says of itself."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(python, "-m", "venv", "env", cwd=folder)
        installed = folder / "env" / "bin"
        run(installed / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", package, cwd=folder)
        used = run(installed / "python", "-c", PROGRAM, cwd=folder)
        return f"{used}: {run(installed / 'kvpagoda', '--version', cwd=folder)}".replace("\n", ", ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install what was built with numpy alone, and use it.")
    parser.add_argument("dist", type=Path, help="the folder with a wheel and a source distribution")
    parser.add_argument("python", nargs="*", default=[sys.executable], help="Pythons (default: the one that runs this)")
    asked = parser.parse_args()
    packages = [path.resolve() for pattern in ("*.whl", "*.tar.gz") for path in asked.dist.glob(pattern)]
    if len(packages) != 2:
        parser.error(f"{asked.dist} must have one wheel and one source distribution, found {len(packages)} files")
    for package in packages:
        print(f"{package.name}: {package.stat().st_size:,} bytes")
        for python in asked.python:
            print(f"    {try_in(python, package)}")


if __name__ == "__main__":
    main()
