"""Fixtures and settings shared by all tests."""

import gc
import importlib.util
import os
import zlib
from pathlib import Path

# Idle OpenMP threads sleep. By default they spin, and the threads of several pytest workers take each other's cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# By default JAX takes three quarters of the device's memory at its first call, and leaves too little to other workers.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import pytest
from hypothesis import settings
from samples import LAYERS

from sketchssm.layer.recurrence import Layer

# No deadline, as a busy machine may pause a test. CI draws the same examples in every run.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def has_cuda_device() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


# Beginnings of the names of files that workers take first, and the file that they take last. While the first file
# compiles the CPU kernels, other workers run files that need none of them. The last file compiles in as many threads
# as there are cores, so no core waits for the last worker. On a device the sanitizers take the longest.
FIRST = "test_heads.", "test_cuda_host", "test_device.", "test_cuda_sanitizer."
LAST = "test_cuda_compile.py"


def turn(item: pytest.Item) -> int:
    name = item.path.name
    return next((i for i, first in enumerate(FIRST) if name.startswith(first)), len(FIRST) + (name == LAST))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files; without a CUDA device deselect what needs one, and thorough tests unless they are asked for."""
    items.sort(key=turn)
    left = [] if os.environ.get("SKETCHSSM_THOROUGH") else ["thorough"]
    out = [item for item in items if any(item.get_closest_marker(name) for name in ["gpu", *left])]
    if out and not has_cuda_device():
        config.hook.pytest_deselected(items=out)
        out = set(out)
        items[:] = [item for item in items if item not in out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add the names of skipped tests and modules, one a line, to the file that SKETCHSSM_SKIPPED names.

    Workers know all modules: xdist takes those for one that skip in the same line, which may be of what they import.
    """
    if path := os.environ.get("SKETCHSSM_SKIPPED"):
        file = Path(path)
        before = file.read_text().splitlines() if file.exists() else []
        skipped = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
        file.write_text("".join(f"{name}\n" for name in sorted(skipped.union(before))))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting thousands of collected tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A random generator for each test, seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    """A small layer of each kind."""
    return LAYERS[request.param]


@pytest.fixture(params=("reference", "cpu"))
def backend(request: pytest.FixtureRequest) -> str:
    """Backends that run on any host."""
    return str(request.param)


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def jax():
    return pytest.importorskip("jax")


@pytest.fixture(scope="session")
def cupy():
    return pytest.importorskip("cupy")
