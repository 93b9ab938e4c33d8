"""All kernels under compute-sanitizer: no access out of bounds or misaligned, and no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


TOOLS = {
    "memcheck": ("", "ERROR SUMMARY: 0 errors"),
    # racecheck does not know that a warp synchronises before one of its lanes arrives at a gate for all
    "racecheck": ("-DEVERY_LANE_ARRIVES", "RACECHECK SUMMARY: 0 hazards"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(cupy, tool):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    options, clean = TOOLS[tool]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent)])
    result = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(here / "sanitized.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": paths, "SKETCHSSM_CUDA_OPTIONS": options},
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "all kernels have run" in result.stdout
    assert clean in result.stdout
