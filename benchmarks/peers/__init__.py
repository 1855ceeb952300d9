"""The host paths of other engines (peers), each behind the same few calls and each in its own process.

An adapter is a module with ``VERSION``, ``LEAST_BLOCK`` (the smallest block size, in tokens, that it is measured with)
and a class ``Peer``:

    Peer(capacity, block_size, longest, at_once)
                           a cache of ``capacity`` tokens, for ``at_once`` requests of at most ``longest`` tokens each
    tokens(ids)            convert an int32 array to what this engine takes; never timed
    admit(i, prompt, n)    match, allocate and publish the prompt of request ``i``; ``n`` output tokens will follow.
                           Returns the number of cached tokens
    append(i, output)      allocate blocks for the output, and do what the engine does when it is written
    finish(i)              end the request; its blocks stay cached
    check()                called when no request runs: raises if blocks are lost
    excluded               seconds of these calls that stand for work that a GPU would do
    AT_ONCE                most requests that it replays at the same time, where its scheduler decides who runs

and, where the engine has such a call, ``lookup(prompt)`` (match only), ``step()`` (one token for every running request,
with index arrays where the host makes them), ``take(n)`` and ``give(blocks)`` (allocate and free), ``evict(n)``.
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

PEERS = ("ours", "prototype", "vllm", "sglang", "sglang_rust", "hf", "minisgl", "nanovllm", "tokenspeed")
"""Names of the adapters, in the order of the rows."""
ROOT = Path(__file__).parents[2]
PYTHON = "KVPAGODA_BENCH_PYTHON"
"""The environment variable that names the interpreter of other peers."""


def from_path(peer: str, module: str) -> ModuleType:
    """Import ``module`` from the folder in the environment variable ``KVPAGODA_BENCH_<PEER>``. Raises ImportError."""
    variable = f"KVPAGODA_BENCH_{peer.upper()}"
    folder = os.environ.get(variable)
    if folder is None:
        raise ImportError(f"{variable} is not set; set it to the folder of {peer}")
    for path in (folder, str(Path(folder) / "python")):
        if path not in sys.path:
            sys.path.append(path)
    return importlib.import_module(module)


def look_in_consumers() -> None:
    """Let packages be imported too from the environment that ``make consumers`` fills, after those of this process."""
    sys.path += [str(folder) for folder in sorted(ROOT.glob(".venv-consumers/lib/python3*/site-packages"))]


class Absent(Exception):
    """Raised for a peer that cannot be imported here; the message is the reason."""


class Process:
    """The process of one peer; ``ask`` runs one of the functions in ``tasks`` there. The constructor raises Absent.

    Other peers run under the interpreter that ``KVPAGODA_BENCH_PYTHON`` names, so that their packages need not be
    installed in the environment of this library. The default is the interpreter of this process, as for ours.
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
        self.at_once = int(loaded["at_once"])

    def ask(self, task: str, **arguments: Any) -> dict[str, Any]:
        """Run a task and return its figures. Raises RuntimeError with the error of the peer."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
        self._child.stdin.flush()
        found = self._answer()
        if "error" in found:
            raise RuntimeError(f"{self.name}: {found['error']}")
        return found

    def _answer(self) -> dict[str, Any]:
        """Read one answer. If the process has ended, it has ``absent`` and ``error``."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            return {"absent": f"its process ended with {self._child.wait()}", "error": "its process ended"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Close the pipes and wait until the process ends."""
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
