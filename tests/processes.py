"""Scripts in several processes of torch.distributed, and the check of merged moments that they run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from samples import LAYERS, relative, tokens_of

import sketchssm as ss

ROOT = Path(__file__).parents[1]

WORKER = """
import sys

import numpy as np
import torch
from torch import distributed

import sketchssm as ss

distributed.init_process_group(sys.argv[1])
rank = distributed.get_rank()
if sys.argv[1] == "nccl":
    torch.cuda.set_device(rank)
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


def torchrun(script, *arguments, folder, devices=""):
    """Run a script in two processes that see some CUDA devices, by default none; returns its standard output."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(script), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": devices},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_moments(communication, rng, folder, devices=""):
    """Two processes have the same sums, those of one process up to the rounding of a few hundred float64 terms."""
    tokens = tokens_of(rng, LAYERS["kda"], 5, 23, np.float64)
    np.savez(folder / "tokens.npz", **tokens._asdict())
    (folder / "worker.py").write_text(WORKER)
    torchrun(folder / "worker.py", communication, folder=folder, devices=devices)
    first, second = (ss.Moments.load(folder / f"total-{rank}.safetensors") for rank in range(2))
    whole = ss.Moments(LAYERS["kda"], window=5)
    whole.update(*tokens)
    np.testing.assert_array_equal(first.samples, whole.samples)
    for name in ("state_gram", "query_gram"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        assert relative(getattr(first, name), getattr(whole, name)) < 1e-13
    assert ss.fit_basis(first).rank_max == ss.fit_basis(whole).rank_max


def check_tensor_parallel_example(folder, devices=""):
    """The script itself compares outputs and states: on CPUs bit for bit, on GPUs outputs up to rounding."""
    printed = torchrun(ROOT / "examples" / "tensor_parallel.py", folder=folder, devices=devices)
    assert "2 processes with [2, 2] heads have the outputs of one with 4 heads" in printed
