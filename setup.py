"""Build of sketchssm: which files make up the package. Its metadata stands in pyproject.toml."""

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

setup(packages=packages, package_dir=package_dir, package_data=package_data)
