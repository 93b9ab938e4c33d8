"""Results kept as they are finished, so that an evaluation that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sketchssm.files import source_digest, write_whole

__all__ = ["Store"]

FORMAT = 1
"""Version of what a part holds; part of its key."""

SOURCES = ("**/*.py", "cuda_src/*.cu*", "../cuda_src/*.cu*")
"""All that a result may come from, CUDA sources of an installed package and of a checkout included."""


class Store:
    """Parts of an evaluation, one file each, or none where no folder is given.

    A part is named by the layer and by what was measured, and carries a key: a digest of the traces' contents, of
    the settings and of the library's sources. One with another key, or one that is broken, counts as missing and is
    measured anew. Files are written whole or not at all.

    Parameters
    ----------
    folder : Path or None
        Where parts are kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, digest: str, layer: str, name: str, make: Callable[[], Any]) -> Any:
        """Return a part, from its file if that is good, else made now and kept.

        Parameters
        ----------
        digest : str
            Digest of the traces and the settings.
        layer : str
            Name of the layer.
        name : str
            What was measured, ``family/setting``.
        make : callable
            Makes the part, a value that JSON knows.

        Returns
        -------
        object
            The part.
        """
        key = hashlib.sha256(f"{FORMAT} {source_digest(*SOURCES)} {digest} {name}".encode()).hexdigest()
        if self._folder is None:
            return make()
        path = self._folder / layer / f"{name.replace('/', '--')}.json"
        kept = _load(path, key)
        if kept is None:
            kept = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, _text({"key": key, "sum": _sum(kept), "part": kept}).encode())
        return kept


def _load(path: Path, key: str) -> Any:
    """A part from its file; None if it is missing, stale or broken."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        good = held["key"] == key and held["sum"] == _sum(held["part"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return held["part"] if good else None


def _sum(part: Any) -> str:
    return hashlib.sha256(_text(part).encode()).hexdigest()


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
