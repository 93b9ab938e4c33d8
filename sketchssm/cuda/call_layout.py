"""Layout of the arrays of a call, and the check whether kernels can use a view in place."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from sketchssm.arrays.interop import host_type
from sketchssm.cuda.constants import ACCESS, MOST_STRIDE


class ArrayLayout:
    """One argument: rows and tokens of contiguous, aligned elements, with any stride between rows and tokens.

    `dtype` is its type in the kernels, `rows` and `length` are the size of the batch and the tokens of a row, `tail`
    is the shape of a token; `several` tells whether arrays have an axis for tokens.
    """

    def __init__(self, name: str, dtype: str, rows: int, length: int, tail: tuple[int, ...], several: bool) -> None:
        self.name, self.dtype = name, dtype
        self._item = item = host_type(dtype).itemsize
        self.align = ACCESS if len(tail) > 1 else item
        self.shape = (rows, length, *tail)
        self._tail, self._several = tail, several
        self._known: dict[tuple[int, ...], tuple[int, int, int] | None] = {}
        step = prod(tail) * item
        row = length * step if rows > 1 else 0
        if row > MOST_STRIDE:
            raise ValueError(
                f"{name}: expected at most {MOST_STRIDE} bytes a row, got {row}; pass fewer tokens in a call"
            )
        self.contiguous = row, step, rows * length * step
        """Bytes of a contiguous array: from row to row (0 for a single row), from token to token, and in all."""

    def strides(self, strides: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Like `contiguous`, of an array with these strides (in elements); None if the kernels can't take it."""
        if strides not in self._known:
            if len(self._known) > 64:  # of a caller whose strides never repeat
                self._known.clear()
            self._known[strides] = self._find(strides)
        return self._known[strides]

    def _find(self, strides: tuple[int, ...]) -> tuple[int, int, int] | None:
        lead = 2 if self._several else 1
        expected = 1
        for size, stride in zip(reversed(self._tail), reversed(strides[lead:]), strict=True):
            if size > 1 and stride != expected:
                return None
            expected *= size
        rows, length = self.shape[:2]
        row = self._item * strides[0] if rows > 1 else 0
        step = self._item * strides[1] if self._several and length > 1 else 0
        if self.name == "out" and step not in (0, self.contiguous[1]):
            return None
        for stride in (row, step):
            if not 0 <= stride <= MOST_STRIDE or stride % self.align:
                return None
        return row, step, (rows - 1) * row + (length - 1) * step + expected * self._item


class CallLayout:
    """All arrays of a call whose v has this shape.

    `tails` and `dtypes` have the shape of a token and the type of each input; `several` is as in `ArrayLayout`.
    """

    def __init__(
        self,
        v_shape: Any,
        several: bool,
        tails: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
        output_dtype: str,
    ) -> None:
        self.v_shape = tuple(v_shape)
        size = v_shape[0], v_shape[1] if several else 1
        self.inputs = [ArrayLayout(name, dtypes[name], *size, tail, several) for name, tail in tails.items()]
        self.out = ArrayLayout("out", output_dtype, *size, tails["v"], several)
        rows, steps, extents = zip(*(x.contiguous for x in self.inputs), strict=True)
        nothing = (0,) * (5 - len(self.inputs))  # a layer without beta
        self.rows: tuple[int, ...] = rows + nothing
        self.steps: tuple[int, ...] = steps + nothing
        self.extents: tuple[int, ...] = extents + nothing
