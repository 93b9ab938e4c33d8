"""Build of sketchssm: which files make up the package. Its metadata stands in pyproject.toml."""

import os
from contextlib import suppress
from pathlib import Path

from setuptools import find_packages, setup

packages = find_packages(include=["sketchssm", "sketchssm.*"])
package_dir = {}
package_data = {"sketchssm": ["py.typed", "data/*.npz"]}

# The CUDA sources live beside the package and are installed into it, to be compiled where they run.
if Path("cuda_src").is_dir():
    packages.append("sketchssm.cuda_src")
    package_dir["sketchssm.cuda_src"] = "cuda_src"
    package_data["sketchssm.cuda_src"] = ["*.cu", "*.cuh"]

# Test equipment, built on demand: runs the CUDA kernels on the host (see tests/host/README.md).
ext_modules, setup_requires = [], []
if os.environ.get("SKETCHSSM_BUILD_HOST_KERNELS") == "1":
    setup_requires.append("pybind11")
    with suppress(ImportError):  # not there yet when an installer asks what the build requires
        from pybind11.setup_helpers import Pybind11Extension

        ext_modules.append(
            Pybind11Extension("sketchssm._cuda_host", ["tests/host/module.cpp"], cxx_std=17, optional=True)
        )

setup(
    packages=packages,
    package_dir=package_dir,
    package_data=package_data,
    ext_modules=ext_modules,
    setup_requires=setup_requires,
)
