"""The sweep of ``kvpagoda replay`` on Ray, on one machine or a cluster: traces, capacities and policies are independent.

    python examples/sweep.py monday.jsonl tuesday.jsonl --capacity 1000,10000 --policy lru,s3fifo,opt
    python examples/sweep.py monday.jsonl --capacity 1000,10000 --address auto   # a cluster that runs already

Every trace is read here and put into Ray's store once; a task replays one trace with one policy at one capacity. The
results are those of ``kvpagoda replay --json`` with the same arguments. Ctrl-C prints what is done. Needs Ray (``pip
install ray``), and kvpagoda on every machine.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import ray

from kvpagoda.replay import Trace, replay


@ray.remote(num_cpus=1)
def one(trace: Trace, capacity: int, policy: str) -> dict[str, Any]:
    """Replay ``trace``, which Ray fetches from its store; return the counts."""
    return replay(trace, capacity_blocks=capacity, policy=policy).to_dict()


def sweep(traces: list[Trace], capacities: list[int], policies: list[str]) -> tuple[list[list[dict[str, Any]]], bool]:
    """Return the results of each trace, capacities as the outer loop, and whether an interrupt left some out."""
    stored = [ray.put(trace) for trace in traces]
    grid = [*product(range(len(traces)), capacities, policies)]
    tasks = {one.remote(stored[number], capacity, policy): i for i, (number, capacity, policy) in enumerate(grid)}
    done: dict[int, dict[str, Any]] = {}
    waiting, is_partial = [*tasks], False
    try:
        while waiting:
            (ended,), waiting = ray.wait(waiting)
            done[tasks[ended]] = ray.get(ended)
    except KeyboardInterrupt:
        is_partial = True
        for task in waiting:
            ray.cancel(task, force=True)
    found: list[list[dict[str, Any]]] = [[] for _ in traces]
    for i in sorted(done):
        found[grid[i][0]].append(done[i])
    return found, is_partial


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay traces on Ray.")
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--capacity", required=True, help="blocks, with commas")
    parser.add_argument("--policy", default="lru,s3fifo,opt", help="names, with commas")
    parser.add_argument("--limit", type=int, help="only the first requests of each trace")
    parser.add_argument("--address", help="of a cluster, or auto (default: Ray starts on this machine)")
    asked = parser.parse_args()
    ray.init(address=asked.address, log_to_driver=False, include_dashboard=False if asked.address is None else None)
    traces = [Trace.read(path, asked.limit) for path in asked.traces]
    found, is_partial = sweep(traces, [int(size) for size in asked.capacity.split(",")], asked.policy.split(","))
    figures = [
        {"trace": trace.name, "requests": len(trace), "results": results} for trace, results in zip(traces, found)
    ]
    print(json.dumps({"traces": figures, "partial": is_partial}, indent=2))
    return 130 if is_partial else 0


if __name__ == "__main__":
    raise SystemExit(main())
