"""Measure and print: ``python -m benchmarks [NAME ..] [--quick] [--json] [--save]``. ``--show``: saved results.

Without a name every question is measured in small sizes (``--quick``), unless ``--save``, ``--peers``, ``--only`` or
``--runs`` ask for more; ``all`` measures every one in its full size.
"""

from __future__ import annotations

import importlib
import json

from benchmarks.show import plots, table
from benchmarks.timing import RESULTS, Parser, add_arguments, is_part, options_of, result, save

NAMES = (
    "match", "lookup", "allocate", "step", "host_step", "evict", "evict_many", "victims", "memory", "growth",
    "hybrid", "one_budget", "hits", "hybrid_peers", "shared_steps", "policies", "replay", "disk", "swap", "restart",
    "shared_store", "reshard", "handover", "adapters", "paged_cache", "vllm_connector", "events", "router", "formats",
    "quantised_heads", "top_k", "packed", "metrics", "hints", "checkpoints_at_rest", "rounded_states",
    "step_checkpoints", "simulate", "count_hits", "memory_for_reuse", "bound", "placement", "runs",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(
        prog="kvpagoda bench",
        description="Measure the host path, and compare it with other engines where they are installed; "
        "see benchmarks/peers. 'kvpagoda bench gpu' measures a GPU, and has options of its own.",
    )
    parser.add_argument(
        "names", nargs="*", help=f"questions, of {', '.join(NAMES)}; or 'all' (default: all of them with --quick)"
    )
    add_arguments(parser)
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; print tables of the saved results and draw their plots"
    )
    asked = parser.parse_args(arguments)
    names = list(NAMES) if asked.names in ([], ["all"]) else asked.names
    asked.quick |= not asked.names and not (asked.save or asked.peers or asked.only or asked.runs)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(NAMES)}")
    options = options_of(parser, asked)
    results = {}
    for name in names:
        if asked.show:
            path = RESULTS / f"{name}.json"
            if not path.exists():
                continue
            results[name] = json.loads(path.read_text())
        else:
            question = importlib.import_module(f"benchmarks.{name}")
            results[name] = result(question.QUESTION, question.measure, options)
            if asked.save:
                save(name, results[name], is_part=is_part(options))
        if not asked.json:
            print(table(results[name]), end="\n\n", flush=True)
    if asked.json:
        print(json.dumps(results, indent=2))
    if asked.save or asked.show:
        plots(results, RESULTS)


if __name__ == "__main__":
    main()
