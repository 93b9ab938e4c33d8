"""Finished results on disk, so that an interrupted evaluation can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sketchssm.plans.files import source_digest, write_whole

FORMAT = 1
"""Version of the content of a part; it enters the key."""

SOURCES = ("**/*.py", "cuda_src/**/*.cu*", "../cuda_src/**/*.cu*")
"""All sources that a result may depend on; the CUDA sources of an installed package, and of a checkout."""


class Store:
    """Parts of an evaluation, one file each; without a folder nothing is kept.

    The layer and the measured system name a part. Its key is a digest of the contents of the traces, of the settings
    and of the sources of the library. A part with another key, or a broken part, counts as missing and is measured
    again. Files are written whole or not at all.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, digest: str, layer: str, name: str, make: Callable[[], Any]) -> Any:
        """Return a part from its file, or make the part and keep it.

        The part belongs to a `layer` and a system `name`, ``family/setting``; `digest` is that of the traces and
        settings. `make` makes the part, a value that JSON can hold.
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
