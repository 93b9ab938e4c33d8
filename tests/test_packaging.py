"""What an installed package holds: the kernels' sources travel with it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

READ = """
from pathlib import Path
import sketchssm
from sketchssm.cuda.modules import source_text
for name in ("standard", "read", "flush", "slots"):
    assert "__global__" in source_text(name) and "#include" not in source_text(name), name
print(Path(sketchssm.__file__).parents[1])
"""


def test_kernels_are_read_from_a_wheel(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    tree, site = tmp_path / "tree", tmp_path / "site"
    for name in ("sketchssm", "cuda_src"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    plain = {name: value for name, value in os.environ.items() if name != "SKETCHSSM_BUILD_HOST_KERNELS"}
    subprocess.run([*build, str(tmp_path), str(tree)], env=plain, check=True, timeout=300)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {Path(name).name for name in wheel.namelist() if "cuda_src/" in name}
        wheel.extractall(site)
    assert names == {path.name for path in (ROOT / "cuda_src").iterdir()}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=tmp_path,
        env=plain | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(site)
