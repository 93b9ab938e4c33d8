"""Threads that share the rows and heads of a call.

The calling thread works together with one thread for each other core. An idle thread polls for work for one or two
milliseconds and then sleeps. The calling thread also does the share of a thread that has not begun in time. If the
threads are busy with another caller's call, the caller does all of its work alone. A forked child starts its own
threads.

Numba's threading layers do not fit a library. Its ``workqueue`` aborts when two threads call it. Its ``omp`` ends a
forked child, and its idle threads spin on cores that PyTorch needs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import config, typeof, types
from numba.extending import intrinsic

from sketchssm.cpu.jit import Kernel, entry, njit
from sketchssm.cpu.layout import Memory, call_record
from sketchssm.cpu.parts import Array
from sketchssm.layer.recurrence import Tokens

SMALL = 2**18
"""A call on fewer elements of states runs on the calling thread alone: waking other threads would take longer."""

SERIAL = -1
"""Worker number of the serial part of a kernel, which the calling thread runs once after each round."""

PATIENCE = 6000
"""Tries to get a lock before a thread sleeps: one or two milliseconds. After each try other threads may have the core.
Threads that sleep between the steps of a loop wake late: with 200 tries steps of qwen3-next took twice as long."""

WAIT, TRY = 1, 0

FUNCTION, CONTEXT, AREAS = range(3)
"""Contents of the threads' mailbox: the addresses of a kernel and of its two records."""

_lock_take = types.ExternalFunction("PyThread_acquire_lock", types.intc(types.intp, types.intc))
_lock_give = types.ExternalFunction("PyThread_release_lock", types.void(types.intp))
_let_others_run = types.ExternalFunction("sched_yield", types.intc())


@intrinsic
def _call(typingctx: Any, function: Any, context: Any, areas: Any, worker: Any) -> Any:
    """Call a kernel by its address."""
    integer = types.intp

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [args[0].type] * 3)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(integer, integer, integer, integer), codegen


@njit
def _take(lock: int) -> None:
    """Take a lock: try for a while, then sleep until it is free."""
    for _ in range(PATIENCE):
        if _lock_take(lock, TRY):
            return
        _let_others_run()
    _lock_take(lock, WAIT)


@entry
def _serve(box: Array, start: int, done: int, worker: int) -> None:
    """Do one worker's share of every round."""
    while True:
        _take(start)
        _call(box[FUNCTION], box[CONTEXT], box[AREAS], worker)
        _lock_give(done)


@entry
def _launch(
    box: Array, locks: Array, function: int, workers: int, context: int, areas: int, rounds: int,
    q: Array, k: Array, v: Array, g: Array, beta: Array, rows: Array, out: Array, length: int,
) -> None:  # fmt: skip
    """Record the arrays of a call, then run a kernel on all workers and its serial part, `rounds` times."""
    m = call_record(context)
    m.in_q, m.in_k, m.in_v, m.in_g = q.ctypes.data, k.ctypes.data, v.ctypes.data, g.ctypes.data
    m.in_beta, m.out, m.rows = beta.ctypes.data, out.ctypes.data, rows.ctypes.data
    m.batch, m.length, m.token, m.workers = rows.size, length, 0, workers
    box[FUNCTION], box[CONTEXT], box[AREAS] = function, context, areas
    for _ in range(rounds):
        for worker in range(1, workers):
            _lock_give(locks[2 * worker])
        _call(function, context, areas, 0)
        for worker in range(1, workers):
            if _lock_take(locks[2 * worker], TRY):
                # the thread has not begun, because another one has its core
                _call(function, context, areas, worker)
            else:
                _take(locks[2 * worker + 1])
        _call(function, context, areas, SERIAL)


class Pool:
    """One thread for each worker but the first, which is the calling thread.

    `workers` is the number of workers; fewer than asked for if the system starts no more threads.
    """

    def __init__(self, workers: int) -> None:
        python = ctypes.pythonapi
        python.PyThread_allocate_lock.restype = ctypes.c_void_p
        python.PyThread_acquire_lock.argtypes = ctypes.c_void_p, ctypes.c_int
        self.box = np.zeros(3, dtype=np.int64)
        # two for each worker: one starts a round, one ends it; both begin taken
        self.locks = np.array([python.PyThread_allocate_lock() for _ in range(2 * workers)], dtype=np.int64)
        for lock in self.locks:
            python.PyThread_acquire_lock(int(lock), WAIT)
        # compiled here, because callers would wait forever for a thread that fails
        _serve.compile((typeof(self.box), types.intp, types.intp, types.intp))
        self.workers = 1
        for worker in range(1, workers):
            start, done = map(int, self.locks[2 * worker : 2 * worker + 2])
            name, args = f"sketchssm-{worker}", (self.box, start, done, worker)
            try:
                threading.Thread(target=_serve, name=name, args=args, daemon=True).start()
            except RuntimeError:
                break
            self.workers += 1


_alone = Pool(1)
_pool: Pool | None = None
_free = threading.Lock()


def _forget() -> None:
    """Drop the pool in a forked child, which has none of its parent's threads."""
    global _pool, _free
    _pool, _free = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def worker_count() -> int:
    """Return the number of workers: ``NUMBA_NUM_THREADS``, by default the cores that this process may use."""
    return int(config.NUMBA_NUM_THREADS)


def run(
    kernel: Kernel,
    memory: Memory,
    rows: npt.NDArray[np.int64],
    tokens: Tokens | None = None,
    out: Array | None = None,
    rounds: int = 1,
) -> None:
    """Run a kernel on an engine's memory: alone if the call is small or the threads are busy, else with all threads.

    `rows` are the slots. `tokens (batch, tokens, ...)` are inputs, and `out (batch, tokens, heads, V)` receives the
    outputs. All workers run the kernel `rounds` times; each round waits for the last.
    """
    global _pool  # noqa: PLW0603
    length = 1 if out is None else out.shape[1]
    if not rows.size or not length:
        return
    given = (None,) * 5 if tokens is None else tokens
    arrays = [NO_FLOATS if x is None else _plain(x) for x in given]
    work = (*memory.addresses, rounds, *arrays, _plain(rows), NO_FLOATS if out is None else out.reshape(-1), length)
    size = rows.size * memory.state_size * length
    if size < SMALL or memory.workers == 1 or not _free.acquire(blocking=False):
        _launch(_alone.box, _alone.locks, kernel.address, 1, *work)
        return
    free = _free
    try:
        _pool = _pool or Pool(memory.workers)
        _launch(_pool.box, _pool.locks, kernel.address, _pool.workers, *work)
    finally:
        free.release()


def _plain(array: Array) -> Array:
    """Flatten an array, and copy an array that is read-only (as JAX's are), unaligned or not contiguous.

    To Numba such an array has another type, for which it would compile again.
    """
    return (array if array.flags.carray else array.copy()).reshape(-1)


NO_FLOATS = np.empty(0, dtype=np.float32)
