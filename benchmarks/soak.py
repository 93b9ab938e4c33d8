"""A long soak: thousands of requests through the slots of one head, each output checked against its own request.

    python benchmarks/soak.py --backend cpu --requests 10000
    python benchmarks/soak.py --backend cuda --requests 10000 --graphs

The server of `tests/soak` joins, forks, preempts and aborts requests, drafts, hits cached prefixes and pads. It stops
at the first output, state or position that is not the request's, and prints seed and events. Memory in use must not
grow: the last quarter of the rounds is compared with the second.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from soak.cases import CASES, server

GROWTH = 8 << 20
"""Bytes by which the process may grow, because of fragmentation."""


def grown(used: list[int]) -> int:
    """Growth of the memory in use, from the second quarter of the rounds to the last."""
    quarter = len(used) // 4
    return int(np.median(used[-quarter:]) - np.median(used[quarter : 2 * quarter])) if quarter else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["reference", "cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", nargs="+", choices=list(map(str, CASES)), default=list(map(str, CASES)))
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", action="store_true", help="replay captured steps and drafts, on cuda")
    options = parser.parse_args()
    for case in CASES:
        if str(case) not in options.cases:
            continue
        started = time.perf_counter()
        served = server(options.backend, case, options.requests, options.seed, graphs=options.graphs)
        counts = served.run()
        growth = grown(served.memory)
        events = ", ".join(f"{count} {name}" for name, count in counts.items())
        worst = ", ".join(f"{error:.1e}" for error in served.verdicts.worst)
        print(f"{case}: {events}; errors {worst}; {growth >> 10} KiB grown; {time.perf_counter() - started:.0f} s")
        if growth > GROWTH:
            raise SystemExit(f"{case}, seed {options.seed}: memory in use grew by {growth} bytes")


if __name__ == "__main__":
    main()
