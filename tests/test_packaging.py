"""Contents of a wheel."""

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


def test_wheel(tmp_path):
    """A wheel has the kernels' sources, finds them, and has no module that was deleted since an earlier build."""
    pytest.importorskip("setuptools", minversion="77")
    tree, site = tmp_path / "tree", tmp_path / "site"
    for name in ("sketchssm", "cuda_src"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    deleted = tree / "build" / "lib" / "sketchssm" / "deleted.py"
    deleted.parent.mkdir(parents=True)
    deleted.touch()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    plain = {name: value for name, value in os.environ.items() if name != "SKETCHSSM_BUILD_HOST_KERNELS"}
    subprocess.run([*build, str(tmp_path), str(tree)], env=plain, check=True, timeout=300)
    path = next(tmp_path.glob("*.whl"))
    assert "-cp311-abi3-" in path.name  # one for all versions of Python
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        wheel.extractall(site)
    (site / "cuda_src").mkdir()  # of another package
    assert {Path(name).name for name in names if "cuda_src/" in name} == {
        x.name for x in (ROOT / "cuda_src").iterdir()
    }
    assert "sketchssm/cli/report.html" in names
    assert ("sketchssm/cuda/_direct.abi3.so" in names) == (shutil.which("g++") is not None)
    assert not any(name.endswith((".cpp", ".c")) for name in names)
    assert {name for name in names if name.endswith(".py")} == {
        str(path.relative_to(tree)) for path in (tree / "sketchssm").rglob("*.py")
    }
    entries = next(site.glob("*.dist-info/entry_points.txt")).read_text()
    assert "[vllm.general_plugins]\nsketchssm = sketchssm.vllm:register" in entries
    done = subprocess.run(
        [sys.executable, "-c", READ],
        cwd=tmp_path,
        env=plain | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(site)
