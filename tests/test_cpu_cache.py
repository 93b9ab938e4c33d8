"""The cache of compiled CPU kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sketchssm as ss
from sketchssm.cpu import decode, jit
from sketchssm.layer.recurrence import Layer
from sketchssm.plans import files
from sketchssm.plans.files import source_digest


def test_kernels_are_cached_under_the_whole_package() -> None:
    assert decode.window_kernel.dispatcher._cache._cache_file._source_stamp == source_digest(*jit.SOURCES)


@pytest.mark.parametrize("module", ["cpu/tiles.py", "reference/maps.py"])
def test_an_edit_of_any_kernel_invalidates_all(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(files.PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__", "data", "*.so"))
    fresh = source_digest.__wrapped__
    before = source_digest(*jit.SOURCES)
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "package")
    assert fresh(*jit.SOURCES) == before
    edited = tmp_path / "package" / module
    edited.write_text(edited.read_text() + "\n")
    assert fresh(*jit.SOURCES) != before


def test_read_only_inputs_need_no_other_kernel() -> None:
    head = ss.ReplayHead(Layer("mamba2", 2, 6, 5), 1, "cpu", window=4)
    head.warmup()
    compiled = len(decode.window_kernel.dispatcher.signatures)
    tokens = [np.zeros(shape, np.float32) for shape in ((1, 2, 6), (1, 2, 6), (1, 2, 5), (1, 2))]
    for array in tokens:
        array.flags.writeable = False
    head.step(*tokens)
    assert len(decode.window_kernel.dispatcher.signatures) == compiled


IGNORED = shutil.ignore_patterns("__pycache__", "data")

STEP = """
import numpy as np
import sketchssm as ss
from sketchssm.layer.recurrence import Layer
from sketchssm.cpu.standard import standard_kernel

head = ss.StandardHead(Layer("mamba2", 2, 16, 16), 1, "cpu")
q = np.ones((1, 2, 16), np.float32)
for _ in range(2):
    head.step(q, q, q, np.zeros((1, 2), np.float32))
statistics = standard_kernel.dispatcher.stats
print("hits", sum(statistics.cache_hits.values()), "misses", sum(statistics.cache_misses.values()))
"""


def run_step(before: str = "", folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Step in a process of its own, with the package from a folder, after some lines of Python."""
    settings = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | environment
    command = [sys.executable, "-W", "always::RuntimeWarning", "-c", before + STEP]
    return subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_full_disk_costs_a_warning(tmp_path: Path) -> None:
    shutil.copytree(files.PACKAGE, tmp_path / "sketchssm", ignore=IGNORED)  # without the cache of other tests
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    done = run_step(full, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hits 0 misses 1\n"
    assert done.stderr.count("compiled CPU kernels cannot be kept") == 1


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, and its kernels compiled beside the sources."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(files.PACKAGE, folder / "sketchssm", ignore=IGNORED)
    first = run_step(folder=folder, **home_of(folder))
    assert first.stdout == "hits 0 misses 1\n", first.stderr
    return folder


def home_of(folder: Path) -> dict[str, str]:
    """Environment in which a folder has the package and the user's files."""
    return {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "home"), "PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_the_cache_of_a_read_only_installation_is_used(compiled: Path) -> None:
    # what makes a folder read-only to Numba, also for a superuser, who may write everywhere
    locked = f"""
import tempfile
real = tempfile.TemporaryFile
def refuse(*args, dir=None, **kwargs):
    if str(dir).startswith({str(compiled / "sketchssm")!r}):
        raise PermissionError(13, "read-only")
    return real(*args, dir=dir, **kwargs)
tempfile.TemporaryFile = refuse
"""
    done = run_step(locked, folder=compiled, **home_of(compiled))
    assert done.stdout == "hits 1 misses 0\n", done.stderr
    assert not done.stderr


@pytest.mark.slow
def test_a_damaged_cache_is_replaced(compiled: Path) -> None:
    """Indices of the cache that are empty or cut, as after a power failure."""
    for number, path in enumerate(sorted(compiled.rglob("*.nbi"))):
        os.truncate(path, 40 * (number % 2))
    for stdout in ("hits 0 misses 1\n", "hits 1 misses 0\n"):
        done = run_step(folder=compiled, **home_of(compiled))
        assert (done.returncode, done.stdout, done.stderr) == (0, stdout, "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT: expected 0, as backend 'cpu' is compiled code, got 1"),
        (
            {"NUMBA_CPU_NAME": "sandybridge", "NUMBA_CPU_FEATURES": ""},
            "backend: 'cpu' needs instructions that convert",
        ),
    ],
)
def test_where_kernels_cannot_be_compiled(settings: dict[str, str], message: str) -> None:
    """Without the check LLVM would end the process on a CPU that does not convert float16."""
    done = run_step(PYTHONPATH=str(files.PACKAGE.parent), **settings)
    assert f"UnsupportedError: {message}" in done.stderr.splitlines()[-1]
