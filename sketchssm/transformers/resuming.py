"""Sums of a calibration in a file, from which an interrupted run continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.sums import Accumulator
from sketchssm.plans.files import FileFormat, check_array, load_file, save_file

FORMAT = FileFormat("sketchssm-sums", 1, (), remedy="remove it, and begin again")
"""A tensor has the name of its kind of sums, a dot, the name of its layer, a dot, and the name of the sum."""

SECONDS = 60.0
"""Least time between two saves."""

Row = TypeVar("Row")


def digest_of(settings: object, rows: Sequence[npt.NDArray[Any]]) -> str:
    """SHA-256 of all that the sums depend on: settings, by their representation, and rows."""
    digest = sha256(repr((settings, [(row.dtype.str, row.shape) for row in rows])).encode())
    for row in rows:
        digest.update(np.ascontiguousarray(row).data)
    return digest.hexdigest()


class Resumable:
    """Runs over rows, of which a file keeps the sums after some of them; None keeps nothing.

    ValueError if the file has the sums of another model, text or settings.
    """

    def __init__(self, path: str | os.PathLike[str] | None, digest: str, step: Callable[[str], None]) -> None:
        if not isinstance(path, str | os.PathLike | None):
            raise TypeError(f"resume: expected a path, got {type(path).__name__}")
        self._path, self._digest, self._step = path, digest, step
        self._at = self._done = 0
        self._sums: dict[str, Accumulator] = {}
        self._found: dict[str, npt.NDArray[Any]] = {}
        self._weightings: dict[str, str | None] = {}
        self._saved = monotonic()
        if path is not None and os.path.exists(path):
            found = load_file(path, FORMAT, self._take)
            if found != digest:
                raise ValueError(f"resume: expected sums of this model, text and settings, got others in {path}")
        elif path is not None:
            self._save()  # an error for a file that cannot be written comes before any work

    def _take(self, tensors: dict[str, npt.NDArray[Any]], digest: Any, done: Any, weightings: Any) -> Any:
        self._found, self._done, self._weightings = tensors, done, weightings
        return digest

    def hold(self, kind: str, sums: Mapping[str, Accumulator]) -> None:
        """Keep sums, by the names of their layers, from now on; they take what the file has of them."""
        for name, own in sums.items():
            place = f"{kind}.{name}"
            self._sums[place] = own
            if place in self._weightings:
                own.weighting = self._weightings[place]
                for each in own.sums:
                    held, found = getattr(own, each), self._found[f"{place}.{each}"]
                    check_array(f"{place}.{each}", found, held.shape, held.dtype)
                    setattr(own, each, found)

    def rows(self, label: str, rows: Sequence[Row]) -> Iterator[Row]:
        """Rows that are still to be run; each is done when the next is asked for."""
        for i, row in enumerate(rows):
            self._step(f"{label}, row {i + 1} of {len(rows)}")
            self._at += 1
            if self._at <= self._done:
                continue
            yield row
            self._done = self._at
            if self._path is not None and monotonic() >= self._saved + SECONDS:
                self._save()

    def _save(self) -> None:
        tensors = {f"{place}.{each}": getattr(own, each) for place, own in self._sums.items() for each in own.sums}
        weightings = {place: getattr(own, "weighting", None) for place, own in self._sums.items()}
        assert self._path is not None
        save_file(self._path, FORMAT, tensors, {"digest": self._digest, "done": self._done, "weightings": weightings})
        self._saved = monotonic()
