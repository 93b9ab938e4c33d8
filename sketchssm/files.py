"""The library's files: safetensors with versioned metadata, written whole or not at all.

Tensors are plain arrays that any framework can open. The metadata names the format and its version; everything
else in it is JSON, one document per key.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sketchssm.recurrence import Layer

__all__ = ["FileFormat", "FileFormatError", "layer_fields", "load_file", "save_file", "source_digest", "write_whole"]

T = TypeVar("T")

PACKAGE = Path(__file__).parent


class FileFormatError(ValueError):
    """A file that can't be used: truncated, of another format, of a newer version, or inconsistent."""


class FileFormat(NamedTuple):
    """What a kind of file is called and holds.

    `name` and `version` go into the metadata; `tensors` are the names that must be there; `error` is what `load_file`
    raises, a subclass of `ValueError`.
    """

    name: str
    version: int
    tensors: tuple[str, ...]
    error: type[ValueError] = FileFormatError


def layer_fields(layer: Layer) -> dict[str, Any]:
    """Keyword arguments that make a layer again, for metadata."""
    return {name: getattr(layer, name) for name in ("kind", "heads", "key_dim", "value_dim", "key_heads")}


def save_file(
    path: str | os.PathLike[str],
    form: FileFormat,
    tensors: Mapping[str, npt.NDArray[Any]],
    metadata: Mapping[str, Any],
) -> None:
    """Write a file, all or nothing: an existing one is replaced at once when the new one is complete.

    Parameters
    ----------
    path : str or PathLike
        Where to.
    form : FileFormat
        Format, with every tensor named.
    tensors : mapping of str to ndarray
        One array for each of the format's names.
    metadata : mapping
        JSON documents by key.
    """
    from safetensors.numpy import save

    meta = {"format": form.name, "version": str(form.version)}
    meta |= {key: json.dumps(value) for key, value in metadata.items()}
    data = save({name: np.ascontiguousarray(tensors[name]) for name in form.tensors}, metadata=meta)
    write_whole(path, data)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file, all or nothing: an existing one is replaced at once when the new one is complete.

    Parameters
    ----------
    path : str or PathLike
        Where to.
    data : bytes
        What the file will hold.
    """
    path = os.fspath(path)
    scratch = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        with open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise


@cache
def source_digest(*patterns: str) -> str:
    """Digest of the package's own sources, which what is kept on disk depends on; read once in a process.

    Parameters
    ----------
    *patterns : str
        Glob patterns relative to the package.

    Returns
    -------
    str
        SHA-256 of the files' names and contents, in hexadecimal.
    """
    text = sha256()
    for path in sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)}):
        content = path.read_bytes()
        text.update(f"{path.name} {len(content)}\n".encode() + content)
    return text.hexdigest()


def load_file(
    path: str | os.PathLike[str],
    form: FileFormat,
    build: Callable[[dict[str, npt.NDArray[Any]], dict[str, Any]], T],
) -> T:
    """Read a file that `save_file` wrote and build what it holds.

    Parameters
    ----------
    path : str or PathLike
        Where from.
    form : FileFormat
        Expected format; files of its version and older are read.
    build : callable
        Takes the tensors and the decoded metadata; a `KeyError`, `TypeError` or `ValueError` that it raises means
        that the file contradicts itself.

    Returns
    -------
    object
        What `build` returned.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        As ``form.error``, if the file is truncated, of another format or a newer version, or inconsistent.
    """
    from safetensors import SafetensorError, safe_open

    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {form.name} file at {path}")
    try:
        with safe_open(path, "np") as file:
            meta = file.metadata() or {}
            _check_header(path, form, meta, set(file.keys()))
            tensors = {name: file.get_tensor(name) for name in form.tensors}
    except SafetensorError as error:
        raise form.error(f"{path}: not a whole safetensors file ({error})") from error
    try:
        return build(tensors, {key: json.loads(meta[key]) for key in meta if key not in ("format", "version")})
    except (KeyError, TypeError, ValueError) as error:
        raise form.error(f"{path}: metadata or tensors are inconsistent ({error})") from error


def _check_header(path: str, form: FileFormat, meta: Mapping[str, str], names: set[str]) -> None:
    if meta.get("format") != form.name:
        raise form.error(f"{path}: expected format {form.name!r}, got {meta.get('format')!r}")
    version = meta.get("version", "")
    if not version.isdecimal() or int(version) < 1:
        raise form.error(f"{path}: expected a version number, got {version!r}")
    if int(version) > form.version:
        raise form.error(f"{path}: version {version} is newer than this library reads ({form.version})")
    missing = set(form.tensors) - names
    if missing:
        raise form.error(f"{path}: tensors missing: {', '.join(sorted(missing))}")
