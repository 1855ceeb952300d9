"""One run, or many. From the folder ``tests``:

python -m random_driver full 7                             run seed 7 of schema full
python -m random_driver full 7 --operations 20000
python -m random_driver all 0 --seeds 50                   50 seeds of every schema; prints each fault and continues
python -m random_driver full 7 --without pin fence         leave operations out
python -m random_driver full 7 --split                     a scheduler without memory, and a worker
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import nullcontext
from time import perf_counter

import torch

from options import shuffled_places

from .caches import has_xxhash, settings_of
from .driver import OPERATIONS, drive
from .faults import Fault
from .schemas import SCHEMA_NAMES


def main() -> None:
    parser = argparse.ArgumentParser(prog="random_driver", description=__doc__)
    parser.add_argument("schema", choices=["all", *SCHEMA_NAMES])
    parser.add_argument("seed", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--operations", type=int, default=500)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--memory-fails", type=float, default=0.01)
    parser.add_argument("--without", nargs="*", default=[], choices=OPERATIONS, metavar="OPERATION")
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    begin, faults = perf_counter(), 0
    for schema in SCHEMA_NAMES if given.schema == "all" else [given.schema]:
        for seed in range(given.seed, given.seed + given.seeds):
            settings = settings_of(schema, seed, split=given.split)
            if "disk" in settings.tiers and not has_xxhash():
                continue
            try:
                with shuffled_places(seed) if seed % 2 else nullcontext():
                    driver = drive(
                        settings, given.operations, without=frozenset(given.without), memory_fails=given.memory_fails
                    )
                counts += driver.counts
            except Fault as fault:
                faults += 1
                if given.seeds == 1 and given.schema != "all":
                    raise
                print(f"{schema} {seed}: {str(fault).splitlines()[0]}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")
    print(f"{faults} faults, {perf_counter() - begin:.1f} s")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
