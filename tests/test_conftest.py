"""What .ci/run asks of conftest.py."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_skipped_modules_are_all_named(tmp_path):
    """Also those that skip in the same line of what they import, of which xdist reports one."""
    (tmp_path / "common.py").write_text("import pytest\npytest.importorskip('a_framework_that_nobody_has')\n")
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text("import common\n")
    (tmp_path / "test_three.py").write_text("import pytest\n\ndef test(): pytest.skip('no')\n")
    path = os.pathsep.join(map(str, (HERE.parent, HERE)))
    given = {"SKETCHSSM_SKIPPED": str(tmp_path / "names"), "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "2", "--rootdir", ".", "-c", os.devnull, "."]
    subprocess.run(command, env=os.environ | given, cwd=tmp_path, capture_output=True, check=True, timeout=200)
    names = (tmp_path / "names").read_text().splitlines()
    assert names == ["test_one.py", "test_three.py::test", "test_two.py"]
