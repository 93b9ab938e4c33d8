"""Traces: the inputs of one layer's recurrence on calibration and on test text, from an npz file.

The documentation defines the format ("How to record traces"). Sequences start from a zero state at their first token.
Some calibration sequences fit the basis and the others score the ranks, so that ranks are not scored on the data of
the basis. Test sequences are used for neither.
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sketchssm.layer.checks import check_gates, check_tokens, check_writes
from sketchssm.layer.recurrence import PROPERTIES, Layer, Tokens, check_choice, check_instance
from sketchssm.plans.files import write_whole

Array = npt.NDArray[Any]

SHIPPED = "mamba2", "gdn", "kda"
"""Kinds of the traces that come with the package."""

TEXT_LIMIT = 2**16
"""Most characters of a `kind` or a `provenance`."""


class TraceFileError(ValueError):
    """A trace file that can't be used: not an npz archive, or an entry missing or of the wrong shape."""


@dataclass(frozen=True, repr=False)
class Traces:
    """Inputs of one layer's recurrence on calibration and on test text.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    calib, test : Tokens
        Float32 arrays ``(sequences, tokens, ...)``; `beta` is None if the kind does not erase.
    grad : ndarray of float32 or None
        Gradient of the loss with respect to the recurrence's output, ``(n, t, heads, V)``: for the first t tokens of
        the *last* n calibration sequences.
    name : str
        Name of the layer in tables and file names.
    provenance : str
        Origin of the traces, if the file names it.

    Raises
    ------
    TypeError
        If `layer`, `calib`, `test`, `name` or `provenance` is of another class.
    ValueError
        If a shape does not fit the layer, or there is no sequence or no token.
    """

    layer: Layer
    calib: Tokens
    test: Tokens
    grad: Array | None = None
    name: str = "traces"
    provenance: str = ""

    def __post_init__(self) -> None:
        check_instance("layer", self.layer, Layer)
        check_instance("name", self.name, str)
        check_instance("provenance", self.provenance, str)
        for name in ("calib", "test"):
            tokens = getattr(self, name)
            check_instance(name, tokens, Tokens)
            _check_shapes(self.layer, tokens, f"{name}.")
        if self.grad is not None:
            shape = tuple(getattr(self.grad, "shape", ()))
            _check_grad("grad", self.layer, shape, *self.calib.v.shape[:2])
            needed = _held_out(self.calib.v.shape[0])
            if shape[0] < needed:
                warnings.warn(
                    f"{self.name}: gradients of {shape[0]} sequences are not used: ranks are scored on the last "
                    f"{needed} calibration sequences, and need gradients of all of them",
                    RuntimeWarning,
                    stacklevel=3,  # the caller of the constructor
                )

    def __repr__(self) -> str:
        """Name, layer and sizes in one line."""
        calib, test = ("x".join(map(str, tokens.v.shape[:2])) for tokens in (self.calib, self.test))
        grad = "none" if self.grad is None else "x".join(map(str, self.grad.shape[:2]))
        return f"Traces({self.name}, {self.layer}, sequences x tokens: calib={calib}, test={test}, grad={grad})"

    @classmethod
    def load(cls, path: str | os.PathLike[str], kind: str | None = None) -> Traces:
        """Read a trace file and check all of it.

        Shapes are checked before values are read. Entries of other names are not read.

        Parameters
        ----------
        path : str or PathLike
            An npz file with the entries ``{calib,test}_{q,k,v,g,beta}``, and optionally ``calib_grad``, ``kind`` and
            ``provenance``.
        kind : {"mamba2", "gdn", "kda", "gla"}, optional
            Kind of the recurrence. Default: the ``kind`` entry of the file. Without that entry the shapes decide: no
            beta is mamba2, a log-decay per channel is kda, anything else gdn.

        Returns
        -------
        Traces
            The traces.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        TraceFileError
            Naming the entry, the expected and the found contents.
        """
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"no trace file at {path}")
        name = os.path.splitext(os.path.basename(path))[0]
        with open(path, "rb") as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    return cls._read(_Archive(archive), kind, name)
            except ValueError as error:
                raise TraceFileError(f"{path}: {error}") from error
            except Exception as error:  # zipfile and its decompressors raise exceptions of many kinds
                raise TraceFileError(f"{path}: expected an npz archive of plain arrays ({error})") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace file, which `load` reads, all or nothing. The file's name becomes the traces' name.

        Parameters
        ----------
        path : str or PathLike
            The npz file; an existing file is replaced.
        """
        parts = (("calib", self.calib), ("test", self.test))
        entries: dict[str, Any] = {
            f"{part}_{name}": x for part, tokens in parts for name, x in tokens._asdict().items() if x is not None
        }
        if self.grad is not None:
            entries["calib_grad"] = self.grad
        whole = io.BytesIO()
        np.savez_compressed(whole, **entries, kind=self.layer.kind, provenance=self.provenance)
        write_whole(path, whole.getvalue())

    @classmethod
    def shipped(cls, kind: str) -> Traces:
        """Load the small traces of one layer that come with the package.

        Parameters
        ----------
        kind : {"mamba2", "gdn", "kda"}
            Kind of the recurrence.

        Returns
        -------
        Traces
            Cut from real traces of a small trained model; see `provenance`.

        Raises
        ------
        ValueError
            If the kind is unknown.
        """
        check_choice("kind", kind, SHIPPED)
        with resources.as_file(resources.files("sketchssm") / "calibrate" / "data" / f"{kind}.npz") as path:
            return cls.load(path)

    @classmethod
    def _read(cls, archive: _Archive, kind: str | None, name: str) -> Traces:
        fields = ["q", "k", "v", "g"]
        if "calib_beta" in archive or "test_beta" in archive:
            fields.append("beta")
        needed = [f"{part}_{field}" for part in ("calib", "test") for field in fields]
        missing = [key for key in needed if key not in archive]
        if missing:
            raise ValueError(f"{', '.join(missing)}: expected an array, got no such entry")
        headers = {key: archive.header(key, "fiu") for key in needed}
        for key in needed:
            if key[-1] in "qkv" and len(headers[key].shape) != 4:
                raise ValueError(f"{key}: expected shape (sequences, tokens, heads, dim), got {headers[key].shape}")
        layer = _infer_layer(headers, archive.text("kind") if kind is None else kind)
        for part in ("calib", "test"):
            headed = Tokens(*(headers.get(f"{part}_{field}") for field in Tokens._fields))
            _check_shapes(layer, headed, f"{part}_")
        grad = None
        if "calib_grad" in archive:
            _check_grad("calib_grad", layer, archive.header("calib_grad", "fiu").shape, *headers["calib_v"].shape[:2])
            grad = archive.array("calib_grad")
        calib, test = (_read_tokens(archive, layer, part, fields) for part in ("calib", "test"))
        return cls(layer, calib, test, grad, name, archive.text("provenance") or "")

    def fit_part(self) -> Tokens:
        """Calibration sequences that fit the basis: all but the last third, which is rounded down to at least one.

        Returns
        -------
        Tokens
            Arrays ``(sequences, tokens, ...)``.
        """
        return self.calib.at(slice(None, self._split()))

    def score_part(self) -> tuple[Tokens, Array | None]:
        """Calibration sequences that score the ranks, disjoint from `fit_part`.

        Returns
        -------
        tokens : Tokens
            Arrays ``(sequences, tokens, ...)``, cut to the tokens with gradients if `grad` is not None.
        grad : ndarray or None
            Gradients ``(sequences, tokens, heads, V)``, or None if one of these sequences has none.
        """
        split = self._split()
        held_out = self.calib.at(slice(split, None))
        rows = held_out.v.shape[0]
        if self.grad is None or self.grad.shape[0] < rows:
            return held_out, None
        length = self.grad.shape[1]
        return held_out.at(np.s_[:, :length]), self.grad[-rows:]

    def _split(self) -> int:
        rows = int(self.calib.v.shape[0])
        if rows < 2:
            raise TraceFileError(
                f"{self.name}: expected at least 2 calibration sequences, some to fit bases and others to score "
                f"ranks, got {rows}"
            )
        return rows - _held_out(rows)


@contextmanager
def named_errors(traces: Traces) -> Iterator[None]:
    """Put the name of traces before the message of a `ValueError` that the block raises."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{traces.name}: "):
            raise
        raise ValueError(f"{traces.name}: {error}") from error


class _Header(NamedTuple):
    """Shape and type of an array that is not read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Archive:
    """Arrays of an npz archive; an array is read at its first access."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def header(self, key: str, kinds: str) -> _Header:
        """Read the header of an array and check that the entry holds an array of that size and of one of the kinds."""
        entry = self._entries[key]
        with self._archive.open(entry) as file:
            try:
                version = np.lib.format.read_magic(file)
                parse = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = parse(file)
            except ValueError as error:
                raise ValueError(f"{key}: expected a plain array ({error})") from error
            begin = file.tell()
        if dtype.kind not in kinds:
            want = "a string" if kinds == "U" else "floating-point numbers"
            hint = ": npz can't hold bfloat16, use float32" if dtype.kind == "V" else ""
            raise ValueError(f"{key}: expected {want}, got dtype {dtype}{hint}")
        if begin + math.prod(shape) * dtype.itemsize != entry.file_size:
            raise ValueError(f"{key}: expected {dtype} of shape {shape}, got {entry.file_size - begin} bytes")
        return _Header(shape, dtype)

    def array(self, key: str) -> Array:
        """Read an array as float32. All values but log-decays must be finite."""
        with np.errstate(over="ignore"):  # beyond float32 means infinite
            array: Array = self._read(key).astype(np.float32)
        if not (key.endswith("_g") or np.isfinite(array).all()):
            raise ValueError(f"{key}: expected finite numbers, got NaN or infinity")
        return array

    def text(self, key: str) -> str | None:
        """Read a string; None if there is no such entry."""
        if key not in self:
            return None
        shape, dtype = self.header(key, "U")
        if shape or dtype.itemsize > 4 * TEXT_LIMIT:
            raise ValueError(f"{key}: expected one string of at most {TEXT_LIMIT} characters, got {dtype} of {shape}")
        return str(self._read(key))

    def _read(self, key: str) -> Array:
        with self._archive.open(self._entries[key]) as file:
            return np.lib.format.read_array(file)


def _held_out(rows: int) -> int:
    """Number of calibration sequences that score the ranks."""
    return max(rows // 3, 1)


def _infer_layer(headers: dict[str, _Header], kind: str | None) -> Layer:
    k, v, g = (headers[f"calib_{x}"].shape for x in "kvg")
    if kind is None:
        facts = "calib_beta" in headers, len(g) == 4
        kind = next(name for name, own in PROPERTIES.items() if own == facts)
    return Layer(kind, v[2], k[3], v[3], k[2])


def _check_shapes(layer: Layer, tokens: Tokens, part: str) -> None:
    """Check the shapes of calibration or test sequences; `part` goes before the names in messages."""
    try:
        check_tokens(layer, *tokens, tokens_axis=True)
    except ValueError as error:
        raise ValueError(f"{part}{error}") from error
    if min(tokens.v.shape[:2]) < 1:
        raise ValueError(f"{part}v: expected at least one sequence of one token, got shape {tokens.v.shape}")


def _check_grad(name: str, layer: Layer, shape: tuple[int, ...], rows: int, length: int) -> None:
    whole = (rows, length, layer.heads, layer.value_dim)
    if len(shape) != 4 or shape[2:] != whole[2:] or not (1 <= shape[0] <= rows and 1 <= shape[1] <= length):
        raise ValueError(
            f"{name}: expected shape (n <= {rows}, t <= {length}, {layer.heads}, {layer.value_dim}), got {shape}"
        )


def _read_tokens(archive: _Archive, layer: Layer, part: str, fields: list[str]) -> Tokens:
    """Read one part of the file and check its gates and keys."""
    arrays = {field: archive.array(f"{part}_{field}") for field in fields}
    try:
        check_gates(arrays["g"], None)
        check_writes(layer, arrays["k"], arrays.get("beta"))
    except ValueError as error:
        raise ValueError(f"{part}_{error}") from error
    return Tokens(*(arrays.get(field) for field in Tokens._fields))
