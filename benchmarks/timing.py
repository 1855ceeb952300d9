"""Shared parts of the benchmarks: options, medians, the peers, the machine, and how a result is printed and saved."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NoReturn

import kvpagoda
from benchmarks.peers import PEERS, Absent, Process

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Options of a measurement.

    ``quick``: small sizes that take seconds in all, to see that everything works. ``peers``: names of the engines to
    measure. ``only``: measure only cases whose name contains this text. ``runs``: rounds; a figure is their median."""

    quick: bool = False
    peers: tuple[str, ...] = PEERS
    only: str = ""
    runs: int = 5


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(calls: Mapping[str, Callable[[], object]], runs: int = 7, repeat: int = 1) -> dict[str, float]:
    """Return the median seconds of each call over ``runs`` rounds. A round times the calls one after the other, and
    takes the best of ``repeat`` times of each."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            taken[name].append(min(seconds(call) for _ in range(repeat)))
    return {name: median(times) for name, times in taken.items()}


class Peers:
    """The available peers, each in its own process, and the reasons why others are absent. ``call``: only peers that
    have this call. Use it in a ``with`` statement, which ends the processes."""

    def __init__(self, options: Options, call: str | None = None) -> None:
        self.found: list[Process] = []
        self.absent: dict[str, str] = {}
        for name in options.peers:
            try:
                process = Process(name)
            except Absent as reason:
                self.absent[name] = str(reason)
                continue
            if call is None or call in process.can:
                self.found.append(process)
            else:
                process.close()

    def ask(
        self, task: str, runs: int = 1, *, block_size: int, at_once: int | None = None, **arguments: Any
    ) -> dict[Process, dict[str, Any]]:
        """Run ``task`` ``runs`` times in every peer that supports ``block_size``, and ``at_once`` requests at the same
        time if the task takes it, in turns. Return the median of each figure. A peer that fails is listed in ``absent``
        with its error from then on."""
        figures: dict[Process, list[dict[str, Any]]] = {
            process: []
            for process in self.found
            if process.least_block <= block_size and process.at_once >= (at_once or 1)
        }
        arguments |= {} if at_once is None else {"at_once": at_once}
        for _ in range(runs):
            for process in [process for process in figures if process in self.found]:
                try:
                    figures[process].append(process.ask(task, block_size=block_size, **arguments))
                except RuntimeError as error:
                    self.absent[process.name] = str(error)
                    self.found.remove(process)
                    process.close()
        return {
            process: {key: median(answer[key] for answer in answers) for key in answers[0]}
            for process, answers in figures.items()
            if process in self.found
        }

    def absentees(self) -> list[Row]:
        """Return a row for each absent peer, with the reason."""
        return [{"who": name, "absent": reason} for name, reason in self.absent.items()]

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.found:
            process.close()


def machine() -> dict[str, str | int | None]:
    """Return the machine and the versions of a measurement: processor, load, system, Python, packages."""
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvpagoda": kvpagoda.__version__,
        **{name: version(name) for name in ("numpy", "torch")},
    }


def result(question: str, measure: Callable[[Options], list[Row]], options: Options) -> dict[str, Any]:
    """Run ``measure`` and return the result of one question: its rows, the machine, the versions of the peers, and the
    reasons why others are absent."""
    started = machine()
    measured = measure(options)
    rows = [row for row in measured if "absent" not in row]
    return {
        "question": question,
        "machine": started,
        "versions": {row["who"].split(",")[0]: row.pop("version") for row in rows if "version" in row},
        "absent": {row["who"]: row["absent"] for row in measured if "absent" in row},
        "quick": options.quick,
        "rows": rows,
    }


def save(name: str, found: dict[str, Any], *, is_part: bool = False) -> Path:
    """Write a result to ``benchmarks/results/<name>.json`` and return the path.

    ``is_part``: only some cases or peers were measured. The saved rows of the others are kept, each with the machine on
    which it was measured. Where a peer is added to a case that other peers have, our row stays too, with which
    those were compared; the new row holds how it compares with ours of its own run."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    empty: dict[str, Any] = {"rows": [], "machine": {}, "versions": {}, "absent": {}}
    old = {**empty, **json.loads(path.read_text())} if is_part and path.exists() else empty
    measured = {(row.get("case"), row.get("who")) for row in found["rows"]}
    kept = [row for row in old["rows"] if (row.get("case"), row.get("who")) not in measured]
    others = {row.get("case") for row in kept if row.get("who", "ours") != "ours"}
    compared = others & {row.get("case") for row in found["rows"] if row.get("who", "ours") != "ours"}
    ours = [row for row in old["rows"] if row.get("who") == "ours" and row["case"] in compared and row not in kept]
    replaced = {(row["case"], "ours") for row in ours}
    new = [row for row in found["rows"] if (row.get("case"), row.get("who")) not in replaced]
    kept = [row if "machine" in row else {**row, "machine": old["machine"]} for row in ours + kept]
    order = list(dict.fromkeys(row.get("case") for row in [*old["rows"], *new]))
    rows = sorted(kept + new, key=lambda row: order.index(row.get("case")))
    absent = {who: why for who, why in old["absent"].items() if who not in found["versions"]} | found.get("absent", {})
    merged = {**found, "versions": {**old["versions"], **found["versions"]}, "absent": absent, "rows": rows}
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return path


def is_part(options: Options) -> bool:
    """Return whether ``options`` leave out cases or peers."""
    return bool(options.only) or options.peers != PEERS


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, as the other commands do, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def tell(name: str, question: str, measure: Callable[[Options], list[Row]]) -> None:
    """Run the command line of one question: ``python -m benchmarks.NAME [--quick] [--json] [--save]``."""
    from benchmarks.show import table

    parser = Parser(description=question)
    add_arguments(parser)
    arguments = parser.parse_args()
    options = options_of(parser, arguments)
    found = result(question, measure, options)
    if arguments.save:
        save(name, found, is_part=is_part(options))
    print(json.dumps(found, indent=2) if arguments.json else table(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all questions have."""
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one run, kvpagoda alone; not figures to quote"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/*.json")
    parser.add_argument("--peers", help=f"engines to compare, comma-separated (default: {','.join(PEERS)})")
    parser.add_argument(
        "--only", default="", help="only cases whose name contains this text, e.g. 'conversation 16 3M'"
    )
    parser.add_argument("--runs", type=int, help="rounds; a figure is their median (default: 5)")


def options_of(parser: Parser, arguments: argparse.Namespace) -> Options:
    """Return the ``Options`` of ``arguments``. Exits with a message if a peer is unknown or ``--runs`` below 1."""
    default_peers, default_runs = (("ours",), 1) if arguments.quick else (PEERS, 5)
    names = default_peers if arguments.peers is None else tuple(name for name in arguments.peers.split(",") if name)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    runs = default_runs if arguments.runs is None else arguments.runs
    if runs < 1:
        parser.error(f"--runs must be a positive whole number, got {runs}")
    return Options(arguments.quick, names, arguments.only, runs)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
