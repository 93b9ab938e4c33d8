"""Small matrix products and eigenvalue problems on all cores of the host.

A BLAS of several threads loses much time with small matrices, most of all beside another busy process. So each thread
here has a BLAS of one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_cores(task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of a task for each item, on all cores, each thread with a BLAS of one thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(cores, len(items))
    with _blas().limit(limits=1):
        if threads <= 1:
            return [task(item) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            try:
                return list(pool.map(task, items))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


@cache
def _blas() -> Any:
    """NumPy's BLAS, as `threadpoolctl` finds it; looked up once, which takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")
