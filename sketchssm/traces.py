"""Traces of one layer: what its recurrence received on calibration and on test text, from an npz file.

The format and how to record it are in the documentation ("How to record traces"). Sequences start from a zero state
at their first token. A basis is fitted on some calibration sequences and ranks are scored on the others, so that no
head's rank is judged on what its basis has seen; test sequences serve neither.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.recurrence import KINDS, Layer, Tokens, check_gates, check_tokens

__all__ = ["TraceFileError", "Traces"]

Array = npt.NDArray[Any]


class TraceFileError(ValueError):
    """A trace file that can't be used: not an npz archive, or an entry missing or of the wrong shape."""


@dataclass(frozen=True)
class Traces:
    """Inputs of one layer's recurrence on calibration and on test text.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    calib, test : Tokens
        Float32 arrays ``(sequences, tokens, ...)``; `beta` is None for mamba2.
    grad : ndarray of float32, optional
        Gradient of the loss with respect to the recurrence's output, ``(n, t, heads, V)``: for the first t tokens of
        the *last* n calibration sequences.
    name : str, default "traces"
        What to call the layer in tables and file names.
    provenance : str, optional
        Where the traces come from, if the file says so.
    """

    layer: Layer
    calib: Tokens
    test: Tokens
    grad: Array | None = None
    name: str = "traces"
    provenance: str = ""

    @classmethod
    def load(cls, path: str | os.PathLike[str], kind: str | None = None) -> Traces:
        """Read a trace file and check all of it.

        Parameters
        ----------
        path : str or PathLike
            An npz file with the entries ``{calib,test}_{q,k,v,g,beta}``, and optionally ``calib_grad``, ``kind`` and
            ``provenance``.
        kind : {"mamba2", "gdn", "kda"}, optional
            Kind of the recurrence. Default: the file's ``kind`` entry or, where it has none, what its shapes say:
            no beta is mamba2, a log-decay per channel kda, anything else gdn.

        Returns
        -------
        Traces
            The traces.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        TraceFileError
            Naming the entry, what was expected and what is there.
        """
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"no trace file at {path}")
        try:
            # opened here, since np.load leaves its own file open where the archive turns out to be broken
            with open(path, "rb") as file:
                archive = np.load(file, allow_pickle=False)
                if not hasattr(archive, "files"):
                    raise TraceFileError(f"{path}: expected an npz archive of named arrays, got a single array")
                entries = {name: archive[name] for name in archive.files}
        except TraceFileError:
            raise
        except (ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            raise TraceFileError(f"{path}: expected an npz archive of plain arrays ({error})") from error
        try:
            return cls._from_entries(entries, kind, os.path.splitext(os.path.basename(path))[0])
        except ValueError as error:
            raise TraceFileError(f"{path}: {error}") from error

    @classmethod
    def shipped(cls, kind: str) -> Traces:
        """Load the small traces that come with the package, of one layer of each kind.

        Parameters
        ----------
        kind : {"mamba2", "gdn", "kda"}
            Which recurrence.

        Returns
        -------
        Traces
            Cut from real traces of a small trained model; see `provenance`.

        Raises
        ------
        ValueError
            If the kind is unknown.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        with resources.as_file(resources.files("sketchssm") / "data" / f"{kind}.npz") as path:
            return cls.load(path)

    @classmethod
    def _from_entries(cls, entries: dict[str, Array], kind: str | None, name: str) -> Traces:
        needed = [f"{part}_{x}" for part in ("calib", "test") for x in "qkvg"]
        if "calib_beta" in entries or "test_beta" in entries:
            needed += ["calib_beta", "test_beta"]
        missing = [key for key in needed if key not in entries]
        if missing:
            raise ValueError(f"{', '.join(missing)}: expected an array, got no such entry")
        arrays = {key: _real(key, entries[key]) for key in [*needed, "calib_grad"] if key in entries}
        for key in [key for key in needed if key[-1] in "qkv"]:
            if arrays[key].ndim != 4:
                raise ValueError(f"{key}: expected shape (sequences, tokens, heads, dim), got {arrays[key].shape}")
        layer = _infer_layer(arrays, kind or (str(entries["kind"]) if "kind" in entries else None))
        parts = {part: _tokens(layer, arrays, part) for part in ("calib", "test")}
        grad = arrays.get("calib_grad")
        if grad is not None:
            rows, length = parts["calib"].v.shape[:2]
            if (
                grad.ndim != 4
                or grad.shape[2:] != (layer.heads, layer.value_dim)
                or not (1 <= grad.shape[0] <= rows and 1 <= grad.shape[1] <= length)
            ):
                raise ValueError(
                    f"calib_grad: expected shape (n <= {rows}, t <= {length}, {layer.heads}, {layer.value_dim}), "
                    f"got {grad.shape}"
                )
            if not np.isfinite(grad).all():
                raise ValueError("calib_grad: expected finite numbers, got NaN or infinity")
        return cls(layer, parts["calib"], parts["test"], grad, name, str(entries.get("provenance", "")))

    def fit_part(self) -> Tokens:
        """Calibration sequences that a basis is fitted on: the first two thirds, at least one.

        Returns
        -------
        Tokens
            Arrays ``(sequences, tokens, ...)``.
        """
        return _rows(self.calib, slice(None, self._split()))

    def score_part(self) -> tuple[Tokens, Array | None]:
        """Calibration sequences that ranks are scored on, disjoint from `fit_part`.

        Returns
        -------
        tokens : Tokens
            Arrays ``(sequences, tokens, ...)``, cut to the tokens that have gradients where there are any.
        grad : ndarray or None
            Gradients ``(sequences, tokens, heads, V)``, if each of these sequences has some.
        """
        split = self._split()
        held_out = _rows(self.calib, slice(split, None))
        rows = held_out.v.shape[0]
        if self.grad is None or self.grad.shape[0] < rows:
            return held_out, None
        length = self.grad.shape[1]
        return Tokens(*(x if x is None else x[:, :length] for x in held_out)), self.grad[-rows:]

    def _split(self) -> int:
        rows = int(self.calib.v.shape[0])
        if rows < 2:
            raise TraceFileError(
                f"{self.name}: expected at least 2 calibration sequences, some to fit bases and others to score "
                f"ranks, got {rows}"
            )
        return rows - max(rows // 3, 1)


def _rows(tokens: Tokens, rows: slice) -> Tokens:
    return Tokens(*(x if x is None else x[rows] for x in tokens))


def _real(key: str, array: Array) -> Array:
    if array.dtype.kind == "V":
        raise ValueError(
            f"{key}: expected floating-point numbers, got raw bytes (npz can't hold bfloat16: use float32)"
        )
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{key}: expected floating-point numbers, got dtype {array.dtype}")
    return array.astype(np.float32)


def _infer_layer(arrays: dict[str, Array], kind: str | None) -> Layer:
    k, v, g = (arrays[f"calib_{x}"] for x in "kvg")
    if kind is None:
        kind = "mamba2" if "calib_beta" not in arrays else "kda" if g.ndim == 4 else "gdn"
    return Layer(kind, v.shape[2], k.shape[3], v.shape[3], k.shape[2])


def _tokens(layer: Layer, arrays: dict[str, Array], part: str) -> Tokens:
    """One part of the file as checked inputs."""
    tokens = Tokens(*(arrays.get(f"{part}_{x}") for x in ("q", "k", "v", "g", "beta")))
    try:
        check_tokens(layer, *tokens, tokens_axis=True)
        check_gates(tokens.g, tokens.beta)
        if min(tokens.v.shape[:2]) < 1:
            raise ValueError(f"v: expected at least one sequence of one token, got shape {tokens.v.shape}")
        for name in ("q", "k", "v", "beta"):
            values = getattr(tokens, name)
            if values is not None and not np.isfinite(values).all():
                raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
    except ValueError as error:
        raise ValueError(f"{part}_{error}") from error
    return tokens
