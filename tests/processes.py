"""Scripts in several processes of torch.distributed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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


def check_tensor_parallel_example(folder, devices=""):
    """The script itself compares outputs and states: on CPUs bit for bit, on GPUs outputs up to rounding."""
    printed = torchrun(ROOT / "examples" / "tensor_parallel.py", folder=folder, devices=devices)
    assert "2 processes with [2, 2] heads have the outputs of one with 4 heads" in printed
