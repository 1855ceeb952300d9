"""The process of one peer. It reads tasks as JSON lines from standard input and answers on standard output."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from benchmarks.peers import tasks
from benchmarks.workload import AT_ONCE

CALLS = ("lookup", "step", "take", "give", "evict")


def main(name: str) -> None:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output that the peer prints must not mix with answers

    def tell(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        peer = importlib.import_module(f"benchmarks.peers.{name}")
    except Exception as error:  # any error at import means that the peer is absent
        tell({"absent": f"{type(error).__name__}: {error}".splitlines()[0]})
        return
    can = [call for call in CALLS if hasattr(peer.Peer, call)]
    at_once = getattr(peer.Peer, "AT_ONCE", AT_ONCE)
    tell({"version": peer.VERSION, "least_block": peer.LEAST_BLOCK, "can": can, "at_once": at_once})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            tell(getattr(tasks, asked.pop("task"))(peer.Peer, **asked))
        except Exception as error:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})


main(sys.argv[1])
os._exit(0)  # do not wait for threads of the engine
