"""Other engines' host paths, each behind the same few calls and each in a process of its own.

An adapter is a module with ``VERSION``, ``LEAST_BLOCK`` (tokens; smaller blocks are not asked of it) and a class ``Peer``:

    Peer(capacity, block_size, longest, at_once)   a cache of ``capacity`` tokens
    tokens(ids)            int32 array -> what this engine takes; never timed
    admit(i, prompt, n)    find, allocate, publish; ``n`` output tokens will follow. Returns the tokens found
    append(i, output)      room for the output, and what the engine does when it is written
    finish(i)              end the request; what it leaves stays cached
    check()                nothing is running: nothing may be lost
    excluded               seconds of all this that stand for work done on a GPU

and, where the engine has such a call, ``lookup(prompt)`` (find only), ``step()`` (one token for everything that runs, with
index arrays where the host makes them), ``take(n)`` and ``give(blocks)`` (allocate and free), ``evict(n)``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

PEERS = ("ours", "prototype", "vllm", "sglang", "sglang_rust", "hf", "minisgl", "nanovllm")
ROOT = Path(__file__).parents[2]
PYTHON = "KVPAGODA_BENCH_PYTHON"


def from_path(peer: str, module: str) -> ModuleType:
    """Import ``module`` from the folder that the environment names for ``peer``. Raises ImportError."""
    variable = f"KVPAGODA_BENCH_{peer.upper()}"
    folder = os.environ.get(variable)
    if folder is None:
        raise ImportError(f"{variable} names no folder")
    for path in (folder, str(Path(folder) / "python")):
        if path not in sys.path:
            sys.path.append(path)
    return importlib.import_module(module)


class Absent(Exception):
    """A peer that cannot be imported here, and why."""


class Process:
    """One peer, loaded in a process of its own; ``ask`` runs one of the ``tasks`` there. Raises Absent.

    Peers run under the interpreter that ``KVPAGODA_BENCH_PYTHON`` names, so that their packages need not be installed
    beside this library; by default under this one.
    """

    def __init__(self, name: str) -> None:
        python = sys.executable if name == "ours" else os.environ.get(PYTHON, sys.executable)
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self.name = name
        self._child = subprocess.Popen(
            [python, "-m", "benchmarks.peers", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        loaded = self._answer()
        if "absent" in loaded:
            self.close()
            raise Absent(loaded["absent"])
        self.version, self.least_block, self.can = loaded["version"], loaded["least_block"], set(loaded["can"])

    def ask(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Run a task and return its figures. Raises RuntimeError with the peer's own error."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
        self._child.stdin.flush()
        found = self._answer()
        if "error" in found:
            raise RuntimeError(f"{self.name}: {found['error']}")
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            return {"absent": f"its process ended with {self._child.wait()}", "error": "its process ended"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.stdout.close()
        self._child.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
