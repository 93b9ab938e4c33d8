"""The plugin's Triton kernels, run by Triton's interpreter, against PyTorch in the same types."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

# The interpreter is chosen when Triton is imported, so the kernels run in a process of their own.
PROGRAM = """
import torch
from sketchssm.vllm import inputs, kernels

torch.manual_seed(0)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # some roundings; bf16, which the interpreter truncates

def close(got, want):
    tolerance = TOLERANCE[want.dtype]
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got.float() - want.float()).norm() <= tolerance * want.float().norm()

for kind in TOLERANCE:
    for heads, dim in ((10, 80), (4, 64), (3, 128)):
        wide = torch.randn(5, 3 * heads * dim + 7, dtype=torch.float32).to(kind)
        x, y = (wide[:, i * heads * dim : (i + 1) * heads * dim].view(5, heads, dim) for i in (0, 2))
        gates = 5 * torch.randn(5, 3 * heads).to(kind)
        a, b = gates[:, :heads], gates[:, 2 * heads :]
        bias, rate = torch.randn(heads), torch.rand(heads)
        for got, want in zip(kernels.mamba_inputs(x, a, -rate, bias), inputs.mamba_inputs(x, a, -rate, bias)):
            close(got, want)
        for got, want in zip(kernels.normalised(x, y), inputs.normalised(x, y)):
            close(got, want)
        for got, want in zip(kernels.delta_inputs(a, b, rate, bias), inputs.delta_inputs(a, b, rate, bias)):
            close(got, want)
        out = torch.randn(5, heads, dim).to(kind)
        want = out.clone()
        inputs.add_skip(want, x, bias)
        kernels.add_skip(out, x, bias)
        close(out, want)
"""


def test_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
