"""Sketch bases: uncentred PCA of state-weighted queries (section 4.1 and its appendix).

With ``E0 = E[S0 S0^T]`` and ``C_z = E0^{1/2} E[x x^T] E0^{1/2} = P Diag(lambda) P^T``, the optimal rank-G basis is
``E0^{-1/2} P_G`` (equation *app-offline-solution*). The sketch depends only on the span of the basis. A basis has two
forms with the same nested spans: `omega` has orthonormal columns, and `weighted` is ``E0^{-1/2} P_G``, with
E0-orthonormal columns.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sketchssm.calibrate.moments import Moments
from sketchssm.layer.checks import check_size
from sketchssm.layer.recurrence import Layer, check_instance, check_window
from sketchssm.plans.files import FileFormat, check_array, load_file, save_file
from sketchssm.reference.recurrence import Array

__all__ = ["SketchBasis", "fit_basis"]

SUPPORT = 1e-10
"""Eigenvalues of E0 below this share of the largest count as zero. Directions with so little of the states' energy do
not change an output, and a float64 eigenvalue solver has errors of more than 1e-5 in smaller eigenvalues."""

FORMAT = FileFormat("sketchssm-basis", 2, ("omega", "weighted", "e0", "spectrum", "retained"))


@dataclass(frozen=True, eq=False)
class SketchBasis:
    """Nested sketch bases of one layer: the first G columns are the rank-G basis.

    Made by `fit_basis`, or by `SketchBasis.random` as a baseline.

    Parameters
    ----------
    layer : Layer
        Kind and shape.
    window : int
        Window that the basis was calibrated for.
    omega : ndarray of float64, (heads, K, rank_max)
        Orthonormal columns.
    weighted : ndarray of float64, (heads, K, rank_max)
        E0-orthonormal columns with the same nested spans: ``weighted^T E0 weighted = I``. Columns beyond the rank of
        a head's E0 are zero, because no calibration state has energy there. In `omega` these columns are the leading
        remaining directions of the queries.
    e0 : ndarray of float64, (heads, K, K)
        Mean state metric, scaled to trace K.
    spectrum : ndarray of float64, (heads, K)
        Eigenvalues of C_z, descending; NaN for a random basis.
    retained : ndarray of float64, (heads, rank_max)
        Share of the spectrum in the first G columns: the predicted share of output energy that a sketch of rank G
        retains, for states of the mean metric. NaN for a random basis.
    """

    layer: Layer
    window: int
    omega: Array
    weighted: Array
    e0: Array
    spectrum: Array
    retained: Array

    @property
    def rank_max(self) -> int:
        """Number of columns."""
        return int(self.omega.shape[-1])

    def columns(self, rank: int, weighted: bool = False) -> tuple[Array, Array]:
        """Sketch basis and shared projection of a coefficient map.

        Parameters
        ----------
        rank : int
            Columns to take, 1 to `rank_max`.
        weighted : bool, default False
            False: the orthonormal basis, which is its own projection. True: the E0-orthonormal basis and ``E0 omega``,
            for `prior` and `offline`.

        Returns
        -------
        omega : ndarray, (heads, K, rank)
            Sketch basis.
        projection : ndarray, (heads, K, rank)
            Projection.

        Raises
        ------
        ValueError
            If the rank is out of range.
        """
        if check_size("rank", rank) > self.rank_max:
            raise ValueError(f"rank: expected 1 to rank_max={self.rank_max}, got {rank}")
        if not weighted:
            return self.omega[..., :rank], self.omega[..., :rank]
        omega = self.weighted[..., :rank]
        return omega, self.e0 @ omega

    @classmethod
    def random(
        cls, layer: Layer, rank_max: int, seed: int = 0, e0: npt.ArrayLike | None = None, window: int = 16
    ) -> SketchBasis:
        """Draw random orthonormal bases, the baseline of a calibrated basis.

        Parameters
        ----------
        layer : Layer
            Kind and shape.
        rank_max : int
            Number of columns, 1 to min(K, V).
        seed : int, default 0
            Seed of the draw.
        e0 : array_like, (heads, K, K), optional
            Mean state metric for the weighted form, such as that of a calibrated basis; default the identity.
        window : int, default 16
            Window of the basis.

        Returns
        -------
        SketchBasis
            Bases without a spectrum.

        Raises
        ------
        ValueError
            If an argument is out of range.
        """
        check_instance("layer", layer, Layer)
        rank_max = _check_rank_max(layer, rank_max)
        heads, size = layer.heads, layer.key_dim
        draw = np.random.default_rng(seed).standard_normal((heads, size, rank_max))
        omega = _orthonormal(draw)[0]
        gram = np.broadcast_to(np.eye(size), (heads, size, size)) if e0 is None else np.asarray(e0, dtype=np.float64)
        if gram.shape != (heads, size, size) or not np.isfinite(gram).all():
            raise ValueError(f"e0: expected finite numbers of shape {(heads, size, size)}, got {gram.shape}")
        metric = np.stack([_unit_trace(head) for head in gram])
        weighted = np.zeros_like(omega)
        for head in range(heads):
            root = _support(metric[head])[0].T
            inside = min(root.shape[0], rank_max)
            _, triangle = _orthonormal(root @ omega[head, :, :inside])
            weighted[head, :, :inside] = np.linalg.solve(triangle.T, omega[head, :, :inside].T).T
        unknown = np.full((heads, size), np.nan)
        return cls(layer, check_window(window), omega, weighted, metric, unknown, unknown[:, :rank_max].copy())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the basis to a safetensors file, all or nothing.

        Parameters
        ----------
        path : str or PathLike
            Where to; the new file replaces an existing one when it is complete.
        """
        tensors = {name: getattr(self, name) for name in FORMAT.tensors}
        save_file(path, FORMAT, tensors, {"layer": asdict(self.layer), "window": self.window})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SketchBasis:
        """Read a file that `save` wrote.

        Parameters
        ----------
        path : str or PathLike
            Where from.

        Returns
        -------
        SketchBasis
            The basis.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        FileFormatError
            If the file is damaged, holds no basis, is of another version, or contradicts itself.
        """
        return load_file(path, FORMAT, cls._build)

    @classmethod
    def _build(cls, tensors: dict[str, npt.NDArray[Any]], layer: Any, window: Any) -> SketchBasis:
        own = Layer(**layer)
        heads, size, columns = own.heads, own.key_dim, tensors["retained"].shape[-1]
        shapes = [(heads, size, columns)] * 2 + [(heads, size, size), (heads, size), (heads, columns)]
        for name, shape in zip(FORMAT.tensors, shapes, strict=True):
            check_array(name, tensors[name], shape, np.float64)
        _check_rank_max(own, columns)
        if not all(np.isfinite(tensors[name]).all() for name in ("omega", "weighted", "e0")):
            raise ValueError("omega, weighted, e0: expected finite numbers, got NaN or infinity")
        return cls(own, check_window(window), **tensors)


def fit_basis(moments: Moments, rank_max: int | None = None) -> SketchBasis:
    """Fit nested sketch bases to calibration moments.

    Parameters
    ----------
    moments : Moments
        Moments of the calibration traces.
    rank_max : int, optional
        Number of columns; default min(K, V), because a wider sketch is not more accurate. Backend "cuda" has room for
        fewer, see *Limits* on the page of the CUDA backend.

    Returns
    -------
    SketchBasis
        Optimal bases of every rank up to `rank_max` for the loss of equation *m-subspace-objective*. A head with zero
        queries gets the leading directions of its states, a head with zero states the leading directions of its
        queries, and a head without samples the unit vectors.

    Raises
    ------
    ValueError
        If `rank_max` is out of range or there is no sample of any head.
    """
    check_instance("moments", moments, Moments)
    if not moments.samples.any():
        raise ValueError(
            f"moments: expected samples of at least one head, got none: sequences must be longer than the window of "
            f"{moments.window} tokens and write a state"
        )
    layer = moments.layer
    columns = _check_rank_max(layer, min(layer.key_dim, layer.value_dim) if rank_max is None else rank_max)
    samples = np.maximum(moments.samples, 1)[:, None, None]
    queries = moments.query_gram / samples
    metric = np.stack([_unit_trace(gram) for gram in moments.state_gram])
    scale = np.trace(moments.state_gram / samples, axis1=-2, axis2=-1) / layer.key_dim
    fits = [_fit_head(e0, gram, columns) for e0, gram in zip(metric, queries, strict=True)]
    omega, weighted, spectrum = (np.stack(parts) for parts in zip(*fits, strict=True))
    spectrum *= scale[:, None]
    total = spectrum.sum(axis=-1, keepdims=True)
    share = np.cumsum(spectrum[:, :columns], axis=-1) / np.where(total > 0, total, 1.0)
    retained = np.where(total > 0, np.minimum(share, 1.0), 1.0)  # a head without energy loses none
    return SketchBasis(layer, moments.window, omega, weighted, metric, spectrum, retained)


def _fit_head(e0: Array, queries: Array, columns: int) -> tuple[Array, Array, Array]:
    """One head's omega and weighted ``(K, columns)`` and its spectrum ``(K,)``, by steps 1 to 5 of the derivation."""
    size = e0.shape[-1]
    root, inverse, null = _support(e0)  # E0 = root root^T, inverse^T root = I
    energy, axes = _descending(root.T @ (queries if queries.any() else np.eye(size)) @ root)
    spectrum = np.zeros(size)
    if queries.any():
        spectrum[: energy.size] = np.maximum(energy, 0.0)
    inside = min(columns, energy.size)
    weighted = np.zeros((size, columns))
    weighted[:, :inside] = inverse @ axes[:, :inside]
    largest = np.abs(weighted).argmax(axis=0)
    weighted *= np.where(weighted[largest, np.arange(columns)] < 0, -1.0, 1.0)
    omega = _orthonormal(weighted[:, :inside])[0]
    if inside < columns:
        rest = null @ _descending(null.T @ queries @ null)[1]
        omega = _orthonormal(np.hstack([omega, rest[:, : columns - inside]]))[0]
    return omega, weighted, spectrum


def _support(e0: Array) -> tuple[Array, Array, Array]:
    """Factor E0 on its support: ``root`` and ``inverse (K, r)``, and a basis ``(K, K - r)`` of the complement."""
    values, vectors = _descending(e0)
    rank = int((values > SUPPORT * values[0]).sum())
    scale = np.sqrt(values[:rank])
    return vectors[:, :rank] * scale, vectors[:, :rank] / scale, vectors[:, rank:]


def _unit_trace(gram: Array) -> Array:
    """Scale a metric to trace K. A zero metric becomes the identity."""
    trace = np.trace(gram)
    return gram * (gram.shape[-1] / trace) if trace > 0 else np.eye(gram.shape[-1])


def _descending(gram: Array) -> tuple[Array, Array]:
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    return values[::-1], vectors[:, ::-1]


def _orthonormal(columns: Array) -> tuple[Array, Array]:
    """QR with a positive diagonal: the first G columns of Q span the first G of the input, with the same signs."""
    q, r = np.linalg.qr(columns)
    sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    return q * sign[..., None, :], r * sign[..., :, None]


def _check_rank_max(layer: Layer, rank_max: Any) -> int:
    limit = min(layer.key_dim, layer.value_dim)
    if isinstance(rank_max, bool) or not isinstance(rank_max, int | np.integer) or not 1 <= rank_max <= limit:
        raise ValueError(f"rank_max: expected an integer from 1 to min(K, V)={limit}, got {rank_max!r}")
    return int(rank_max)
