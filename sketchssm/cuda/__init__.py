"""CUDA backend: the kernels of `cuda_src/`, compiled where they run, and the engines that launch them."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

__all__ = ["missing"]


@cache
def missing() -> str:
    """Tell what this machine lacks to run the backend; looked up once, never raises.

    Returns
    -------
    str
        Empty where CuPy is installed and sees a device.
    """
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'sketchssm[cuda12]' or 'sketchssm[cuda13]')"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a CuPy that can't be used must not trouble who did not ask for it
            import cupy

            return "" if cupy.cuda.is_available() else "CuPy sees no CUDA device"
    except Exception as error:  # a broken installation fails in many ways
        return f"CuPy does not work: {error}"
