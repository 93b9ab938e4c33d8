"""The memory of an argument on the device."""

from __future__ import annotations

__all__ = ["Pointer"]


class Pointer:
    """An array's memory as a kernel sees it.

    Parameters
    ----------
    address : int
        Where the first row starts.
    shape : tuple of int
        Rows first; then, for tokens and outputs, tokens.
    row_bytes : int
        Bytes from one row to the next.
    """

    __slots__ = ("address", "row_bytes", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], row_bytes: int) -> None:
        self.address, self.shape, self.row_bytes = address, shape, row_bytes

    def rows(self, first: int, last: int) -> Pointer:
        """Some of the rows."""
        count = min(last, self.shape[0]) - first
        return Pointer(self.address + first * self.row_bytes, (count, *self.shape[1:]), self.row_bytes)
