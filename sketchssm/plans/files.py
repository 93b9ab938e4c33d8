"""The library's files: safetensors with one JSON document of versioned, checksummed metadata.

Tensors are plain arrays that any framework can open. The document is the value of the only metadata key, `KEY`: with a
single key, the bytes of a file are the same from run to run. The document holds ``format``, ``version``, ``sha256``
and the fields of the format. The checksum is SHA-256 over the document and the tensors. It detects damage; it is no
signature.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

KEY = "sketchssm"
"""Metadata key of the JSON document."""

READERS = {
    "sketchssm-plan": "SketchPlan",
    "sketchssm-model-plans": "ModelPlans",
    "sketchssm-moments": "Moments",
    "sketchssm-calibration": "Calibration",
    "sketchssm-basis": "SketchBasis",
    "sketchssm-snapshot": "Snapshot",
}
"""The class that reads each format, for messages."""

PACKAGE = Path(__file__).parents[1]


class FileFormatError(ValueError):
    """A file that can't be used: damaged, of another format or version, or inconsistent."""


class FileFormat(NamedTuple):
    """Name and contents of one kind of file.

    `name` and `version` go into the metadata. `tensors` names the arrays of a file, no more and no fewer; none
    allows any. `error` is the exception of `load_file`, a subclass of `ValueError`. `remedy` says what to do about a
    file of another version. `older` holds the versions that are also read, each with the fields that it lacks and
    their values; their files may have other tensors.
    """

    name: str
    version: int
    tensors: tuple[str, ...]
    error: type[ValueError] = FileFormatError
    remedy: str = "calibrate again"
    older: Mapping[int, Mapping[str, Any]] = MappingProxyType({})


def save_file(
    path: str | os.PathLike[str],
    form: FileFormat,
    tensors: Mapping[str, npt.NDArray[Any]],
    fields: Mapping[str, Any],
) -> None:
    """Write all tensors of a format, and fields that JSON knows. The same contents give the same bytes."""
    from safetensors.numpy import save

    document, arrays = _contents(form, tensors, fields)
    document["sha256"] = _checksum(document, arrays)
    write_whole(path, save(arrays, metadata={KEY: json.dumps(document)}))


def fingerprint(form: FileFormat, tensors: Mapping[str, npt.NDArray[Any]], fields: Mapping[str, Any]) -> str:
    """Checksum of a file with these contents, without writing the file; the arguments are those of `save_file`."""
    return _checksum(*_contents(form, tensors, fields))


def _contents(
    form: FileFormat, tensors: Mapping[str, npt.NDArray[Any]], fields: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Document and tensors of a file."""
    names = form.tensors or sorted(tensors)
    arrays = {name: np.ascontiguousarray(tensors[name]) for name in names}
    return {"format": form.name, "version": form.version, **fields}, arrays


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file all or nothing: the new file replaces an existing one when it is complete.

    The new file has the permissions of the old one. A symbolic link stays, and its target is replaced. A device or a
    pipe, such as /dev/null, is written in place. A process that is killed while it writes leaves a file
    ``.sketchssm-*.tmp`` in the folder, which may be deleted. OSError, which names the path, if the file can't be
    written.
    """
    path = os.path.realpath(os.fsdecode(path))
    in_place = os.path.exists(path) and not os.path.isfile(path)
    # of a length of its own: the name of the file may be as long as the file system allows
    scratch = os.path.join(os.path.dirname(path), f".sketchssm-{secrets.token_hex(8)}.tmp")
    try:
        with open(path if in_place else scratch, "wb") as file:  # an error for a folder
            file.write(data)
            if in_place:
                return
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, scratch)
        os.replace(scratch, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(scratch)
        if isinstance(error, OSError) and error.errno is not None:
            raise type(error)(error.errno, error.strerror, path) from error
        raise


@cache
def source_digest(*patterns: str) -> str:
    """SHA-256 of the package's sources that fit some patterns, for files on disk that depend on them.

    A process reads each source once.
    """
    text = sha256()
    for path in sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)}):
        content = path.read_bytes()
        text.update(f"{path.name} {len(content)}\n".encode() + content)
    return text.hexdigest()


def load_file(path: str | os.PathLike[str], form: FileFormat, build: Callable[..., T]) -> T:
    """Read a file that `save_file` wrote and build its object.

    `build` takes the tensors as a dict and each field by name; its exceptions mean that the file contradicts itself.
    FileNotFoundError if there is no such file. A ValueError of class ``form.error`` if the file is damaged, of another
    format or version, or inconsistent.
    """
    from safetensors import SafetensorError, safe_open

    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no {form.name} file at {path}")
    try:
        with safe_open(path, "np") as file:
            document = _document(form, file.metadata() or {})
            names = sorted(file.keys())
            expected = form.tensors if form.tensors and document["version"] == form.version else names
            if names != sorted(expected):
                raise ValueError(f"expected the tensors {', '.join(expected)}, got {', '.join(names)}")
            tensors = {name: file.get_tensor(name) for name in expected}
        if document.pop("sha256", None) != _checksum(document, tensors):
            raise ValueError("the contents do not match their checksum: the file is damaged")
        del document["format"]
        return build(tensors, **form.older.get(document.pop("version"), {}), **document)
    except SafetensorError as error:
        raise form.error(f"{path}: not a whole safetensors file ({error})") from error
    except OSError:
        raise
    except Exception as error:  # whatever a damaged or crafted file provokes, such as a RecursionError
        raise form.error(f"{path}: {error}") from error


class Stored(ABC):
    """An object with a file of its own, a safetensors file.

    `FORMAT` is that of the file, `_contents` returns its tensors and fields, and `_build` takes them.
    """

    FORMAT: ClassVar[FileFormat]
    _build: ClassVar[Callable[..., Any]]

    @abstractmethod
    def _contents(self) -> tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, Any]]: ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the object to a safetensors file, all or nothing.

        Parameters
        ----------
        path : str or PathLike
            Where to; the new file replaces an existing one when it is complete.
        """
        save_file(path, self.FORMAT, *self._contents())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote, and check all of it.

        Parameters
        ----------
        path : str or PathLike
            Where from.

        Returns
        -------
        object
            An object of the class.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        FileFormatError
            If the file is damaged, of another class or version, contradicts itself, or has settings that this version
            does not have. Of plans the error is a `PlanFileError`, of snapshots a `SnapshotFileError`.
        """
        return load_file(path, cls.FORMAT, cls._build)


def format_of(path: str | os.PathLike[str]) -> str | None:
    """Name of a file's format; None for a file that `save_file` did not write, or none at all."""
    from safetensors import safe_open

    try:
        with safe_open(os.fspath(path), "np") as file:
            return str(json.loads((file.metadata() or {})[KEY])["format"])
    except Exception:  # whatever a damaged or foreign file provokes
        return None


def check_array(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    """Check the shape and the type of a tensor that `load_file` read, and raise `ValueError` if either is wrong."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name}: expected {np.dtype(dtype)} of shape {shape}, got {array.dtype} of {array.shape}")


def _document(form: FileFormat, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON document of a file's metadata, of the expected format and version."""
    document = json.loads(metadata[KEY]) if KEY in metadata else dict(metadata)
    name = document.get("format") if isinstance(document, dict) else document
    if name != form.name:
        reader = READERS.get(str(name))
        hint = f": {reader}.load reads it" if reader else ""
        raise ValueError(f"expected format {form.name!r}, got {name!r}{hint}")
    version = document.get("version")
    if version not in (form.version, *form.older):
        raise ValueError(f"expected version {form.version} of {form.name}, got {version!r}: {form.remedy}")
    return document


def _checksum(document: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 of a document and of the names, types, shapes and bytes of tensors, in hexadecimal."""
    parts = [(name, array.dtype.str, array.shape) for name, array in tensors.items()]
    digest = sha256(json.dumps([document, parts]).encode())
    for array in tensors.values():
        digest.update(array.data)
    return digest.hexdigest()
