"""One spelling for NumPy, CuPy and PyTorch, for code that computes where its arrays are.

The three agree on most functions: PyTorch knows NumPy's names of arguments. `Space` has the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sketchssm.arrays import interop


class Space:
    """The library, device and types of some arrays.

    `xp` is the module, and `on_device` tells whether the arrays are on a GPU, as CuPy's are and PyTorch's may be. All
    other arrays are NumPy's: `Space` has no other kinds.
    """

    def __init__(self, like: Any = None) -> None:
        kind = interop.framework(like)
        self.on_device = kind in ("torch", "cupy") and interop.is_on_device(like)
        self._like: Any = like if self.on_device else None
        self._torch = self.on_device and kind == "torch"
        self.xp: Any = sys.modules[kind] if self.on_device else np

    def holds(self, array: Any) -> bool:
        """Whether an array is one of this space: of its library, and on its device."""
        if not self.on_device:
            return type(array) is np.ndarray
        return interop.framework(array) == interop.framework(self._like) and array.device == self._like.device

    def dtype(self, name: str) -> Any:
        """Return the library's type of a name."""
        return getattr(self.xp, name)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array to fill."""
        if self._torch:
            return self._like.new_empty(shape, dtype=self.dtype(dtype))
        with self._current():
            return self.xp.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of zeros."""
        if self._torch:
            return self._like.new_zeros(shape, dtype=self.dtype(dtype))
        with self._current():
            return self.xp.zeros(shape, dtype)

    def cast(self, array: Any, dtype: str) -> Any:
        """Return an array of a type; the same array if it is of that type."""
        return array.to(self.dtype(dtype)) if self._torch else array.astype(dtype, copy=False)

    def array(self, values: Any, dtype: str) -> Any:
        """Return an array of this space, of any array or numbers."""
        if self.holds(values):
            return self.cast(values, dtype)
        host = np.asarray(values if np.isscalar(values) else interop.to_host(values, "values"), dtype)
        return interop.to_kind(host, self._like) if self.on_device else host

    def product(self, x: Any, y: Any) -> Any:
        """``x @ y`` where the larger factor is a transposed view, which CuPy would copy: computed as ``y^T x^T``."""
        return (y.swapaxes(-1, -2) @ x.swapaxes(-1, -2)).swapaxes(-1, -2) if self.on_device else x @ y

    @contextmanager
    def _current(self) -> Iterator[None]:
        """CuPy creates arrays on its current device."""
        if self.on_device and not self._torch:
            with self._like.device:
                yield
        else:
            yield

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Compute without gradients, and products in the types of their arguments: no TF32, no autocast."""
        if not self._torch:
            with self._current():
                yield
            return
        torch = self.xp
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.no_grad(), torch.autocast(self._like.device.type, enabled=False):
                yield
        finally:
            torch.set_float32_matmul_precision(before)
