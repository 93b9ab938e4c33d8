"""The memory of a call's arguments on the device, as the kernels take it."""

from __future__ import annotations

__all__ = ["WIDE", "Pointer", "Slots", "StepInputs"]

WIDE = 1
"""Flag of integers of 8 bytes; as in ``cuda_src/call_slots.cuh``."""


class Pointer:
    """Rows of an argument.

    Parameters
    ----------
    address : int
        Where the first row starts.
    shape : tuple of int
        Rows first; then, for outputs, tokens.
    row, step : int
        Bytes from one row to the next, and from one token to the next.
    """

    __slots__ = ("address", "row", "shape", "step")

    def __init__(self, address: int, shape: tuple[int, ...], row: int, step: int = 0) -> None:
        self.address, self.shape, self.row, self.step = address, shape, row, step

    def rows(self, first: int, last: int) -> Pointer:
        """Some of the rows."""
        shape = (min(last, self.shape[0]) - first, *self.shape[1:])
        return Pointer(self.address + first * self.row, shape, self.row, self.step)


class Slots:
    """Slot numbers of a call, or counts of tokens: an integer for each row.

    Parameters
    ----------
    address : int
        Where they start; they are contiguous.
    shape : tuple of int
        ``(rows,)``.
    flags : int
        `WIDE` if they are int64, 0 if they are int32.
    """

    __slots__ = ("address", "flags", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], flags: int) -> None:
        self.address, self.shape, self.flags = address, shape, flags

    @property
    def number(self) -> tuple[int, int]:
        """Address and flags."""
        return self.address, self.flags

    def rows(self, first: int, last: int) -> Slots:
        """Some of the rows."""
        size = 8 if self.flags & WIDE else 4
        return Slots(self.address + first * size, (min(last, self.shape[0]) - first,), self.flags)


class StepInputs:
    """A step's q, k, v, g and beta; zeros stand for a beta that the layer does not have.

    Parameters
    ----------
    addresses : sequence of int
        Where the first rows start.
    row_strides, steps : tuple of int
        Bytes of each array from one row to the next, and from one token to the next.
    """

    __slots__ = ("addresses", "row_strides", "steps")

    def __init__(self, addresses: list[int], row_strides: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.addresses, self.row_strides, self.steps = addresses, row_strides, steps

    def token(self, row: int, t: int = 0) -> list[int]:
        """Addresses of a token of a row."""
        if not row and not t:
            return self.addresses
        strides = zip(self.addresses, self.row_strides, self.steps, strict=True)
        return [address + row * stride + t * step for address, stride, step in strides]
