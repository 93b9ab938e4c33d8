"""Several processes through torch.distributed, on the host: merged moments, and the tensor-parallel example."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from samples import LAYERS, relative, tokens_of

import sketchssm as ss

ROOT = Path(__file__).parents[1]
WINDOW = 5

WORKER = """
import sys

import numpy as np
from torch import distributed

import sketchssm as ss

distributed.init_process_group("gloo")
rank = distributed.get_rank()
tokens = np.load("tokens.npz")
moments = ss.Moments(ss.Layer("kda", 4, 6, 5, 2), window=5)
moments.update(*(tokens[name][rank::2] for name in ("q", "k", "v", "g", "beta")))
before = moments.state_gram.copy()
total = ss.distributed.all_reduce_moments(moments)
assert np.array_equal(moments.state_gram, before)
total.save(f"total-{rank}.safetensors")

last = distributed.new_group([1])
if rank == 1:
    assert np.array_equal(ss.distributed.all_reduce_moments(moments, last).state_gram, before)

try:
    ss.distributed.all_reduce_moments(ss.Moments("gdn", 4, 6, 5, window=8 + rank))
except ValueError as error:
    assert str(error) == (
        "moments: expected the same window in all processes, got 8 in process 0 and 9 in process 1 of the group"
    )
else:
    raise AssertionError
distributed.destroy_process_group()
"""


def torchrun(script, folder, processes=2):
    """Run a script in several processes on the host; returns its standard output."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_moments(torch, rng, tmp_path):
    """Two processes have the same sums, those of one process up to the rounding of a few hundred float64 terms."""
    tokens = tokens_of(rng, LAYERS["kda"], 5, 23, np.float64)
    np.savez(tmp_path / "tokens.npz", **tokens._asdict())
    (tmp_path / "worker.py").write_text(WORKER)
    torchrun(tmp_path / "worker.py", tmp_path)
    first, second = (ss.Moments.load(tmp_path / f"total-{rank}.safetensors") for rank in range(2))
    whole = ss.Moments(LAYERS["kda"], window=WINDOW)
    whole.update(*tokens)
    np.testing.assert_array_equal(first.samples, whole.samples)
    for name in ("state_gram", "query_gram"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        assert relative(getattr(first, name), getattr(whole, name)) < 1e-13
    assert ss.fit_basis(first).rank_max == ss.fit_basis(whole).rank_max


@pytest.mark.slow
def test_tensor_parallel_example(torch, tmp_path):
    """The script itself compares outputs and states, on a CPU bit for bit."""
    printed = torchrun(ROOT / "examples" / "tensor_parallel.py", tmp_path)
    assert "2 processes with [2, 2] heads have the outputs of one with 4 heads" in printed
