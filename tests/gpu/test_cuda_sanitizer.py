"""All kernels under compute-sanitizer: no access out of bounds or misaligned.

racecheck is left out: it reports accesses that gates order at which one lane arrives for its warp.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def test_memcheck(cupy):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here.parents[1]), str(here.parent), str(here)])
    result = subprocess.run(
        [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(here / "sanitized.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "all kernels have run" in result.stdout
    assert "0 errors" in result.stdout
