"""CUDA backend: the kernels of `cuda_src/`, compiled on the user's machine, and the engines that launch them."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

from sketchssm.arrays import interop
from sketchssm.cuda.constants import MAX_RANK, WINDOWS

__all__ = ["MAX_RANK", "WINDOWS", "calibration", "load_layer_inputs", "missing"]

DRIVER = 12000
"""First version of the driver that has launches with attributes."""


@cache
def missing() -> str:
    """Name the requirement of the backend that this machine lacks, or nothing; evaluated once, never raises."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'sketchssm-decode[cuda12]' or 'sketchssm-decode[cuda13]')"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # callers of other backends need no warning about an unusable CuPy
            import cupy

            if not cupy.cuda.is_available():
                return "CuPy sees no CUDA device"
            driver = cupy.cuda.runtime.driverGetVersion()
            return (
                ""
                if driver >= DRIVER
                else f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, expected 12.0 or later"
            )
    except Exception as error:  # a broken installation fails in many ways
        return f"CuPy does not work: {error}"


def calibration(like: Any) -> Any:
    """The kernels of calibration (`sketchssm.cuda.calibrate`) for arrays like one, or None: they need CuPy."""
    if not interop.is_on_device(like) or missing() or like.__dlpack_device__()[0] not in interop.CUDA_DEVICES:
        return None
    from sketchssm.cuda import calibrate

    return calibrate


def load_layer_inputs(device: int, heads: int, dim: int, types: tuple[str, ...]) -> tuple[Any, Any]:
    """Load the kernels between a PyTorch layer and a head on a GPU, for `heads` of `dim` elements.

    `types` are those of activations, of raw gates, of rates and skips, and of biases. Returns the kernels
    (`LayerInputs`) and a function that returns the context in which they are launched on PyTorch's current stream.
    """
    import cupy

    from sketchssm.cuda.frameworks import TorchArrays
    from sketchssm.cuda.layer_kernels import LayerInputs

    with cupy.cuda.Device(device):
        return LayerInputs(heads, dim, types), TorchArrays(device).stream
