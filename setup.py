"""Build of sketchssm: the files of the package. Its metadata is in pyproject.toml."""

import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py


class CleanBuild(build_py):
    """Remove what an earlier build left in the build folder, so that deleted modules do not get into wheels."""

    def run(self):
        """Build the modules into an empty folder."""
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "sketchssm"), ignore_errors=True)
        super().run()


packages = find_packages(include=["sketchssm", "sketchssm.*"])
package_dir = {}
package_data = {"sketchssm": ["py.typed", "calibrate/data/*.npz"]}

# The CUDA sources are beside the package. They are installed into it and compiled on the user's machine.
if Path("cuda_src").is_dir():
    packages.append("sketchssm.cuda_src")
    package_dir["sketchssm.cuda_src"] = "cuda_src"
    package_data["sketchssm.cuda_src"] = ["*.cu", "*/*.cuh"]

# Launches of steps with less work on the host. Needs neither CUDA nor PyTorch to build, and heads work without it. One
# build serves all versions of Python.
sources = [Path("sketchssm/cuda", name) for name in ("_direct.cpp", "_direct_interfaces.h")]
digest = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
direct = Extension(
    "sketchssm.cuda._direct",
    [str(sources[0])],
    depends=[str(sources[1])],
    language="c++",
    define_macros=[("SOURCE", f'"{digest}"')],  # tells builds of old sources
    extra_compile_args=["-std=c++17", "-fvisibility=hidden"] if os.name == "posix" else ["/std:c++17"],
    py_limited_api=True,
    optional=True,
)

# Built only for the tests: runs the CUDA kernels on the host (see tests/host/README.md).
ext_modules, setup_requires = [direct], []
if os.environ.get("SKETCHSSM_BUILD_HOST_KERNELS") == "1":
    setup_requires.append("pybind11")
    with suppress(ImportError):  # pybind11 is missing while the installer asks for the build's requirements
        from pybind11.setup_helpers import Pybind11Extension

        ext_modules.append(
            Pybind11Extension("sketchssm._cuda_host", ["tests/host/module.cpp"], cxx_std=17, optional=True)
        )

setup(
    cmdclass={"build_py": CleanBuild},
    packages=packages,
    package_dir=package_dir,
    package_data=package_data,
    exclude_package_data={"": ["*.cpp", "*.h"]},
    ext_modules=ext_modules,
    setup_requires=setup_requires,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
