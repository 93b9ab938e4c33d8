"""Addresses of a call's arguments on the device."""

from __future__ import annotations

from sketchssm.cuda.constants import COUNTED, WIDE


class Pointer:
    """Rows of an argument: address of the first row, shape, and bytes from row to row and from token to token.

    The shape has rows first; then, for outputs, tokens.
    """

    __slots__ = ("address", "row", "shape", "step")

    def __init__(self, address: int, shape: tuple[int, ...], row: int, step: int = 0) -> None:
        self.address, self.shape, self.row, self.step = address, shape, row, step

    def rows(self, first: int, last: int) -> Pointer:
        """Some of the rows."""
        shape = (min(last, self.shape[0]) - first, *self.shape[1:])
        return Pointer(self.address + first * self.row, shape, self.row, self.step)


class Slots:
    """Slot numbers of a call, or counts of tokens: a contiguous integer for each row, ``(rows,)``.

    `flags` are `WIDE`, if they are int64, and `COUNTED`. `scan` are the rows of the call, counted from the first of
    these, that may name the same slot; (0, 0) if the host has checked.
    """

    __slots__ = ("address", "flags", "scan", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], flags: int, scan: tuple[int, int] = (0, 0)) -> None:
        self.address, self.shape, self.flags, self.scan = address, shape, flags, scan

    @property
    def number(self) -> tuple[int, int]:
        """Address and flags."""
        return self.address, self.flags

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """Address, flags and the rows to scan."""
        return self.address, self.flags, *self.scan

    def again(self) -> Slots:
        """The same slots for another launch of the call, which does not count rows that are left out."""
        return Slots(self.address, self.shape, self.flags & ~COUNTED, self.scan)

    def rows(self, first: int, last: int) -> Slots:
        """Some of the rows."""
        size = 8 if self.flags & WIDE else 4
        scan = self.scan[0] - first, self.scan[1] - first
        shape = (min(last, self.shape[0]) - first,)
        return Slots(self.address + first * size, shape, self.flags, scan if self.scan[1] else self.scan)


class StepInputs:
    """A step's q, k, v, g and beta; zeros if the layer has no beta.

    Addresses of the first rows, and bytes of each array from row to row and from token to token (`steps`).
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
