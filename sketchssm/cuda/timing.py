"""What programs that time heads on the device need: inputs that are there, and an idle device."""

from __future__ import annotations

from typing import Any

import numpy as np

from sketchssm.recurrence import Tokens

__all__ = ["synchronize", "upload"]


def upload(tokens: Tokens, activation: str = "float32") -> Tokens:
    """Copy inputs to the current device: q, k and v in the activations' type, gates in float32."""
    import cupy
    import ml_dtypes

    wide = np.dtype(np.float32)
    narrow = np.dtype(ml_dtypes.bfloat16 if activation == "bfloat16" else activation)

    def copied(name: str, x: Any) -> Any:
        return cupy.asarray(np.ascontiguousarray(x, dtype=narrow if name in "qkv" else wide))

    return Tokens(*(None if x is None else copied(name, x) for name, x in tokens._asdict().items()))


def synchronize() -> None:
    """Wait until the current device has done all that it was told to."""
    import cupy

    cupy.cuda.Device().synchronize()
