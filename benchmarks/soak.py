"""A long soak: thousands of requests through the slots of one head, each output checked against its own request.

    python benchmarks/soak.py --backend cpu --requests 10000
    python benchmarks/soak.py --backend cuda --requests 10000 --graphs --workers 15 --json soak.json

The server of `tests/soak` joins, forks, preempts and aborts requests, drafts, hits cached prefixes and pads. A case
stops at the first output, state or position that is not the request's, and prints seed and events. Memory in use must
not grow: the last quarter of the rounds is compared with the second. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from reports import about, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from soak.cases import CASES, server

GROWTH = 8 << 20
"""Bytes by which the process may grow, because of fragmentation."""

NAMES = [str(case) for case in CASES]


def grown(used: list[int]) -> int:
    """Growth of the memory in use, from the second quarter of the rounds to the last."""
    quarter = len(used) // 4
    return int(np.median(used[-quarter:]) - np.median(used[quarter : 2 * quarter])) if quarter else 0


def serve(name: str, backend: str, requests: int, seed: int, graphs: bool) -> dict[str, object]:
    """Serve all requests of a case; how often each thing happened, the worst output of each head, and the growth."""
    started = time.perf_counter()
    served = server(backend, CASES[NAMES.index(name)], requests, seed, graphs=graphs)
    events = served.run()
    growth = grown(served.memory)
    if growth > GROWTH:
        raise MemoryError(f"seed {seed}: memory in use grew by {growth} bytes")
    worst = [float(f"{error:.2g}") for error in served.verdicts.worst]
    seconds = round(time.perf_counter() - started, 1)
    return {"case": name, "errors_of_heads": worst, "grown_bytes": growth, "seconds": seconds, "events": events}


def in_own_process(*arguments: object) -> dict[str, object]:
    """Run `serve` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(serve, *arguments).result()


def device_of(backend: str) -> str:
    """Name of the GPU, or of the host's processor architecture."""
    if backend != "cuda":
        return platform.machine()
    from sketchssm.study.bench import device_name

    return device_name()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["reference", "cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", action="store_true", help="replay captured steps and drafts, on cuda")
    parser.add_argument("--workers", type=int, default=1, help="cases that run at the same time")
    parser.add_argument("--commit", help="for the report, where this is no clone")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    results, failed = [], []
    with ThreadPoolExecutor(options.workers) as pool:
        arguments = options.backend, options.requests, options.seed, options.graphs
        running = {pool.submit(in_own_process, name, *arguments): name for name in options.cases}
        for done in as_completed(running):
            if done.exception():
                failed.append(running[done])
                print(f"{running[done]}: {type(done.exception()).__name__}: {done.exception()}", flush=True)
                continue
            results.append(done.result())
            told = ", ".join(f"{key} {value}" for key, value in results[-1].items() if key != "case")
            print(f"{running[done]}: {told}", flush=True)
    if options.json:
        served = sorted(results, key=lambda result: NAMES.index(str(result["case"])))
        own = {"requests": options.requests, "failed": failed, "results": served}
        write(about(device_of(options.backend), options.commit) | own, options.json)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
