"""Contents of a wheel, the name of the distribution, and the other package with the same import name."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
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
    assert {name for name in names if "cuda_src/" in name} == {
        f"sketchssm/{path.relative_to(ROOT)}" for path in (ROOT / "cuda_src").rglob("*.cu*")
    }
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


def test_commands_name_this_distribution():
    """`pip install sketchssm` gets another package. Extras that messages and pages name exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    for folder in ("sketchssm", "docs", "examples", "benchmarks"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    named = set()
    for path in texts:
        for name, extras in re.findall(r"""(sketchssm[\w-]*|'\.)\[([a-z\d,]+)\]['"]""", path.read_text("utf-8")):
            assert name in (project["name"], "'."), path
            named |= set(extras.split(","))
    assert {"plot", "transformers", "cuda13", "test"} <= named <= set(project["optional-dependencies"])


def test_no_module_of_the_other_package():
    """Engines look for ``sketchssm.kernels`` to find the authors' package: they do not find it here."""
    assert importlib.util.find_spec("sketchssm.kernels") is None


@pytest.mark.parametrize(
    "place",
    [None, "kernels/_nvrtc.py", "../sketchssm-0.1.15.dist-info/RECORD", "../../b/sketchssm-0.2.dist-info/RECORD"],
)
def test_another_package_of_the_same_name(place, tmp_path):
    """The import warns if files of the authors' package lie among ours, or it is installed beside or elsewhere."""
    package, other = tmp_path / "a" / "sketchssm", tmp_path / "b"
    for folder in (package, other, tmp_path / "a" / "sketchssm-0.1.0.dist-info"):
        folder.mkdir(parents=True)
    (tmp_path / "a" / "sketchssm-0.1.0.dist-info" / "RECORD").write_text(
        "sketchssm/plan.py,,\n"
    )  # an older one of ours
    shutil.copy(ROOT / "sketchssm" / "__init__.py", package)
    if place:
        (package / place).parent.mkdir(exist_ok=True)
        (package / place).write_text("sketchssm/__init__.py,,\nsketchssm/kernels/_nvrtc.py,,\n")
    search = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "a", other)))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sketchssm"], env=search, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("RuntimeWarning: the package sketchssm of the paper's authors is in ") == bool(place)
