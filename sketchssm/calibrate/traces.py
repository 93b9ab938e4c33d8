"""Traces: the inputs of one layer's recurrence on calibration and on test text, from an npz file.

The documentation defines the format ("How to record traces"). Sequences start from a zero state at their first token.
Some calibration sequences fit the basis and the others score the ranks, so that ranks are not scored on the data of
the basis. Test sequences are used for neither.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.layer.calls import check_gates, check_tokens, check_writes
from sketchssm.layer.checks import check_choice, check_instance
from sketchssm.layer.recurrence import PROPERTIES, Layer, Tokens
from sketchssm.plans.files import write_whole

Array = npt.NDArray[Any]

SHIPPED = "mamba2", "gdn", "kda"
"""Kinds of the traces that come with the package."""

TEXTS = "kind", "provenance"
ENTRIES = *(f"{part}_{name}" for part in ("calib", "test") for name in Tokens._fields), "calib_grad", *TEXTS
"""Entries of a file; others are not read."""


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
    def load(cls, path: str | os.PathLike[str]) -> Traces:
        """Read a trace file and check all of it.

        Entries of other names are not read.

        Parameters
        ----------
        path : str or PathLike
            An npz file with the entries ``{calib,test}_{q,k,v,g,beta}``, and optionally ``calib_grad``, ``kind`` and
            ``provenance``. Without a ``kind`` the shapes decide.

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
        try:
            with zipfile.ZipFile(path), open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                entries = {key: archive[key] for key in ENTRIES if key in archive}
        except Exception as error:  # zipfile and its decompressors raise exceptions of many kinds
            raise TraceFileError(f"{path}: expected an npz archive of plain arrays ({error})") from error
        try:
            return cls._of(entries, name)
        except ValueError as error:
            raise TraceFileError(f"{path}: {error}") from error

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
    def _of(cls, entries: dict[str, Array], name: str) -> Traces:
        """Traces of the entries of a file, checked."""
        fields = ["q", "k", "v", "g", *(["beta"] if "calib_beta" in entries or "test_beta" in entries else [])]
        needed = [f"{part}_{field}" for part in ("calib", "test") for field in fields]
        missing = [key for key in needed if key not in entries]
        if missing:
            raise ValueError(f"{', '.join(missing)}: expected an array, got no such entry")
        arrays = {key: _numbers(key, x) for key, x in entries.items() if key not in TEXTS}
        for key in needed:
            if key[-1] in "qkv" and arrays[key].ndim != 4:
                raise ValueError(f"{key}: expected shape (sequences, tokens, heads, dim), got {arrays[key].shape}")
        texts = {key: _text(key, entries[key]) for key in TEXTS if key in entries}
        layer = _infer_layer(arrays, texts.get("kind"))
        parts = []
        for part in ("calib", "test"):
            parts.append(Tokens(*(arrays.get(f"{part}_{field}") for field in Tokens._fields)))
            _check_shapes(layer, parts[-1], f"{part}_")
            try:
                check_gates(parts[-1].g, None)
                check_writes(layer, parts[-1].k, parts[-1].beta)
            except ValueError as error:
                raise ValueError(f"{part}_{error}") from error
        grad = arrays.get("calib_grad")
        if grad is not None:
            _check_grad("calib_grad", layer, grad.shape, *parts[0].v.shape[:2])
        return cls(layer, parts[0], parts[1], grad, name, texts.get("provenance", ""))

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


def _numbers(key: str, array: Array) -> Array:
    """An entry as float32. All values but log-decays must be finite."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{key}: expected a plain array, got other bytes")
    if array.dtype.kind not in "fiu":
        hint = ": npz can't hold bfloat16, use float32" if array.dtype.kind == "V" else ""
        raise ValueError(f"{key}: expected floating-point numbers, got dtype {array.dtype}{hint}")
    with np.errstate(over="ignore"):  # beyond float32 means infinite
        found: Array = array.astype(np.float32, copy=False)
    if not (key.endswith("_g") or np.isfinite(found).all()):
        raise ValueError(f"{key}: expected finite numbers, got NaN or infinity")
    return found


def _text(key: str, array: Array) -> str:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "U" or array.shape:
        raise ValueError(f"{key}: expected one string, got {np.asarray(array).dtype} of {np.shape(array)}")
    return str(array)


def _held_out(rows: int) -> int:
    """Number of calibration sequences that score the ranks."""
    return max(rows // 3, 1)


def _infer_layer(arrays: dict[str, Array], kind: str | None) -> Layer:
    k, v, g = (arrays[f"calib_{x}"].shape for x in "kvg")
    if kind is None:
        facts = "calib_beta" in arrays, len(g) == 4
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
