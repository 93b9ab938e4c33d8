"""The CPU backend's threads, each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SETUP = """
import os, threading, time
import numpy as np
import sketchssm as ss
from sketchssm.layer.recurrence import Layer

LAYER = Layer("mamba2", 8, 128, 128)  # four rows hold twice what one thread would take alone

def decode(seed, tokens=60):
    rng = np.random.default_rng(seed)
    head = ss.StandardHead(LAYER, 4, "cpu")
    outputs = []
    for _ in range(tokens):
        q, k, v = (rng.standard_normal((4, 8, 128), dtype=np.float32) for _ in range(3))
        outputs.append(head.step(q, k, v, np.full((4, 8), -0.5, np.float32)))
    return np.stack(outputs)
"""


def run(script: str, **environment: str) -> str:
    """What a script prints, run with two workers however many cores there are."""
    command = [sys.executable, "-c", SETUP + script]
    settings = os.environ | {"NUMBA_NUM_THREADS": "2"} | environment
    settings.pop("OMP_WAIT_POLICY", None)  # the users' default, not the tests'
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Numba's layer that allows one caller at a time is not used; with it the process would abort.
@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_heads_of_two_threads_decode_what_each_decodes_alone(layer: str) -> None:
    run(
        """
want = [decode(seed) for seed in range(2)]
have = [None, None]
def work(seed):
    have[seed] = [decode(seed) for _ in range(5)]
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for seed in range(2):
    for outputs in have[seed]:
        np.testing.assert_array_equal(outputs, want[seed])
""",
        NUMBA_THREADING_LAYER=layer,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_decodes() -> None:
    run("""
import warnings
warnings.simplefilter("ignore")  # Python's own, of threads and fork
want = decode(0)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(decode(0), want) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
np.testing.assert_array_equal(decode(0), want)
""")


def test_idle_threads_sleep() -> None:
    """A step of a quarter of a millisecond takes no more than 9 ms of processor time, the pause after it included. On
    a loaded machine it took 6.5 ms. Threads that spin, like those of OpenMP, use more than the 10 ms of the pause;
    PyTorch then lacks this time between two steps.
    """
    used = run("""
decode(0)
start = time.process_time()
for _ in range(50):
    decode(0, 1)
    time.sleep(0.01)
print((time.process_time() - start) / 50)
""")
    assert float(used) < 9e-3


def test_a_system_without_further_threads_decodes_with_one() -> None:
    run("""
want = decode(0)
from sketchssm.cpu import workers
workers._pool = None
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
np.testing.assert_array_equal(decode(0), want)
assert workers._pool.workers == 1
""")
