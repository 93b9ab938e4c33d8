"""Arrays of any framework in, the caller's kind out, through DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["from_host", "to_host"]


def to_host(array: Any, name: str) -> npt.NDArray[Any]:
    """The caller's array as a NumPy array."""
    return np.asarray(array)


def from_host(array: npt.NDArray[Any], like: Any, out: Any = None) -> Any:
    """A NumPy result as the caller's kind of array."""
    if out is not None:
        out[...] = array
        return out
    return array.astype(like.dtype, copy=False)
